"""What estimates are compared with: the exact gradient, or the mean of very many draws of an unbiased estimator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from flipgrad import exact
from flipgrad.errors import InputError
from flipgrad.estimators import Estimator, Exact
from flipgrad.gradeval.draws import Problem, check_finite
from flipgrad.gradeval.statistics import Tally

# A part of the gradient that is shorter than this, relative to the whole, is rounding.
ROUNDING_SHARE = 1e-6


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


def drawn_reference(problem: Problem, estimator: Estimator, draws: int, made: Iterable[Tensor]) -> Reference:
    """The mean of ``draws`` draws of an unbiased ``estimator``, which are ``made`` [n, P] at a time."""
    name = type(estimator).__name__
    reference = mean_of_draws(problem.layers(), name, draws, made)
    for layer in reference.layers:
        if layer.error >= 1:
            raise InputError(
                f"the reference of {draws:,} draws of {name} is mostly noise in {layer.name!r}: take more of them "
                "(reference_samples), or an unbiased estimator with less variance (reference)"
            )
    return replace(reference, layers=_checked(reference.layers))


def mean_of_draws(layers: Mapping[str, slice], name: str, draws: int, made: Iterable[Tensor]) -> Reference:
    """The mean of ``draws`` draws of the estimator with that ``name``: its own expectation, be it biased or not.

    A layer in which the mean is mostly noise has the relative error 1.
    """
    tally = Tally(torch.zeros(layers["all"].stop), layers, draws, grid=[])
    for some in made:
        check_finite(some, layers, name)
        tally.add(some)
    gradient, known = tally.mean(), []
    for (layer, part), of_one_draw in zip(layers.items(), tally.variances(), strict=True):
        variance = max(0.0, of_one_draw / draws)
        # The squared length of a noisy mean holds its variance, too.
        squared = max(float(gradient[part].square().sum()) - variance, variance)
        known.append(ReferenceLayer(layer, math.sqrt(squared), math.sqrt(variance / squared) if squared else 1.0))
    return Reference(gradient, "draws", name, draws, known)


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
        if layer.length <= ROUNDING_SHARE * layers[-1].length:
            raise InputError(
                f"the true gradient of {layer.name!r} is zero to rounding, so that no error can be relative to it: exclude its "
                "parameters with requires_grad_(False), or look for dead units"
            )
    return layers
