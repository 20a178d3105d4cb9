"""Sampled losses of a network, and the bounds on its marginal loss that they give.

With S draws of all noises and losses f_s, the mean estimates the expected loss (paper, eq. A.1) and
-log mean_s exp(-f_s) is the S-sample bound (Raiko et al. 2015): between the expected loss and the marginal loss
-log E_Z[exp(-f)] (paper, eq. A.2) in expectation, and the tighter the larger S.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.objectives import Objective, evaluate


@torch.no_grad()
def sampled_losses(
    net: Sequential, x: Tensor, objective: Objective, samples: int, *, generator: Generator | None = None
) -> Tensor:
    """Losses of ``samples`` independent draws, [samples, B], without a gradient."""
    if samples < 1:
        raise InputError(f"samples={samples}: at least one sample is needed")
    return torch.stack([evaluate(objective, net(x, generator=generator)) for _ in range(samples)])


def expected_loss(
    net: Sequential, x: Tensor, objective: Objective, samples: int = 10, *, generator: Generator | None = None
) -> Tensor:
    """The expected loss of every example, estimated from ``samples`` draws, [B]."""
    return sampled_losses(net, x, objective, samples, generator=generator).mean(0)


def marginal_loss(
    net: Sequential, x: Tensor, objective: Objective, samples: int = 10, *, generator: Generator | None = None
) -> Tensor:
    """The ``samples``-sample bound on the marginal loss of every example, [B]."""
    return multi_sample_bound(sampled_losses(net, x, objective, samples, generator=generator))


def multi_sample_bound(losses: Tensor) -> Tensor:
    """-log mean_s exp(-f_s) over the first dimension of ``losses`` [S, ...].

    >>> multi_sample_bound(torch.tensor([[1.0], [1.0]]))
    tensor([1.])
    """
    return math.log(len(losses)) - torch.logsumexp(-losses, 0)
