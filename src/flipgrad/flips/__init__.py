r"""Sums over flips of a layer's binary inputs, of which four are needed.

- :func:`flip_product` is the gradient in binary states,
  :math:`u_i = x_i \sum_j [F(a_j) - F(a_j - 2A_{ji}x_i)]\, g_j`: the one hard operation of PSA.
- :func:`log_ratio` is how much likelier the layer's output states y would be,
  :math:`\log r_i = \sum_j [\log p(y_j | a_j - 2A_{ji}x_i) - \log p(y_j | a_j)]`; the posterior of a unit given its
  children follows from it.
- :func:`entropy_product` is the flip product of :math:`g_j F(a) - H(F(a))`: with the entropy of the layer's states for a cost.
- :func:`slope_product` is how much a weight's gradient changes with its own input.

``naive`` is their definition. Each other way of computing them is a module with a function for every sum that it knows:
``vectorized`` is exact for every noise, in tensor operations; ``compiled`` is exact for logistic noise, and ``triton`` the same
on a GPU; ``separable`` is ordinary products, to a tolerance, and ``one_product`` a log ratio by a single one, to a few percent.
The functions here choose by :mod:`flipgrad.flips.choice`, and are operators of torch, so that they compile and are one node of
a graph.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import compiled, one_product, separable, triton, vectorized
from flipgrad.flips._arguments import check_devices, check_kinds, check_shapes, flat, memory_format, unflat
from flipgrad.flips._vmap import WithoutGradient, over_draws
from flipgrad.flips.choice import Choice, choose, choose_ratio, choose_without_kernel, explain
from flipgrad.flips.ordinary import Geometry
from flipgrad.flips.plan import Plan
from flipgrad.guards import applied, only_computes
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform

__all__ = ["Choice", "Geometry", "Plan", "choose", "entropy_product", "explain", "flip_product", "log_ratio", "slope_product"]

# The noises that operators know.
KINDS: dict[str, type[Noise]] = {kind.__name__: kind for kind in (Laplace, Logistic, Normal, Uniform)}

# The exact ways, by :attr:`Choice.kernel`.
EXACT = {"native": compiled, "triton": triton, "vectorized": vectorized}

# The error of log ratios and slope products may be this many times the tolerance, which is that of flip products: what depends
# on them, a posterior probability or a small correction, does so weakly.
RATIO_ERROR_FACTOR = 10

# Curvatures of entropies have all the same sign, so that errors add up which those of a flip product's gradients do not: a form
# for them has this share of the tolerance.
ENTROPY_SHARE = 0.25


class _Sum(NamedTuple):
    """A sum over flips: its name, and those of its tensors, of which ``x`` is the first and ``weight`` the last.

    It has one number per unit or, if ``per_weight``, one per weight.
    """

    name: str
    tensors: tuple[str, ...]
    per_weight: bool = False

    def like(self, tensors: Sequence[Tensor]) -> Tensor:
        """The one of its tensors whose shape and dtype the sum has."""
        return tensors[-1 if self.per_weight else 0]

    def memory_format(self, tensors: Sequence[Tensor]) -> torch.memory_format:
        """The memory format of the sum."""
        return torch.contiguous_format if self.per_weight else memory_format(tensors[0])


_FLIP = _Sum("flip_product", ("x", "a", "grad", "weight"))
_RATIO = _Sum("log_ratio", ("x", "a", "states", "weight"))
_ENTROPY = _Sum("entropy_product", ("x", "a", "grad", "weight"))
_SLOPE = _Sum("slope_product", ("x", "share", "a", "grad", "weight"), per_weight=True)


def flip_product(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
    plan: Plan | None = None,
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
        plan: what other sums of the same layer have found out, and leave for others.

    Returns:
        The discrete gradient in the states ``x``, shaped like these.
    """
    return _evaluate(_FLIP, noise, tolerance, (x, a, grad, weight), geometry, plan)


