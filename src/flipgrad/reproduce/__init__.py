"""The paper's figures from one command each: one file per figure, with the claims checked against the numbers."""

from flipgrad.reproduce._experiment import SCALES, Claim, Experiment, Workshop
from flipgrad.reproduce.accuracy import Cosine, Rmse
from flipgrad.reproduce.cifar import Cifar
from flipgrad.reproduce.estimators import Estimators
from flipgrad.reproduce.muprop import MuProp
from flipgrad.reproduce.size import Depth, Width
from flipgrad.reproduce.timing import Timing
from flipgrad.reproduce.toy import ToyExample, ToyTraining
from flipgrad.reproduce.unbiased import CosineUnbiased, RmseUnbiased

# The names on the command line.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Rmse(),
        Cosine(),
        RmseUnbiased(),
        CosineUnbiased(),
        Width(),
        Depth(),
        Estimators(),
        ToyTraining(),
        ToyExample(),
        Cifar(),
        MuProp(),
        Timing(),
    )
}

__all__ = ["EXPERIMENTS", "SCALES", "Claim", "Experiment", "Workshop"]
