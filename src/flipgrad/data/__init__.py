"""Data sets as tensors, and augmentations on tensors."""

from flipgrad.data.augment import shift
from flipgrad.data.cifar10 import cifar10
from flipgrad.data.digits import digits
from flipgrad.data.mnist import mnist
from flipgrad.data.sets import DataSet, Split
from flipgrad.data.toy import toy

__all__ = ["DataSet", "Split", "cifar10", "digits", "mnist", "shift", "toy"]
