"""The data sets that ``--data`` names, each stated once: how it is read, and what is usually trained on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from flipgrad.data.cifar10 import cifar10
from flipgrad.data.digits import digits
from flipgrad.data.images import image_folder
from flipgrad.data.mnist import mnist
from flipgrad.data.sets import DataSet
from flipgrad.data.toy import toy


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
    """

    read: Callable[[Path, int | None, int], DataSet]
    needs_folder: bool
    model: str | None
    augment: str
    resizes: bool = False


SOURCES: dict[str, DataSource] = {
    "digits": DataSource(lambda folder, side, seed: digits(), False, "digits", "shift"),
    "toy": DataSource(lambda folder, side, seed: toy(seed=seed), False, "5-5-5", "none"),
    "mnist": DataSource(lambda folder, side, seed: mnist(folder), True, "mnist", "affine"),
    "cifar10": DataSource(lambda folder, side, seed: cifar10(folder), True, "cifar", "flip-crop"),
    "images": DataSource(lambda folder, side, seed: image_folder(folder, side, seed=seed), True, None, "none", resizes=True),
}
