r"""The flip product as its definition, in float64: the reference that every faster way is tested against.

.. math:: u_i = x_i \sum_j \big[F(a_j(x)) - F(a_j(x_{\downarrow i}))\big]\, g_j

Every unit is flipped in turn and the layer evaluated anew. Slow on purpose; it shares no code with the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.noise import Noise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, noise: Noise) -> Tensor:
    """The flip product of a fully connected layer: ``x`` [B, in], ``weight`` [out, in], ``grad`` [B, out] -> [B, in]."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    bias = None if bias is None else bias.double()
    probability = noise.cdf(functional.linear(x, weight, bias))
    u = torch.zeros_like(x)
    for i in range(x.shape[1]):
        flipped = x.clone()
        flipped[:, i] = -flipped[:, i]
        change = probability - noise.cdf(functional.linear(flipped, weight, bias))
        u[:, i] = x[:, i] * (change * grad).sum(1)
    return u


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The flip product of a convolution: ``x`` [B, C, H, W], ``grad`` [B, out, H', W'] -> [B, C, H, W].

    The zeros that pad the input are no units: they are not among the flipped positions.
    """
    x, weight, grad = x.double(), weight.double(), grad.double()
    bias = None if bias is None else bias.double()
    probability = noise.cdf(functional.conv2d(x, weight, bias, stride, padding, dilation, groups))
    u = torch.zeros_like(x)
    _, channels, height, width = x.shape
    for c in range(channels):
        for row in range(height):
            for column in range(width):
                flipped = x.clone()
                flipped[:, c, row, column] = -flipped[:, c, row, column]
                a = functional.conv2d(flipped, weight, bias, stride, padding, dilation, groups)
                change = probability - noise.cdf(a)
                u[:, c, row, column] = x[:, c, row, column] * (change * grad).sum((1, 2, 3))
    return u
