"""The passes over memory of separable sums over flips; ``flipgrad.flips.passes`` says what they compute.

All tensors are contiguous and float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flipgrad.native.library import Problem, call, floats, integers

# ``kBlock`` of csrc/features.cpp.
BLOCK = 256

FLOATS = ctypes.POINTER(ctypes.c_float)
Matrix = Sequence[Sequence[float]]


class FeatureProblem(Problem):
    """``FeatureProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *integers("images block differences curvatures"),
        ("cosh_steps", FLOATS),
        ("curvature_nodes", ctypes.POINTER(ctypes.c_int64)),
        ("scale", ctypes.c_double),
        *integers("threads portable"),
    )


class LogFeatureProblem(Problem):
    """``LogFeatureProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *integers("images block differences curvatures"),
        *((name, FLOATS) for name in ("half_steps", "half_tanhs", "heights", "difference_matrix", "curvature_matrix")),
        ("scale", ctypes.c_double),
        *integers("threads portable"),
    )


class WeightProblem(Problem):
    """``WeightProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *integers("count functions odd_powers terms"),
        ("coefficients", FLOATS),
        ("limit", ctypes.c_double),
        *integers("threads portable"),
    )


class ProductProblem(Problem):
    """``ProductProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *integers("batch inputs outputs differences curvatures terms"),
        ("coefficients", FLOATS),
        ("limit", ctypes.c_double),
        *integers("threads portable"),
    )


class MomentProblem(Problem):
    """``MomentProblem`` of csrc/flipgrad.h."""

    _fields_ = integers("count every threads portable")


def flip_functions(
    a: Tensor, grad: Tensor, scale: float, steps: Sequence[float], curvature_nodes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the flip product of logistic noise, times ``grad``.

    Args:
        a: pre-activations [B, C, ...].
        grad: what to multiply by, shaped like ``a``.
        scale: of the noise.
        steps: the nodes of the differences.
        curvature_nodes: the indices of those among them that have a curvature.

    Returns:
        The differences [B, len(steps) C, ...] and the curvatures [B, len(curvature_nodes) C, ...], node after node.
    """
    differences, curvatures = _further_channels(a, len(steps)), _further_channels(a, len(curvature_nodes))
    problem = FeatureProblem(
        images=len(a),
        block=a[0].numel() if len(a) else 0,
        differences=len(steps),
        curvatures=len(curvature_nodes),
        cosh_steps=floats(map(math.cosh, steps)),
        curvature_nodes=(ctypes.c_int64 * len(curvature_nodes))(*curvature_nodes),
        scale=scale,
    )
    call("features", torch.float32, problem, a, grad, differences, curvatures)
    return differences, curvatures


def log_functions(
    a: Tensor,
    states: Tensor,
    scale: float,
    difference: tuple[Sequence[float], Matrix],
    curvature: tuple[Sequence[float], Matrix],
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the log ratio of logistic noise.

    Args:
        a: pre-activations [B, C, ...].
        states: the output states, shaped like ``a``.
        scale: of the noise.
        difference: the nodes of the differences, and the matrix that their values are multiplied by.
        curvature: those of the curvatures.

    Returns:
        The differences [B, nodes C, ...] and the curvatures, one after the other.
    """
    differences, curvatures = (_further_channels(a, len(nodes)) for nodes, _ in (difference, curvature))
    problem = LogFeatureProblem(
        images=len(a),
        block=a[0].numel() if len(a) else 0,
        differences=len(difference[0]),
        curvatures=len(curvature[0]),
        half_steps=floats(step / 2 for step in difference[0]),
        half_tanhs=floats(math.tanh(step / 2) for step in difference[0]),
        heights=floats(math.sinh(step / 2) ** 2 for step in curvature[0]),
        difference_matrix=floats(number for row in difference[1] for number in row),
        curvature_matrix=floats(number for row in curvature[1] for number in row),
        scale=scale,
    )
    call("log_features", torch.float32, problem, a, states, differences, curvatures)
    return differences, curvatures


def weight_functions(weight: Tensor, difference: Matrix, curvature: Matrix, limit: float) -> tuple[Tensor, Tensor]:
    """The functions of the weights [out, ...].

    Args:
        weight: of the layer.
        difference: coefficients of the polynomials in 2 (w / limit)^2 - 1, lowest power first, that are multiplied by w.
        curvature: of those that are multiplied by w^2.
        limit: the largest weight.

    Returns:
        The functions [len(difference) out, ...] and [len(curvature) out, ...].
    """
    terms, coefficients = _padded([*difference, *curvature])
    out = weight.new_empty(len(difference) + len(curvature), *weight.shape)
    problem = WeightProblem(
        count=weight.numel(),
        functions=len(out),
        odd_powers=len(difference),
        terms=terms,
        coefficients=coefficients,
        limit=limit,
    )
    call("weights", torch.float32, problem, weight, out)
    return out[: len(difference)].flatten(0, 1), out[len(difference) :].flatten(0, 1)


def product(
    x: Tensor, differences: Tensor, curvatures: Tensor, weight: Tensor, difference: Matrix, curvature: Matrix, limit: float
) -> Tensor:
    """x (x ``differences`` v + ``curvatures`` q), with the functions v and q of the weights of :func:`weight_functions`.

    The result does not depend on the number of threads.

    Args:
        x: states [B, in].
        differences: functions of the pre-activations [B, len(difference) out].
        curvatures: likewise [B, len(curvature) out].
        weight: [out, in].
        difference: as for :func:`weight_functions`, like ``curvature`` and ``limit``; at least one.

    Returns:
        The flip product [B, in].
    """
    terms, coefficients = _padded([*difference, *curvature])
    u = torch.empty_like(x)
    problem = ProductProblem(
        batch=len(x),
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        differences=len(difference),
        curvatures=len(curvature),
        terms=terms,
        coefficients=coefficients,
        limit=limit,
    )
    call("product", torch.float32, problem, differences, curvatures, weight, x, u)
    return u


def moments(t: Tensor, most: int) -> tuple[float, float, float]:
    """The largest square, the mean square and the mean fourth power.

    Of more than ``most`` elements about as many are read, in blocks at even distances.
    """
    count = t.numel()
    every = max(1, count // most)
    sums = torch.zeros(3, dtype=torch.float64)
    call("moments", torch.float32, MomentProblem(count=count, every=every), t, sums)
    blocks = -(-count // (every * BLOCK))
    read = blocks * BLOCK - max(0, (blocks - 1) * every * BLOCK + BLOCK - count)
    largest, second, fourth = sums.tolist()
    return largest, second / max(1, read), fourth / max(1, read)


def _further_channels(a: Tensor, functions: int) -> Tensor:
    """Memory for functions of ``a`` [B, C, ...], each as C further channels."""
    return a.new_empty(a.shape[0], functions * a.shape[1], *a.shape[2:])


def _padded(rows: Matrix) -> tuple[int, ctypes.Array[ctypes.c_float]]:
    """The length of the longest row, and all rows one after the other, filled with zeros to that length."""
    length = max(map(len, rows))
    return length, floats(number for row in rows for number in (*row, *[0.0] * (length - len(row))))
