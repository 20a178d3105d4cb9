"""Gradient estimators, and the one place where their names are listed."""

from flipgrad.contract import Estimator, LocalEstimator, recommend
from flipgrad.estimators._paths import Path, PathEstimator
from flipgrad.estimators.arm import ARM, ARMS, DisARM
from flipgrad.estimators.exact import Exact
from flipgrad.estimators.hard_st import HardST
from flipgrad.estimators.leg import LEG, BitFlip
from flipgrad.estimators.moments import ADF, LocalReparam
from flipgrad.estimators.psa import PSA
from flipgrad.estimators.reinforce import REINFORCE, Baseline, ConstantBaseline, LearnedBaseline, MuProp, RunningBaseline
from flipgrad.estimators.relaxations import ZGR, Concrete, GumbelRao, Tanh
from flipgrad.estimators.st import ST
from flipgrad.estimators.tuned import REBAR, RELAX, DoubleCV

# Who does not choose gets the one that we recommend.
recommend(PSA)

# The names on the command line.
ESTIMATORS: dict[str, type[Estimator]] = {
    "adf": ADF,
    "arm": ARM,
    "arms": ARMS,
    "bitflip": BitFlip,
    "concrete": Concrete,
    "disarm": DisARM,
    "double-cv": DoubleCV,
    "exact": Exact,
    "gumbel-rao": GumbelRao,
    "hard-st": HardST,
    "leg": LEG,
    "local-reparam": LocalReparam,
    "muprop": MuProp,
    "psa": PSA,
    "rebar": REBAR,
    "reinforce": REINFORCE,
    "relax": RELAX,
    "st": ST,
    "tanh": Tanh,
    "zgr": ZGR,
}

# fmt: off
__all__ = [  # noqa: RUF022
    "ESTIMATORS", "Estimator", "LocalEstimator", "Path", "PathEstimator",
    "ADF", "ARM", "ARMS", "BitFlip", "Concrete", "DisARM", "DoubleCV", "Exact", "GumbelRao", "HardST", "LEG", "LocalReparam",
    "MuProp", "PSA", "REBAR", "REINFORCE", "RELAX", "ST", "Tanh", "ZGR",
    "Baseline", "ConstantBaseline", "LearnedBaseline", "RunningBaseline",
]
# fmt: on
