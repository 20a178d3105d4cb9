r"""Affine maps of a layer's input: :math:`a(x) = A x + b`, what a binary layer computes before its sign.

A map is a snapshot of the parameters taken once per call, so that a weight which is itself computed (a
parametrisation, say) is computed once, and the forward pass and the flips see the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import averaging, ordinary
from flipgrad.flips.averaging import Averaging
from flipgrad.flips.ordinary import Geometry
from flipgrad.flips.plan import new_plan
from flipgrad.guards import check_unchanged, exporting, has_hooks
from flipgrad.noise import Noise
from flipgrad.pooling import PoolModule, fold, overlaps

# Products with at most this many outputs, of at least this many examples, are laid out by outputs.
NARROW, MANY = 12, 64


@final
@dataclass(frozen=True)
class Signal:
    """What comes back to the states sign(a - Z) of a layer: the gradient ``grad`` in their means.

    Attributes:
        x: the layer's input.
        inputs: what a weight takes for it: ``x`` itself, or an average of every unit.
        a: the pre-activations of ``x``.
        grad: the gradient in the states.
        noise: the distribution of Z.
        share: with ``inputs`` that are averages, the share of the state not sampled, where the change of a weight's gradient
            with its own input is to count.
        binary: whether ``x`` is made of ±1 states.
        flips: whether derivatives in binary variables are discrete.
        tolerance: the relative error that is allowed in sums over flips, 0 for none.
        exact: whether nothing may be approximated.
    """

    x: Tensor
    inputs: Tensor
    a: Tensor
    grad: Tensor
    noise: Noise
    share: Tensor | None = None
    binary: bool = True
    flips: bool = True
    tolerance: float = 0.0
    exact: bool = True

    @property
    def flips_units(self) -> bool:
        """Whether the gradient in the input is the discrete one."""
        return self.flips and self.binary

    def slopes(self) -> Tensor:
        """The ordinary gradient in the pre-activations."""
        return self.noise.mean_gradient(self.a, self.grad)


class AffineMap(ABC):
    """A map from a layer's input to its pre-activations, which knows its own way back.

    It gives the gradients in its input and in :attr:`tensors`, and the sums over flips of a binary input that estimators need.
    There ``tolerance`` is the relative L2 error that is allowed, 0 for none.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the way back needs and an autograd function keeps; the weight, what else is differentiated, and the rest."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor | None]) -> AffineMap:
        """The same map of other :attr:`tensors`."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The pre-activations of ``x``; differentiable in the ordinary way in ``x`` and in the parameters."""

    @abstractmethod
    def gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        """The gradients in the input and in :attr:`tensors` of the states' means; None where they are not wanted.

        In binary variables, states or weights, they are discrete if the signal says so, else ordinary.
        """

    @abstractmethod
    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """The discrete gradient in the binary states ``x``, given ``a`` = ``self(x)`` and the gradient in sign(a - Z)."""

    @abstractmethod
    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """How much likelier the output ``states`` would be with a unit flipped, in logarithms, for every unit of ``x``."""

    @abstractmethod
    def slope_product(self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """:func:`flipgrad.flips.slope_product` of the map, shaped like its weight; ``share`` is like ``x``."""

    def averaging(self, x: Tensor, a: Tensor, noise: Noise, log_odds: Tensor, tolerance: float) -> Averaging | Tensor | None:
        """Whether it pays to average the binary input ``x``, which was drawn with these ``log_odds``; None if not known.

        ``tolerance`` is that of its :meth:`flip_product`. While torch captures a graph, it is a tensor that will be True or
        False.
        """
        return None

    @abstractmethod
    def variance(self, v: Tensor) -> Tensor:
        """The variances of the pre-activations of independent units with variances ``v``, shaped like the states.

        Differentiable in ``v`` and in the weight. Padding is no unit, or a constant one: it adds nothing.
        """


class Padding(NamedTuple):
    """What stands around the pixels of an image, by the arguments of ``torch.nn.functional.pad``."""

    sides: tuple[int, int, int, int]
    mode: str
    value: float


class FlipForm(NamedTuple):
    """A map written so that a flip of one unit is one flip in the input of a layer or convolution with zero padding.

    That has this ``weight`` and, a convolution, this ``geometry``. Its input is what ``units`` makes of the states.
    """

    weight: Tensor
    geometry: Geometry | None
    units: Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Affine(AffineMap):
    """A map of every example alone, with coefficients that do not depend on the states.

    Fully connected ``x`` [..., in] to [..., out] or, with a geometry, the convolution of [B, C, H, W]. Before that the input
    goes through ``views``, linear modules such as average pooling, and ``padding``, where that is not the convolution's own.

    Pre-activations are computed as written. Flips need the coefficient of every state, so there poolings are folded into the
    weight: exactly, and anew every time, which costs no more than the weight's own size.

    With ``binary_weights`` all weights are ±1, and a norm or a scale comes after them.
    """

    weight: Tensor
    bias: Tensor | None
    geometry: Geometry | None = None
    padding: Padding | None = None
    views: tuple[nn.Module, ...] = ()
    binary_weights: bool = False
    plan: flips.Plan | None = field(default_factory=new_plan, compare=False, repr=False)

    @property
    def channel_dim(self) -> int:
        """The dimension of the pre-activations that holds the output channels."""
        return -1 if self.geometry is None else 1

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Affine:
        weight, bias = tensors
        return replace(self, weight=weight, bias=bias)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        seen = called(self.views, x)
        self._check(seen)
        if self.geometry is None:
            return linear(seen, self.weight, self.bias)
        padded = seen if self.padding is None else functional.pad(seen, *self.padding)
        return functional.conv2d(ordinary.in_fast_order(padded), self.weight, self.bias, *self.geometry)

    def gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        slopes = back.slopes()
        grad_x = None
        straight = of_x and of_parameters and not back.flips_units and back.share is None
        if straight and back.inputs is back.x and self.padding is None and not self.views and self.geometry is not None:
            values, seen = (t.detach().to(self.weight.dtype) for t in (slopes, back.x))
            grad_x, grad_weight = ordinary.gradients(values, self.weight, seen, self.geometry)
            return grad_x.to(back.x.dtype), grad_weight, self.bias_gradient(slopes)
        if of_x and back.flips_units:
            grad_x = self.flip_product(back.x, back.a, back.grad, back.noise, back.tolerance)
        elif of_x:
            grad_x = self.transposed(slopes, back.x)
        if not of_parameters:
            return grad_x, None, None
        grad_weight = self.weight_gradient(back.inputs, slopes)
        if back.share is not None:
            # How the gradient of a weight changes with its own input.
            product = self.slope_product(back.x, back.share, back.a, 2 * back.grad, back.noise, back.tolerance)
            grad_weight = grad_weight + product
        return grad_x, grad_weight, self.bias_gradient(slopes)

    def weight_gradient(self, inputs: Tensor, grad: Tensor) -> Tensor:
        """The ordinary gradient in the weight, which sees ``inputs``, for the gradient ``grad`` in the pre-activations."""
        rows, seen = (self.rows(t).to(self.weight.dtype) for t in (grad, self.seen(inputs)))
        return ordinary.weight_gradient(rows, self.weight, seen, self.geometry)

    def bias_gradient(self, grad: Tensor) -> Tensor | None:
        """The gradient in the bias, if there is one, for the gradient ``grad`` in the pre-activations."""
        if self.bias is None:
            return None
        rows = self.rows(grad).to(self.bias.dtype)
        return rows.sum([dim for dim in range(rows.dim()) if dim != 1])

    def transposed(self, values: Tensor, x: Tensor) -> Tensor:
        """The ordinary gradient in an input like ``x`` for the gradient ``values`` in its pre-activations."""
        # Under autocast these have half the digits.
        values, wide = values.to(self.weight.dtype), x.detach().to(self.weight.dtype)
        if self.padding is None and not self.views:
            return ordinary.input_gradient(values, self.weight, wide, self.geometry).to(x.dtype)
        transform: Any = torch.func.vjp(self.seen, wide)
        seen, pullback = transform
        result: Tensor = pullback(ordinary.input_gradient(values, self.weight, seen, self.geometry))[0]
        return result.to(x.dtype)

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._over_flips(flips.flip_product, x, a, grad, noise, tolerance)

    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._over_flips(flips.log_ratio, x, a, states, noise, tolerance)

    def entropy_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """:func:`flipgrad.flips.entropy_product` of the map, for every unit of ``x``."""
        return self._over_flips(flips.entropy_product, x, a, grad, noise, tolerance)

    def slope_product(self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        form = self.flip_form(self.weight.detach(), x)
        units, shares, a, grad = form.units(x), form.units(share), self.rows(a), self.rows(grad)
        options: dict[str, Any] = {"tolerance": tolerance, "plan": self.plan}
        product = flips.slope_product(units, shares, a, grad, form.weight, noise, form.geometry, **options)
        if not self.views:
            return product
        return transpose(lambda weight: self.flip_form(weight, x).weight, self.weight, product)

    def averaging(self, x: Tensor, a: Tensor, noise: Noise, log_odds: Tensor, tolerance: float) -> Averaging | Tensor | None:
        if self.views:
            return None
        return averaging.of_real_weights(x, a, self.weight, noise, log_odds, tolerance, plan=self.plan)

    def variance(self, v: Tensor) -> Tensor:
        if self.geometry is None and not self.views:
            return linear(v, self.weight.square(), None)
        form = self.flip_form(self.weight, v)
        if form.geometry is None:
            return functional.linear(form.units(v), form.weight.square())
        return functional.conv2d(form.units(v), form.weight.square(), None, *form.geometry)

    def _over_flips(
        self, of: Callable[..., Tensor], x: Tensor, a: Tensor, other: Tensor, noise: Noise, tolerance: float
    ) -> Tensor:
        """One of the sums of :mod:`flipgrad.flips`, for every unit of ``x``."""
        form = self.flip_form(self.weight.detach(), x)
        given, shape = (self.rows(a), self.rows(other)), (noise, form.geometry)
        u = of(form.units(x), *given, form.weight, *shape, tolerance=tolerance, plan=self.plan)
        return self.moved_back(form, x, u)

    def moved_back(self, form: FlipForm, x: Tensor, u: Tensor) -> Tensor:
        """Numbers ``u`` of the units as a ``form`` has them, where these are in ``x``."""
        if self.geometry is None or (self.padding is None and not self.views):
            return u.reshape(x.shape)
        return transpose(form.units, x, u)

    def share_of_a_unit(self, x: Tensor) -> Tensor | float | None:
        """The size of all coefficients of states ``x`` where every weight is ±1; None if they differ.

        That is what a pixel counts in the window of an average pooling; it differs if windows overlap.
        """
        if not self.views:
            return 1.0
        pools = [module for module in self.views if isinstance(module, PoolModule)]
        if any(overlaps(module) for module in pools):
            return None
        return self.flip_form(self.weight.detach(), x).weight.abs().amax()

    def flip_form(self, weight: Tensor, x: Tensor) -> FlipForm:
        """The map with this ``weight``, for states like ``x``."""
        if self.geometry is None:
            if not self.views:
                return FlipForm(weight, None, self.rows)
            return FlipForm(folded_weight(weight, self.views, x), None, lambda units: units.flatten(1))
        if self.views:
            pools = [module for module in self.views if isinstance(module, PoolModule)]
            return FlipForm(*fold(weight, self.geometry, self._sides, pools, x.shape[2:]))
        if self.padding is None:
            return FlipForm(weight, self.geometry, lambda units: units)
        # Padding is no unit: around numbers of units there are zeros.
        sides = self.padding.sides
        return FlipForm(weight, self.geometry, lambda units: functional.pad(units, sides))

    def seen(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with: ``x`` through the views, padded."""
        x = connect(self.views, x)
        return x if self.padding is None else functional.pad(x, *self.padding)

    def rows(self, t: Tensor) -> Tensor:
        """Of a fully connected map one example in each row, whatever dimensions there are in front."""
        return t.reshape(-1, t.shape[-1]) if self.geometry is None else t

    @property
    def _sides(self) -> tuple[int, int, int, int]:
        """How much of padding there is on the left, right, top and bottom, the convolution's own included."""
        if self.padding is not None:
            return self.padding.sides
        rows, columns = (0, 0) if self.geometry is None else self.geometry.padding
        return columns, columns, rows, rows

    def _check(self, x: Tensor) -> None:
        """Refuse what the weight cannot be multiplied with."""
        if not x.is_floating_point():
            raise InputError(
                f"binary layers take floating-point inputs, got {x.dtype}: convert them, e.g. images.float() / 255"
            )
        shape = list(self.weight.shape)
        if self.geometry is not None:
            self._check_image(x, self.geometry)
        elif self.views and x.dim() != 2:
            raise InputError(
                f"a fully connected layer got {list(x.shape)} from the pooling before it: put torch.nn.Flatten() between them"
            )
        elif x.dim() == 0 or x.shape[-1] != shape[1]:
            raise InputError(
                f"a fully connected layer with weight {shape} takes inputs [..., {shape[1]}], got {list(x.shape)}: change "
                "in_features, or put torch.nn.Flatten() before it"
            )

    def _check_image(self, x: Tensor, geometry: Geometry) -> None:
        channels = self.weight.shape[1] * geometry.groups
        if x.dim() != 4 or x.shape[1] != channels:
            raise InputError(
                f"a convolution with weight {list(self.weight.shape)} and groups={geometry.groups} takes inputs "
                f"[batch, {channels}, height, width], got {list(x.shape)}: change in_channels or the input"
            )
        left, right, top, bottom = self._sides
        size = (x.shape[2] + top + bottom, x.shape[3] + left + right)
        extent = tuple(d * (k - 1) + 1 for d, k in zip(geometry.dilation, self.weight.shape[2:], strict=True))
        if size[0] < extent[0] or size[1] < extent[1]:
            raise InputError(
                f"a convolution whose kernel spans {extent[0]}x{extent[1]} needs at least that many pixels, got "
                f"{x.shape[2]}x{x.shape[3]} (with padding {size[0]}x{size[1]}): give larger images, more padding, or "
                "a smaller kernel_size, dilation or stride in the layers before"
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear``; where the outputs are few, with the examples next to each other in memory.

    Processors multiply such matrices several times faster than rows of a few numbers each, and what follows is elementwise.
    """
    # A graph that stands alone is for batches of any size.
    if x.dim() != 2 or weight.shape[0] > NARROW or x.device.type != "cpu" or exporting() or x.shape[0] < MANY:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias[:, None], weight, x.t()).t()


def called(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """States ``x`` through every module in turn, with its hooks, which may look but not change anything."""
    for module in modules:
        result = module(x)
        if has_hooks(module):
            check_unchanged(module, "result", module.forward(x), result)
        x = result
    return x


def connect(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Whatever ``x`` holds, moved or averaged as states would be: no hook sees it."""
    for module in modules:
        x = module.forward(x)
    return x


def folded_weight(weight: Tensor, views: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The weight [out, units] in the states ``x`` [B, ...] of a fully connected map that sees them through ``views``.

    Its rows take the place of a batch, on which the modules act one by one.
    """
    if not views:
        return weight
    states = x.new_zeros(weight.shape[0], *x.shape[1:], dtype=weight.dtype)
    return transpose(lambda states: connect(views, states), states, weight).flatten(1)


def transpose(function: Callable[[Tensor], Tensor], x: Tensor, values: Tensor) -> Tensor:
    """The transpose of an affine ``function`` of tensors like ``x``, applied to ``values``: its vector-Jacobian product."""
    transform: Any = torch.func.vjp(function, x.detach())
    _, pullback = transform
    result: Tensor = pullback(values)[0]
    return result


def per_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """The ``weight`` [out, ...] with every output channel scaled."""
    return weight * scale.view(-1, *[1] * (weight.dim() - 1))


def over_channels(values: Tensor, affine: Affine) -> Tensor:
    """``values`` [out] in a shape that broadcasts over the pre-activations of a map."""
    return values if affine.geometry is None else values[:, None, None]


def along(values: Tensor, dims: int, dim: int) -> Tensor:
    """``values`` in a shape that broadcasts over tensors of so many dimensions, along one of these.

    >>> along(torch.ones(3), 4, 1).shape
    torch.Size([3, 1, 1])
    """
    return values.view(-1, *[1] * (dims - 1 - dim % dims))
