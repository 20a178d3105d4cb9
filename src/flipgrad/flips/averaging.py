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
differ, fell to 0.4 to 1.3 times f, in 26 layers (4 and 8 x 200 on MNIST, the digits' net and the paper's for CIFAR-10 at a
quarter of its width, before and after training) to 0.85 times f in the geometric mean.

At equal time variance counts times cost. If each layer of a network weighs as much, averaging in one of them pays where minus
the log of what it leaves is more than what it adds to the time of the layer, relative to that time. That depends little on
shapes, so that averages pay up to a share f that is known beforehand, ``LARGEST_SHARES``. Layers with decided units, whose
f is nearly 1, and those whose log ratio costs as much as all the rest and that are half decided, take sampled states. Neither
the shapes nor the weights nor the probabilities of the units depend on the states that are averaged over, so that the choice
does not prefer some of them: the mean of an estimate is that of :class:`flipgrad.PSA` with the inputs that were chosen. Nothing
is remembered from one step to the next.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from flipgrad.flips import KINDS
from flipgrad.flips.form import moments
from flipgrad.flips.ordinary import as_rows
from flipgrad.flips.plan import Plan
from flipgrad.guards import cannot_look, capturing, unwrapped, without_transforms
from flipgrad.native import library
from flipgrad.noise import Noise

# In layers with fewer terms, to decide would take as long as what it may save.
LEAST_TERMS = 2**18
# Units whose probabilities are looked at: of more, about as many evenly spaced ones.
UNITS_READ = 2**10
# Up to which share averages pay: exp(-added) / 0.85, where they add to the time of a layer, relative to that without, 0.25 with
# binary weights (0.18 to 0.31); with real ones 0.35 (0.2 to 0.57) where sums over flips are approximated and the noise has a
# closed form, else 0.85 (0.6 to 1.0). One core of a server from 2023, batches of 64, 4 x 200 units, and the paper's network for
# CIFAR-10 at widths 1/4, 1/2 and 1.
LARGEST_SHARES = {"rank one": 0.92, "closed form": 0.83, "other": 0.5}
# Information is told apart to a quarter octave, and is as good as none, or as all, beyond these.
PER_OCTAVE, LEAST_INFORMATION, MOST_INFORMATION = 4, 2.0**-10, 2.0**8


@final
class Averaging(NamedTuple):
    """A decision for the inputs of one layer.

    Attributes:
        pays: whether they are averaged.
        left: about the share of the variance that averages leave.
        most: the largest share with which they pay.
    """

    pays: bool
    left: float
    most: float

    def __str__(self) -> str:
        if self is ALWAYS:
            return "inputs are averaged: the layer is too small for anything to be saved"
        choice = "averaged" if self.pays else "sampled"
        return f"inputs are {choice}: averages leave about {self.left:.0%} of the variance, and pay up to {self.most:.0%}"


ALWAYS = Averaging(True, 0.0, 1.0)


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
    most = LARGEST_SHARES["closed form" if tolerance and noise.closed_form else "other"]
    return _decision(x, a, weight, noise, log_odds, most, lambda: (plan or Plan()).moments(weight)[1])


def _of_rank_one(noise: Noise, x: Tensor, a: Tensor, weight: Tensor, log_odds: Tensor, size: Tensor) -> Averaging:
    return _decision(x, a, weight, noise, log_odds, LARGEST_SHARES["rank one"], lambda: moments(size.reshape(-1))[1])


def _decision(
    x: Tensor, a: Tensor, weight: Tensor, noise: Noise, log_odds: Tensor, most: float, second: Callable[[], float]
) -> Averaging:
    """Whether averages leave less than ``most``, by the ``second`` moment of the coefficients, which is asked for if needed."""
    places = a.numel() // max(1, weight.shape[0])
    if places * weight.numel() < LEAST_TERMS:
        return ALWAYS
    left = share_left(log_odds, second(), places, weight, x, noise)
    return Averaging(left < most, left, most)


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
    """The share f, for coefficients with this ``second`` moment."""
    undecided = 1 - certainty(log_odds)
    terms = places * weight.numel()
    # In units in which the noise's log-odds have the slope 1 at 0, as those of logistic noise of scale 1.
    square = second * _slope(noise) ** 2
    # The pre-activations of states ±1 have about this variance; for normal ones the mean of F' falls like that.
    variance = square * weight[:1].numel()
    information = terms / max(1, x.numel()) * square / math.sqrt(1 + math.pi / 8 * variance)
    return min(1.0, max(0.0, 1 - undecided * remaining(information)))


def certainty(log_odds: Tensor) -> float:
    """The mean square of the means of units with these ``log_odds``, of some of them."""
    flat = as_rows(log_odds.detach()).reshape(-1)
    if not len(flat):
        return 1.0
    every = -(-len(flat) // UNITS_READ)
    if library.takes(flat):
        total = torch.empty(1, dtype=torch.float64)
        library.call("certainty", torch.float32, flat, total, count=len(flat), every=every)
        return float(total) / -(-len(flat) // every)
    some = flat[::every]
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
