"""The paper's figures and tables, and what lies beyond, from one command each, with the claims checked against the numbers."""

from flipgrad.reproduce._cells import CellError
from flipgrad.reproduce._dask import DaskRunner
from flipgrad.reproduce._experiment import SCALES, Claim, Experiment, Workshop
from flipgrad.reproduce._local import LocalRunner
from flipgrad.reproduce.accuracy import Cosine, Rmse
from flipgrad.reproduce.beyond import Beyond
from flipgrad.reproduce.cifar import Cifar
from flipgrad.reproduce.estimators import Estimators
from flipgrad.reproduce.muprop import MuProp
from flipgrad.reproduce.report import keep, write_report
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
        Beyond(),
    )
}

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "CellError",
    "Claim",
    "DaskRunner",
    "Experiment",
    "LocalRunner",
    "Workshop",
    "keep",
    "write_report",
]
