r"""Whether it pays to average a layer's binary inputs: what that leaves of the gradient's variance, and what it costs.

The gradient of a weight is a sum of terms :math:`h_j x_i`; averaging takes :math:`\mu_i`, the unit's mean given the layer's
states, in place of the sampled :math:`x_i = \pm 1`. Of the second moment of a term, which is its variance but for a small mean,
that leaves the share :math:`E[\mu^2]`. A unit is decided before the layer's states are known, by its own probabilities, to
:math:`E[m^2]`, where m is its mean; and by the states y of the layer. These tell of it as much as a normal variable does,
whose mean is :math:`\pm s^2/2` and variance :math:`s^2` for the two states of the unit, with the Fisher information

.. math:: s^2 = \sum_j (2A_{ji})^2\, F'(a_j)^2 / [F(a_j) F(-a_j)] .

So with :math:`\rho(s^2) = E[\cosh^{-2}(\lambda/2)]`, :math:`\lambda \sim N(s^2/2, s^2)`, the share that is left is about
:math:`f = 1 - (1 - E[m^2])\, \rho(s^2)`. Measured in the digits' network, in fully connected ones (4 x 200, 5-5-5, 50-1000)
from the start of a training to its end, and in the paper's network for CIFAR-10 with weights 1, 3 and 10 times as large, it is
within 0.1 of the mean of :math:`\mu^2`. The variance over draws of the gradient of a batch, which leaves out how examples
differ, fell to 0.4 to 1.0 times f.

At equal time variance counts times cost. If each layer of a network weighs as much, averaging in one of them pays where
:math:`-\log f` is more than what it adds to the time of the layer, relative to that time. Layers with decided units, whose f is
nearly 1, and those where averages cost more than all the rest, take sampled states. Neither the shapes nor the weights nor the
probabilities of the units depend on the states that are averaged over, so that the choice does not prefer some of them: the
mean of an estimate is that of :class:`flipgrad.PSA` with the inputs that were chosen. Nothing is remembered from one step to
the next.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from flipgrad.flips import KINDS
from flipgrad.flips.choice import CALL, CALL_OF_ONE_PRODUCT, EXACT_RATIO_TIME, FUNCTION, LOG_FUNCTION, PRODUCT, TERM
from flipgrad.flips.form import moments
from flipgrad.flips.ordinary import NARROW_TIME, narrow_pays
from flipgrad.flips.plan import Plan
from flipgrad.guards import cannot_look, capturing, unwrapped, without_transforms
from flipgrad.native import library
from flipgrad.noise import Noise

# In layers with fewer terms, to decide would take as long as what it may save.
LEAST_TERMS = 2**18
# The products that a flip product takes with the default tolerance, mostly.
USUAL_RANK = 3
# Units whose probabilities are looked at: of more, about as many evenly spaced ones.
UNITS_READ = 2**10
# Seconds, measured like those of :mod:`flipgrad.flips.choice`. Of a layer without averages, besides its products: a call, and
# one activation (sampling, slopes). Of a posterior from the log ratio: a call, and one unit.
LAYER_CALL, ACTIVATION = 4e-4, 1.2e-8
POSTERIOR_CALL, UNIT = 8e-5, 6e-9
# Information is told apart to a quarter octave, and is as good as none, or as all, beyond these.
PER_OCTAVE, LEAST_INFORMATION, MOST_INFORMATION = 4, 2.0**-10, 2.0**8


@final
class Averaging(NamedTuple):
    """A decision for the inputs of one layer.

    Attributes:
        pays: whether they are averaged.
        left: the share of the variance that averages leave.
        added: the time that they add, relative to that of the layer without.
    """

    pays: bool
    left: float
    added: float

    def __str__(self) -> str:
        if self is ALWAYS:
            return "inputs are averaged: the layer is too small for anything to be saved"
        choice = "averaged" if self.pays else "sampled"
        return f"inputs are {choice}: averages leave {self.left:.0%} of the variance for {self.added:.0%} more time"


ALWAYS = Averaging(True, 0.0, 0.0)


def weigh(left: float, added: float) -> Averaging:
    """Whether averages that leave so much of the variance are worth the time that they add."""
    return Averaging(-math.log(max(left, 1e-12)) > added, left, added)


def of_real_weights(
    x: Tensor, a: Tensor, weight: Tensor, noise: Noise, log_odds: Tensor, tolerance: float, *,
    plan: Plan | None = None,
) -> Averaging | Tensor | None:  # fmt: skip
    """Decide for a layer with real weights.

    Args:
        x: states [B, in], or [B, C, H, W] of a convolution.
        a: pre-activations of ``x``, of which only the shape counts, as of ``x``.
        weight: as for :func:`flipgrad.flips.flip_product`, like ``noise``.
        log_odds: of the states ``x`` being +1, given what they were drawn from.
        tolerance: of sums over flips, 0 for exact.
        plan: of the layer.

    Returns:
        The decision, or None if it is not known how: draws under ``torch.vmap`` have weights of their own. While torch captures
        a graph, a tensor that will be True or False.
    """
    if capturing():
        return _captured(x, a, weight, weight, noise, log_odds, tolerance, binary=False)
    return _outside(partial(_of_real_weights, noise, tolerance, plan), x, a, weight, log_odds)


def of_rank_one(
    x: Tensor, a: Tensor, weight: Tensor, size: Tensor, noise: Noise, log_odds: Tensor
) -> Averaging | Tensor | None:
    """The same for a layer with binary ``weight``, whose flips change pre-activations by twice the ``size`` [out]."""
    if capturing():
        return _captured(x, a, weight, size, noise, log_odds, 0.0, binary=True)
    return _outside(partial(_of_rank_one, noise), x, a, weight, log_odds, size)


def _outside(decide: Callable[..., Averaging], x: Tensor, a: Tensor, weight: Tensor, *others: Tensor) -> Averaging | None:
    """A decision by the numbers of all draws, if there are such."""
    if not cannot_look():
        return decide(x, a, weight, *others)
    tensors = [unwrapped(t) for t in (x, a, weight, *others)]
    if tensors[2].dim() != weight.dim():
        return None
    with without_transforms():
        return decide(*tensors)


def _of_real_weights(
    noise: Noise, tolerance: float, plan: Plan | None, x: Tensor, a: Tensor, weight: Tensor, log_odds: Tensor
) -> Averaging:
    places = a.numel() // max(1, weight.shape[0])
    if places * weight.numel() < LEAST_TERMS:
        return ALWAYS
    left = share_left(log_odds, (plan or Plan()).moments(weight)[1], places, weight, x, noise)
    kernel = "native" if noise.compiled and library.available() else "vectorized"
    shape = places, len(weight), weight[:1].numel(), x.numel()
    return weigh(left, _added(*shape, weight.dim() > 2, noise, tolerance, kernel, narrow_pays(places, weight)))


def _of_rank_one(noise: Noise, x: Tensor, a: Tensor, weight: Tensor, log_odds: Tensor, size: Tensor) -> Averaging:
    places = a.numel() // max(1, weight.shape[0])
    if places * weight.numel() < LEAST_TERMS:
        return ALWAYS
    left = share_left(log_odds, moments(size.reshape(-1))[1], places, weight, x, noise)
    terms = places * weight.numel()
    return weigh(left, relative_time(terms * PRODUCT, terms * PRODUCT, terms, places * len(weight), x.numel()))


@lru_cache(maxsize=1024)
def _added(
    places: int, outputs: int, inputs: int, units: int, convolution: bool, noise: Noise, tolerance: float, kernel: str,
    narrow: bool,
) -> float:  # fmt: skip
    """:func:`relative_time` by shapes alone: of a flip product by a separable form of rank 3, and a log ratio by one product.

    The layer has a weight [``outputs``, ``inputs``] and so many ``units``; the exact sums are those of a ``kernel``, and
    ``narrow`` is whether products of log ratios are in bfloat16.
    """
    activations = places * outputs
    terms = activations * inputs
    flips = CALL[kernel] + terms * TERM[kernel]
    ratio = EXACT_RATIO_TIME * flips
    if tolerance:
        separable = USUAL_RANK * (terms * PRODUCT + activations * FUNCTION[noise.closed_form])
        product = terms * PRODUCT * (NARROW_TIME if narrow else 1.0) + activations * LOG_FUNCTION[noise.closed_form]
        flips, ratio = min(flips, CALL["separable"] + separable), min(ratio, CALL_OF_ONE_PRODUCT[convolution] + product)
    return relative_time(flips, ratio, terms, activations, units)


def _captured(
    x: Tensor, a: Tensor, weight: Tensor, size: Tensor, noise: Noise, log_odds: Tensor, tolerance: float, *, binary: bool
) -> Tensor | None:
    """The decision by an operator, which a noise of the user has none for."""
    if type(noise) is not KINDS.get(type(noise).__name__):
        return None
    given = type(noise).__name__, noise.scale, tolerance, binary
    result: Tensor = torch.ops.flipgrad.averaging_pays(x, a, weight, size, log_odds, *given)
    return result


def _register() -> None:
    """Make an operator of torch of the decision, for graphs that are captured."""

    def implementation(x: Tensor, a: Tensor, weight: Tensor, size: Tensor, log_odds: Tensor, *given: Any) -> Tensor:
        kind, scale, tolerance, binary = given
        noise = KINDS[kind](scale)
        if binary:
            decision = _of_rank_one(noise, x, a, weight, log_odds, size)
        else:
            decision = _of_real_weights(noise, tolerance, None, x, a, weight, log_odds)
        return torch.tensor(decision.pays, device=x.device)

    def fake(x: Tensor, *others: Any) -> Tensor:
        return torch.empty((), dtype=torch.bool, device=x.device)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, None]:
        # As in :func:`_outside`: by the numbers of all draws, if these share the weight.
        shared = in_dims[2] is None
        pays = torch.ops.flipgrad.averaging_pays(*arguments) if shared else torch.ones((), dtype=torch.bool)
        return pays.to(arguments[0].device), None

    tensors = ", ".join(f"Tensor {name}" for name in ("x", "a", "weight", "size", "log_odds"))
    given = "str noise, float scale, float tolerance, bool binary"
    name = "flipgrad::averaging_pays"
    torch.library.define(name, f"({tensors}, {given}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)
    torch.library.register_vmap(name, vmap)


def share_left(log_odds: Tensor, second: float, places: int, weight: Tensor, x: Tensor, noise: Noise) -> float:
    """What averages leave of the variance, for coefficients with this ``second`` moment."""
    undecided = 1 - certainty(log_odds)
    terms = places * weight.numel()
    # In units in which the noise's log-odds have the slope 1 at 0, as those of logistic noise of scale 1.
    square = second * _slope(noise) ** 2
    # The pre-activations of states ±1 have about this variance; for normal ones the mean of F' falls like that.
    variance = square * weight[:1].numel()
    information = terms / max(1, x.numel()) * square / math.sqrt(1 + math.pi / 8 * variance)
    return min(1.0, max(0.0, 1 - undecided * remaining(information)))


def relative_time(flips: float, ratio: float, terms: int, activations: int, units: int) -> float:
    """What averages add to the time of a layer, by the seconds of its ``flips`` and of its log ``ratio``."""
    # Besides flips, the pre-activations and the gradient of the weight.
    without = LAYER_CALL + flips + 2 * terms * PRODUCT + activations * ACTIVATION
    return (POSTERIOR_CALL + ratio + units * UNIT) / without


def certainty(log_odds: Tensor) -> float:
    """The mean square of the means of units with these ``log_odds``, of some of them."""
    flat = log_odds.detach().reshape(-1)
    if not len(flat):
        return 1.0
    some = flat[:: -(-len(flat) // UNITS_READ)]
    means = torch.tanh(some.to(torch.promote_types(some.dtype, torch.float32)) * 0.5)
    return float(torch.dot(means, means)) / len(means)


def remaining(information: float) -> float:
    """The share of an undecided unit's variance that is left where the layer's states give so much ``information``."""
    if not information <= MOST_INFORMATION:
        return 0.0
    return _remaining(round(PER_OCTAVE * math.log2(max(information, LEAST_INFORMATION))))


@lru_cache(maxsize=256)
def _remaining(information: int) -> float:
    s = 2.0 ** (information / PER_OCTAVE)
    z = torch.linspace(-6, 6, 193, dtype=torch.float64, device="cpu")
    density = torch.exp(-(z**2) / 2)
    return float((density * torch.cosh((s / 2 + math.sqrt(s) * z).clamp(-600, 600) / 2) ** -2).sum() / density.sum())


@lru_cache(maxsize=256)
def _slope(noise: Noise) -> float:
    """The slope of the log-odds at 0."""
    return 4 * float(noise.pdf(torch.zeros((), dtype=torch.float64, device="cpu")))


_register()
