r"""Sums over flips of a layer's binary inputs, of which three are needed.

- The flip product (:func:`linear`, :func:`conv2d`) is the gradient in binary states,
  :math:`u_i = x_i \sum_j [F(a_j) - F(a_j - 2A_{ji}x_i)]\, g_j`: the one hard operation of PSA.
- The log ratio (:func:`ratio_linear`, :func:`ratio_conv2d`) is how much likelier the layer's output states y would be,
  :math:`\log r_i = \sum_j [\log p(y_j | a_j - 2A_{ji}x_i) - \log p(y_j | a_j)]`; the posterior of a unit given its
  children follows from it.
- The slope product (:func:`slope_linear`, :func:`slope_conv2d`) is how much a weight's gradient changes with its own input.

``naive`` is their definition; ``vectorized`` is exact for every noise, in tensor operations; ``native`` is exact for logistic
noise, compiled, and ``triton`` the same on a GPU; ``separable`` and ``interpolated`` are ordinary products, to a tolerance.
The functions here choose by :mod:`flipgrad.flips.choice`, and are operators of torch, so that they compile and are one node
of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import interpolated, native, separable, triton, vectorized
from flipgrad.flips._arguments import memory_format
from flipgrad.flips.choice import CALL, TERM, Choice, choose, common_dtype, explain, spread
from flipgrad.flips.ordinary import Geometry
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform

__all__ = [
    "Choice",
    "choose",
    "conv2d",
    "explain",
    "linear",
    "ratio_conv2d",
    "ratio_linear",
    "slope_conv2d",
    "slope_linear",
]

# Operators of torch take numbers and strings, so a noise goes in by its name and scale.
KINDS: dict[str, type[Noise]] = {kind.__name__: kind for kind in (Laplace, Logistic, Normal, Uniform)}

# Log ratios and slope products may have an error so many times as large as the tolerance, which is that of flip products: what
# depends on them, a posterior probability or a small correction, does so weakly.
MOST = 10


class _Sum(NamedTuple):
    """A sum over the flips of every unit, of states, pre-activations and another tensor like these."""

    exact: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]
    separable: Callable[..., Tensor]
    error: Callable[[separable.Plan, Noise], float]


_FLIP = _Sum(
    {
        "native": (native.linear, native.conv2d),
        "triton": (triton.linear, triton.conv2d),
        "vectorized": (vectorized.linear, vectorized.conv2d),
    },
    separable.product,
    lambda plan, noise: plan.estimated_error,
)
_RATIO = _Sum(
    {
        "native": (native.ratio_linear, native.ratio_conv2d),
        "triton": (triton.ratio_linear, triton.ratio_conv2d),
        "vectorized": (vectorized.ratio_linear, vectorized.ratio_conv2d),
    },
    interpolated.ratio,
    lambda plan, noise: interpolated.errors(plan, noise)[0],
)


def linear(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, *, tolerance: float = 0.0) -> Tensor:
    """The flip product of a fully connected layer.

    Args:
        x: states [B, in]; a zero is no unit and gets no gradient.
        a: pre-activations [B, out] of ``x``.
        grad: the gradient [B, out] in the layer's output states.
        weight: [out, in].
        noise: the layer's noise.
        tolerance: the relative L2 error that is allowed; 0 is exact.

    Returns:
        The discrete gradient [B, in] in the states ``x``.
    """
    if _of_the_user(noise):
        return _compute(_FLIP, x, a, grad, weight, noise, tolerance, None)
    u: Tensor = torch.ops.flipgrad.flip_linear(x, a, grad, weight, type(noise).__name__, noise.scale, tolerance)
    return u


def ratio_linear(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, *, tolerance: float = 0.0) -> Tensor:
    """The log ratio [B, in] of a fully connected layer: like :func:`linear`, with the output ``states`` [B, out]."""
    if _of_the_user(noise):
        return _compute(_RATIO, x, a, states, weight, noise, tolerance, None)
    ratio: Tensor = torch.ops.flipgrad.ratio_linear(x, a, states, weight, type(noise).__name__, noise.scale, tolerance)
    return ratio


def slope_linear(
    x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, *, tolerance: float = 0.0
) -> Tensor:
    """The slope product [out, in] of a fully connected layer, see :func:`slope_conv2d`."""
    if _of_the_user(noise):
        return _slope(x, share, a, grad, weight, noise, tolerance, None)
    kind = type(noise).__name__
    product: Tensor = torch.ops.flipgrad.slope_linear(x, share, a, grad, weight, kind, noise.scale, tolerance)
    return product


def conv2d(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    """The flip product of a convolution with zero padding.

    Args:
        x: states [B, C, H, W]; a zero is no unit and gets no gradient.
        a: pre-activations [B, out, H', W'] of ``x``.
        grad: the gradient [B, out, H', W'] in the layer's output states.
        weight: [out, C / groups, kh, kw].
        noise: the layer's noise.
        stride: of the convolution, like ``padding``, ``dilation`` and ``groups``.
        tolerance: the relative L2 error that is allowed; 0 is exact.

    Returns:
        The discrete gradient [B, C, H, W] in the states ``x``.
    """
    geometry = Geometry(stride, padding, dilation, groups)
    if _of_the_user(noise):
        return _compute(_FLIP, x, a, grad, weight, noise, tolerance, geometry)
    u: Tensor = torch.ops.flipgrad.flip_conv2d(x, a, grad, weight, type(noise).__name__, noise.scale, tolerance, *geometry)
    return u


def ratio_conv2d(
    x: Tensor,
    a: Tensor,
    states: Tensor,
    weight: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    """The log ratio [B, C, H, W] of a convolution: like :func:`conv2d`, with the output ``states`` [B, out, H', W']."""
    geometry = Geometry(stride, padding, dilation, groups)
    if _of_the_user(noise):
        return _compute(_RATIO, x, a, states, weight, noise, tolerance, geometry)
    kind = type(noise).__name__
    ratio: Tensor = torch.ops.flipgrad.ratio_conv2d(x, a, states, weight, kind, noise.scale, tolerance, *geometry)
    return ratio


def slope_conv2d(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    r"""The slope product of a convolution with zero padding, one number per weight.

    .. math:: \sum x_i\, c_i \big[p_Z(a_j) - p_Z(a_j - 2 A_{ji} x_i)\big]\, g_j

    summed over the examples and places.

    Args:
        x: states [B, C, H, W]; a zero is no unit and adds nothing.
        share: the factors c [B, C, H, W].
        a: pre-activations [B, out, H', W'] of ``x``.
        grad: the gradient [B, out, H', W'] in the layer's output states.
        weight: [out, C / groups, kh, kw].
        noise: the layer's noise.
        stride: of the convolution, like ``padding``, ``dilation`` and ``groups``.
        tolerance: the relative L2 error that is allowed; 0 is exact.

    Returns:
        A tensor like ``weight``.
    """
    geometry = Geometry(stride, padding, dilation, groups)
    if _of_the_user(noise):
        return _slope(x, share, a, grad, weight, noise, tolerance, geometry)
    kind = type(noise).__name__
    product: Tensor = torch.ops.flipgrad.slope_conv2d(x, share, a, grad, weight, kind, noise.scale, tolerance, *geometry)
    return product


def _of_the_user(noise: Noise) -> bool:
    """Whether the noise is one that operators do not know: then the same is computed without them."""
    return type(noise) is not KINDS.get(type(noise).__name__)


def _compute(
    kind: _Sum,
    x: Tensor,
    a: Tensor,
    other: Tensor,
    weight: Tensor,
    noise: Noise,
    tolerance: float,
    geometry: Geometry | None,
) -> Tensor:
    """A sum over flips by the implementation that is chosen; without a geometry, of a fully connected layer."""
    dtype = common_dtype(x, a, other, weight)
    states, a, other, weight = (t.detach().to(dtype) for t in (x, a, other, weight))
    choice = choose(weight, noise, _places(a), tolerance, a=a)
    if choice.kernel == "separable" and choice.plan is not None and kind.error(choice.plan, noise) > MOST * tolerance:
        choice = choose(weight, noise, _places(a), 0.0)
    if choice.kernel == "separable" and choice.plan is not None:
        u = kind.separable(states, a, other, weight, noise, choice.plan, *(geometry or ()))
    else:
        of_linear, of_convolution = kind.exact[choice.kernel]
        arguments = (states, a, other, weight, noise)
        u = of_linear(*arguments) if geometry is None else of_convolution(*arguments, *geometry)
    return u.to(x.dtype)


def _slope(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    tolerance: float,
    geometry: Geometry | None,
) -> Tensor:
    """The slope product: to a tolerance where there is a separable form that is faster, else in tensor operations."""
    dtype = common_dtype(x, share, a, grad, weight)
    states, share, a, grad, kernel = (t.detach().to(dtype) for t in (x, share, a, grad, weight))
    plan = _slope_plan(kernel, noise, a, tolerance)
    if plan is not None:
        result = interpolated.slope(states, share, a, grad, kernel, noise, plan, *(geometry or ()))
    elif geometry is None:
        result = vectorized.slope_linear(states, share, a, grad, kernel, noise)
    else:
        result = vectorized.slope_conv2d(states, share, a, grad, kernel, noise, *geometry)
    return result.to(weight.dtype)


def _slope_plan(weight: Tensor, noise: Noise, a: Tensor, tolerance: float) -> separable.Plan | None:
    """The separable form of a slope product, if there is one within the tolerance that is worth its call."""
    if tolerance == 0 or _places(a) * weight.numel() * TERM["vectorized"] <= CALL["separable"]:
        return None
    plan = separable.plan(weight, noise, tolerance, spread=spread(a))
    return plan if plan.reachable and interpolated.errors(plan, noise)[1] <= MOST * tolerance else None


def _places(a: Tensor) -> int:
    """Output positions of all examples together."""
    return a.numel() // max(1, a.shape[1])


def _noise(name: str, scale: float) -> Noise:
    if name not in KINDS:
        raise InputError(f"noise {name!r}: the operator knows {', '.join(KINDS)}; call flipgrad.flips.linear or conv2d")
    return KINDS[name](scale)


def _geometry(arguments: Sequence[Any]) -> Geometry | None:
    """From an operator's arguments, if it is that of a convolution."""
    if not arguments:
        return None
    *pairs, groups = arguments
    stride, padding, dilation = ((pair[0], pair[1]) for pair in pairs)
    return Geometry(stride, padding, dilation, groups)


