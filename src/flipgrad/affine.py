r"""Affine maps of a layer's input: :math:`a(x) = A x + b`, what a binary layer computes before its sign.

A map is a snapshot of the parameters taken once per call, so that a weight which is itself computed (a
parametrisation, say) is computed once, and the forward pass and the flips see the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import ordinary
from flipgrad.flips.ordinary import Geometry
from flipgrad.guards import check_unchanged, has_hooks, once
from flipgrad.noise import Noise
from flipgrad.pooling import PooledConv, PoolModule

Pads = tuple[int, int, int, int]
Connectors = Sequence[nn.Module]
Inputs = Callable[..., Tensor]
OverFlips = Callable[..., Tensor]

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
    def at_inputs(self, x: Tensor, a: Tensor, inputs: Inputs, tensors: Sequence[Tensor], *, flips: bool) -> Tensor:
        """``a`` = ``self(x)`` again, with a derivative in the parameters that takes other inputs than ``x``.

        These are ``inputs(*tensors)``, computed in the backward pass. In ``x`` the derivative is the ordinary one or, with
        ``flips``, that of :meth:`besides_flips`. The map must have been evaluated at ``x`` before.
        """

    @abstractmethod
    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """The discrete gradient in the binary states ``x``, given ``a`` = ``self(x)`` and the gradient in sign(a - Z).

        ``weight`` is :attr:`parameter` without its history, as an autograd function has kept it for the backward pass;
        ``tolerance`` is the relative L2 error that is allowed, 0 for none.
        """

    @abstractmethod
    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """How much likelier the output ``states`` would be with a unit flipped, in logarithms, for every unit of ``x``."""

    @abstractmethod
    def slope_product(
        self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0
    ) -> Tensor:
        """:func:`flipgrad.flips.slope_product` of the map, shaped like :attr:`parameter`; ``share`` is like ``x``."""

    @abstractmethod
    def variance(self, v: Tensor) -> Tensor:
        """The variances of the pre-activations of independent units with variances ``v``, shaped like the states.

        Differentiable in ``v`` and in the weight. Padding is no unit, or a constant one: it adds nothing.
        """


class FixedMap(Affine):
    """A map of every example alone, with coefficients that do not depend on the states."""

    @property
    @abstractmethod
    def offset(self) -> Tensor | None:
        """The bias [out] that the map was made from."""

    @final
    def besides_flips(self, x: Tensor) -> Tensor:
        return self(x.detach())

    @final
    def at_inputs(self, x: Tensor, a: Tensor, inputs: Inputs, tensors: Sequence[Tensor], *, flips: bool) -> Tensor:
        differentiated = None if flips else x
        result: Tensor = _AtInputs.apply(  # type: ignore[no-untyped-call]
            a, self.parameter, self.offset, differentiated, self, inputs, *tensors
        )
        return result

    @final
    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._over_flips(partial(flips.flip_product, noise=noise, tolerance=tolerance), x, a, grad, weight)

    @final
    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._over_flips(partial(flips.log_ratio, noise=noise, tolerance=tolerance), x, a, states, weight)

    @abstractmethod
    def _over_flips(self, of: OverFlips, x: Tensor, a: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        """A sum over flips; ``of`` is that of a layer's states, pre-activations, ``other`` like these, weight and geometry."""

    @abstractmethod
    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """The ordinary gradient in :attr:`parameter` at the input ``x`` for the gradient ``grad`` in the pre-activations."""

    @property
    def core(self) -> FixedMap:
        """The map behind connectors, if there are any."""
        return self

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

    @property
    def offset(self) -> Tensor | None:
        return self.bias

    def __call__(self, x: Tensor) -> Tensor:
        _check_real(x)
        if x.dim() == 0 or x.shape[-1] != self.weight.shape[1]:
            raise InputError(
                f"a fully connected layer with weight {list(self.weight.shape)} takes inputs [..., "
                f"{self.weight.shape[1]}], got {list(x.shape)}: change in_features, or put torch.nn.Flatten() before it"
            )
        return linear(x, self.weight, self.bias)

    def _over_flips(self, of: OverFlips, x: Tensor, a: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        if x.dim() == 3 and x.stride(-1) != 1:
            # Many batches whose examples lie side by side in memory: places of a convolution, as they are.
            units, a, other = (t.transpose(1, 2)[..., None] for t in (x, a, other))
            u = of(units, a, other, weight[..., None, None], geometry=Geometry())
            return u[..., 0].transpose(1, 2)
        states, a, other = (t.reshape(-1, t.shape[-1]) for t in (x, a, other))
        return of(states, a, other, weight).reshape(x.shape)

    def slope_product(
        self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0
    ) -> Tensor:
        x, share, a, grad = (t.reshape(-1, t.shape[-1]) for t in (x, share, a, grad))
        return flips.slope_product(x, share, a, grad, weight, noise, tolerance=tolerance)

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return ordinary.weight_gradient(grad.flatten(0, -2), self.weight, x.flatten(0, -2), None)

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

    @property
    def offset(self) -> Tensor | None:
        return self.bias

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        if self._is_plain:
            padding = (self.pads[2], self.pads[0])
            return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        return functional.conv2d(self._padded(x), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    def _over_flips(self, of: OverFlips, x: Tensor, a: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        if self._is_plain:
            return of(x, a, other, weight, geometry=self._geometry())
        u = of(self._padded(x), a, other, weight, geometry=self._geometry())
        return transpose(self._padded, x, u)

    def slope_product(
        self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0
    ) -> Tensor:
        if not self._is_plain:
            # Padding is certain: it has no share.
            x, share = self._padded(x), functional.pad(share, self.pads)
        return flips.slope_product(x, share, a, grad, weight, noise, self._geometry(), tolerance=tolerance)

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        seen = x if self._is_plain else self._padded(x)
        return ordinary.weight_gradient(grad, self.weight, seen, self._geometry())

    def with_weight(self, weight: Tensor) -> ConvMap:
        return replace(self, weight=weight)

    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        if self._is_plain:
            return ordinary.input_gradient(values, self.weight, x, self._geometry())
        result = ordinary.input_gradient(values, self.weight, self._padded(x), self._geometry())
        return transpose(self._padded, x, result)

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

    def _geometry(self) -> Geometry:
        """Of the convolution of the input, or of the padded input where the padding is not the convolution's own."""
        padding = (self.pads[2], self.pads[0]) if self._is_plain else (0, 0)
        return Geometry(self.stride, padding, self.dilation, self.groups)

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

    @property
    def core(self) -> FixedMap:
        return self.inner

    @property
    def offset(self) -> Tensor | None:
        return self.inner.bias

    def __call__(self, x: Tensor) -> Tensor:
        connected = called(self.connectors, x)
        if isinstance(self.inner, LinearMap) and connected.dim() != 2:
            raise InputError(
                f"a fully connected layer got {list(connected.shape)} from the pooling before it: put torch.nn.Flatten() "
                "between them"
            )
        return self.inner(connected)

    def _over_flips(self, of: OverFlips, x: Tensor, a: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.inner, LinearMap):
            folded = folded_weight(weight, self.connectors, x)
            return of(x.flatten(1), a, other, folded).reshape(x.shape)
        wide = self._pooled(self.inner, weight, x)
        geometry = Geometry(wide.stride, groups=self.inner.groups)
        u = of(wide.prepare(x), a, other, wide.weight, geometry=geometry)
        return transpose(wide.prepare, x, u)

    def slope_product(
        self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float = 0.0
    ) -> Tensor:
        inner = self.inner
        if isinstance(inner, LinearMap):
            folded = folded_weight(weight, self.connectors, x)
            product = flips.slope_product(x.flatten(1), share.flatten(1), a, grad, folded, noise, tolerance=tolerance)
            return transpose(lambda weight: folded_weight(weight, self.connectors, x), weight, product)
        wide = self._pooled(inner, weight, x)
        units, shares, geometry = wide.prepare(x), wide.prepare(share), Geometry(wide.stride, groups=inner.groups)
        product = flips.slope_product(units, shares, a, grad, wide.weight, noise, geometry, tolerance=tolerance)
        return transpose(lambda weight: self._pooled(inner, weight, x).weight, weight, product)

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return self.inner.weight_gradient(connect(self.connectors, x), grad)

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


@final
class _AtInputs(torch.autograd.Function):
    """Pre-activations as they are; backward, the parameters' gradients at other inputs, and the ordinary one in the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor | None, affine: FixedMap, inputs: Inputs, *tensors: Tensor
    ) -> Tensor:
        return a.clone()

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        _, weight, bias, x, ctx.affine, ctx.inputs, *tensors = arguments
        ctx.bias_dim = None if bias is None else output.dim() - 1 if isinstance(ctx.affine.core, LinearMap) else 1
        ctx.save_for_backward(weight, x, *tensors)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, *tensors = ctx.saved_tensors
        affine = ctx.affine.with_weight(weight)
        grad_weight = affine.weight_gradient(ctx.inputs(*tensors), grad) if ctx.needs_input_grad[1] else None
        others = [dim for dim in range(grad.dim()) if dim != ctx.bias_dim]
        grad_bias = grad.sum(others) if ctx.needs_input_grad[2] else None
        grad_x = affine.transposed(grad, x) if ctx.needs_input_grad[3] else None
        return grad, grad_weight, grad_bias, grad_x, None, None, *[None] * len(tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear``; where the outputs are few, with the examples next to each other in memory.

    Processors multiply such matrices several times faster than rows of a few numbers each, and what follows is elementwise.
    """
    if x.dim() != 2 or weight.shape[0] > NARROW or x.shape[0] < MANY or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias[:, None], weight, x.t()).t()


def called(connectors: Connectors, x: Tensor) -> Tensor:
    """States ``x`` through every connector in turn, with its hooks, which may look but not change anything."""
    for module in connectors:
        result = module(x)
        if has_hooks(module):
            check_unchanged(module, "result", module.forward(x), result)
        x = result
    return x


def connect(connectors: Connectors, x: Tensor) -> Tensor:
    """Whatever ``x`` holds, moved or averaged as states would be: no hook sees it."""
    for module in connectors:
        x = module.forward(x)
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
