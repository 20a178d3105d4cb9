"""What several benchmarks time: gradients and updates of a network, on photographs of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from flipgrad.contract import Estimator
from flipgrad.estimators import PSA
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy

# The paper's own PSA, with approximate and with exact sums over flips.
PSA_SAMPLED = PSA(inputs="sampled", head="sampled")
PSA_SAMPLED_EXACT = PSA(inputs="sampled", head="sampled", exact=True)
# A rate of nearly 0: the work of an update, and all methods see the same weights.
RATE = 1e-12


def photographs(batch: int, size: int = 32) -> tuple[Tensor, CrossEntropy]:
    """Images like those of CIFAR-10, and their ten classes, from torch's generator."""
    return torch.randn(batch, 3, size, size), CrossEntropy(torch.randint(10, (batch,)))


def gradient(
    net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator, generator: Generator | None = None
) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        net.zero_grad(set_to_none=True)
        net(x, objective, estimator=rule, generator=generator).mean().backward()

    return run


def update(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator) -> Callable[[], None]:
    """Forward, backward and an update."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    backward = gradient(net, x, objective, rule)

    def run() -> None:
        backward()
        optimizer.step()

    return run
