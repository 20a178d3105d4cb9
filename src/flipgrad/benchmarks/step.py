"""A training step of the paper's CIFAR-10 network at full width, batch 64: PSA and ST over Tanh, the ordinary network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flipgrad.benchmarks._timing import interleaved
from flipgrad.estimators import PSA, ST, Estimator, Tanh
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.training.models import cifar_net

BATCH = 64
REPEATS = 5
# Weights grow in training: the same with all of them, and the biases, so many times larger.
FACTORS = (1, 3, 10)
# The relative error of a layer's gradient that the default tolerance may make.
LARGEST_ERROR = 3e-3


def step() -> dict[str, Any]:
    """Ratios of the time of a step (forward, backward, update), and the error that PSA's tolerance makes in a gradient."""
    result: dict[str, Any] = {"batch": BATCH, "threads": torch.get_num_threads()}
    for factor in FACTORS:
        numbers = _measure(factor)
        if factor == 1:
            result.update(numbers)
        else:
            result[f"weights_x{factor}"] = numbers
    return result


def _measure(factor: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, objective = torch.randn(BATCH, 3, 32, 32), CrossEntropy(torch.randint(10, (BATCH,)))
    net = cifar_net().initialize(x)
    with torch.no_grad():
        for layer in net.binary_layers:
            layer.weight *= factor
            layer.bias *= factor
    error = _error(net, x, objective)
    estimators = {"tanh": Tanh(), "st": ST(), "psa": PSA(), "psa_exact": PSA(exact=True)}
    seconds = interleaved({name: _step(net, x, objective, rule) for name, rule in estimators.items()}, repeats=REPEATS)
    ratios = {"psa_over_st": None, "psa_exact_over_st": seconds["psa_exact"] / seconds["st"]}
    if error <= LARGEST_ERROR:
        ratios["psa_over_st"] = seconds["psa"] / seconds["st"]
    return {
        **ratios,
        "psa_relative_error": error,
        "st_over_tanh": seconds["st"] / seconds["tanh"],
        "seconds": seconds,
    }


def _step(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator) -> Callable[[], None]:
    # A rate of nearly 0: the work of an update, and all methods see the same weights.
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12, momentum=0.9, nesterov=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        net(x, objective, estimator=rule).mean().backward()
        optimizer.step()

    return run


def _error(net: Sequential, x: Tensor, objective: CrossEntropy) -> float:
    """The largest relative error of any layer's gradient against exact flips with the same draw."""
    estimate, exact = (_gradients(net, x, objective, rule) for rule in (PSA(), PSA(exact=True)))
    errors = [float((g - h).norm() / h.norm()) for g, h in zip(estimate, exact, strict=True)]
    return max(errors)


def _gradients(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator) -> list[Tensor]:
    loss = net(x, objective, estimator=rule, generator=torch.Generator().manual_seed(0)).mean()
    return list(torch.autograd.grad(loss, list(net.parameters())))
