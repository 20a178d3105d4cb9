r"""Sums over flips as their definitions, in float64: the reference that every faster way is tested against.

The flip product, and the log ratio of the probabilities of output states :math:`y`:

.. math::
    u_i = x_i \sum_j \big[F(a_j(x)) - F(a_j(x_{\downarrow i}))\big]\, g_j, \qquad
    \log r_i = \sum_j \big[\log F(y_j a_j(x_{\downarrow i})) - \log F(y_j a_j(x))\big]

Every unit is flipped in turn and the layer evaluated anew. Slow on purpose; it shares no code with the others.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.flips.ordinary import Geometry
from flipgrad.noise import Noise


def flip_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, noise: Noise, geometry: Geometry | None = None
) -> Tensor:
    """The flip product [B, in] or [B, C, H, W] of the states ``x``, for the gradient ``grad`` in the output states.

    The zeros that pad the input of a convolution are no units: they are not among the flipped positions.
    """
    return -x.double() * _changes(x, _layer(weight, bias, geometry), lambda a: noise.cdf(a) * grad.double())


def log_ratio(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, noise: Noise, geometry: Geometry | None = None
) -> Tensor:
    """The log ratio [B, in] or [B, C, H, W] of the states ``x``, for the output ``states``."""
    return _changes(x, _layer(weight, bias, geometry), lambda a: noise.log_cdf(states.double() * a))


def entropy_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, noise: Noise, geometry: Geometry | None = None
) -> Tensor:
    """The flip product with the function g F(a) - H(F(a)) in place of g F(a), for the gradients g = ``grad``."""

    def function(a: Tensor) -> Tensor:
        p, q = noise.cdf(a), noise.cdf(-a)
        result: Tensor = p * grad.double() + torch.special.xlogy(p, p) + torch.special.xlogy(q, q)
        return result

    return -x.double() * _changes(x, _layer(weight, bias, geometry), function)


def _layer(weight: Tensor, bias: Tensor | None, geometry: Geometry | None) -> Callable[[Tensor], Tensor]:
    """The pre-activations of a fully connected layer or, with a geometry, of a convolution."""
    weight, bias = weight.double(), None if bias is None else bias.double()
    if geometry is None:
        return lambda x: functional.linear(x, weight, bias)
    return lambda x: functional.conv2d(x, weight, bias, *geometry)


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
