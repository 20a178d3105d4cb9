r"""The separable form of a layer's flip product: which functions of its weights, at which nodes, for a tolerance.

:func:`find_form` finds the least ranks for a layer's weights and a tolerance, :func:`fit_basis` the functions of one rank.

The estimated error is the relative L2 error of the product under two assumptions. The errors of the terms of one sum are
independent, as they are with gradients of random sign. And the pre-activations cover the noise's range: it is the largest for
normal distributions with a standard deviation of 1/2 and of 1 scale and for the uniform distribution on ±4 scales and the
largest step beyond; units further out change little. It does not hold for a layer with all its units far in the noise's tails,
where the product itself vanishes.

A fit replaces the flip term by few products of a function of the pre-activation and a function of the weight.
With the step :math:`s = 2w` the term is :math:`E(a, s) + x\,O(a, s)`, a difference and a curvature:

.. math:: E = \tfrac12 [F(a + s) - F(a - s)], \qquad O = F(a) - \tfrac12 [F(a + s) + F(a - s)].

The difference is odd in the step and even in a, the curvature even in the step and odd in a. Both are replaced by
interpolation in the step: :math:`E(a, s) \approx \sum_r E(a, s_r)\, v_r(s)` and
:math:`O(a, s) \approx \sum_r O(a, s_r)\, q_r(s)`, where the polynomials :math:`v_r` are odd in the step and :math:`q_r` even
in it. In :math:`s^2` the functions are smooth, so the error at rank r is close to :math:`\prod_r (s^2 - s_r^2)`, and its mean
square is least where the :math:`s_r^2` are the Gauss nodes of the weights' distribution. The polynomials are weighted
least-squares fits.

Measured, uniform weights, up to rank 3: the L2 error is that of the best fit of the same rank (the singular value
decomposition) times 1.0 to 1.3 for logistic and normal noise, and times 1.0 to 1.7 for Laplace and Uniform, or for steps of
several scales. Largest error of E relative to its largest value, logistic noise, against Taylor's series of as many terms:

=============  ================  ================  =======
largest 2|w|   rank 1 (Taylor)   rank 2 (Taylor)   rank 3
=============  ================  ================  =======
0.1            1.8e-4 (8.3e-4)   2.0e-8 (8.3e-7)   2e-11
0.5            5.3e-3 (2.1e-2)   2.1e-5 (5.2e-4)   8.3e-8
1              2.1e-2 (8.2e-2)   3.1e-4 (8.2e-3)   4.8e-6
2              7.5e-2 (0.31)     4.0e-3 (0.12)     1.9e-4
4              0.22 (1.1)        2.7e-2 (1.7)      4.8e-3
=============  ================  ================  =======

Averages of the density at two points, cheaper for other noises than these differences of the cdf, are as good at rank 1 but
three times worse at rank 2, and do not follow the kinks of Laplace and Uniform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, zip_longest

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips.ordinary import NARROW_ERROR
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

# The size of the weights, relative to the noise's scale, is counted in bins of a quarter octave from 2**-15 to 2**3.
PER_OCTAVE = 4
LOWEST, HIGHEST = -15 * PER_OCTAVE, 3 * PER_OCTAVE - 1

# The upper edge of the highest bin: no fit holds for larger weights.
LARGEST = 2.0 ** ((HIGHEST + 1) / PER_OCTAVE)

# The basis of weights up to 2**-11 serves all smaller ones: there F is as good as quadratic over a step.
SMALLEST_TOP = -11 * PER_OCTAVE - 1

# Terms of the polynomials in the weight, at most: more would lose digits in float32.
TERMS = 8


@dataclass(frozen=True)
class Form:
    """How to compute the flip product of a layer with weights like those it was made for.

    Functions of the weight w are given by the coefficients, lowest power first, of a polynomial in ``2 (w / limit)**2 - 1``.

    Attributes:
        tolerance: the relative L2 error that was asked for.
        estimated_error: the one that is to be expected; infinite if some weight is beyond the limit, or not a number.
        limit: the weights' absolute values up to which it holds; for any weights at most :data:`LARGEST` scales of
            the noise.
        steps: the nodes of the functions of the pre-activations.
        difference: the functions of the weight for the differences E, one for every node, each a polynomial times w.
        curvature: those for the curvatures O, polynomials times w**2; none if these are below the tolerance.
        curvature_nodes: the indices of their nodes among the steps.
        narrow: whether the tolerance allows the products of the curvatures in bfloat16.
        leads: of every difference after the first, how many times the first one it is on average. What is left of them, see
            :meth:`led`, is small.
        narrow_rest: whether the tolerance allows the products of that in bfloat16 besides.
    """

    tolerance: float
    estimated_error: float
    limit: float
    steps: tuple[float, ...]
    difference: Coefficients
    curvature: Coefficients
    curvature_nodes: tuple[int, ...]
    narrow: bool = False
    leads: tuple[float, ...] = ()
    narrow_rest: bool = False

    def led(self) -> Form:
        r"""The same sum in other functions: for the differences less :attr:`leads` times the first one, and for this itself.

        Their functions of the weight stay, and the first one gets so many times the others': :math:`\sum_r E_r v_r =
        E_1 (v_1 + \sum_r \lambda_r v_r) + \sum_r (E_r - \lambda_r E_1)\, v_r`.
        """
        rows = zip((1.0, *self.leads), self.difference, strict=True)
        terms = zip_longest(*([lead * c for c in row] for lead, row in rows), fillvalue=0.0)
        return replace(self, difference=(tuple(map(sum, terms)), *self.difference[1:]))

    @property
    def reachable(self) -> bool:
        """Whether the estimated error is within the tolerance. If not, an exact kernel is the better choice."""
        return self.estimated_error <= self.tolerance

    @property
    def rank(self) -> int:
        """The number of ordinary products that it takes."""
        return len(self.difference) + len(self.curvature)


def find_form(
    weight: Tensor,
    noise: Noise,
    tolerance: float = 1e-3,
    *,
    activation_rms: float = math.inf,
    known: tuple[float, float, float] | None = None,
) -> Form:
    """The least ranks that keep the product's relative L2 error within the tolerance, for weights of any shape.

    Where no rank up to :data:`MAX_RANK` is enough it is the most accurate form, which is not ``reachable``. Where the root mean
    square of the pre-activations is small the estimate is that of normal pre-activations, and need not allow for others.

    It reads three numbers from the weights' device: their largest, and their second and fourth moments (of many weights, of
    some of them), unless these :func:`moments` are ``known``. Forms are kept for them, finely rounded; a new one needs a
    histogram of the weights.

    >>> from flipgrad.noise import Logistic
    >>> found = find_form(torch.linspace(-0.02, 0.02, 100), Logistic(), tolerance=1e-3)
    >>> len(found.difference), len(found.curvature), found.reachable
    (1, 1, True)
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance}: the tolerance is a relative error between 0 and 1, e.g. 1e-3")
    normal = activation_rms <= LARGEST_NORMAL_RMS * noise.scale
    key = (noise, tolerance, normal, weight.dtype, *_summary(weight, noise.scale, known))
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
    bins = bin_steps(top)
    typical = math.sqrt(float((counts * bins**2).sum() / counts.sum().clamp(min=1)))
    half_octaves = round(2 * math.log2(float(bins[-1]) / typical)) if typical > 0 else MOST_HALF_OCTAVES
    # The first two distributions of the pre-activations are normal, with a standard deviation of up to 1 scale.
    distributions = slice(0, 2) if normal else slice(None)
    eps = torch.finfo(weight.dtype).eps
    # Steps so small that differences of probabilities would lose more than a tenth of the tolerance are no nodes.
    smallest = 0.0 if noise.closed_form else 2.0 ** math.ceil(math.log2(10 * eps / tolerance))

    def fitted(rank: int, curved: int) -> tuple[float, int, Basis]:
        basis = fit_basis(noise, top, min(max(half_octaves, 1), MOST_HALF_OCTAVES), smallest, rank)
        return _error(basis, curved, counts, eps, distributions), curved, basis

    best = fitted(1, 0)
    for total in range(2, 2 * MAX_RANK + 1):
        # The first total that is enough, and for it the more accurate split.
        if best[0] <= tolerance:
            break
        splits = range((total + 1) // 2, min(total, MAX_RANK) + 1)
        best = min(best, *(fitted(rank, total - rank) for rank in splits), key=lambda candidate: candidate[0])
    error, curved, basis = best
    curvature = _narrow_error(basis.curvature[curved].energy, basis, counts, distributions)
    rest = _narrow_error(basis.difference.rest, basis, counts, distributions)
    return Form(
        tolerance=tolerance,
        estimated_error=error if largest <= HIGHEST else math.inf,
        limit=basis.reach / 2 * noise.scale,
        steps=basis.steps,
        difference=_scaled(basis.difference.coefficients, 2 / noise.scale),
        curvature=_scaled(basis.curvature[curved].coefficients, (2 / noise.scale) ** 2),
        curvature_nodes=basis.curvature[curved].nodes,
        narrow=math.hypot(error, curvature) <= tolerance,
        leads=basis.difference.leads,
        narrow_rest=math.hypot(error, curvature, rest) <= tolerance,
    )


def _summary(weight: Tensor, scale: float, known: tuple[float, float, float] | None) -> tuple[int, ...]:
    """What tells distributions of weights apart: the logarithms of their largest, of their second and fourth moments."""
    if not weight.numel():
        return ()
    largest, second, fourth = known or moments(weight)
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


def _error(basis: Basis, curved: int, counts: Tensor, eps: float, distributions: slice) -> float:
    """The relative L2 error of the product. Over symmetric a the errors of E, even in a, and of O, odd in a, are orthogonal."""
    difference, curvature = basis.difference, basis.curvature[curved]
    left = difference.error + curvature.error + eps**2 * (difference.rounding + curvature.rounding)
    return _relative(left, basis, counts, distributions)


def _narrow_error(energy: Tensor, basis: Basis, counts: Tensor, distributions: slice) -> float:
    """What products in bfloat16 add to it, whose terms have this ``energy``."""
    return NARROW_ERROR * _relative(energy, basis, counts, distributions)


def _relative(left: Tensor, basis: Basis, counts: Tensor, distributions: slice) -> float:
    """The root of mean squares [distribution of a, bin of weights] relative to the product, with the margin."""
    energy = basis.signal @ counts
    errors = left @ counts / energy.clamp(min=torch.finfo(energy.dtype).tiny)
    return MARGIN * math.sqrt(float(errors[distributions].amax()))


def _scaled(coefficients: Coefficients, factor: float) -> Coefficients:
    return tuple(tuple(factor * c for c in row) for row in coefficients)


def root_mean_square(a: Tensor) -> float:
    """That of some of the pre-activations."""
    if library.takes_alike(a):
        return math.sqrt(compiled_moments(a, ACTIVATIONS_READ)[1])
    flat = a.detach().flatten()
    return float(flat[:: max(1, len(flat) // ACTIVATIONS_READ)].float().square().mean().sqrt()) if len(flat) else 0.0


def moments(weight: Tensor) -> tuple[float, float, float]:
    """The largest square of weights, their mean square and their mean fourth power."""
    if library.takes_alike(weight):
        return compiled_moments(weight, weight.numel())
    square = _some(weight).square()
    largest, second, fourth = torch.stack([square.amax(), square.mean(), square.square().mean()]).tolist()
    return largest, second, fourth


def compiled_moments(t: Tensor, most: int) -> tuple[float, float, float]:
    """The largest square, the mean square and the mean fourth power of float32 numbers without gaps, in whatever order.

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


@dataclass(frozen=True)
class Fit:
    """One of the two parts, E or O, at one rank, and what is left of it.

    Attributes:
        nodes: which of the basis's steps it uses.
        coefficients: for each of them the polynomial in ``2 (s / reach)**2 - 1``, lowest power first, that is multiplied
            by s for E and by s**2 for O.
        error: mean square error [distribution of a, bin of weights].
        rounding: mean square of the features' rounding errors, in units of the dtype's eps, of the same shape.
        energy: mean square of the terms, those of several nodes added up, of the same shape.
        leads: see :attr:`Form.leads`, for its own nodes.
        rest: mean square of the terms of what is left after these, of the same shape.
    """

    nodes: tuple[int, ...]
    coefficients: tuple[tuple[float, ...], ...]
    error: Tensor
    rounding: Tensor
    energy: Tensor
    leads: tuple[float, ...]
    rest: Tensor


@dataclass(frozen=True)
class Basis:
    """The fits that share the same nodes.

    Attributes:
        reach: the largest step they hold for, in the noise's scale.
        steps: the nodes s_r, in the noise's scale.
        difference: the fit of E at the full rank.
        curvature: the fits of O at rank 0, 1, ... full.
        signal: mean square of the term [distribution of a, bin of weights].
    """

    reach: float
    steps: tuple[float, ...]
    difference: Fit
    curvature: tuple[Fit, ...]
    signal: Tensor


def bin_steps(top: int) -> Tensor:
    """The steps 2w in the middle of the bins from the lowest to ``top``, in the noise's scale."""
    bins = torch.arange(LOWEST, top + 1, dtype=torch.float64, device="cpu")
    return 2 * torch.exp2((bins + 0.5) / PER_OCTAVE)


@lru_cache(maxsize=1024)
def fit_basis(noise: Noise, top: int, half_octaves: int, smallest: float, rank: int) -> Basis:
    """The fit of ``rank`` nodes for weights up to the upper edge of bin ``top``.

    The root mean square of the weights is ``half_octaves`` smaller than the largest; no node is below the step ``smallest``, in
    the noise's scale.
    """
    reach = 2 * 2.0 ** ((top + 1) / PER_OCTAVE)
    steps, energy = _steps(reach, reach * 2.0 ** (-half_octaves / 2))
    nodes = _gauss_nodes((steps / reach) ** 2, energy, rank).sqrt() * reach
    nodes = nodes * max(1.0, smallest / float(nodes[0]))
    grid = _Grid(noise, reach, max(reach, float(nodes[-1])), steps, energy / steps**2, bin_steps(top))
    a, full = grid.t * noise.scale, tuple(range(rank))
    parts = noise.flip_parts(a, torch.ones_like(a), tuple(nodes.tolist()), full)
    difference, curvature = (torch.stack(part, 1) for part in parts)
    # A difference of probabilities has their rounding error; a closed form only its own.
    blurs = (difference, curvature) if noise.closed_form else (noise.cdf(-a)[:, None].expand_as(difference),) * 2
    # Each at the steps of the fit, and at the bins.
    wanted_difference, wanted_curvature = zip(*(terms(noise, grid.t, s) for s in (grid.steps, grid.bins)), strict=True)
    whole = grid.fit(1, difference, blurs[0], wanted_difference, full)
    nothing = grid.densities @ wanted_curvature[1].square()
    zeros = torch.zeros_like(nothing)
    curvatures = [Fit((), (), nothing, zeros, zeros, (), zeros)]
    for some in range(1, rank + 1):
        best = grid.best_nodes(curvature, wanted_curvature[0], some)
        curvatures.append(grid.fit(2, curvature, blurs[1], wanted_curvature, best))
    signal = grid.densities @ (wanted_difference[1].square() + wanted_curvature[1].square())
    return Basis(reach, tuple(nodes.tolist()), whole, tuple(curvatures), signal)


class _Grid:
    """Where a fit is made and judged, in the noise's scale: steps, and pre-activations [T] >= 0, as all is symmetric.

    ``share`` is the weight [S] of each of the ``steps`` [S] of the fit; ``bins`` are the steps in the middle of the bins.
    """

    def __init__(self, noise: Noise, reach: float, width: float, steps: Tensor, share: Tensor, bins: Tensor) -> None:
        self.reach, self.steps, self.share, self.bins = reach, steps, share, bins
        # Over the noise's range and a step beyond, dense within ``width`` of 0 and of the density's jumps.
        end = 8 + reach
        t = torch.arange(0, end, 0.02, dtype=torch.float64, device="cpu")
        k = torch.linspace(-1, 1, 161, dtype=torch.float64, device="cpu")
        window = 1.25 * width * k * k.abs()
        t = torch.cat([t, *(window + centre for centre in (0.0, *_jumps(noise, t)))])
        self.t = t = t[(t >= 0) & (t <= end)].unique()
        gaps = t.diff()
        cell = torch.cat([gaps, gaps.new_zeros(1)]) + torch.cat([gaps.new_zeros(1), gaps])
        # Distributions [3, T] of the pre-activations, as weights of a quadrature: narrow, as usual in a layer, and broad.
        densities = torch.stack([torch.exp(-2 * t**2), torch.exp(-(t**2) / 2), (t <= 4 + reach).to(t.dtype)]) * cell
        self.densities = densities / densities.sum(1, keepdim=True)
        slope = terms(noise, t, steps[:1])[0][:, 0] / steps[0]
        # Their mixture [T] for the fit, where each of them has the same say.
        self.density = (self.densities / (self.densities @ slope**2)[:, None]).mean(0)

    def fit(self, power: int, features: Tensor, blur: Tensor, wanted: Sequence[Tensor], nodes: tuple[int, ...]) -> Fit:
        """The weighted least-squares fit of ``wanted``, at the steps and at the bins, by the features at ``nodes``."""
        features, blur = features[:, nodes], blur[:, nodes]
        along = self.share.sqrt()
        target = self.density.sqrt()[:, None] * wanted[0] * along
        q, r = torch.linalg.qr(self.density.sqrt()[:, None] * features)
        functions = q.T @ target
        left = target.square().sum() - functions.square().sum()
        # In orthogonal polynomials: what all after the first n would add. Two percent of the error is too little for them.
        p, s = torch.linalg.qr(self._powers(self.steps, power, TERMS) * along[:, None])
        missed = functions.square().sum() - (functions @ p).square().sum(0).cumsum(0)
        terms = int((missed[:-1] > 0.04 * left).sum()) + 1
        in_powers = torch.linalg.solve_triangular(s[:terms, :terms], (functions @ p[:, :terms]).T, upper=True).T
        coefficients = torch.linalg.solve_triangular(r, in_powers, upper=True)
        at_bins = coefficients @ self._powers(self.bins, power, terms).T
        error = self.densities @ (wanted[1] - features @ at_bins).square()
        rounding = self.densities @ (blur.square() @ at_bins.square())
        energy = self.densities @ (features.square() @ at_bins.square())
        first, others = features[:, :1], features[:, 1:]
        leads = (self.density[:, None] * first * others).sum(0) / (self.density[:, None] * first.square()).sum()
        rest = self.densities @ ((others - first * leads).square() @ at_bins[1:].square())
        rows = tuple(tuple(row) for row in coefficients.tolist())
        return Fit(nodes, rows, error, rounding, energy, tuple(leads.tolist()), rest)

    def best_nodes(self, features: Tensor, wanted: Tensor, rank: int) -> tuple[int, ...]:
        """Those ``rank`` of the features whose span is nearest to ``wanted``."""
        across = self.density.sqrt()[:, None]
        target = across * wanted * self.share.sqrt()

        def captured(nodes: tuple[int, ...]) -> float:
            return float((torch.linalg.qr(across * features[:, nodes])[0].T @ target).square().sum())

        return max(combinations(range(features.shape[1]), rank), key=captured)

    def _powers(self, step: Tensor, power: int, terms: int) -> Tensor:
        centred = 2 * (step / self.reach) ** 2 - 1
        return torch.stack([step**power * centred**k for k in range(terms)], 1)


def difference_and_curvature(function: Callable[[Tensor], Tensor], a: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """[f(a + s) - f(a - s)] / 2, which is odd in the step s, and f(a) - [f(a + s) + f(a - s)] / 2, which is even in it."""
    upper, lower = function(a + step), function(a - step)
    return (upper - lower) / 2, function(a) - (upper + lower) / 2


def terms(noise: Noise, t: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """E and O [T, S] at pre-activations ``t >= 0`` and ``steps``, both in the noise's scale, from their definition."""
    # On the lower tail probabilities are precise: E is even in a, O is odd in a.
    difference, curvature = difference_and_curvature(noise.cdf, -t[:, None] * noise.scale, steps * noise.scale)
    return difference, -curvature


def _steps(reach: float, typical: float) -> tuple[Tensor, Tensor]:
    """Steps up to ``reach``, and the share of the product's energy that they are taken to have.

    The weights are taken as normal with the given root mean square, and a few as uniform over the whole range, so that
    the polynomials stay bounded there.
    """
    k = torch.arange(1, 65, dtype=torch.float64, device="cpu") / 64
    steps = reach * k**2
    normal = steps**2 * torch.exp(-((steps / typical) ** 2) / 2) / typical**3
    uniform = steps**2 / reach**3
    return steps, (normal + uniform / 2) * k * reach


def _gauss_nodes(z: Tensor, measure: Tensor, rank: int) -> Tensor:
    """The Gauss quadrature nodes of a discrete measure on [0, 1]: eigenvalues of z in an orthogonal basis of polynomials."""
    powers = torch.stack([z**k for k in range(rank)], 1) * measure.sqrt()[:, None]
    q = torch.linalg.qr(powers)[0]
    nodes: Tensor = torch.linalg.eigvalsh(q.T @ (z[:, None] * q))
    return nodes


def _jumps(noise: Noise, t: Tensor) -> list[float]:
    """Where the density jumps, by bisection: there the terms change within a step, however small the weights."""

    def density(at: float) -> float:
        return float(noise.pdf(torch.tensor(at * noise.scale, dtype=torch.float64, device="cpu")))

    values = noise.pdf(t * noise.scale)
    found = []
    for k in (values.diff().abs() > 0.1 * values.abs().amax()).nonzero().flatten().tolist():
        low, high = float(t[k]), float(t[k + 1])
        for _ in range(40):
            middle = (low + high) / 2
            first = abs(density(middle) - density(low)) >= abs(density(high) - density(middle))
            low, high = (low, middle) if first else (middle, high)
        found.append(low)
    return found
