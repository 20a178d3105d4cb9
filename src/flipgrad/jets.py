r"""Higher derivatives along a residual stream: what the flips of units need that ordinary backpropagation does not carry.

A stream adds up: :math:`h_k = h_{k-1} + A_k s_k` with states :math:`s_k = \mathrm{sign}(\alpha_k h_{k-1} + \beta_k - Z_k)`, so
that a unit acts on every later layer. The path sample-analytic estimator over that graph would add up :math:`D_i m_j u_j` of
the units j of all later layers, whose cost grows with the square of the depth. But a flip of unit i of layer k changes the
stream by :math:`-2 s_i w` with the column w of :math:`A_k`, and polynomials in w separate:

.. math::
    H_m = \sum_{l > k} 2 \alpha_l^m F^{(m)}(a_l) u_l , \qquad
    u_i = D_i f + \sum_j w_j H_{1,j} - s_i \sum_j w_j^2 H_{2,j} + \tfrac23 \sum_j w_j^3 H_{3,j} - \dots

So the way back carries, along the stream, the first M derivatives of every place in place of one. Ordinary backpropagation
carries :math:`H_1`; the others are the gradients of *carriers*: tensors of zeros that are handed along the stream, through the
same scales and poolings, each to its own power. They hold no memory and cost nothing on the way forward. With M = 1 the
estimator is straight-through; each further order costs one transposed convolution per layer, however many layers follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from flipgrad.affine import Affine, along, over_channels, per_channel
from flipgrad.flips import ordinary
from flipgrad.guards import applied, once

# A linear map on the way back: from the gradient in a result to that in what it was made of.
Pullback = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Added:
    """What a residual block added to a stream: ``affine`` of its ``states``.

    ``shortcut`` is the way back of a gradient, from the stream after the block to the stream before it.
    """

    states: Tensor
    affine: Affine
    shortcut: Pullback


@final
@dataclass(frozen=True)
class Jets:
    """What goes along a stream besides its value.

    Attributes:
        carriers: for every order from 2, zeros like the stream whose gradient is the derivative of that order.
        trail: the blocks that have added to the stream, and the ways back through modules between them, as far back as what
            was added has a linear effect on the stream now.
    """

    carriers: Mapping[int, Tensor] = field(default_factory=dict)
    trail: tuple[Added | Pullback, ...] = ()

    def through(self, shape: torch.Size, pullback: Callable[[Tensor, int], Tensor]) -> Jets:
        """Those of what a linear module makes of the stream, of that ``shape``.

        ``pullback`` of a gradient, and an order m, sums over the module's outputs with its coefficients to the power m.
        """

        def moved(order: int, carrier: Tensor) -> Tensor:
            result: Tensor = applied(_Carried, carrier, shape, lambda grad: pullback(grad, order))
            return result

        return replace(self, carriers={order: moved(order, carrier) for order, carrier in self.carriers.items()})

    def scaled(self, scale: Tensor | None, channel_dim: int) -> Jets:
        """Those of the stream times a ``scale`` of every channel, in the stream's dimension 1 or -1."""
        if scale is None or not self.carriers:
            return self
        shape = next(iter(self.carriers.values())).shape
        factor = along(scale.detach(), len(shape), channel_dim)
        return self.through(shape, lambda grad, order: grad * factor**order)

    def added(self, states: Tensor, affine: Affine, scale: Tensor | None, order: int, shape: torch.Size) -> Jets:
        """Those of the stream, of that ``shape``, after ``affine`` of a layer's ``states``, times ``scale``, was added to it.

        Flips of the states, and of binary weights of the map, act along the stream up to an ``order``.
        """
        orders = tuple(range(2, order + 1))
        both = dict(self.carriers)
        if orders:
            arguments = (states, affine.weight, affine, scale if scale is None else scale.detach(), orders, shape)
            begun: tuple[Tensor, ...] = applied(_Flips, *arguments)
            for order, carrier in zip(orders, begun, strict=True):
                first = both.get(order)
                both[order] = carrier if first is None else applied(_Joined, first, carrier)
        return replace(self, carriers=both)


