"""What relaxations share: a checked temperature, noise given a state, and draws besides every layer's Z."""

import math

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.noise import Noise
from flipgrad.sampling import Draw


def positive(estimator: object, name: str, value: float, meaning: str = "") -> float:
    """The ``value`` of an estimator's argument, refused unless it is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        what = f"{type(estimator).__name__}({name}={value})"
        raise InputError(f"{what}: the {meaning or name} must be positive and finite, e.g. 1.0")
    return value


def own_draws(estimator: object, draw: Draw, noise: Noise, a: Tensor, count: int) -> Tensor:
    """Draws [count, *a.shape] of ``noise`` that are no layer's Z, so that handed-in noise is refused for them."""
    wanted = a.detach().expand(count, *a.shape)
    refusal = InputError(
        f"noise: {type(estimator).__name__} draws more than every layer's Z, so it cannot replay handed-in noise; pass a "
        "seeded generator instead"
    )
    try:
        z = draw(noise, wanted)
    except InputError as error:
        raise refusal from error
    # Handed-in noise has the shape of the pre-activations, or broadcasts to it.
    if z.shape != wanted.shape:
        raise refusal
    return z


def conditional(noise: Noise, a: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """Noise given that sign(a - Z) = x, made of unconditional noise ``z`` [..., *a.shape]; differentiable in ``a``.

    By symmetry x Z is noise below x a, and its cdf there is that of Z divided by F(x a): with u = F(z) uniform, it is
    the inverse cdf of u F(x a). Above one half that is taken from the other tail, so that neither is rounded to 0 or 1.
    """
    tiny, half = torch.finfo(a.dtype).tiny, 0.5
    u = noise.cdf(z)
    lower = u * noise.cdf(x * a)
    upper = noise.cdf(-z) + u * noise.cdf(-x * a)
    quantile = torch.where(lower < half, noise.icdf(lower.clamp(tiny, half)), -noise.icdf(upper.clamp(tiny, half)))
    # Rounding must not leave the half-line.
    return x * torch.minimum(quantile, x * a)
