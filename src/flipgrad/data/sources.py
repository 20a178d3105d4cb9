"""The data sets that ``--data`` names, each stated once: how it is read, and what is usually trained on it.

Those that need no files are here.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from flipgrad.data.cifar10 import cifar10
from flipgrad.data.images import image_folder
from flipgrad.data.mnist import mnist
from flipgrad.data.sets import DataSet, Split
from flipgrad.errors import InputError

TEST_DIGITS = 360
# The variable that names the folder of data sets.
VARIABLE = "FLIPGRAD_DATA"
# What flipgrad.data.sets.from_bytes does.
PIXELS = "pixels of 0 to 255, / 127.5 - 1"
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"


def digits() -> DataSet:
    """1,437 training and 360 test images [1, 8, 8] with values in [-1, 1]; the split is stratified and always the same.

    The handwritten digits that come with scikit-learn: no download.
    Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning Repository, 1998.

    >>> len(digits().train), len(digits().test)
    (1437, 360)
    """
    # Its import takes half a second, which other data sets need not wait for.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(raw.target)
    train, test = train_test_split(range(len(y)), test_size=TEST_DIGITS, stratify=raw.target, random_state=0)
    return DataSet("digits", Split(x[train], y[train]), Split(x[test], y[test]), classes=10, background=-1.0)


def toy(points: int = 100, *, seed: int = 0) -> DataSet:
    """The paper's two overlapping classes in the plane.

    Points with x in [-pi/2, pi/2]: class 0 uniform above y = 0 up to 1, class 1 uniform below y = cos x down to -1.
    Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020,
    appendix C.1; there the classes are called 1 and 2.

    Args:
        points: per class, in the training and in the test part each.
        seed: of the draw.

    >>> toy().train.x.shape, toy().train.y.bincount()
    (torch.Size([200, 2]), tensor([100, 100]))
    """
    if points < 1:
        raise InputError(f"toy(points={points}): give at least one point per class")
    generator = torch.Generator().manual_seed(seed)
    return DataSet("toy", _points(points, generator), _points(points, generator), classes=2, background=0.0)


def _points(points: int, generator: Generator) -> Split:
    above = _rectangle(points, 0.0, generator)
    below = torch.empty(0, 2)
    while len(below) < points:
        candidates = _rectangle(points, -1.0, generator)
        below = torch.cat([below, candidates[candidates[:, 1] < candidates[:, 0].cos()]])
    return Split(torch.cat([above, below[:points]]), torch.arange(2).repeat_interleave(points))


def _rectangle(points: int, bottom: float, generator: Generator) -> Tensor:
    """Uniform points with x in [-pi/2, pi/2] and y in [bottom, 1]."""
    u = torch.rand(points, 2, generator=generator)
    return torch.stack([math.pi * (u[:, 0] - 0.5), bottom + (1 - bottom) * u[:, 1]], 1)


@final
@dataclass(frozen=True)
class DataSource:
    """One data set of ``--data``.

    Attributes:
        read: gives the data set from the folder of its files, the side of its images in pixels (None: as they are) and a seed.
        needs_folder: whether a user has to bring the files; the others come with flipgrad, and are small.
        model: the name of its network; None if the user has to choose one.
        augment: the name of its usual augmentation.
        resizes: whether its images can be resized.
        inputs: how the numbers that a network sees are made of what is usually stored.
        class_names: what its classes are called; those without names have their numbers.
    """

    read: Callable[[Path, int | None, int], DataSet]
    needs_folder: bool
    model: str | None
    augment: str
    resizes: bool = False
    inputs: str = PIXELS
    class_names: tuple[str, ...] = ()


# The data sets by their names on the command line.
SOURCES: dict[str, DataSource] = {
    "digits": DataSource(lambda folder, side, seed: digits(), False, "digits", "shift", inputs="pixels of 0 to 16, / 8 - 1"),
    "toy": DataSource(lambda folder, side, seed: toy(seed=seed), False, "5-5-5", "none", inputs="coordinates as they are"),
    "mnist": DataSource(lambda folder, side, seed: mnist(folder), True, "mnist", "affine"),
    "cifar10": DataSource(
        lambda folder, side, seed: cifar10(folder), True, "cifar", "flip-crop", class_names=tuple(CIFAR10_CLASSES.split())
    ),
    "images": DataSource(lambda folder, side, seed: image_folder(folder, side, seed=seed), True, None, "none", resizes=True),
}


def usual_folder(name: str) -> Path | None:
    """Where the files of the data set ``name`` are if nothing else is said: its folder in ``$FLIPGRAD_DATA``, if set."""
    return Path(os.environ[VARIABLE]) / name if os.environ.get(VARIABLE) else None
