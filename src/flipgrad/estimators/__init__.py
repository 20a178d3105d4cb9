"""Gradient estimators, and the one place where their names are listed."""

from flipgrad.contract import Estimator, LocalEstimator, recommend
from flipgrad.estimators._paths import Path, PathEstimator, Variables
from flipgrad.estimators.adf import ADF
from flipgrad.estimators.arm import ARM
from flipgrad.estimators.arms import ARMS
from flipgrad.estimators.baselines import Baseline, ConstantBaseline, LearnedBaseline, RunningBaseline
from flipgrad.estimators.bitflip import BitFlip
from flipgrad.estimators.concrete import Concrete
from flipgrad.estimators.disarm import DisARM
from flipgrad.estimators.double_cv import DoubleCV
from flipgrad.estimators.exact import Exact
from flipgrad.estimators.flip_cv import FlipCV
from flipgrad.estimators.gumbel_rao import GumbelRao
from flipgrad.estimators.hard_st import HardST
from flipgrad.estimators.leg import LEG
from flipgrad.estimators.local_reparam import LocalReparam
from flipgrad.estimators.muprop import MuProp
from flipgrad.estimators.psa import PSA
from flipgrad.estimators.rebar import REBAR
from flipgrad.estimators.reinforce import REINFORCE
from flipgrad.estimators.relax import RELAX
from flipgrad.estimators.st import ST
from flipgrad.estimators.tanh import Tanh
from flipgrad.estimators.zgr import ZGR

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
    "flip-cv": FlipCV,
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
    "ESTIMATORS", "Estimator", "LocalEstimator", "Path", "PathEstimator", "Variables",
    "ADF", "ARM", "ARMS", "BitFlip", "Concrete", "DisARM", "DoubleCV", "Exact", "FlipCV", "GumbelRao", "HardST", "LEG",
    "LocalReparam", "MuProp", "PSA", "REBAR", "REINFORCE", "RELAX", "ST", "Tanh", "ZGR",
    "Baseline", "ConstantBaseline", "LearnedBaseline", "RunningBaseline",
]
# fmt: on
