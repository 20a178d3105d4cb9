"""What estimates are compared with: the exact gradient, or the mean of very many draws of an unbiased estimator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flipgrad import exact
from flipgrad.errors import InputError
from flipgrad.estimators import Estimator, Exact
from flipgrad.gradeval.draws import Problem, Sampler, check_finite
from flipgrad.gradeval.statistics import Tally

# A part of the gradient that is shorter than this, relative to the whole, is rounding.
NOTHING = 1e-6


@final
@dataclass(frozen=True)
class ReferenceLayer:
    """The reference in one layer: its length, and its own standard error relative to that (0 if exact)."""

    name: str
    length: float
    error: float


@final
@dataclass(frozen=True)
class Reference:
    """The gradient that estimates are compared with.

    Attributes:
        gradient: [P], in double precision.
        kind: "exact" or "draws".
        estimator: whose draws were averaged.
        draws: how many.
        layers: length and standard error of every layer's part.
    """

    gradient: Tensor
    kind: str
    estimator: str
    draws: int
    layers: list[ReferenceLayer]


def exact_reference(problem: Problem) -> Reference:
    """The exact gradient; an :class:`InputError` if the network is too wide for it."""
    parameters = list(problem.parameters().values())
    loss = exact.expected_loss(problem.net, problem.x, problem.objective).mean()
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    gradient = problem.flatten([g[None] for g in gradients])[0].double().cpu()
    check_finite(gradient[None], problem.layers(), "Exact")
    layers = [ReferenceLayer(name, float(gradient[part].norm()), 0.0) for name, part in problem.layers().items()]
    return Reference(gradient, "exact", "Exact", 0, _checked(layers))


def drawn_reference(
    problem: Problem, estimator: Estimator, draws: int, *, seed: int, workers: int, report: Callable[[int], None]
) -> Reference:
    """The mean of ``draws`` draws of an unbiased ``estimator``."""
    name = type(estimator).__name__
    layers = problem.layers()
    size = max(part.stop for part in layers.values())
    tally = Tally(torch.zeros(size), layers, draws)
    for some in Sampler(problem, estimator, [seed, 0], workers).draws(draws):
        check_finite(some, layers, name)
        tally.add(some)
        report(len(some))
    gradient = tally.mean()
    result = []
    for (layer, part), variance in zip(layers.items(), tally.variances(), strict=True):
        # The squared length of a noisy mean holds its variance, too.
        squared = float(gradient[part].square().sum()) - variance / draws
        if squared <= variance / draws:
            raise InputError(
                f"the reference of {draws:,} draws of {name} is mostly noise in {layer!r}: take more of them "
                "(reference_samples), or an unbiased estimator with less variance (reference)"
            )
        result.append(ReferenceLayer(layer, math.sqrt(squared), math.sqrt(variance / draws / squared)))
    return Reference(gradient, "draws", name, draws, _checked(result))


def can_be_exact(problem: Problem) -> bool:
    """Whether the network is small enough for the exact gradient."""
    try:
        with torch.no_grad():
            exact.expected_loss(problem.net, problem.x[:2], lambda outputs: outputs.sum(-1))
    except InputError:
        return False
    return True


def check_unbiased(estimator: Estimator) -> None:
    """Refuse a biased estimator as a reference."""
    if not estimator.unbiased or isinstance(estimator, Exact):
        raise InputError(
            f"reference={type(estimator).__name__}: averaging draws finds the true gradient only with an unbiased estimator, "
            "e.g. fg.DisARM() or fg.LEG()"
        )


def _checked(layers: list[ReferenceLayer]) -> list[ReferenceLayer]:
    for layer in layers:
        if layer.length <= NOTHING * layers[-1].length:
            raise InputError(
                f"the true gradient of {layer.name!r} is zero to rounding, so that no error can be relative to it: exclude its "
                "parameters with requires_grad_(False), or look for dead units"
            )
    return layers
