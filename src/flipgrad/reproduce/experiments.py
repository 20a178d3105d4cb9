"""All experiments, by their names on the command line; what is cheap and needs no images comes first."""

from flipgrad.reproduce._experiment import Experiment
from flipgrad.reproduce.accuracy import Cosine, Rmse
from flipgrad.reproduce.beyond import Beyond
from flipgrad.reproduce.cifar import Cifar
from flipgrad.reproduce.estimators import Estimators
from flipgrad.reproduce.muprop import MuProp
from flipgrad.reproduce.size import Depth, Width
from flipgrad.reproduce.timing import Timing
from flipgrad.reproduce.toy import ToyExample, ToyTraining
from flipgrad.reproduce.unbiased import CosineUnbiased, RmseUnbiased

ALL: list[type[Experiment]] = [
    Rmse,
    Cosine,
    RmseUnbiased,
    CosineUnbiased,
    Width,
    Depth,
    Timing,
    Estimators,
    ToyTraining,
    ToyExample,
    Cifar,
    MuProp,
    Beyond,
]
EXPERIMENTS = {kind.name: kind() for kind in ALL}
