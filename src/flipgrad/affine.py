r"""Affine maps of a layer's input: :math:`a(x) = A x + b`, what a binary layer computes before its sign.

A map is a snapshot of the parameters taken once per call, so that a weight which is itself computed (a
parametrisation, say) is computed once, and the forward pass and the flips see the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.noise import Noise
from flipgrad.pooling import PooledConv, PoolModule

Pads = tuple[int, int, int, int]
Connectors = Sequence[nn.Module]

# At most so many outputs, and at least so many examples, make it worth while to lay out a product by outputs.
NARROW, MANY = 12, 64


class Affine(ABC):
    """An affine map of states and its flip product."""

    @property
    @abstractmethod
    def parameter(self) -> Tensor:
        """The weight that the map was made from."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The pre-activations of ``x``; differentiable in the ordinary way in ``x`` and in the parameters."""

    @abstractmethod
    def besides_flips(self, x: Tensor) -> Tensor:
        """The pre-activations of binary states ``x``, where the derivative in ``x`` is only what :meth:`flip_product` lacks."""

    @abstractmethod
    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """The discrete gradient in the binary states ``x``, given ``a`` = ``self(x)`` and the gradient in sign(a - Z).

        ``weight`` is :attr:`parameter` without its history, as an autograd function has kept it for the backward pass;
        ``tolerance`` is the relative L2 error that is allowed, 0 for none.
        """

    @abstractmethod
    def variance(self, v: Tensor) -> Tensor:
        """The variances of the pre-activations of independent units with variances ``v``, shaped like the states.

        Differentiable in ``v`` and in the weight. Padding is no unit, or a constant one: it adds nothing.
        """


class FixedMap(Affine):
    """A map of every example alone, with coefficients that do not depend on the states."""

    @final
    def besides_flips(self, x: Tensor) -> Tensor:
        return self(x.detach())

    @abstractmethod
    def with_weight(self, weight: Tensor) -> FixedMap:
        """The same map of another :attr:`parameter`."""

    @abstractmethod
    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        """The ordinary gradient in states like ``x`` for the gradient ``values`` in their pre-activations."""


@final
@dataclass(frozen=True)
class LinearMap(FixedMap):
    """``x`` [..., in] to [..., out]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def parameter(self) -> Tensor:
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:
        _check_real(x)
        if x.dim() == 0 or x.shape[-1] != self.weight.shape[1]:
            raise InputError(
                f"a fully connected layer with weight {list(self.weight.shape)} takes inputs [..., "
                f"{self.weight.shape[1]}], got {list(x.shape)}: change in_features, or put torch.nn.Flatten() before it"
            )
        return linear(x, self.weight, self.bias)

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        if x.dim() == 3 and x.stride(-1) != 1:
            # Many batches whose examples lie side by side in memory: places of a convolution, as they are.
            units, a, grad = (t.transpose(1, 2)[..., None] for t in (x, a, grad))
            u = flips.conv2d(units, a, grad, weight[..., None, None], noise, tolerance=tolerance)
            return u[..., 0].transpose(1, 2)
        states, a, grad = (t.reshape(-1, t.shape[-1]) for t in (x, a, grad))
        return flips.linear(states, a, grad, weight, noise, tolerance=tolerance).reshape(x.shape)

    def with_weight(self, weight: Tensor) -> LinearMap:
        return replace(self, weight=weight)

    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        return values @ self.weight

    def variance(self, v: Tensor) -> Tensor:
        return linear(v, self.weight.square(), None)


@final
@dataclass(frozen=True)
class ConvMap(FixedMap):
    """``x`` [B, C, H, W] to [B, out, H', W'], padded with ``padding_value``: 0 (no unit), or the states -1 or +1.

    ``pads`` are left, right, top, bottom, as for ``torch.nn.functional.pad``; so is ``padding_mode``, of which the modes
    that repeat units ("reflect", "replicate", "circular") are for real inputs only.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    pads: Pads
    dilation: tuple[int, int]
    groups: int
    padding_value: float = 0.0
    padding_mode: str = "zeros"

    @property
    def parameter(self) -> Tensor:
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        if self._is_plain:
            padding = (self.pads[2], self.pads[0])
            return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        return functional.conv2d(self._padded(x), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        shape = (self.dilation, self.groups)
        if self._is_plain:
            padding = (self.pads[2], self.pads[0])
            return flips.conv2d(x, a, grad, weight, noise, self.stride, padding, *shape, tolerance=tolerance)
        padded = self._padded(x)
        u = flips.conv2d(padded, a, grad, weight, noise, self.stride, (0, 0), *shape, tolerance=tolerance)
        return transpose(self._padded, x, u)

    def with_weight(self, weight: Tensor) -> ConvMap:
        return replace(self, weight=weight)

    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        plain = self._is_plain
        padding = (self.pads[2], self.pads[0]) if plain else (0, 0)
        size = x.shape if plain else self._padded(x).shape
        result: Tensor = conv2d_input(size, self.weight, values, self.stride, padding, self.dilation, self.groups)
        return result if plain else transpose(self._padded, x, result)

    def variance(self, v: Tensor) -> Tensor:
        padded = functional.pad(v, self.pads)
        return functional.conv2d(padded, self.weight.square(), None, self.stride, 0, self.dilation, self.groups)

    @property
    def _is_plain(self) -> bool:
        """Whether the padding is zeros, the same on both sides: the convolution's own."""
        left, right, top, bottom = self.pads
        unpadded = not any(self.pads)
        same = left == right and top == bottom
        return unpadded or (self.padding_mode == "zeros" and self.padding_value == 0 and same)

    def _padded(self, x: Tensor) -> Tensor:
        if self.padding_mode == "zeros":
            return functional.pad(x, self.pads, value=self.padding_value)
        return functional.pad(x, self.pads, mode=self.padding_mode)

    def _check(self, x: Tensor) -> None:
        _check_real(x)
        channels = self.weight.shape[1] * self.groups
        if x.dim() != 4 or x.shape[1] != channels:
            raise InputError(
                f"a convolution with weight {list(self.weight.shape)} and groups={self.groups} takes inputs "
                f"[batch, {channels}, height, width], got {list(x.shape)}: change in_channels or the input"
            )
        left, right, top, bottom = self.pads
        size = (x.shape[2] + top + bottom, x.shape[3] + left + right)
        extent = tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.weight.shape[2:], strict=True))
        if size[0] < extent[0] or size[1] < extent[1]:
            raise InputError(
                f"a convolution whose kernel spans {extent[0]}x{extent[1]} needs at least that many pixels, got "
                f"{x.shape[2]}x{x.shape[3]} (with padding {size[0]}x{size[1]}): give larger images, more padding, or "
                "a smaller kernel_size, dilation or stride in the layers before"
            )


