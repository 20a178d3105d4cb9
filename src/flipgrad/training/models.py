"""Networks for the built-in data sets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from flipgrad.errors import InputError
from flipgrad.layers import BinaryConv2d, BinaryLinear
from flipgrad.network import Sequential
from flipgrad.noise import Noise


def digits_net(classes: int = 10) -> Sequential:
    """A small convolutional net for 8x8 images: a real-valued convolution, two binary ones, a linear head."""
    return Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        BinaryConv2d(32, 64, 3, stride=2, padding=1),
        BinaryConv2d(64, 64, 3),
        nn.Flatten(),
        head=nn.Linear(64 * 2 * 2, classes),
    )


def fully_connected(inputs: int, widths: Sequence[int], classes: int, *, noise: Noise | None = None) -> Sequential:
    """Binary layers of the given ``widths``, each connected to all of the one before, and a linear head.

    >>> fully_connected(2, [5, 5, 5], 2).head
    Linear(in_features=5, out_features=2, bias=True)
    """
    if not widths or min(widths) < 1:
        raise InputError(f"widths={list(widths)}: give the units of every binary layer, e.g. 5-5-5")
    sizes = [inputs, *widths]
    layers = [BinaryLinear(n, m, noise=noise) for n, m in itertools.pairwise(sizes)]
    return Sequential(*layers, head=nn.Linear(widths[-1], classes))
