r"""Fits of the flip term by few products of a function of the pre-activation and a function of the weight.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from flipgrad.noise import Noise

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
class Fit:
    """One of the two parts, E or O, at one rank, and what is left of it.

    Attributes:
        nodes: which of the basis's steps it uses.
        coefficients: for each of them the polynomial in ``2 (s / reach)**2 - 1``, lowest power first, that is multiplied
            by s for E and by s**2 for O.
        error: mean square error [distribution of a, bin of weights].
        rounding: mean square of the features' rounding errors, in units of the dtype's eps, of the same shape.
    """

    nodes: tuple[int, ...]
    coefficients: tuple[tuple[float, ...], ...]
    error: Tensor
    rounding: Tensor


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
def basis(noise: Noise, top: int, half_octaves: int, smallest: float, rank: int) -> Basis:
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
    curvatures = [Fit((), (), nothing, torch.zeros_like(nothing))]
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
        return Fit(nodes, tuple(tuple(row) for row in coefficients.tolist()), error, rounding)

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
