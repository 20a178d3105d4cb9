r"""The log ratio of a layer with real weights by one ordinary product, to a few percent, for smooth noises.

The term of a weight w, with the step s = 2w, is :math:`x\,E(a, s) + O(a, s)`, odd and even in s (:mod:`flipgrad.flips.form`).
Every output channel j has a node of its own, :math:`\gamma_j^2 = k\,\overline{w_j^2}` with the kurtosis
:math:`k = \overline{w^4} / \overline{w^2}^2` of all channels, and

.. math:: \log r_i \approx x_i \sum_j \frac{w_{ji}}{\gamma_j} E_j + \sum_j \frac{w_{ji}^2}{\gamma_j^2} O_j,

with E and O at the node: interpolation of rank 1 + 1, whose sum over many weights is right to the fifth power of these. The
first sum is an ordinary transposed product. It has terms of either sign, and is computed in bfloat16 where that is faster. The
second one's are all negative, so that it is mostly their number that counts: of the product of
:math:`w_{ji}^2 / \gamma_j^2` and :math:`O_j` the part that is the mean of the one times the other is kept, and that costs no
product. What is left out is the product of the two deviations from these means.

What depends on a log ratio is a posterior mean, which moves by less than half of an error, and by less the more decided it is.
Measured against the exact posterior in the paper's network for CIFAR-10 (all layers with binary inputs, the largest of each):

=============  ============  ============  ==============  ===============  ==============
weights times  error of the  error of the  component of    growth of the    bias of the
               log ratio     mean (rms)    that along the  gradient's RMSE  gradient over
               (relative)                  mean                             its RMSE
=============  ============  ============  ==============  ===============  ==============
1              1.3e-2        2.7e-3        1.7e-4          6e-5             5e-4
3              3.5e-2        2.0e-2        1.6e-4          9e-5             2e-4
10             9.6e-2        4.3e-2        8.6e-4          1.2e-4           4e-4
=============  ============  ============  ==============  ===============  ==============

The last two columns are of 12 draws of a batch of 8, for the whole of :class:`flipgrad.PSA` with its default tolerance;
``flipgrad bench step`` measures them anew. Without the second sum the mean would be off by 0.04 to 0.6.
"""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from flipgrad.flips import rank_one, units
from flipgrad.flips.form import MARGIN, difference_and_curvature, moments
from flipgrad.flips.ordinary import NARROW_ERROR, Geometry, by_examples, narrow_input_gradient
from flipgrad.flips.separable import fused_product_pays
from flipgrad.guards import cannot_look
from flipgrad.native import library
from flipgrad.noise import Noise

