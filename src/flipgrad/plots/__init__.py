"""Figures, drawn from result files only: anything drawn can be redrawn."""

from flipgrad.plots.curves import training_curve

__all__ = ["training_curve"]
