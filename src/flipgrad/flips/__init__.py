r"""Flip products: the gradient in binary states, :math:`u_i = x_i \sum_j [F(a_j) - F(a_j - 2A_{ji}x_i)]\, g_j`.

The one hard operation of PSA. ``naive`` is its definition; ``vectorized`` is exact for every noise, in tensor operations;
``native`` is exact for logistic noise, compiled, and ``triton`` the same on a GPU; ``separable`` is ordinary products, to a
tolerance. The functions here choose by :mod:`flipgrad.flips.choice`, and are operators of torch, so that they compile and
are one node of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import native, separable, triton, vectorized
from flipgrad.flips._arguments import memory_format
from flipgrad.flips.choice import Choice, choose, common_dtype, explain
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform

__all__ = ["Choice", "choose", "conv2d", "explain", "linear"]

# Operators of torch take numbers and strings, so a noise goes in by its name and scale.
KINDS: dict[str, type[Noise]] = {kind.__name__: kind for kind in (Laplace, Logistic, Normal, Uniform)}

EXACT = {"native": native, "triton": triton, "vectorized": vectorized}


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
    if type(noise) is not KINDS.get(type(noise).__name__):
        # A noise of the user's own: the same, but no operator.
        return _linear(x, a, grad, weight, noise, tolerance)
    u: Tensor = torch.ops.flipgrad.flip_linear(x, a, grad, weight, type(noise).__name__, noise.scale, tolerance)
    return u


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
    geometry = (stride, padding, dilation, groups)
    if type(noise) is not KINDS.get(type(noise).__name__):
        return _conv2d(x, a, grad, weight, noise, tolerance, *geometry)
    u: Tensor = torch.ops.flipgrad.flip_conv2d(x, a, grad, weight, type(noise).__name__, noise.scale, tolerance, *geometry)
    return u


def _linear(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float) -> Tensor:
    dtype = common_dtype(x, a, grad, weight)
    states, a, grad, weight = (t.detach().to(dtype) for t in (x, a, grad, weight))
    choice = choose(weight, noise, len(x), tolerance, a=a)
    if choice.kernel == "separable" and choice.plan is not None:
        u = separable.product(states, a, grad, weight, noise, choice.plan)
    else:
        u = EXACT[choice.kernel].linear(states, a, grad, weight, noise)
    return u.to(x.dtype)


def _conv2d(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    tolerance: float,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Tensor:
    geometry = (stride, padding, dilation, groups)
    dtype = common_dtype(x, a, grad, weight)
    states, a, grad, weight = (t.detach().to(dtype) for t in (x, a, grad, weight))
    choice = choose(weight, noise, a.numel() // max(1, a.shape[1]), tolerance, a=a)
    if choice.kernel == "separable" and choice.plan is not None:
        u = separable.product(states, a, grad, weight, noise, choice.plan, *geometry)
    else:
        u = EXACT[choice.kernel].conv2d(states, a, grad, weight, noise, *geometry)
    return u.to(x.dtype)


def _noise(name: str, scale: float) -> Noise:
    if name not in KINDS:
        raise InputError(f"noise {name!r}: the operator knows {', '.join(KINDS)}; call flipgrad.flips.linear or conv2d")
    return KINDS[name](scale)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return values[0], values[1]


def _linear_operator(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator's implementation: numbers and strings instead of a noise, and a contiguous result."""

    def operator(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: str, scale: float, tolerance: float) -> Tensor:
        return compute(x, a, grad, weight, _noise(noise, scale), tolerance).contiguous()

    return operator


def _conv2d_operator(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for a convolution."""

    def operator(
        x: Tensor,
        a: Tensor,
        grad: Tensor,
        weight: Tensor,
        noise: str,
        scale: float,
        tolerance: float,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        geometry = (_pair(stride), _pair(padding), _pair(dilation), groups)
        u = compute(x, a, grad, weight, _noise(noise, scale), tolerance, *geometry)
        return u.contiguous(memory_format=memory_format(x))

    return operator


def _fake_linear(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_conv2d(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=memory_format(x))


_LINEAR = "Tensor x, Tensor a, Tensor grad, Tensor weight, str noise, float scale, float tolerance"
_CONV2D = f"{_LINEAR}, int[2] stride, int[2] padding, int[2] dilation, int groups"
_OPERATORS = (
    ("flip_linear", _LINEAR, _linear_operator(_linear), _fake_linear),
    ("flip_conv2d", _CONV2D, _conv2d_operator(_conv2d), _fake_conv2d),
    ("flip_linear_separable", _LINEAR, _linear_operator(separable.linear), _fake_linear),
    ("flip_conv2d_separable", _CONV2D, _conv2d_operator(separable.conv2d), _fake_conv2d),
)
for _name, _arguments, _implementation, _fake in _OPERATORS:
    torch.library.define(f"flipgrad::{_name}", f"({_arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flipgrad::{_name}", "default", _implementation)
    torch.library.register_fake(f"flipgrad::{_name}", _fake)
