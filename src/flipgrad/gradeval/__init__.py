"""Measure gradient estimators against the truth: bias, variance, RMSE and cosine, per layer. Draws no pictures."""

from flipgrad.estimators.names import by_name
from flipgrad.gradeval.evaluate import REFERENCE_FACTOR, Measured, Reference, ReferenceLayer, Result, check_options, evaluate
from flipgrad.gradeval.statistics import Accuracy

__all__ = [
    "REFERENCE_FACTOR",
    "Accuracy",
    "Measured",
    "Reference",
    "ReferenceLayer",
    "Result",
    "by_name",
    "check_options",
    "evaluate",
]
