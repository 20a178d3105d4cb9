"""The exact expected loss and its gradient, three layers, 200 points of the toy problem."""

from __future__ import annotations

import resource
from typing import Any

import torch

from flipgrad import exact as exact_loss
from flipgrad.data import toy
from flipgrad.machine import fastest
from flipgrad.objectives import CrossEntropy
from flipgrad.training.models import fully_connected

# Seconds on two cores, by the width of the three layers.
LIMITS = {5: 0.05, 10: 1.0, 12: 10.0}


def exact() -> dict[str, Any]:
    """Seconds and peak memory (of the process, in GB) for 5-5-5, 10-10-10 and 12-12-12."""
    data = toy().train
    objective = CrossEntropy(data.y)
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    for width in LIMITS:
        torch.manual_seed(0)
        net = fully_connected(2, [width] * 3, 2).initialize(data.x, moments=True)

        def gradient(net: torch.nn.Module = net) -> None:
            net.zero_grad()
            exact_loss.expected_loss(net, data.x, objective).mean().backward()  # type: ignore[arg-type]

        seconds |= fastest({_name(width): gradient}, repeats=3)
        memory[_name(width)] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    limits = {_name(width): limit for width, limit in LIMITS.items()}
    return {"points": len(data), "seconds": seconds, "limits": limits, "peak_memory_gb": memory}


def _name(width: int) -> str:
    return f"{width}-{width}-{width}"
