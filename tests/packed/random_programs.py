"""Random packed programs, for tests that compare engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from flipgrad.packed import parts
from flipgrad.packed.parts import Array, Part, Shape


def random_sums(rng: np.random.Generator, outputs: int, filter_shape: Shape, **geometry: Any) -> parts.Sums:
    """Sums by random weights."""
    count = outputs * int(np.prod(filter_shape))
    return parts.Sums(np.packbits(rng.random(count) < 0.5), outputs, filter_shape, **geometry)


def random_affine(rng: np.random.Generator, channels: int, size: float = 1.0) -> parts.Affine:
    """Scales of both signs, some of them 0, and shifts."""
    scale = rng.normal(size=channels) / np.sqrt(size) * (rng.random(channels) < 0.95)
    return parts.Affine(scale.astype(np.float32), rng.normal(size=channels).astype(np.float32))


def random_norm(rng: np.random.Generator, channels: int) -> parts.BatchNorm:
    """Statistics that were kept."""
    mean, weight, bias = (rng.normal(size=channels).astype(np.float32) for _ in range(3))
    return parts.BatchNorm(mean, rng.uniform(0.5, 2, channels).astype(np.float32), weight, bias)


def real_weights(rng: np.random.Generator, *shape: int) -> Array:
    """Weights of single precision."""
    return rng.normal(size=shape).astype(np.float32)


def binary_layer(
    rng: np.random.Generator, outputs: int, filter_shape: Shape, noise: str = "logistic", **geometry: Any
) -> list[Part]:
    """Sums, an affine function and the sign."""
    affine = random_affine(rng, outputs, float(np.prod(filter_shape)))
    return [random_sums(rng, outputs, filter_shape, **geometry), affine, parts.Sign(noise, 1.0)]
