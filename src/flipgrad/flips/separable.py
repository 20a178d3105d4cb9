r"""The flip product as a few ordinary transposed convolutions or matrix products, to a tolerance, for every noise.

The term of one weight splits into a part that is odd in the weight and a part that is even in it (see ``_basis``):

.. math:: u_i = \sum_j \big[E(a_j, w_{ji}) + x_i\, O(a_j, w_{ji})\big] g_j
    \approx \sum_j \Big[\sum_r e_r(a_j)\, v_r(w_{ji}) + x_i \sum_r o_r(a_j)\, q_r(w_{ji})\Big] g_j .

So it is the ordinary gradient of a layer with the weights :math:`v_r(w)`, and of another with :math:`q_r(w)`: it runs at
the speed of the device's own library. :func:`plan` finds the least ranks for a layer's weights and a tolerance;
:func:`product` uses them, in tensor operations only, without looking at the data, so that it compiles as one graph.

The estimated error is the relative L2 error of the product under two assumptions. The errors of the terms of one sum are
independent, as they are with gradients of random sign. And the pre-activations spread over the noise's range: it is the
largest for normal distributions with a standard deviation of 1/2 and of 1 scale and for the uniform distribution on ±4 scales
and the largest step beyond; units further out change little. It does not hold for a layer with all its units far in the
noise's tails, where the product itself vanishes.

Memory formats are kept as they come. On a CPU the gradient of a convolution is up to a fifth faster with ``channels_last``
tensors, about what it would cost to convert them here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import _basis, native
from flipgrad.flips._basis import HIGHEST, LARGEST, LOWEST, PER_OCTAVE, SMALLEST_TOP
from flipgrad.flips.ordinary import Geometry, input_gradient
from flipgrad.noise import Logistic, Noise

# Beyond this many products of either kind an exact kernel is faster.
MAX_RANK = 6

# Elements of the pre-activations that are worked on at once on a CPU: with more, the memory allocator returns the temporary
# tensors to the system every time, and to fault the pages in anew costs more than the arithmetic.
CHUNK = 2**21

# The estimated error is this much larger than the computed one: layers differ, and few of their units may be active.
MARGIN = 1.5

# Pre-activations with a root mean square of up to so many scales are taken as normal.
NARROW = 1.25

# Weights that the histogram counts: of more, so many at even distances. The largest one is always found.
COUNTED = 2**15

# Plans are kept for distributions of weights that are told apart to 1/16 octave in size, far within the margin; so many.
FINENESS, MOST_PLANS = 16, 4096
SMALLEST_SQUARE = 1e-30
_plans: dict[tuple[object, ...], Plan] = {}

# The largest ratio of the largest weight to their root mean square that is told apart, in half octaves.
MAX_SPREAD = 12


@dataclass(frozen=True)
class Function:
    """A function of the weight at one node: ``w**power`` times a polynomial in ``2 (w / limit)**2 - 1``."""

    node: int
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """How to compute the flip product of a layer with weights like those it was made for.

    Attributes:
        tolerance: the relative L2 error that was asked for.
        estimated_error: the one that is to be expected; infinite if some weight is beyond the limit, or not a number.
        limit: the weights' absolute values up to which it holds; for any weights at most :data:`_basis.LARGEST` scales of
            the noise.
        steps: the nodes of the functions of the pre-activations.
        even: the functions of the weight that belong to E.
        odd: those that belong to O.
    """

    tolerance: float
    estimated_error: float
    limit: float
    steps: tuple[float, ...]
    even: tuple[Function, ...]
    odd: tuple[Function, ...]

    @property
    def reachable(self) -> bool:
        """Whether the estimated error is within the tolerance. If not, an exact kernel is the better choice."""
        return self.estimated_error <= self.tolerance

    @property
    def rank_e(self) -> int:
        """The number of products for E."""
        return len(self.even)

    @property
    def rank_o(self) -> int:
        """The number of products for O; 0 if it is below the tolerance."""
        return len(self.odd)


def plan(weight: Tensor, noise: Noise, tolerance: float = 1e-3, *, spread: float = math.inf) -> Plan:
    """The least ranks that keep the product's relative error within the tolerance, for these weights.

    It reads three numbers from the weights' device: their largest, and their second and fourth moments (of many weights, of
    some of them). Plans are kept for these, finely rounded; a new one needs a histogram of the weights.

    Args:
        weight: the layer's weights, of any shape.
        noise: the layer's noise.
        tolerance: the relative L2 error of the product that is allowed, e.g. 1e-3.
        spread: the root mean square of the pre-activations, if known; where it is small the estimate is that of normal
            pre-activations, and need not allow for others.

    Returns:
        The plan; where no rank up to :data:`MAX_RANK` is enough, the most accurate one, which is not ``reachable``.

    >>> from flipgrad.noise import Logistic
    >>> found = plan(torch.linspace(-0.02, 0.02, 100), Logistic(), tolerance=1e-3)
    >>> found.rank_e, found.rank_o, found.reachable
    (1, 1, True)
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance}: the tolerance is a relative error between 0 and 1, e.g. 1e-3")
    narrow = spread <= NARROW * noise.scale
    key = (noise, tolerance, narrow, weight.dtype, *_summary(weight, noise.scale))
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = _make_plan(_some(weight), noise, tolerance, narrow)
    return _plans[key]


