"""The separable form of a layer's flip product: which functions of its weights, at which nodes, for a tolerance.

:func:`find_form` finds the least ranks for a layer's weights and a tolerance.

The estimated error is the relative L2 error of the product under two assumptions. The errors of the terms of one sum are
independent, as they are with gradients of random sign. And the pre-activations cover the noise's range: it is the largest for
normal distributions with a standard deviation of 1/2 and of 1 scale and for the uniform distribution on ±4 scales and the
largest step beyond; units further out change little. It does not hold for a layer with all its units far in the noise's tails,
where the product itself vanishes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import _basis
from flipgrad.flips._basis import HIGHEST, LOWEST, PER_OCTAVE, SMALLEST_TOP
from flipgrad.native import library
from flipgrad.noise import Noise

# Beyond this many products of either kind an exact kernel is faster.
MAX_RANK = 6

# The estimated error is this much larger than the computed one: layers differ, and few of their units may be active.
MARGIN = 1.5

# Pre-activations are taken as normal if their root mean square is at most this many scales.
LARGEST_NORMAL_RMS = 1.25

# Weights, and pre-activations, that statistics are made of: of more, about as many evenly spaced ones.
WEIGHTS_READ, ACTIVATIONS_READ = 2**15, 2**14

# Forms are kept for distributions of weights that are told apart to 1/16 octave in size, far within the margin.
BINS_PER_OCTAVE, MOST_FORMS_KEPT = 16, 4096
SMALLEST_SQUARE = 1e-30
_forms: dict[tuple[object, ...], Form] = {}

# The largest ratio of the largest weight to the weights' root mean square that is told apart, in half octaves.
MOST_HALF_OCTAVES = 12

# ``kBlock`` of csrc/features.cpp.
BLOCK = 256

Coefficients = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Form:
    """How to compute the flip product of a layer with weights like those it was made for.

    Functions of the weight w are given by the coefficients, lowest power first, of a polynomial in ``2 (w / limit)**2 - 1``.

    Attributes:
        tolerance: the relative L2 error that was asked for.
        estimated_error: the one that is to be expected; infinite if some weight is beyond the limit, or not a number.
        limit: the weights' absolute values up to which it holds; for any weights at most :data:`_basis.LARGEST` scales of
            the noise.
        steps: the nodes of the functions of the pre-activations.
        difference: the functions of the weight for the differences E, one for every node, each a polynomial times w.
        curvature: those for the curvatures O, polynomials times w**2; none if these are below the tolerance.
        curvature_nodes: the indices of their nodes among the steps.
    """

    tolerance: float
    estimated_error: float
    limit: float
    steps: tuple[float, ...]
    difference: Coefficients
    curvature: Coefficients
    curvature_nodes: tuple[int, ...]

    @property
    def reachable(self) -> bool:
        """Whether the estimated error is within the tolerance. If not, an exact kernel is the better choice."""
        return self.estimated_error <= self.tolerance

    @property
    def rank(self) -> int:
        """The number of ordinary products that it takes."""
        return len(self.difference) + len(self.curvature)


def find_form(weight: Tensor, noise: Noise, tolerance: float = 1e-3, *, activation_rms: float = math.inf) -> Form:
    """The least ranks that keep the product's relative L2 error within the tolerance, for weights of any shape.

    Where no rank up to :data:`MAX_RANK` is enough it is the most accurate form, which is not ``reachable``. Where the root mean
    square of the pre-activations is small the estimate is that of normal pre-activations, and need not allow for others.

    It reads three numbers from the weights' device: their largest, and their second and fourth moments (of many weights, of
    some of them). Forms are kept for these, finely rounded; a new one needs a histogram of the weights.

    >>> from flipgrad.noise import Logistic
    >>> found = find_form(torch.linspace(-0.02, 0.02, 100), Logistic(), tolerance=1e-3)
    >>> len(found.difference), len(found.curvature), found.reachable
    (1, 1, True)
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance}: the tolerance is a relative error between 0 and 1, e.g. 1e-3")
    normal = activation_rms <= LARGEST_NORMAL_RMS * noise.scale
    key = (noise, tolerance, normal, weight.dtype, *_summary(weight, noise.scale))
    if key not in _forms:
        if len(_forms) >= MOST_FORMS_KEPT:
            _forms.clear()
        _forms[key] = _find(_some(weight), noise, tolerance, normal)
    return _forms[key]


