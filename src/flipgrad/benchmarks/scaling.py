"""How the cost of a PSA step grows with width, depth, batch and cores, against ST: exponents in log-log coordinates."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flipgrad.benchmarks.step import PSA_SAMPLED, PSA_SAMPLED_EXACT, gradient, photographs
from flipgrad.estimators import ST, Estimator
from flipgrad.layers import BinaryConv2d
from flipgrad.machine import cores, fastest, threads
from flipgrad.network import Sequential

WIDTH, DEPTH, BATCH, SIZE = 96, 4, 32, 16
REPEATS = 3
# What is varied, and the power of it that the number of operations has.
AXES: dict[str, tuple[list[int], float]] = {
    "width": ([24, 48, 96, 192], 2.0),
    "depth": ([2, 4, 8, 16], 1.0),
    "batch": ([8, 16, 32, 64], 1.0),
}
# The paper's two.
METHODS: dict[str, Estimator] = {"ST": ST(), "PSA": PSA_SAMPLED, "PSA exact": PSA_SAMPLED_EXACT}


def scaling() -> dict[str, Any]:
    """Seconds of a step of every method along every axis, and the exponent between the two largest sizes."""
    axes = {
        axis: _axis(values, [_step_seconds(**{axis: n}) for n in values], theory) for axis, (values, theory) in AXES.items()
    }
    counts, rows = list(range(1, cores() + 1)), []
    for count in counts:
        with threads(count):
            rows.append(_step_seconds())
    axes["cores"] = _axis(counts, rows, -1.0)
    return {"width": WIDTH, "depth": DEPTH, "batch": BATCH, "size": SIZE, "axes": axes}


def _axis(values: list[int], rows: Sequence[Mapping[str, float]], theory: float) -> dict[str, Any]:
    seconds = {name: [row[name] for row in rows] for name in METHODS}
    exponents = {}
    if len(values) > 1:
        for name, column in seconds.items():
            exponents[name] = math.log(column[-1] / column[-2]) / math.log(values[-1] / values[-2])
    return {"values": values, "seconds": seconds, "exponent": exponents, "theory": theory}


def _step_seconds(width: int = WIDTH, depth: int = DEPTH, batch: int = BATCH) -> dict[str, float]:
    torch.manual_seed(0)
    channels = [3, *[width] * depth]
    layers = [BinaryConv2d(n, m, 3, padding=1) for n, m in itertools.pairwise(channels)]
    net = Sequential(*layers, nn.AvgPool2d(SIZE), nn.Flatten(), head=nn.Linear(width, 10))
    x, objective = photographs(batch, SIZE)
    net.initialize(x)
    return fastest({name: gradient(net, x, objective, rule) for name, rule in METHODS.items()}, repeats=REPEATS)