def _make_plan(weight: Tensor, noise: Noise, tolerance: float, narrow: bool) -> Plan:
    counts = _histogram(weight, noise)
    largest = int(counts.nonzero().amax()) + LOWEST if weight.numel() else LOWEST
    top = min(max(largest, SMALLEST_TOP), HIGHEST)
    counts = counts[: top + 1 - LOWEST]
    bins = _basis.bin_steps(top)
    typical = math.sqrt(float((counts * bins**2).sum() / counts.sum().clamp(min=1)))
    octaves = round(2 * math.log2(float(bins[-1]) / typical)) if typical > 0 else MAX_SPREAD
    # The first two distributions of the pre-activations are normal, with a standard deviation of up to 1 scale.
    distributions = slice(0, 2) if narrow else slice(None)
    eps = torch.finfo(_wide(weight.dtype)).eps
    # Steps so small that differences of probabilities would lose more than a tenth of the tolerance are no nodes.
    smallest = 0.0 if isinstance(noise, Logistic) else 2.0 ** math.ceil(math.log2(10 * eps / tolerance))

    def fitted(rank: int, rank_o: int) -> tuple[float, int, _basis.Basis]:
        basis = _basis.basis(noise, top, min(max(octaves, 1), MAX_SPREAD), smallest, rank)
        return _error(basis, rank_o, counts, eps, distributions), rank_o, basis

    best = fitted(1, 0)
    for total in range(2, 2 * MAX_RANK + 1):
        # The first total that is enough, and for it the more accurate split.
        if best[0] <= tolerance:
            break
        splits = range((total + 1) // 2, min(total, MAX_RANK) + 1)
        best = min(best, *(fitted(rank, total - rank) for rank in splits), key=lambda candidate: candidate[0])
    error, rank_o, basis = best
    return Plan(
        tolerance=tolerance,
        estimated_error=error if largest <= HIGHEST else math.inf,
        limit=basis.reach / 2 * noise.scale,
        steps=basis.steps,
        even=_functions(basis.even, 2 / noise.scale),
        odd=_functions(basis.odd[rank_o], (2 / noise.scale) ** 2),
    )


def flip_product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, tolerance: float, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.flip_product` to a tolerance; if that cannot be reached, an ``InputError`` is raised."""
    return product(x, a, grad, weight, noise, _reached(plan(weight, noise, tolerance)), geometry)


def product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, plan: Plan, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.flip_product` by a plan for these weights."""
    dtype, wide = x.dtype, _wide(x.dtype)
    x, a, grad, weight = (t.to(wide) for t in (x, a, grad, weight))
    groups = 1 if geometry is None else geometry.groups
    fused = geometry is None and wide == torch.float32 and native.usable(x) and native.product_pays(len(x), x.shape[1])
    if fused:
        x, weight = x.contiguous(), weight.contiguous()
    else:
        kernels_even, kernels_odd = kernels(weight, plan, groups)

    def examples(x: Tensor, a: Tensor, grad: Tensor) -> Tensor:
        even, odd = _features(a, grad, plan, noise, groups)
        if fused:
            return native.product(x, even.contiguous(), odd.contiguous(), weight, *_coefficients(plan), plan.limit)
        u = input_gradient(even, kernels_even, x, geometry)
        # Times x twice, not once: a zero is no unit.
        if not plan.odd:
            return u.mul_(x).mul_(x)
        # Its memory is good for the next result.
        del even
        v = input_gradient(odd, kernels_odd, x, geometry)
        return combine(u, v, x)

    return by_examples(examples, x, a, grad).to(dtype)


def combine(even: Tensor, odd: Tensor, x: Tensor) -> Tensor:
    """x (x even + odd), in the memory of ``even``."""
    if native.usable(even) and all(t.is_contiguous() and t.dtype == torch.float32 for t in (even, odd, x)):
        return native.combine(even, odd, x)
    return torch.addcmul(odd, even, x, out=even).mul_(x)


def by_examples(function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, a: Tensor, other: Tensor) -> Tensor:
    """The result of a function of states, pre-activations and the like, some examples at a time if that is faster."""
    if x.device.type != "cpu" or a.numel() <= CHUNK or torch.compiler.is_compiling():
        return function(x, a, other)
    size = math.ceil(len(x) / math.ceil(a.numel() / CHUNK))
    return torch.cat([function(*some) for some in zip(*(t.split(size) for t in (x, a, other)), strict=True)])


def kernels(weight: Tensor, plan: Plan, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the weights, all ranks as further output channels of one layer; those of O may be none."""
    if groups == 1 and weight.is_contiguous() and weight.dtype == torch.float32 and native.usable(weight):
        return native.weight_functions(weight, *_coefficients(plan), plan.limit)
    square = weight * weight
    even = [polynomial(f, weight, square, plan.limit) for f in plan.even]
    odd = [polynomial(f, square, square, plan.limit) for f in plan.odd]
    return join(even, 0, groups), join(odd, 0, groups) if odd else weight.new_empty(0)


def polynomial(function: Function, leading: Tensor, square: Tensor, limit: float) -> Tensor:
    """The function of the weight: ``leading``, the weight or its square, times the polynomial, by Horner's scheme."""
    *lower, c = function.coefficients
    if not lower:
        return leading * c
    centred = (square * (2 / limit**2)).sub_(1)
    value = (centred * c).add_(lower.pop())
    for c in reversed(lower):
        value.mul_(centred).add_(c)
    return value.mul_(leading)


def _coefficients(plan: Plan) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    return [f.coefficients for f in plan.even], [f.coefficients for f in plan.odd]


def _features(a: Tensor, grad: Tensor, plan: Plan, noise: Noise, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations, as further output channels; those of O may be none."""
    nodes = tuple(f.node for f in plan.odd)
    plain = groups == 1 and a.is_contiguous() and grad.is_contiguous() and a.dtype == torch.float32
    if plain and isinstance(noise, Logistic) and native.usable(a):
        return native.logistic_features(a, grad, noise.scale, plan.steps, nodes)
    even, odd = _basis.features(a, grad, plan.steps, nodes, noise)
    return join(even, 1, groups), join(odd, 1, groups) if odd else a.new_empty(0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _reached(plan: Plan) -> Plan:
    if plan.estimated_error == math.inf:
        raise InputError(
            f"some weight is above {plan.limit:.2g}, {LARGEST:g} scales of the noise, or not a number: "
            "there is no separable flip product of such weights; use flips.vectorized"
        )
    if not plan.reachable:
        raise InputError(
            f"tolerance={plan.tolerance}: with these weights, up to {plan.limit:.2g}, the separable flip product has an error "
            f"of {plan.estimated_error:.1e} at its largest rank, {MAX_RANK}; allow that much, or use flips.vectorized"
        )
    return plan


def _some(weight: Tensor) -> Tensor:
    """The weights, or of many of them some at even distances and the largest, in at least float32."""
    flat = weight.detach().flatten()
    if len(flat) > COUNTED:
        flat = torch.cat([flat[:: -(-len(flat) // COUNTED)], torch.stack(torch.aminmax(flat))])
    return flat.to(_wide(flat.dtype))


def _summary(weight: Tensor, scale: float) -> tuple[int, ...]:
    """What tells distributions of weights apart: the logarithms of their largest, of their second and fourth moments."""
    if not weight.numel():
        return ()
    if weight.dtype == torch.float32 and weight.is_contiguous() and native.usable(weight):
        largest, second, fourth = native.moments(weight, weight.numel())
    else:
        square = _some(weight).square()
        largest, second, fourth = torch.stack([square.amax(), square.mean(), square.square().mean()]).tolist()
    numbers = (n / scale**2 for n in (largest, second, math.sqrt(fourth)))
    return tuple(math.floor(FINENESS / 2 * math.log2(max(n, SMALLEST_SQUARE))) if math.isfinite(n) else 0 for n in numbers)


def _histogram(weight: Tensor, noise: Noise) -> Tensor:
    """How many weights are in each bin of their absolute value and, last, beyond all bins; in float64, on the CPU."""
    size = weight.abs().div_(noise.scale).log2_()
    # A weight that is no number is beyond every range.
    bins = size.mul_(PER_OCTAVE).nan_to_num_(nan=HIGHEST + 1).floor_().clamp_(LOWEST, HIGHEST + 1).sub_(LOWEST)
    return torch.bincount(bins.flatten().int(), minlength=HIGHEST + 1 - LOWEST + 1).cpu().double()


def _error(basis: _basis.Basis, rank_o: int, counts: Tensor, eps: float, distributions: slice) -> float:
    """The relative L2 error of the product. Over symmetric a the errors of E, even, and of O, odd, are orthogonal."""
    odd = basis.odd[rank_o]
    left = basis.even.error + odd.error + eps**2 * (basis.even.rounding + odd.rounding)
    energy = basis.signal @ counts
    errors = left @ counts / energy.clamp(min=torch.finfo(energy.dtype).tiny)
    return MARGIN * math.sqrt(float(errors[distributions].amax()))


def _functions(fit: _basis.Fit, factor: float) -> tuple[Function, ...]:
    return tuple(
        Function(node, tuple(factor * c for c in coefficients))
        for node, coefficients in zip(fit.nodes, fit.coefficients, strict=True)
    )


def join(tensors: list[Tensor], dim: int, groups: int) -> Tensor:
    """The tensors' channels, which are at ``dim``, one tensor after the other within each group."""
    if len(tensors) == 1:
        return tensors[0]
    if groups == 1:
        return torch.cat(tensors, dim)
    return torch.stack([t.unflatten(dim, (groups, -1)) for t in tensors], dim + 1).flatten(dim, dim + 2)
