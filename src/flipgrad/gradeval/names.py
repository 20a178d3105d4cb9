"""Estimators by name, for the command line and the paper's figures: "psa", "concrete:0.1", "reinforce+mean"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS, REINFORCE, ConstantBaseline, Estimator, MuProp

# Estimators that take a baseline, here the true expected loss of every data point.
WITH_MEAN: dict[str, Callable[[ConstantBaseline], Estimator]] = {"reinforce": REINFORCE, "muprop": MuProp}

# Estimators that take a number: their temperature, interpolation or number of samples.
WITH_NUMBER: dict[str, Callable[[str], float]] = {
    "arms": int,
    "concrete": float,
    "double-cv": int,
    "gumbel-rao": int,
    "rebar": float,
    "zgr": float,
}

SYNTAX = (
    f"one of {', '.join(ESTIMATORS)}; with a number where it takes one (concrete:0.1, arms:8, gumbel-rao:100), and with "
    "'+mean' for the true expected loss as the baseline (reinforce+mean, muprop+mean)"
)


def by_name(specifications: Sequence[str], mean: Callable[[], Tensor]) -> dict[str, Estimator]:
    """Estimators and the names that results and figures call them.

    Args:
        specifications: what is wanted, see :data:`SYNTAX`.
        mean: gives the expected loss [B] of every data point, for baselines; called only if one is wanted.

    >>> import torch
    >>> list(by_name(["psa", "concrete:0.1", "concrete"], lambda: torch.zeros(1)))
    ['PSA', 'Concrete 0.1', 'Concrete 1']
    """
    named: dict[str, Estimator] = {}
    for specification in specifications:
        label, estimator = _one(specification.strip().lower(), mean)
        if label in named:
            raise InputError(f"estimators: {specification!r} is there more than once")
        named[label] = estimator
    return named


def _one(specification: str, mean: Callable[[], Tensor]) -> tuple[str, Estimator]:
    name, plus, baseline = specification.partition("+")
    if plus:
        if name not in WITH_MEAN or baseline != "mean":
            raise _unknown(specification)
        return f"{ESTIMATORS[name].__name__} + mean", WITH_MEAN[name](ConstantBaseline(mean()))
    name, colon, text = specification.partition(":")
    if name not in ESTIMATORS or (colon and name not in WITH_NUMBER):
        raise _unknown(specification)
    kind: Callable[..., Estimator] = ESTIMATORS[name]
    label = ESTIMATORS[name].__name__
    if not colon:
        return ("Concrete 1" if name == "concrete" else label), kind()
    try:
        number = WITH_NUMBER[name](text)
    except ValueError:
        raise _unknown(specification) from None
    return f"{label} {number:g}", kind(number)


def _unknown(specification: str) -> InputError:
    return InputError(f"unknown estimator {specification!r}; give {SYNTAX}")
