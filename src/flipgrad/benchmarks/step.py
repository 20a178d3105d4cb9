"""A training step of the paper's CIFAR-10 network at full width, batch 64: PSA over ST, and ST over Tanh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flipgrad.benchmarks._steps import PSA_SAMPLED, PSA_SAMPLED_EXACT, photographs, update
from flipgrad.estimators import PSA, ST, Estimator, Tanh
from flipgrad.machine import fastest
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.training.models import cifar_net

BATCH = 64
REPEATS = 5
# Weights grow in training: the same with all weights and biases multiplied by these.
FACTORS = (1, 3, 10)
# The relative error of a layer's gradient that the default tolerance may make.
LARGEST_ERROR = 3e-3

# The paper's estimators, and those with averaged inputs and head.
ESTIMATORS: dict[str, Estimator] = {
    "tanh": Tanh(),
    "st": ST(),
    "psa": PSA_SAMPLED,
    "psa_exact": PSA_SAMPLED_EXACT,
    "psa_mean": PSA(inputs="mean", head="rao-blackwell"),
    "psa_rb": PSA(inputs="posterior", head="rao-blackwell"),
}
# What an approximation is compared with.
EXACT: dict[str, Estimator] = {
    "psa": PSA_SAMPLED_EXACT,
    "psa_mean": PSA(inputs="mean", head="rao-blackwell", exact=True),
    "psa_rb": PSA(inputs="posterior", head="rao-blackwell", exact=True),
}


def step() -> dict[str, Any]:
    """Ratios of the time of a step (forward, backward, update), and the errors that the tolerance makes in a gradient."""
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
    x, objective = photographs(BATCH)
    net = cifar_net().initialize(x)
    with torch.no_grad():
        for layer in net.binary_layers:
            layer.weight *= factor
            layer.bias *= factor
    errors = {name: _error(net, x, objective, ESTIMATORS[name], exact) for name, exact in EXACT.items()}
    seconds = fastest({name: update(net, x, objective, rule) for name, rule in ESTIMATORS.items()}, repeats=REPEATS)
    ratios = {
        f"{name}_over_st": seconds[name] / seconds["st"] if errors.get(name, 0.0) <= LARGEST_ERROR else None
        for name in ESTIMATORS
        if name.startswith("psa")
    }
    return {
        **ratios,
        **{f"{name}_relative_error": error for name, error in errors.items()},
        "st_over_tanh": seconds["st"] / seconds["tanh"],
        "seconds": seconds,
    }


def _error(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator, exact: Estimator) -> float:
    """The largest relative error of any layer's gradient against exact sums over flips with the same draw."""
    pairs = zip(*(_gradients(net, x, objective, either) for either in (rule, exact)), strict=True)
    return max(float((g - h).norm() / h.norm()) for g, h in pairs)


def _gradients(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator) -> list[Tensor]:
    loss = net(x, objective, estimator=rule, generator=torch.Generator().manual_seed(0)).mean()
    return list(torch.autograd.grad(loss, list(net.parameters())))
