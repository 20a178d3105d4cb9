"""The paper's figures from one command each: one file per figure, with the claims checked against the numbers."""

from flipgrad.reproduce._experiment import SCALES, Claim, Experiment, Workshop
from flipgrad.reproduce.accuracy import Cosine, Rmse
from flipgrad.reproduce.estimators import Estimators
from flipgrad.reproduce.size import Depth, Width
from flipgrad.reproduce.unbiased import CosineUnbiased, RmseUnbiased

# The names on the command line.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (Rmse(), Cosine(), RmseUnbiased(), CosineUnbiased(), Width(), Depth(), Estimators())
}

__all__ = ["EXPERIMENTS", "SCALES", "Claim", "Experiment", "Workshop"]
