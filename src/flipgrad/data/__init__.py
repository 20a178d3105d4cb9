"""Data sets as tensors, and augmentations on tensors."""

from flipgrad.data.augment import shift
from flipgrad.data.digits import digits
from flipgrad.data.mnist import mnist
from flipgrad.data.sets import DataSet, Split
from flipgrad.data.toy import toy

__all__ = ["DataSet", "Split", "digits", "mnist", "shift", "toy"]
