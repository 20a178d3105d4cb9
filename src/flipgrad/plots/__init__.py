"""Figures, drawn from result files only: anything drawn can be redrawn."""

from flipgrad.plots.accuracy import cosine, rmse
from flipgrad.plots.bias import bias_and_spread
from flipgrad.plots.curves import training_curve
from flipgrad.plots.learning import cifar, cifar_extra, muprop
from flipgrad.plots.options import by_layer, over_rates
from flipgrad.plots.report import report
from flipgrad.plots.results import Panel, layers
from flipgrad.plots.scaling import scaling
from flipgrad.plots.timing import timing
from flipgrad.plots.toy import toy_example, toy_training

__all__ = [
    "Panel",
    "bias_and_spread",
    "by_layer",
    "cifar",
    "cifar_extra",
    "cosine",
    "layers",
    "muprop",
    "over_rates",
    "report",
    "rmse",
    "scaling",
    "timing",
    "toy_example",
    "toy_training",
    "training_curve",
]
