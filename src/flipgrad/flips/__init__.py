r"""Sums over flips of a layer's binary inputs, of which three are needed.

- :func:`flip_product` is the gradient in binary states,
  :math:`u_i = x_i \sum_j [F(a_j) - F(a_j - 2A_{ji}x_i)]\, g_j`: the one hard operation of PSA.
- :func:`log_ratio` is how much likelier the layer's output states y would be,
  :math:`\log r_i = \sum_j [\log p(y_j | a_j - 2A_{ji}x_i) - \log p(y_j | a_j)]`; the posterior of a unit given its
  children follows from it.
- :func:`slope_product` is how much a weight's gradient changes with its own input.

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
from flipgrad.flips._arguments import check_devices, check_kinds, check_shapes, fake_per_unit, flat, memory_format, unflat
from flipgrad.flips._draws import WithoutGradient, over_draws
from flipgrad.flips.choice import CALL, TERM, Choice, choose, common_dtype, explain, spread
from flipgrad.flips.ordinary import Geometry
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform

__all__ = ["Choice", "Geometry", "choose", "explain", "flip_product", "log_ratio", "slope_product"]

# The noises that operators know.
KINDS: dict[str, type[Noise]] = {kind.__name__: kind for kind in (Laplace, Logistic, Normal, Uniform)}

# Log ratios and slope products may have an error so many times as large as the tolerance, which is that of flip products: what
# depends on them, a posterior probability or a small correction, does so weakly.
MOST = 10


class _Sum(NamedTuple):
    """A sum over the flips of every unit, of states, pre-activations and another tensor like these, which is ``given``."""

    given: str
    exact: Mapping[str, Callable[..., Tensor]]
    separable: Callable[..., Tensor]
    error: Callable[[separable.Plan, Noise], float]


_FLIP = _Sum(
    "grad",
    {"native": native.flip_product, "triton": triton.flip_product, "vectorized": vectorized.flip_product},
    separable.product,
    lambda plan, noise: plan.estimated_error,
)
_RATIO = _Sum(
    "states",
    {"native": native.log_ratio, "triton": triton.log_ratio, "vectorized": vectorized.log_ratio},
    interpolated.ratio,
    lambda plan, noise: interpolated.errors(plan, noise)[0],
)


def flip_product(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    r"""The flip product of a fully connected layer or, with a geometry, of a convolution with zero padding.

    .. math:: u_i = x_i \sum_j \big[F(a_j) - F(a_j - 2 A_{ji} x_i)\big]\, g_j

    Args:
        x: states [B, in], or [B, C, H, W] of a convolution; a zero is no unit and gets no gradient.
        a: pre-activations of ``x``, [B, out] or [B, out, H', W'].
        grad: the gradient g in the layer's output states, shaped like ``a``.
        weight: [out, in] or [out, C / groups, kh, kw].
        noise: the layer's noise.
        geometry: the stride, padding, dilation and groups of a convolution; None for a fully connected layer.
        tolerance: the relative L2 error that is allowed; 0 is exact.

    Returns:
        The discrete gradient in the states ``x``, shaped like these.
    """
    if _of_the_user(noise):
        return _apart(partial(_compute, _FLIP), x, a, grad, weight, noise=noise, tolerance=tolerance, geometry=geometry)
    u: Tensor = torch.ops.flipgrad.flip_product(x, a, grad, weight, *_as_taken(noise, tolerance, geometry))
    return u


def log_ratio(
    x: Tensor,
    a: Tensor,
    states: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    r"""How much likelier the layer's output states are with one input flipped, in logarithms.

    .. math:: \log r_i = \sum_j \big[\log p(y_j \mid a_j - 2 A_{ji} x_i) - \log p(y_j \mid a_j)\big], \quad
        p(y \mid a) = F(y a)

    Args:
        x: states, as for :func:`flip_product`; a zero is no unit and gets 0.
        a: pre-activations of ``x``.
        states: the layer's output states y, shaped like ``a``.
        weight: as for :func:`flip_product`, like ``noise`` and ``geometry``.
        tolerance: that of a flip product, of which the relative L2 error may be ten times as much here; 0 is exact.

    Returns:
        The logarithms, shaped like ``x``.
    """
    if _of_the_user(noise):
        return _apart(partial(_compute, _RATIO), x, a, states, weight, noise=noise, tolerance=tolerance, geometry=geometry)
    ratio: Tensor = torch.ops.flipgrad.log_ratio(x, a, states, weight, *_as_taken(noise, tolerance, geometry))
    return ratio


def slope_product(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
) -> Tensor:
    r"""The slope product, one number per weight.

    .. math:: \sum x_i\, c_i \big[p_Z(a_j) - p_Z(a_j - 2 A_{ji} x_i)\big]\, g_j

    summed over the examples and, of a convolution, the places.

    Args:
        x: states, as for :func:`flip_product`; a zero is no unit and adds nothing.
        share: the factors c, shaped like ``x``.
        a: pre-activations of ``x``.
        grad: the gradient g in the layer's output states, shaped like ``a``.
        weight: as for :func:`flip_product`, like ``noise`` and ``geometry``.
        tolerance: as for :func:`log_ratio`.

    Returns:
        A tensor like ``weight``.
    """
    if _of_the_user(noise):
        return _apart(_slope, x, share, a, grad, weight, noise=noise, tolerance=tolerance, geometry=geometry, per_weight=True)
    product: Tensor = torch.ops.flipgrad.slope_product(x, share, a, grad, weight, *_as_taken(noise, tolerance, geometry))
    return product


def _of_the_user(noise: Noise) -> bool:
    """Whether the noise is one that operators do not know: then the same is computed without them."""
    return type(noise) is not KINDS.get(type(noise).__name__)


def _apart(
    compute: Callable[..., Tensor],
    *tensors: Tensor,
    noise: Noise,
    tolerance: float,
    geometry: Geometry | None,
    per_weight: bool = False,
) -> Tensor:
    """A sum over flips without an operator."""

    def evaluate(tensors: Sequence[Tensor], geometry: Geometry | None) -> Tensor:
        return compute(*tensors, noise, tolerance, geometry)

    result: Tensor = WithoutGradient.apply(evaluate, geometry, per_weight, *tensors)  # type: ignore[no-untyped-call]
    return result


def _as_taken(noise: Noise, tolerance: float, geometry: Geometry | None) -> tuple[str, float, float, list[int]]:
    """The noise by its name and scale, and the geometry flat: operators of torch take numbers and strings."""
    return type(noise).__name__, noise.scale, tolerance, flat(geometry)


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
    """A sum over flips by the implementation that is chosen."""
    check_kinds(x=x, a=a, **{kind.given: other}, weight=weight)
    check_shapes(x, weight, geometry, a=a, **{kind.given: other})
    dtype = common_dtype(x, a, other, weight)
    states, a, other, weight = (t.detach().to(dtype) for t in (x, a, other, weight))
    choice = choose(weight, noise, _places(a), tolerance, a=a)
    if choice.kernel == "separable" and choice.plan is not None and kind.error(choice.plan, noise) > MOST * tolerance:
        choice = choose(weight, noise, _places(a), 0.0)
    if choice.kernel == "separable" and choice.plan is not None:
        u = kind.separable(states, a, other, weight, noise, choice.plan, geometry)
    else:
        u = kind.exact[choice.kernel](states, a, other, weight, noise, geometry)
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
    check_kinds(x=x, share=share, a=a, grad=grad, weight=weight)
    check_shapes(x, weight, geometry, a=a, grad=grad)
    if share.shape != x.shape:
        raise InputError(f"share has shape {tuple(share.shape)}, but the states have {tuple(x.shape)}: give a factor for each")
    dtype = common_dtype(x, share, a, grad, weight)
    states, share, a, grad, kernel = (t.detach().to(dtype) for t in (x, share, a, grad, weight))
    plan = _slope_plan(kernel, noise, a, tolerance)
    if plan is not None:
        result = interpolated.slope(states, share, a, grad, kernel, noise, plan, geometry)
    else:
        result = vectorized.slope_product(states, share, a, grad, kernel, noise, geometry)
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
        known = ", ".join(KINDS)
        raise InputError(f"noise {name!r}: the operator knows {known}; call flip_product and the like of flipgrad.flips")
    return KINDS[name](scale)


Implementation = Callable[..., Tensor]


def _per_unit(compute: Implementation) -> Implementation:
    """An operator with one number per unit: numbers and strings instead of a noise, and the memory format of the states."""

    def operator(
        x: Tensor, a: Tensor, other: Tensor, weight: Tensor, noise: str, scale: float, tolerance: float, shape: Sequence[int]
    ) -> Tensor:
        u = compute(x, a, other, weight, _noise(noise, scale), tolerance, unflat(shape))
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
    shape: Sequence[int],
) -> Tensor:
    return _slope(x, share, a, grad, weight, _noise(noise, scale), tolerance, unflat(shape)).contiguous()


def _fake_slope(x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, *_: object) -> Tensor:
    check_devices(x, share, a, grad, weight)
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _vmap(name: str) -> Callable[..., tuple[Tensor, int]]:
    """An operator's rule for ``torch.vmap``."""
    operator = getattr(torch.ops.flipgrad, name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *tensors, noise, scale, tolerance, shape = arguments

        def evaluate(tensors: Sequence[Tensor], geometry: Geometry | None) -> Tensor:
            result: Tensor = operator(*tensors, noise, scale, tolerance, flat(geometry))
            return result

        per_weight = name == "slope_product"
        return over_draws(evaluate, info.batch_size, in_dims[: len(tensors)], tensors, unflat(shape), per_weight=per_weight)

    return rule


_LAYER = "str noise, float scale, float tolerance, int[] shape"
_UNITS = f"Tensor x, Tensor a, Tensor other, Tensor weight, {_LAYER}"
_WEIGHTS = f"Tensor x, Tensor share, Tensor a, Tensor grad, Tensor weight, {_LAYER}"
_OPERATORS = (
    ("flip_product", _UNITS, _per_unit(partial(_compute, _FLIP)), fake_per_unit),
    ("log_ratio", _UNITS, _per_unit(partial(_compute, _RATIO)), fake_per_unit),
    ("slope_product", _WEIGHTS, _slope_operator, _fake_slope),
)
for _name, _arguments, _implementation, _fake in _OPERATORS:
    torch.library.define(f"flipgrad::{_name}", f"({_arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flipgrad::{_name}", "default", _implementation)
    torch.library.register_fake(f"flipgrad::{_name}", _fake)
    torch.library.register_vmap(f"flipgrad::{_name}", _vmap(_name))
