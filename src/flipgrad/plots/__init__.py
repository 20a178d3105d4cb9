"""Figures, drawn from result files only: anything drawn can be redrawn."""

from flipgrad.plots.accuracy import cosine, rmse
from flipgrad.plots.bias import bias_and_spread
from flipgrad.plots.curves import training_curve
from flipgrad.plots.report import report
from flipgrad.plots.results import Panel, layers
from flipgrad.plots.scaling import scaling

__all__ = ["Panel", "bias_and_spread", "cosine", "layers", "report", "rmse", "scaling", "training_curve"]
