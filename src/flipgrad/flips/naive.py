r"""Sums over flips as their definitions, in float64: the reference that every faster way is tested against.

The flip product, and the log ratio of the probabilities of output states :math:`y`:

.. math::
    u_i = x_i \sum_j \big[F(a_j(x)) - F(a_j(x_{\downarrow i}))\big]\, g_j, \qquad
    \log r_i = \sum_j \big[\log F(y_j a_j(x_{\downarrow i})) - \log F(y_j a_j(x))\big]

Every unit is flipped in turn and the layer evaluated anew. Slow on purpose; it shares no code with the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.noise import Noise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, noise: Noise) -> Tensor:
    """The flip product of a fully connected layer: ``x`` [B, in], ``weight`` [out, in], ``grad`` [B, out] -> [B, in]."""
    change = _changes(x, _linear(weight, bias), lambda a: noise.cdf(a) * grad.double())
    return -x.double() * change


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
    layer = _conv2d(weight, bias, stride, padding, dilation, groups)
    return -x.double() * _changes(x, layer, lambda a: noise.cdf(a) * grad.double())


def ratio_linear(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, noise: Noise) -> Tensor:
    """The log ratio of a fully connected layer: ``x`` [B, in], ``weight`` [out, in], ``states`` [B, out] -> [B, in]."""
    return _changes(x, _linear(weight, bias), lambda a: noise.log_cdf(states.double() * a))


def ratio_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The log ratio of a convolution: ``x`` [B, C, H, W], ``states`` [B, out, H', W'] -> [B, C, H, W]."""
    layer = _conv2d(weight, bias, stride, padding, dilation, groups)
    return _changes(x, layer, lambda a: noise.log_cdf(states.double() * a))


def _linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.linear(x, weight.double(), None if bias is None else bias.double())


def _conv2d(weight: Tensor, bias: Tensor | None, *geometry: tuple[int, int] | int) -> Callable[[Tensor], Tensor]:
    convolve: Callable[..., Tensor] = functional.conv2d
    return lambda x: convolve(x, weight.double(), None if bias is None else bias.double(), *geometry)


def _changes(x: Tensor, layer: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """By how much flipping each unit of ``x`` changes the sum over outputs of a function of their pre-activations."""
    x = x.double()
    before = function(layer(x))
    changes = torch.zeros_like(x)
    units, flat = x.flatten(1), changes.flatten(1)
    for i in range(units.shape[1]):
        flipped = units.clone()
        flipped[:, i] = -flipped[:, i]
        # The difference of every term, not of the sums: those are large where the terms are small.
        flat[:, i] = (function(layer(flipped.view_as(x))) - before).flatten(1).sum(1)
    return flat.view_as(x)
