"""Networks for the built-in data sets."""

from __future__ import annotations

from torch import nn

from flipgrad.layers import BinaryConv2d
from flipgrad.network import Sequential


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