# The error is computed for steps that are told apart to a quarter octave, and is the largest for these standard deviations of
# normal pre-activations, in scales.
PER_OCTAVE = 4
SPREADS = (1.0, 4.0)
# The root mean squares of steps, in scales, between which errors are computed.
SMALLEST, LARGEST = 2.0**-10, 8.0


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio`, to the relative error that :func:`error` gives."""
    if geometry is None and noise.compiled and library.takes(x, a, states, weight) and not cannot_look():
        whole = _compiled(x, a, states, weight, noise) if fused_product_pays(x) else None
        if whole is not None:
            return whole
    groups = 1 if geometry is None else geometry.groups
    node, scaled, per_input = _nodes(weight, groups)

    def examples(x: Tensor, a: Tensor, states: Tensor) -> Tensor:
        parts = rank_one.log_changes(a, states, 2 * node, noise, groups)
        odd = narrow_input_gradient(parts.odd, scaled, x, geometry)
        if geometry is None:
            return units.joined(odd, parts.spread * per_input.view(-1), x)
        # A kernel for all inputs of a group, and a factor for each of them.
        kernel = per_input.sum(1)
        share = per_input.sum(2) / kernel.sum(1, keepdim=True).clamp(min=torch.finfo(kernel.dtype).tiny)
        kernel = kernel.view(groups, *weight.shape[2:])
        return units.spread(parts.spread, kernel, share, odd, x, geometry, of_ratio=True)

    return by_examples(examples, x, a, states)


def _compiled(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise) -> Tensor | None:
    """The whole of it for logistic noise and a fully connected layer, in one call; None where a step is too large."""
    ratio = torch.empty_like(x)
    sizes = {"batch": len(x), "inputs": x.shape[1], "outputs": len(weight)}
    status = library.call("one_product", torch.float32, weight, a, states, x, ratio, scale=noise.scale, **sizes)
    return None if status else ratio


def _nodes(weight: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The node of every output channel, [out]; the weight over it; and the mean of the squares of that in every group.

    The last one is a mean over the output channels, [groups, inputs, places of the kernel].
    """
    weight = weight.contiguous()
    if library.takes(weight) and not cannot_look() and weight.numel():
        node, scaled = weight.new_empty(len(weight)), torch.empty_like(weight)
        per_input = weight.new_empty(groups, weight.shape[1], weight[0, 0].numel())
        sizes = {"outputs": len(weight), "inputs": weight[0].numel(), "groups": groups}
        library.call("nodes", torch.float32, weight, node, scaled, per_input, **sizes)
        return node, scaled, per_input
    square = weight.square().flatten(1)
    tiny = torch.finfo(square.dtype).tiny
    size = square.mean(1)
    kurtosis = (torch.linalg.vecdot(square, square) / size.clamp(min=tiny)).sum() / (square.sum().clamp(min=tiny))
    node = (kurtosis * size).sqrt()
    # A channel without weights has the node 0, and adds nothing.
    inverse = 1 / torch.where(node > 0, node, 1.0)
    scaled = weight * inverse.view(-1, *[1] * (weight.dim() - 1))
    # The mean over the output channels of a group, [groups, inputs, places of the kernel].
    outputs = weight.shape[0] // groups
    per_input = torch.bmm(inverse.square().view(groups, 1, -1), square.unflatten(0, (groups, -1)))
    per_input = per_input.view(groups, weight.shape[1], -1) / outputs
    return node, scaled, per_input


def error(weight: Tensor, noise: Noise, known: tuple[float, float, float] | None = None) -> float:
    """The relative L2 error of the log ratio, of many weights like these; infinite where it is not known to be small.

    It is told by the weights' moments, if these are not ``known``.
    """
    if not weight.numel():
        return 0.0
    _, second, fourth = known or moments(weight)
    step = 2 * math.sqrt(second) / noise.scale
    if not step <= LARGEST or not math.isfinite(fourth):
        return math.inf
    above = math.ceil(PER_OCTAVE * math.log2(max(step, SMALLEST)))
    interpolation, deviation = _errors(noise, above)
    # The variance of squared weights, relative to that of normal ones.
    uneven = max(0.0, fourth / second**2 - 1) / 2 if second**2 > 0 else 1.0
    return MARGIN * math.sqrt(interpolation + uneven * deviation + NARROW_ERROR**2)


@lru_cache(maxsize=256)
def _errors(noise: Noise, size: int) -> tuple[float, float]:
    """The mean squares of what interpolation and the deviations from means leave out, relative to the log ratio's variance.

    For normal weights with steps of the given size, in quarter octaves, and states that are drawn with their probabilities.
    """
    t, k = (torch.linspace(low, high, n, dtype=torch.float64, device="cpu") for low, high, n in ((-4, 4, 161), (0, 4, 33)))
    share = torch.exp(-(k**2) / 2)
    share, step = share / share.sum(), k * 2.0 ** (size / PER_OCTAVE) * noise.scale
    second, fourth = (share * step**2).sum(), (share * step**4).sum()
    node = (fourth / second).sqrt()
    worst = (0.0, 0.0)
    for spread in SPREADS:
        a = (t * spread * noise.scale)[:, None]
        density = torch.exp(-(t**2) / 2)[:, None]
        density = density / density.sum()
        missed = whole = mean = square = torch.zeros((), dtype=torch.float64)
        for state in (-1.0, 1.0):
            y = torch.full_like(a, state)
            drawn = density * noise.cdf(y * a)
            difference, curvature = difference_and_curvature(partial(noise.log_prob, y), a, step)
            at_node, curved = difference_and_curvature(partial(noise.log_prob, y), a, node)
            left = (difference - step / node * at_node).square() + (curvature - (step / node) ** 2 * curved).square()
            missed = missed + (drawn * share * left).sum()
            whole = whole + (drawn * share * difference.square()).sum()
            mean, square = mean + (drawn * curved).sum(), square + (drawn * curved.square()).sum()
        # Twice: the variance of the square of a normal number.
        deviation = 2 * (second / node**2) ** 2 * (square - mean**2)
        found = tuple(float(part / whole) for part in (missed, deviation))
        if not all(math.isfinite(part) for part in found):
            return math.inf, math.inf
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    return worst
