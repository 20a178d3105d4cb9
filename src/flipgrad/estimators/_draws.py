"""Checked temperatures, and draws that an estimator makes besides every layer's Z."""

from __future__ import annotations

import math

from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.layers import Draw
from flipgrad.noise import Noise


def check_temperature(estimator: object, t: float) -> float:
    """The temperature ``t`` of a relaxation, refused unless it is positive and finite."""
    if not (math.isfinite(t) and t > 0):
        raise InputError(f"{type(estimator).__name__}(t={t}): the temperature must be positive and finite, e.g. 1.0")
    return t


def own_draws(estimator: object, draw: Draw, noise: Noise, a: Tensor, count: int) -> Tensor:
    """Draws [count, *a.shape] of ``noise`` that are no layer's Z, so that handed-in noise is refused for them."""
    wanted = a.detach().expand(count, *a.shape)
    try:
        z = draw(noise, wanted)
    except InputError as error:
        raise _refusal(estimator) from error
    # Handed-in noise has the shape of the pre-activations, or broadcasts to it.
    if z.shape != wanted.shape:
        raise _refusal(estimator)
    return z


def _refusal(estimator: object) -> InputError:
    return InputError(
        f"noise: {type(estimator).__name__} draws more than every layer's Z, so it cannot replay handed-in noise; pass a "
        "seeded generator instead"
    )
