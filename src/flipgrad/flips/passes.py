"""The passes over memory that separable sums over flips are made of: the functions of the pre-activations and of the weights.

Each is compiled where the library takes the tensors, else in tensor operations. All sums have two parts: *differences*, which
are odd in the weight, and *curvatures*, which are even in it; see :mod:`flipgrad.flips._basis`. Several functions of one tensor
are further channels of it, one function after the other.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flipgrad.flips.form import Form
from flipgrad.native import library
from flipgrad.native.library import call, floats
from flipgrad.noise import Noise

Matrix = Sequence[Sequence[float]]

# Where the fused product is faster than ordinary ones: it computes 16 inputs at once, and with many examples it matters little
# that the functions of the weights need not be written to memory.
LEAST_FUSED_INPUTS, MOST_FUSED_EXAMPLES = 32, 384


def flip_functions(a: Tensor, grad: Tensor, noise: Noise, form: Form, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the flip product: see :meth:`flipgrad.noise.Noise.flip_parts`."""
    nodes = form.curvature_nodes
    if groups == 1 and noise.compiled and library.takes(a, grad):
        indices = (ctypes.c_int64 * len(nodes))(*nodes)
        steps = floats(map(math.cosh, form.steps))
        return _compiled_functions("features", a, grad, noise, form, cosh_steps=steps, curvature_nodes=indices)
    differences, curvatures = noise.flip_parts(a, grad, form.steps, nodes)
    return join(differences, 1, groups), join(curvatures, 1, groups)


def log_functions(
    a: Tensor, states: Tensor, noise: Noise, form: Form, matrices: tuple[Matrix, Matrix], groups: int
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the log ratio: :meth:`flipgrad.noise.Noise.log_parts`, times the ``matrices``."""
    nodes = form.curvature_nodes
    if groups == 1 and noise.compiled and library.takes(a, states):
        return _compiled_functions(
            "log_features",
            *(a, states, noise, form),
            half_steps=floats(step / 2 for step in form.steps),
            half_tanhs=floats(math.tanh(step / 2) for step in form.steps),
            heights=floats(math.sinh(form.steps[node] / 2) ** 2 for node in nodes),
            difference_matrix=floats(chain.from_iterable(matrices[0])),
            curvature_matrix=floats(chain.from_iterable(matrices[1])),
        )
    differences, curvatures = noise.log_parts(a, states, form.steps, nodes)
    return join(mixed(differences, matrices[0]), 1, groups), join(mixed(curvatures, matrices[1]), 1, groups)


def _compiled_functions(
    function: str, a: Tensor, given: Tensor, noise: Noise, form: Form, **fields: Any
) -> tuple[Tensor, Tensor]:
    """The functions [B, nodes C, ...] of ``a`` [B, C, ...] and of what is ``given`` with it, by a compiled ``function``."""
    counts = {"differences": len(form.steps), "curvatures": len(form.curvature_nodes)}
    results = [a.new_empty(a.shape[0], count * a.shape[1], *a.shape[2:]) for count in counts.values()]
    block = a[0].numel() if len(a) else 0
    call(function, torch.float32, a, given, *results, images=len(a), block=block, scale=noise.scale, **counts, **fields)
    return results[0], results[1]


def weight_functions(weight: Tensor, form: Form, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the weights [out, ...] for the differences and, if there are any, for the curvatures."""
    if groups == 1 and library.takes(weight):
        out, odd_powers = weight.new_empty(form.rank, *weight.shape), len(form.difference)
        fields = {"count": weight.numel(), "functions": form.rank, "odd_powers": odd_powers}
        call("weights", torch.float32, weight, out, **fields, **_polynomials(form))
        return out[:odd_powers].flatten(0, 1), out[odd_powers:].flatten(0, 1)
    square = weight * weight
    differences = [polynomial(row, weight, square, form.limit) for row in form.difference]
    curvatures = [polynomial(row, square, square, form.limit) for row in form.curvature]
    return join(differences, 0, groups), join(curvatures, 0, groups)


def polynomial(coefficients: Sequence[float], leading: Tensor, square: Tensor, limit: float) -> Tensor:
    """``leading``, the weight or its square, times a polynomial in 2 (w / limit)^2 - 1, by Horner's scheme."""
    *lower, c = coefficients
    if not lower:
        return leading * c
    centred = (square * (2 / limit**2)).sub_(1)
    value = (centred * c).add_(lower.pop())
    for c in reversed(lower):
        value.mul_(centred).add_(c)
    return value.mul_(leading)


def fused_product_pays(x: Tensor) -> bool:
    """Whether :func:`fused_product` is faster than ordinary products, for states ``x`` [B, in]."""
    examples, inputs = x.shape
    fits = inputs >= LEAST_FUSED_INPUTS and examples <= MOST_FUSED_EXAMPLES and x.dtype == torch.float32
    return fits and library.usable(x) and library.has_fast_products()


def fused_product(x: Tensor, differences: Tensor, curvatures: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The flip product x (x ``differences`` v + ``curvatures`` q), with v and q of :func:`weight_functions`.

    The tensors are contiguous float32: ``x`` [B, in], ``weight`` [out, in] and the two of :func:`flip_functions`. The result
    does not depend on the number of threads.
    """
    u = torch.empty_like(x)
    call(
        "product",
        torch.float32,
        *(differences, curvatures, weight, x, u),
        batch=len(x),
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        differences=len(form.difference),
        curvatures=len(form.curvature),
        **_polynomials(form),
    )
    return u


def _polynomials(form: Form) -> dict[str, Any]:
    """The polynomials of a form as compiled code takes them: one after the other, filled with zeros to one length."""
    rows = form.difference + form.curvature
    terms = max(map(len, rows))
    padded = (number for row in rows for number in (*row, *[0.0] * (terms - len(row))))
    return {"terms": terms, "coefficients": floats(padded), "limit": form.limit}


def mixed(values: list[Tensor], matrix: Matrix) -> list[Tensor]:
    """Tensors times a matrix, whose rows belong to them."""
    if len(values) == 1:
        return [values[0].mul_(matrix[0][0])]
    stacked = torch.stack(values, -1)
    return list((stacked @ stacked.new_tensor(matrix)).unbind(-1))


def join(tensors: list[Tensor], dim: int, groups: int) -> Tensor:
    """The tensors' channels, which are at ``dim``, one tensor after the other within each group."""
    if len(tensors) <= 1:
        return tensors[0] if tensors else torch.empty(0)
    if groups == 1:
        return torch.cat(tensors, dim)
    return torch.stack([t.unflatten(dim, (groups, -1)) for t in tensors], dim + 1).flatten(dim, dim + 2)