def _zeros(like: Tensor, shape: torch.Size) -> Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand(shape)


@final
class _Carried(torch.autograd.Function):
    """A carrier in another ``shape``, whose gradient comes back through a ``pullback``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(carrier: Tensor, shape: torch.Size, pullback: Pullback) -> Tensor:
        return _zeros(carrier, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pullback = inputs[2]

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pullback(grad), None, None


@final
class _Joined(torch.autograd.Function):
    """The sum of two carriers, whose gradient is that of both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        return _zeros(first, first.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


@final
class _Flips(torch.autograd.Function):
    """The carriers that states begin: their gradients come to the states and, if these are binary, to the weights."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        states: Tensor, weight: Tensor, affine: Affine, scale: Tensor | None, orders: tuple[int, ...], shape: torch.Size
    ) -> tuple[Tensor, ...]:
        return tuple(_zeros(states, shape) for _ in orders)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        states, weight, ctx.affine, scale, ctx.orders, _ = inputs
        ctx.save_for_backward(states, weight, scale)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, scale = ctx.saved_tensors
        affine = replace(ctx.affine, weight=weight, bias=None)
        u = v = None
        for order, grad in zip(ctx.orders, grads, strict=True):
            if grad is None:
                continue
            if ctx.needs_input_grad[0]:
                part = _over_units(affine, scale, order, grad, states)
                part = part * states if order % 2 == 0 else part
                u = part if u is None else u + part
            if ctx.needs_input_grad[1] and affine.binary_weights:
                part = _coefficient(order) * _over_weights(affine, scale, order, grad, states)
                v = part if v is None else v + part
        return u, v, None, None, None, None


def _coefficient(order: int) -> float:
    """Of w^m H_m in the signal of a unit, up to the unit's state where m is even; H has the factor 2 of m = 2F - 1.

    >>> [_coefficient(order) for order in (1, 2, 3)]
    [1.0, -1.0, 0.6666666666666666]
    """
    return -((-2.0) ** order) / (2 * math.factorial(order))


def _over_units(affine: Affine, scale: Tensor | None, order: int, grad: Tensor, states: Tensor) -> Tensor:
    """The sums over outputs of w^order H, with their coefficient, for every unit."""
    if affine.binary_weights and order % 2 == 0:
        return _over_windows(affine, scale, order, grad, states)
    weight = affine.weight if scale is None else per_channel(affine.weight, scale)
    return replace(affine, weight=_coefficient(order) * weight**order, binary_weights=False).transposed(grad, states)


def _over_windows(affine: Affine, scale: Tensor | None, order: int, grad: Tensor, states: Tensor) -> Tensor:
    """The same where an even power of all weights is that of their scale: sums over channels, then over windows."""
    if scale is not None:
        grad = grad * over_channels(scale, affine) ** order
    if affine.geometry is None:
        return _coefficient(order) * grad.sum(-1, keepdim=True).expand_as(states)
    groups = affine.geometry.groups
    per_group = grad.unflatten(1, (groups, -1)).sum(2)
    ones = affine.weight.new_full((groups, 1, *affine.weight.shape[2:]), _coefficient(order))
    part = replace(affine, weight=ones, binary_weights=False).transposed(per_group, states[:, :groups])
    return part.repeat_interleave(states.shape[1] // groups, 1)


def _over_weights(affine: Affine, scale: Tensor | None, order: int, grad: Tensor, states: Tensor) -> Tensor:
    """The sums over examples and places of (scale x)^order H, for every binary weight, times its own state if that is even."""
    if scale is not None:
        grad = grad * over_channels(scale, affine) ** order
    if order % 2:
        return affine.weight_gradient(states, grad)
    if affine.geometry is None:
        return affine.weight * affine.rows(grad).sum(0)[:, None]
    # Whatever the states are, their square is 1, and 0 where there is padding with 0.
    groups = affine.geometry.groups
    met = affine.seen(torch.ones_like(states[:1, :groups])).square()
    like = affine.weight[:, :1]
    return affine.weight * ordinary.weight_gradient(
        grad.sum(0, keepdim=True).to(like.dtype), like, met.to(like.dtype), affine.geometry
    )
