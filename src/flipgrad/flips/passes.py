"""The passes over memory that separable sums over flips are made of.

Each has two implementations: compiled (:mod:`flipgrad.native.separable`), where the library takes the tensors, and in tensor
operations. All sums have two parts, *differences*, which are odd in the weight, and *curvatures*, which are even in it; see
:mod:`flipgrad.flips._basis`. Several functions of one tensor are further channels of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flipgrad.native import library
from flipgrad.native import separable as compiled
from flipgrad.noise import Logistic, Noise

Matrix = Sequence[Sequence[float]]

# Weights, and pre-activations, that statistics are made of: of more, as many at even distances.
WEIGHTS_READ, ACTIVATIONS_READ = 2**15, 2**14

# Where the fused product is faster than ordinary ones: it computes 16 inputs at once, and with many examples it matters little
# that the functions of the weights need not be written to memory.
LEAST_FUSED_INPUTS, MOST_FUSED_EXAMPLES = 32, 384


def flip_functions(
    a: Tensor, grad: Tensor, steps: Sequence[float], curvature_nodes: Sequence[int], noise: Noise, groups: int
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the flip product: see :meth:`flipgrad.noise.Noise.flip_parts`."""
    if groups == 1 and isinstance(noise, Logistic) and library.takes(a, grad):
        return compiled.flip_functions(a, grad, noise.scale, steps, curvature_nodes)
    differences, curvatures = noise.flip_parts(a, grad, steps, curvature_nodes)
    return join(differences, 1, groups), join(curvatures, 1, groups) if curvatures else a.new_empty(0)


def log_functions(
    a: Tensor,
    states: Tensor,
    steps: Sequence[float],
    curvature_nodes: Sequence[int],
    matrices: tuple[Matrix, Matrix],
    noise: Noise,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the log ratio: :meth:`flipgrad.noise.Noise.log_parts`, times the ``matrices``."""
    if groups == 1 and isinstance(noise, Logistic) and library.takes(a, states):
        curved = [steps[node] for node in curvature_nodes]
        return compiled.log_functions(a, states, noise.scale, (steps, matrices[0]), (curved, matrices[1]))
    parts = noise.log_parts(a, states, steps, curvature_nodes)
    differences, curvatures = (mixed(values, matrix) for values, matrix in zip(parts, matrices, strict=True))
    return join(differences, 1, groups), join(curvatures, 1, groups)


def weight_functions(weight: Tensor, difference: Matrix, curvature: Matrix, limit: float, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the weights: polynomials with these coefficients, times w and w^2. Of curvatures there may be none."""
    if groups == 1 and library.takes(weight):
        return compiled.weight_functions(weight, difference, curvature, limit)
    square = weight * weight
    differences = [polynomial(row, weight, square, limit) for row in difference]
    curvatures = [polynomial(row, square, square, limit) for row in curvature]
    return join(differences, 0, groups), join(curvatures, 0, groups) if curvatures else weight.new_empty(0)


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
    """Whether one compiled matrix product with functions of the weights is faster than ordinary products, for states ``x``."""
    examples, inputs = x.shape
    fits = inputs >= LEAST_FUSED_INPUTS and examples <= MOST_FUSED_EXAMPLES and x.dtype == torch.float32
    return fits and library.usable(x) and library.has_fast_products()


def moments(weight: Tensor) -> tuple[float, float, float]:
    """The largest square of weights, their mean square and their mean fourth power."""
    if library.takes(weight):
        return compiled.moments(weight, weight.numel())
    square = some(weight).square()
    largest, second, fourth = torch.stack([square.amax(), square.mean(), square.square().mean()]).tolist()
    return largest, second, fourth


def root_mean_square(a: Tensor) -> float:
    """That of some of the pre-activations."""
    if library.takes(a):
        return math.sqrt(compiled.moments(a, ACTIVATIONS_READ)[1])
    flat = a.detach().flatten()
    return float(flat[:: max(1, len(flat) // ACTIVATIONS_READ)].float().square().mean().sqrt()) if len(flat) else 0.0


def some(weight: Tensor) -> Tensor:
    """The weights, or of many of them some at even distances and the largest, in at least float32."""
    flat = weight.detach().flatten()
    if len(flat) > WEIGHTS_READ:
        flat = torch.cat([flat[:: -(-len(flat) // WEIGHTS_READ)], torch.stack(torch.aminmax(flat))])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def mixed(values: list[Tensor], matrix: Matrix) -> list[Tensor]:
    """Tensors times a matrix, whose rows belong to them."""
    if len(values) == 1:
        return [values[0].mul_(matrix[0][0])]
    stacked = torch.stack(values, -1)
    return list((stacked @ stacked.new_tensor(matrix)).unbind(-1))


def join(tensors: list[Tensor], dim: int, groups: int) -> Tensor:
    """The tensors' channels, which are at ``dim``, one tensor after the other within each group."""
    if len(tensors) == 1:
        return tensors[0]
    if groups == 1:
        return torch.cat(tensors, dim)
    return torch.stack([t.unflatten(dim, (groups, -1)) for t in tensors], dim + 1).flatten(dim, dim + 2)
