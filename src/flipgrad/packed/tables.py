"""What a unit does with an integer t: the threshold of a deterministic one, the table of probabilities of a stochastic one.

A unit of channel j has the pre-activation :math:`a = (t f) s_j + b_j`, an integer t, a positive factor f and float32 scales and
shifts. The sign of a is exact in float64 where f is 1 or a power of two: the product of a float32 and an integer below 2^29 is.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flipgrad.packed.parts import Array

# Probabilities are whole multiples of 1 / WORDS.
WORDS = 2**32
# Values of the error function that are known for every 1.
GRID = 256


def probabilities(noise: str, a: Array, noise_scale: float) -> NDArray[np.float64]:
    """P(a >= Z) for every pre-activation ``a``, for noise Z of that scale, in double precision.

    >>> probabilities("logistic", np.array([0.0, 1000.0]), 1.0)
    array([0.5, 1. ])
    """
    z = np.asarray(a, np.float64) / noise_scale
    tail = -np.abs(z)
    if noise == "logistic":
        odds = np.exp(tail)
        lower = odds / (1 + odds)
    elif noise == "normal":
        lower = _erfc(tail * -math.sqrt(0.5)) / 2
    elif noise == "laplace":
        lower = np.exp(tail) / 2
    else:
        lower = np.clip((tail + 1) / 2, 0, 1)
    result: NDArray[np.float64] = np.where(z < 0, lower, 1 - lower)
    return result


def chances(noise: str, a: Array, noise_scale: float) -> NDArray[np.uint32]:
    """The probabilities as numbers p: a unit is +1 if its random word is below p.

    They are rounded to 2^-32; a certain +1 is missed once in 2^32.

    >>> chances("uniform", np.array([-1.0, 0.0, 1.0]), 1.0).tolist()
    [0, 2147483648, 4294967295]
    """
    rounded = np.rint(probabilities(noise, a, noise_scale) * WORDS)
    return np.minimum(rounded, WORDS - 1).astype(np.uint32)


def pre_activations(t: Array, scale: Array, shift: Array, factor: float = 1.0) -> NDArray[np.float64]:
    """The pre-activations (t factor) scale + shift, in double precision; the arguments broadcast."""
    return (np.asarray(t, np.float64) * factor) * scale.astype(np.float64) + shift.astype(np.float64)


def thresholds(scale: Array, shift: Array, bound: int, factor: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For every channel the integer T, from -bound to bound + 1, and whether the channel falls with t.

    A unit is +1 if t >= T or, where the channel falls, if -t >= T.

    >>> thresholds(np.float32([0.5, -0.5, 0]), np.float32([-1, -1, 3]), 4)
    (array([ 2,  2, -4]), array([False,  True, False]))
    """
    falls = scale < 0
    turned = np.where(falls, -1, 1)
    first = first_positive(lambda t: pre_activations(t * turned, scale, shift, factor) >= 0, bound, len(scale))
    return first, falls


def first_positive(positive: Callable[[Array], Array], bound: int, channels: int) -> NDArray[np.int64]:
    """For every channel the first t from -bound to bound for which ``positive`` (t of all channels) is true, else bound + 1.

    By bisection: once true it stays true as t grows.
    """
    low, high = np.full(channels, -bound), np.full(channels, bound + 1)
    while (low < high).any():
        middle = (low + high) // 2
        true, going_on = positive(middle), low < high
        high = np.where(true & going_on, middle, high)
        low = np.where(~true & going_on, middle + 1, low)
    return high


def table(noise: str, noise_scale: float, scale: Array, shift: Array, bound: int, factor: float = 1.0) -> NDArray[np.uint32]:
    """:func:`chances` of every channel for every t from -bound to bound, [channels, 2 bound + 1]."""
    t = np.arange(-bound, bound + 1)
    return chances(noise, pre_activations(t, scale[:, None], shift[:, None], factor), noise_scale)


def _erfc(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The complementary error function of numbers that are not negative, which numpy lacks, to 1e-14.

    From the nearest of its values on a grid by its first four derivatives.
    """
    values = _erfc_on_grid()
    nearest = np.minimum(np.rint(z * GRID), len(values) - 1)
    x = nearest / GRID
    d = np.clip(z - x, -1, 1)
    slope = 2 / math.sqrt(math.pi) * np.exp(-x * x)
    series = d * (-1 + d * (x + d * ((1 - 2 * x * x) / 3 + d * (2 * x * x - 3) * x / 6)))
    return values[nearest.astype(np.int64)] + slope * series


@cache
def _erfc_on_grid() -> NDArray[np.float64]:
    # At 8 it is 1e-29.
    return np.array([math.erfc(k / GRID) for k in range(8 * GRID + 1)])
