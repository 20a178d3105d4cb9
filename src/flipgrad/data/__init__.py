"""Data sets as tensors, and augmentations on tensors."""

from flipgrad.data.augment import AUGMENTATIONS, affine, flip_and_crop, shift
from flipgrad.data.cifar10 import cifar10
from flipgrad.data.images import image_folder
from flipgrad.data.mnist import mnist
from flipgrad.data.sets import DataSet, Split
from flipgrad.data.sources import SOURCES, VARIABLE, DataSource, digits, toy, usual_folder

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "VARIABLE",
    "DataSet",
    "DataSource",
    "Split",
    "affine",
    "cifar10",
    "digits",
    "flip_and_crop",
    "image_folder",
    "mnist",
    "shift",
    "toy",
    "usual_folder",
]
