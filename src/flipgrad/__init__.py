"""Stochastic binary networks in PyTorch, trained with gradients one can trust.

The names of this package are imported when they are first used, as scientific Python's SPEC 1 asks for: what needs no torch, as
the command line's help and packed networks, starts without it.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flipgrad.errors import InputError

if TYPE_CHECKING:
    from flipgrad import bounds, estimators, exact, export, flips, gradeval, packed, plots, zoo
    from flipgrad.costs import LayerSummary, Summary, summary
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

__version__ = "0.2.0"

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
    "bounds", "estimators", "exact", "export", "flips", "gradeval", "packed", "plots", "zoo",
    # errors
    "InputError",
]

# The module of each name that is no module itself; a test compares it with the imports above, which type checkers read.
_HOMES = {name: f"flipgrad.{module}" for module, names in {
    "costs": ["LayerSummary", "Summary", "summary"],
    "estimators": [
        "ADF", "ARM", "ARMS", "LEG", "PSA", "REBAR", "REINFORCE", "RELAX", "ST", "ZGR", "BitFlip", "Concrete",
        "ConstantBaseline", "DisARM", "DoubleCV", "Estimator", "Exact", "FlipCV", "GumbelRao", "HardST", "LearnedBaseline",
        "LocalEstimator", "LocalReparam", "MuProp", "Path", "PathEstimator", "RunningBaseline", "Tanh", "Variables",
    ],
    "graph": ["Graph"],
    "latent": ["Variational"],
    "layers": ["BinaryConv2d", "BinaryLayer", "BinaryLinear", "use"],
    "max_pooling": ["MaxPool2d"],
    "network": ["Member", "Sequential"],
    "noise": ["Laplace", "Logistic", "Noise", "Normal", "Uniform"],
    "norms": ["ScaleShift"],
    "objectives": [
        "BernoulliLikelihood", "CrossEntropy", "GaussianLikelihood", "LogisticLoss", "SoftCrossEntropy", "SquaredError",
    ],
    "residual": ["Residual", "ResidualConv2d", "ResidualLinear", "Sign"],
    "steps": ["Concat"],
}.items() for name in names}
# fmt: on


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Type checkers do not see it: they would take every name for one that exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """What is not imported yet: a name of ``__all__``, or a module of ours."""
        if name in _HOMES:
            # It recommends an estimator to all networks, and inside of a compiled graph nothing can be imported any more.
            import_module("flipgrad.estimators")
            found = globals()[name] = getattr(import_module(_HOMES[name]), name)
            return found
        if not name.startswith("_") and find_spec(f"flipgrad.{name}") is not None:
            return import_module(f"flipgrad.{name}")
        raise AttributeError(f"module 'flipgrad' has no attribute {name!r}", name=name, obj=sys.modules["flipgrad"])