def _find(weight: Tensor, noise: Noise, tolerance: float, normal: bool) -> Form:
    counts = _histogram(weight, noise)
    largest = int(counts.nonzero().amax()) + LOWEST if weight.numel() else LOWEST
    top = min(max(largest, SMALLEST_TOP), HIGHEST)
    counts = counts[: top + 1 - LOWEST]
    bins = _basis.bin_steps(top)
    typical = math.sqrt(float((counts * bins**2).sum() / counts.sum().clamp(min=1)))
    half_octaves = round(2 * math.log2(float(bins[-1]) / typical)) if typical > 0 else MOST_HALF_OCTAVES
    # The first two distributions of the pre-activations are normal, with a standard deviation of up to 1 scale.
    distributions = slice(0, 2) if normal else slice(None)
    eps = torch.finfo(weight.dtype).eps
    # Steps so small that differences of probabilities would lose more than a tenth of the tolerance are no nodes.
    smallest = 0.0 if noise.closed_form else 2.0 ** math.ceil(math.log2(10 * eps / tolerance))

    def fitted(rank: int, curved: int) -> tuple[float, int, _basis.Basis]:
        basis = _basis.basis(noise, top, min(max(half_octaves, 1), MOST_HALF_OCTAVES), smallest, rank)
        return _error(basis, curved, counts, eps, distributions), curved, basis

    best = fitted(1, 0)
    for total in range(2, 2 * MAX_RANK + 1):
        # The first total that is enough, and for it the more accurate split.
        if best[0] <= tolerance:
            break
        splits = range((total + 1) // 2, min(total, MAX_RANK) + 1)
        best = min(best, *(fitted(rank, total - rank) for rank in splits), key=lambda candidate: candidate[0])
    error, curved, basis = best
    return Form(
        tolerance=tolerance,
        estimated_error=error if largest <= HIGHEST else math.inf,
        limit=basis.reach / 2 * noise.scale,
        steps=basis.steps,
        difference=_scaled(basis.difference.coefficients, 2 / noise.scale),
        curvature=_scaled(basis.curvature[curved].coefficients, (2 / noise.scale) ** 2),
        curvature_nodes=basis.curvature[curved].nodes,
    )


def _summary(weight: Tensor, scale: float) -> tuple[int, ...]:
    """What tells distributions of weights apart: the logarithms of their largest, of their second and fourth moments."""
    if not weight.numel():
        return ()
    largest, second, fourth = _moments(weight)
    numbers = (n / scale**2 for n in (largest, second, math.sqrt(fourth)))
    return tuple(
        math.floor(BINS_PER_OCTAVE / 2 * math.log2(max(n, SMALLEST_SQUARE))) if math.isfinite(n) else 0 for n in numbers
    )


def _histogram(weight: Tensor, noise: Noise) -> Tensor:
    """How many weights are in each bin of their absolute value and, last, beyond all bins; in float64, on the CPU."""
    size = weight.abs().div_(noise.scale).log2_()
    # A weight that is no number is beyond every range.
    bins = size.mul_(PER_OCTAVE).nan_to_num_(nan=HIGHEST + 1).floor_().clamp_(LOWEST, HIGHEST + 1).sub_(LOWEST)
    return torch.bincount(bins.flatten().int(), minlength=HIGHEST + 1 - LOWEST + 1).cpu().double()


def _error(basis: _basis.Basis, curved: int, counts: Tensor, eps: float, distributions: slice) -> float:
    """The relative L2 error of the product. Over symmetric a the errors of E, even in a, and of O, odd in a, are orthogonal."""
    difference, curvature = basis.difference, basis.curvature[curved]
    left = difference.error + curvature.error + eps**2 * (difference.rounding + curvature.rounding)
    energy = basis.signal @ counts
    errors = left @ counts / energy.clamp(min=torch.finfo(energy.dtype).tiny)
    return MARGIN * math.sqrt(float(errors[distributions].amax()))


def _scaled(coefficients: Coefficients, factor: float) -> Coefficients:
    return tuple(tuple(factor * c for c in row) for row in coefficients)


def root_mean_square(a: Tensor) -> float:
    """That of some of the pre-activations."""
    if library.takes(a):
        return math.sqrt(compiled_moments(a, ACTIVATIONS_READ)[1])
    flat = a.detach().flatten()
    return float(flat[:: max(1, len(flat) // ACTIVATIONS_READ)].float().square().mean().sqrt()) if len(flat) else 0.0


def _moments(weight: Tensor) -> tuple[float, float, float]:
    """The largest square of weights, their mean square and their mean fourth power."""
    if library.takes(weight):
        return compiled_moments(weight, weight.numel())
    square = _some(weight).square()
    largest, second, fourth = torch.stack([square.amax(), square.mean(), square.square().mean()]).tolist()
    return largest, second, fourth


def compiled_moments(t: Tensor, most: int) -> tuple[float, float, float]:
    """The largest square, the mean square and the mean fourth power of contiguous float32 numbers.

    Of more than ``most`` numbers about as many are read, in evenly spaced blocks.
    """
    count = t.numel()
    every = max(1, count // most)
    sums = torch.zeros(3, dtype=torch.float64)
    library.call("moments", torch.float32, t, sums, count=count, every=every)
    blocks = -(-count // (every * BLOCK))
    read = blocks * BLOCK - max(0, (blocks - 1) * every * BLOCK + BLOCK - count)
    largest, second, fourth = sums.tolist()
    return largest, second / max(1, read), fourth / max(1, read)


def _some(weight: Tensor) -> Tensor:
    """The weights, or of many of them some evenly spaced ones and the largest, in at least float32."""
    flat = weight.detach().flatten()
    if len(flat) > WEIGHTS_READ:
        flat = torch.cat([flat[:: -(-len(flat) // WEIGHTS_READ)], torch.stack(torch.aminmax(flat))])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
