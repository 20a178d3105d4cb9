"""Data sets as tensors, and augmentations on tensors."""

from flipgrad.data.augment import shift
from flipgrad.data.digits import digits
from flipgrad.data.sets import DataSet, Split

__all__ = ["DataSet", "Split", "digits", "shift"]