@final
@dataclass(frozen=True)
class FoldedMap(FixedMap):
    """A map whose input went through linear connectors: average pooling, flattening, padding.

    Pre-activations are computed as written. Flips need the coefficient of every state, so there the connectors are folded
    into the weight: exactly, and anew in every backward pass, which costs no more than the weight's own size.
    """

    inner: LinearMap | ConvMap
    connectors: tuple[nn.Module, ...]

    @property
    def parameter(self) -> Tensor:
        return self.inner.weight

    def __call__(self, x: Tensor) -> Tensor:
        connected = connect(self.connectors, x)
        if isinstance(self.inner, LinearMap) and connected.dim() != 2:
            raise InputError(
                f"a fully connected layer got {list(connected.shape)} from the pooling before it: put torch.nn.Flatten() "
                "between them"
            )
        return self.inner(connected)

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        if isinstance(self.inner, LinearMap):
            folded = folded_weight(weight, self.connectors, x)
            return flips.linear(x.flatten(1), a, grad, folded, noise, tolerance=tolerance).reshape(x.shape)
        wide = self._pooled(self.inner, weight, x)
        units = wide.prepare(x)
        u = flips.conv2d(units, a, grad, wide.weight, noise, wide.stride, groups=self.inner.groups, tolerance=tolerance)
        return transpose(wide.prepare, x, u)

    def with_weight(self, weight: Tensor) -> FoldedMap:
        return replace(self, inner=self.inner.with_weight(weight))

    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        transform: Any = torch.func.vjp(lambda x: connect(self.connectors, x), x.detach())
        connected, pullback = transform
        result: Tensor = pullback(self.inner.transposed(values, connected))[0]
        return result

    def variance(self, v: Tensor) -> Tensor:
        if isinstance(self.inner, LinearMap):
            return functional.linear(v.flatten(1), folded_weight(self.inner.weight, self.connectors, v).square())
        wide = self._pooled(self.inner, self.inner.weight, v)
        return functional.conv2d(wide.prepare(v), wide.weight.square(), None, wide.stride, groups=self.inner.groups)

    def _pooled(self, conv: ConvMap, weight: Tensor, x: Tensor) -> PooledConv:
        pools = [module for module in self.connectors if isinstance(module, PoolModule)]
        return PooledConv.fold(weight, conv.stride, conv.pads, conv.dilation, pools, x.shape[2:])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear``; where the outputs are few, with the examples next to each other in memory.

    Processors multiply such matrices several times faster than rows of a few numbers each, and what follows is elementwise.
    """
    if x.dim() != 2 or weight.shape[0] > NARROW or x.shape[0] < MANY or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias[:, None], weight, x.t()).t()


def connect(connectors: Connectors, x: Tensor) -> Tensor:
    """``x`` through every connector in turn."""
    for module in connectors:
        x = module(x)
    return x


def folded_weight(weight: Tensor, connectors: Connectors, x: Tensor) -> Tensor:
    """The weight [out, units] in the states ``x`` [B, ...] of a fully connected map that sees them through ``connectors``.

    Its rows take the place of a batch, on which the connectors act one by one.
    """
    if not connectors:
        return weight
    states = x.new_zeros(weight.shape[0], *x.shape[1:], dtype=weight.dtype)
    return transpose(lambda states: connect(connectors, states), states, weight).flatten(1)


def transpose(function: Callable[[Tensor], Tensor], x: Tensor, values: Tensor) -> Tensor:
    """The transpose of an affine ``function`` of tensors like ``x``, applied to ``values``: its vector-Jacobian product."""
    transform: Any = torch.func.vjp(function, x.detach())
    _, pullback = transform
    result: Tensor = pullback(values)[0]
    return result


def _check_real(x: Tensor) -> None:
    if not x.is_floating_point():
        raise InputError(f"binary layers take floating-point inputs, got {x.dtype}: convert them, e.g. images.float() / 255")
