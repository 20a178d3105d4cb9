"""Networks for the built-in data sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flipgrad.errors import InputError
from flipgrad.layers import BinaryConv2d, BinaryLinear
from flipgrad.network import Sequential
from flipgrad.noise import Noise

# The paper's network for CIFAR-10, layer by layer.
CIFAR_CHANNELS = (96, 96, 96, 192, 192, 192, 192, 192)
CIFAR_KERNELS = (3, 3, 3, 3, 3, 3, 3, 1)
CIFAR_STRIDES = (1, 1, 2, 1, 1, 2, 1, 1)


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
    layers = [BinaryLinear(n, m, noise=noise) for n, m in pairwise(sizes)]
    return Sequential(*layers, head=nn.Linear(widths[-1], classes))


def cifar_net(width: float = 1.0, classes: int = 10, *, noise: Noise | None = None) -> Sequential:
    """The paper's all-convolutional network for 32x32 colour images: eight binary convolutions and a linear head.

    Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020,
    appendix C.2, after Springenberg et al. 2014: strides instead of pooling, no padding, 192 x 2 x 2 units before the head.

    Args:
        width: the factor on the numbers of channels.
        classes: outputs of the head.
        noise: of all units; logistic by default.
    """
    if not width > 0:
        raise InputError(f"cifar_net(width={width}): the factor on the channels must be positive, e.g. 0.25")
    channels = [3, *(max(1, round(width * depth)) for depth in CIFAR_CHANNELS)]
    layers = [
        BinaryConv2d(n, m, kernel, stride, noise=noise)
        for (n, m), kernel, stride in zip(pairwise(channels), CIFAR_KERNELS, CIFAR_STRIDES, strict=True)
    ]
    return Sequential(*layers, nn.Flatten(), head=nn.Linear(channels[-1] * 2 * 2, classes))
