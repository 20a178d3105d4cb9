"""The paper's two overlapping classes in the plane."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from flipgrad.data.sets import DataSet, Split
from flipgrad.errors import InputError


def toy(points: int = 100, *, seed: int = 0) -> DataSet:
    """Points with x in [-pi/2, pi/2]: class 0 uniform above y = 0 up to 1, class 1 uniform below y = cos x down to -1.

    Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020,
    appendix C.1; there the classes are called 1 and 2.

    Args:
        points: per class, in the training and in the test part each.
        seed: of the draw.

    >>> toy().train.x.shape, toy().train.y.bincount()
    (torch.Size([200, 2]), tensor([100, 100]))
    """
    if points < 1:
        raise InputError(f"toy(points={points}): give at least one point per class")
    generator = torch.Generator().manual_seed(seed)
    return DataSet("toy", _split(points, generator), _split(points, generator), classes=2, background=0.0)


def _split(points: int, generator: Generator) -> Split:
    above = _rectangle(points, 0.0, generator)
    below = torch.empty(0, 2)
    while len(below) < points:
        candidates = _rectangle(points, -1.0, generator)
        below = torch.cat([below, candidates[candidates[:, 1] < candidates[:, 0].cos()]])
    return Split(torch.cat([above, below[:points]]), torch.arange(2).repeat_interleave(points))


def _rectangle(points: int, bottom: float, generator: Generator) -> Tensor:
    """Uniform points with x in [-pi/2, pi/2] and y in [bottom, 1]."""
    u = torch.rand(points, 2, generator=generator)
    return torch.stack([math.pi * (u[:, 0] - 0.5), bottom + (1 - bottom) * u[:, 1]], 1)
