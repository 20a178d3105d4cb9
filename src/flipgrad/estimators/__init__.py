"""Gradient estimators, and the one place where their names are listed."""

from flipgrad.estimators._base import Estimator, LinearHeadEstimator, LocalEstimator
from flipgrad.estimators.psa import PSA
from flipgrad.estimators.st import ST

# The names on the command line.
ESTIMATORS: dict[str, type[Estimator]] = {
    "psa": PSA,
    "st": ST,
}

__all__ = ["ESTIMATORS", "PSA", "ST", "Estimator", "LinearHeadEstimator", "LocalEstimator"]
