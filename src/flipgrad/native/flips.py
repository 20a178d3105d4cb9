"""Sums over flips of logistic noise, in a convolution; ``flipgrad.flips.compiled`` says what they are."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flipgrad.native.library import WEIGHTS_TOO_LARGE, Problem, call, computed_in, integers


class FlipProblem(Problem):
    """``FlipProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *integers("batch groups in_channels out_channels height width out_height out_width"),
        *((name, ctypes.c_int64 * 2) for name in ("kernel", "stride", "padding", "dilation")),
        *((f"{name}_strides", ctypes.c_int64 * 4) for name in ("x", "a", "grad", "weight", "u")),
        ("largest_weight", ctypes.c_double),
        ("scale", ctypes.c_double),
        *integers("threads portable"),
    )


def sum_over_flips(
    function: Literal["flip", "ratio"],
    tensors: Sequence[Tensor],
    scale: float,
    pairs: Sequence[tuple[int, int]],
    groups: int,
    memory_format: torch.memory_format,
) -> Tensor | None:
    """The flip product or the log ratio of a convolution; None if its weights are too large.

    Args:
        function: which of the two.
        tensors: states, pre-activations, what is given for every output, and weight: of one dtype, of shapes that belong
            together, since nothing is checked here.
        scale: of the noise.
        pairs: stride, padding and dilation.
        groups: of the convolution.
        memory_format: that of the result.
    """
    x, a, _, weight = tensors
    dtype = computed_in(x.dtype)
    u = torch.empty(x.shape, dtype=dtype, memory_format=memory_format)
    if u.numel() == 0:
        return u.to(x.dtype)
    memory = [*(t.detach().to(dtype) for t in tensors), u]
    stride, padding, dilation = pairs
    problem = FlipProblem(
        batch=x.shape[0],
        groups=groups,
        in_channels=weight.shape[1],
        out_channels=weight.shape[0] // groups,
        height=x.shape[2],
        width=x.shape[3],
        out_height=a.shape[2],
        out_width=a.shape[3],
        kernel=tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        largest_weight=_largest(memory[3]),
        scale=scale,
        **{f"{name}_strides": t.stride() for name, t in zip(("x", "a", "grad", "weight", "u"), memory, strict=True)},
    )
    if call(function, dtype, problem, *memory) == WEIGHTS_TOO_LARGE:
        return None
    return u.to(x.dtype)


def _largest(t: Tensor) -> float:
    """The largest absolute value; infinite where one is NaN, which says nothing about the others."""
    if t.numel() == 0:
        return 0.0
    low, high = torch.aminmax(t)
    return math.inf if low.isnan() else max(-low.item(), high.item())
