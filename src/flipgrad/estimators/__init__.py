"""Gradient estimators, and the one place where their names are listed."""

from flipgrad.estimators._base import Estimator, LinearHeadEstimator, LocalEstimator
from flipgrad.estimators.arm import ARM
from flipgrad.estimators.psa import PSA
from flipgrad.estimators.st import ST

# The names on the command line.
ESTIMATORS: dict[str, type[Estimator]] = {
    "arm": ARM,
    "psa": PSA,
    "st": ST,
}

__all__ = ["ARM", "ESTIMATORS", "PSA", "ST", "Estimator", "LinearHeadEstimator", "LocalEstimator"]