Implementation = Callable[..., Tensor]


def _per_unit(compute: Implementation) -> Implementation:
    """An operator with one number per unit: numbers and strings instead of a noise, and the memory format of the states."""

    def operator(
        x: Tensor, a: Tensor, other: Tensor, weight: Tensor, noise: str, scale: float, tolerance: float, *shape: Any
    ) -> Tensor:
        u = compute(x, a, other, weight, _noise(noise, scale), tolerance, _geometry(shape))
        return u.contiguous(memory_format=memory_format(x))

    return operator


def _slope_operator(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: str,
    scale: float,
    tolerance: float,
    *shape: Any,
) -> Tensor:
    return _slope(x, share, a, grad, weight, _noise(noise, scale), tolerance, _geometry(shape)).contiguous()


def _by_separable(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float, geometry: Geometry | None
) -> Tensor:
    if geometry is None:
        return separable.linear(x, a, grad, weight, noise, tolerance)
    return separable.conv2d(x, a, grad, weight, noise, tolerance, *geometry)


def _fake_per_unit(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=memory_format(x))


def _fake_slope(x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


_NOISE = "str noise, float scale, float tolerance"
_SHAPE = "int[2] stride, int[2] padding, int[2] dilation, int groups"
_UNITS = f"Tensor x, Tensor a, Tensor other, Tensor weight, {_NOISE}"
_WEIGHTS = f"Tensor x, Tensor share, Tensor a, Tensor grad, Tensor weight, {_NOISE}"
_OPERATORS = (
    ("flip_linear", _UNITS, _per_unit(partial(_compute, _FLIP)), _fake_per_unit),
    ("flip_conv2d", f"{_UNITS}, {_SHAPE}", _per_unit(partial(_compute, _FLIP)), _fake_per_unit),
    ("flip_linear_separable", _UNITS, _per_unit(_by_separable), _fake_per_unit),
    ("flip_conv2d_separable", f"{_UNITS}, {_SHAPE}", _per_unit(_by_separable), _fake_per_unit),
    ("ratio_linear", _UNITS, _per_unit(partial(_compute, _RATIO)), _fake_per_unit),
    ("ratio_conv2d", f"{_UNITS}, {_SHAPE}", _per_unit(partial(_compute, _RATIO)), _fake_per_unit),
    ("slope_linear", _WEIGHTS, _slope_operator, _fake_slope),
    ("slope_conv2d", f"{_WEIGHTS}, {_SHAPE}", _slope_operator, _fake_slope),
)
for _name, _arguments, _implementation, _fake in _OPERATORS:
    torch.library.define(f"flipgrad::{_name}", f"({_arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flipgrad::{_name}", "default", _implementation)
    torch.library.register_fake(f"flipgrad::{_name}", _fake)