def log_ratio(
    x: Tensor,
    a: Tensor,
    states: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
    plan: Plan | None = None,
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
        plan: as for :func:`flip_product`.

    Returns:
        The logarithms, shaped like ``x``.
    """
    return _evaluate(_RATIO, noise, tolerance, (x, a, states, weight), geometry, plan)


def entropy_product(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    geometry: Geometry | None = None,
    *,
    tolerance: float = 0.0,
    plan: Plan | None = None,
) -> Tensor:
    r"""The flip product with the negative entropy of the layer's states for one more cost.

    .. math:: u_i = x_i \sum_j \big[h_j(a_j) - h_j(a_j - 2 A_{ji} x_i)\big], \quad h_j(a) = g_j F(a) - H(F(a))

    Args:
        x, a, grad, weight, noise, geometry, tolerance, plan: as for :func:`flip_product`.

    Returns:
        The sums, shaped like ``x``.
    """
    return _evaluate(_ENTROPY, noise, ENTROPY_SHARE * tolerance, (x, a, grad, weight), geometry, plan)


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
    plan: Plan | None = None,
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
        plan: as for :func:`flip_product`.

    Returns:
        A tensor like ``weight``.
    """
    return _evaluate(_SLOPE, noise, tolerance, (x, share, a, grad, weight), geometry, plan)


def _evaluate(
    kind: _Sum,
    noise: Noise,
    tolerance: float,
    tensors: Sequence[Tensor],
    geometry: Geometry | None,
    plan: Plan | None = None,
) -> Tensor:
    """A sum by its operator, or without it: where none is needed, and with a noise of the user, which operators do not know."""
    result: Tensor
    if only_computes(tensors):
        return _in_format(kind, tensors, _compute(kind, noise, tolerance, tensors, geometry, plan))
    if type(noise) is KINDS.get(type(noise).__name__):
        # Operators take numbers and strings.
        layer = type(noise).__name__, noise.scale, tolerance, flat(geometry)
        result = getattr(torch.ops.flipgrad, kind.name)(*tensors, *layer)
    else:
        compute = partial(_compute, kind, noise, tolerance)
        result = applied(WithoutGradient, compute, geometry, kind.per_weight, *tensors)
    return result


def _compute(
    kind: _Sum,
    noise: Noise,
    tolerance: float,
    tensors: Sequence[Tensor],
    geometry: Geometry | None,
    plan: Plan | None = None,
) -> Tensor:
    """A sum by the way that is chosen."""
    if plan is None:
        # Whoever has a plan is a layer, whose tensors belong together.
        named = dict(zip(kind.tensors, tensors, strict=True))
        check_kinds(**named)
        check_shapes(geometry=geometry, **named)
    inputs = [t.detach() for t in tensors]
    if any(t.dtype != torch.float32 for t in inputs):
        # The widest dtype of all, at least float32.
        dtype = reduce(torch.promote_types, (t.dtype for t in inputs), torch.float32)
        inputs = [t.to(dtype) for t in inputs]
    weight, a = inputs[-1], inputs[kind.tensors.index("a")]
    # Output positions of all examples together.
    places = a.numel() // max(1, a.shape[1])
    # A form is made for flip products, and may be too coarse for the other sums.
    allowed = tolerance if kind in (_FLIP, _ENTROPY) else RATIO_ERROR_FACTOR * tolerance
    decide: Callable[..., Choice] = choose
    if kind is _RATIO:
        decide = partial(choose_ratio, error=allowed)
    elif kind is not _FLIP:
        decide = partial(choose_without_kernel, enough=lambda form: separable.error(kind.name, form, noise) <= allowed)
    choice = decide(weight, noise, places, tolerance, a=a, plan=plan)
    if choice.kernel == "one product":
        coarse: Tensor = getattr(one_product, kind.name)(*inputs, noise, geometry)
        return coarse.to(kind.like(tensors).dtype)
    form = choice.form if choice.kernel == "separable" else None
    if form is not None and separable.error(kind.name, form, noise) <= allowed:
        result: Tensor = getattr(separable, kind.name)(*inputs, noise, form, geometry)
    else:
        exact = choice if form is None else decide(weight, noise, places, 0.0, a=a)
        result = getattr(EXACT[exact.kernel], kind.name)(*inputs, noise, geometry)
    return result.to(kind.like(tensors).dtype)


def _in_format(kind: _Sum, tensors: Sequence[Tensor], result: Tensor) -> Tensor:
    """The ``result`` in the memory format that the sum is said to have."""
    return result.contiguous(memory_format=kind.memory_format(tensors))


def _noise(name: str, scale: float) -> Noise:
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise InputError(f"noise {name!r}: the operator knows {known}; call flip_product and the like of flipgrad.flips")
    return KINDS[name](scale)


def _register(kind: _Sum) -> None:
    """Make an operator of torch of a sum: numbers and strings instead of a noise and a geometry."""

    def implementation(*arguments: Any) -> Tensor:
        *tensors, noise, scale, tolerance, shape = arguments
        return _in_format(kind, tensors, _compute(kind, _noise(noise, scale), tolerance, tensors, unflat(shape)))

    def fake(*arguments: Any) -> Tensor:
        tensors = arguments[: len(kind.tensors)]
        check_devices(*tensors)
        return torch.empty_like(kind.like(tensors), memory_format=kind.memory_format(tensors))

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *tensors, noise, scale, tolerance, shape = arguments
        evaluate, dims = partial(_evaluate, kind, _noise(noise, scale), tolerance), in_dims[: len(tensors)]
        return over_draws(evaluate, info.batch_size, dims, tensors, unflat(shape), per_weight=kind.per_weight)

    schema = ", ".join(f"Tensor {name}" for name in kind.tensors)
    name, layer = f"flipgrad::{kind.name}", "str noise, float scale, float tolerance, int[] shape"
    torch.library.define(name, f"({schema}, {layer}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)
    torch.library.register_vmap(name, vmap)


for _kind in (_FLIP, _RATIO, _ENTROPY, _SLOPE):
    _register(_kind)
