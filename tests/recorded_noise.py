"""Noise that an estimate asked for, recorded for several draws, and sources that hand it out again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import flipgrad as fg
from flipgrad.gradeval.draws import Problem, one_by_one
from flipgrad.sampling import Draw


def recorded_noise(problem: Problem, estimator: fg.Estimator, draws: int) -> list[Tensor]:
    """Values [draws, ...] for everything that an estimate asks of its source of noise."""
    generator, noise = torch.Generator().manual_seed(5), []

    def record(distribution: fg.Noise, a: Tensor) -> Tensor:
        noise.append(distribution.sample((draws, *a.shape), generator=generator, dtype=a.dtype))
        return noise[-1][0]

    one_by_one(problem, estimator, 1, record)
    return noise


def one_after_the_other(noise: Sequence[Tensor]) -> Draw:
    """All that the first draw asks for, then all that the second one does; an error if more is asked for than was recorded."""
    remaining = iter([z for draw in zip(*noise, strict=True) for z in draw])
    return lambda distribution, a: next(remaining)


def all_at_once(noise: Sequence[Tensor]) -> Draw:
    """The noise of all draws, to be used inside of ``torch.vmap`` over these."""
    remaining = iter(noise)
    return lambda distribution, a: torch._C._functorch._add_batch_dim(next(remaining), 0, 1)
