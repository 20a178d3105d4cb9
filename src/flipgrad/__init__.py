"""Stochastic binary networks in PyTorch, trained with gradients one can trust."""

from flipgrad import bounds, estimators, exact, flips, gradeval, zoo
from flipgrad.errors import InputError
from flipgrad.estimators import (
    ADF,
    ARM,
    ARMS,
    LEG,
    PSA,
    REBAR,
    REINFORCE,
    RELAX,
    ST,
    ZGR,
    BitFlip,
    Concrete,
    ConstantBaseline,
    DisARM,
    DoubleCV,
    Estimator,
    Exact,
    FlipCV,
    GumbelRao,
    HardST,
    LearnedBaseline,
    LocalEstimator,
    LocalReparam,
    MuProp,
    Path,
    PathEstimator,
    RunningBaseline,
    Tanh,
    Variables,
)
from flipgrad.graph import Graph
from flipgrad.latent import Variational
from flipgrad.layers import BinaryConv2d, BinaryLayer, BinaryLinear, use
from flipgrad.max_pooling import MaxPool2d
from flipgrad.network import Member, Sequential
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform
from flipgrad.norms import ScaleShift
from flipgrad.objectives import (
    BernoulliLikelihood,
    CrossEntropy,
    GaussianLikelihood,
    LogisticLoss,
    SoftCrossEntropy,
    SquaredError,
)
from flipgrad.residual import Residual, ResidualConv2d, ResidualLinear, Sign
from flipgrad.steps import Concat
from flipgrad.summary import LayerSummary, Summary, summary

__version__ = "0.1.0.dev0"

# fmt: off
__all__ = [  # noqa: RUF022
    # networks
    "BinaryConv2d", "BinaryLayer", "BinaryLinear", "Concat", "Graph", "MaxPool2d", "Member", "ScaleShift", "Sequential", "use",
    "Residual", "ResidualConv2d", "ResidualLinear", "Sign", "Variational",
    # what it costs
    "LayerSummary", "Summary", "summary",
    # noise
    "Laplace", "Logistic", "Noise", "Normal", "Uniform",
    # objectives
    "BernoulliLikelihood", "CrossEntropy", "GaussianLikelihood", "LogisticLoss", "SoftCrossEntropy", "SquaredError",
    # estimators
    "ARMS", "BitFlip", "DoubleCV", "REBAR", "RELAX",
    "LEG", "REINFORCE", "DisARM", "FlipCV", "MuProp",
    "ConstantBaseline", "LearnedBaseline", "RunningBaseline",
    "ADF", "Concrete", "GumbelRao", "HardST", "LocalReparam", "Tanh", "ZGR",
    "ARM", "PSA", "ST", "Estimator", "Exact", "LocalEstimator", "Path", "PathEstimator", "Variables",
    # modules
    "bounds", "estimators", "exact", "flips", "gradeval", "zoo",
    # errors
    "InputError",
]
# fmt: on
