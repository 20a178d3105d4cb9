"""Gradients and updates, as several benchmarks time them; the time and the peak memory of an update of the paper's network."""

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from flipgrad.benchmarks import posterior, rank_one
from flipgrad.benchmarks.plain import ACTIVATIONS, plain_update
from flipgrad.connections import WeightKind
from flipgrad.contract import Estimator
from flipgrad.estimators import PSA, ST, Tanh
from flipgrad.machine import fastest
from flipgrad.network import BinaryNetwork, Sequential
from flipgrad.norms import Norm
from flipgrad.objectives import CrossEntropy, Objective
from flipgrad.residual import ResidualConv2d
from flipgrad.training.models import CIFAR_CHANNELS, CIFAR_KERNELS, CIFAR_STRIDES, cifar_net

# The paper's own PSA, with approximate and with exact sums over flips.
PSA_SAMPLED = PSA(inputs="sampled", head="sampled")
PSA_SAMPLED_EXACT = PSA(inputs="sampled", head="sampled", exact=True)
# A rate of nearly 0: the work of an update, and all methods see the same weights.
RATE = 1e-12

BATCH = 64
REPEATS = 5
# Weights grow in training: the same with all weights and biases multiplied by these.
FACTORS = (3, 10)
# The relative error of a layer's gradient that the default tolerance may make; where inputs are averaged by a posterior, which
# is coarser, by how much of its RMSE its RMSE and bias may grow.
LARGEST_ERROR, LARGEST_GROWTH = 3e-3, 0.01

# The paper's estimators, and those with averaged inputs and head.
ESTIMATORS: dict[str, Estimator] = {
    "tanh": Tanh(),
    "st": ST(),
    "psa": PSA_SAMPLED,
    "psa_exact": PSA_SAMPLED_EXACT,
    "psa_mean": PSA(inputs="mean", head="rao-blackwell"),
    "psa_rb": PSA(),
}
# What an approximation is compared with.
EXACT: dict[str, Estimator] = {
    "psa": PSA_SAMPLED_EXACT,
    "psa_mean": PSA(inputs="mean", head="rao-blackwell", exact=True),
}
# The default, with sums over flips as it computes them, and with exact ones.
DEFAULT, EXACT_DEFAULT = PSA(inputs="posterior"), PSA(inputs="posterior", exact=True)

# With binary weights, whose flips need no tolerance: the paper's PSA, and the default.
OF_BINARY_WEIGHTS: dict[str, Estimator] = {"st": ST(), "psa": PSA_SAMPLED_EXACT, "psa_rb": PSA()}
# The relative error of flips of rank one that rounding to float32 may make.
LARGEST_ROUNDING = 1e-5

# On residual streams: to the order that the tolerance asks for, and to the order 3.
ON_STREAMS: dict[str, Estimator] = {"st": ST(), "psa": PSA(), "psa_third": PSA(tolerance=1e-9)}

# Whose memory is measured, after how many steps, and in how many processes of each: how much memory the system hands out
# varies, so the least counts.
MEASURED, STEPS, PROCESSES = ("st", "psa", "psa_rb"), 3, 3


def photographs(batch: int, size: int = 32) -> tuple[Tensor, CrossEntropy]:
    """Images like those of CIFAR-10, and their ten classes, from torch's generator."""
    return torch.randn(batch, 3, size, size), CrossEntropy(torch.randint(10, (batch,)))


def gradient(
    net: BinaryNetwork, x: Tensor, objective: Objective, rule: Estimator, generator: Generator | None = None
) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        net.zero_grad(set_to_none=True)
        net(x, objective, estimator=rule, generator=generator).mean().backward()

    return run


def update(
    net: BinaryNetwork, x: Tensor, objective: Objective, rule: Estimator, optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """Forward, backward and an update, by default of stochastic gradient descent with momentum."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    backward = gradient(net, x, objective, rule)

    def run() -> None:
        backward()
        optimizer.step()

    return run


def step() -> dict[str, Any]:
    """Ratios of the time of a step (forward, backward, update) of the CIFAR-10 network at full width, batch 64.

    With them, the errors that the tolerance makes in a gradient, and how RMSE and bias of the default's gradient grow by that
    of its posterior; under ``plain`` the same network in torch alone, with other activations; under ``binary`` ratios with
    binary weights, which have no errors; under ``residual`` those of a residual network of that size.
    """
    numbers = _measure(1)
    grown = {f"weights_x{factor}": _measure(factor) for factor in FACTORS}
    others = {"plain": _measure_plain(), "binary": _measure_binary(), "residual": _measure_residual()}
    return {"batch": BATCH, "threads": torch.get_num_threads(), **numbers, **grown, **others}


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
    growth = posterior.growth(net, x, objective, DEFAULT, EXACT_DEFAULT)
    wrong = {name for name, error in errors.items() if not error <= LARGEST_ERROR}
    wrong |= {"psa_rb"} if not max(growth["rmse"], growth["bias"]) <= LARGEST_GROWTH else set()
    ratios = {
        f"{name}_over_st": None if name in wrong else seconds[name] / seconds["st"]
        for name in ESTIMATORS
        if name.startswith("psa")
    }
    relative = {f"{name}_relative_error": error for name, error in errors.items()}
    grown = {f"psa_rb_{name}_growth": number for name, number in growth.items()}
    return {**ratios, **relative, **grown, "st_over_tanh": seconds["st"] / seconds["tanh"], "seconds": seconds}


def _measure_plain() -> dict[str, Any]:
    """The times of the same network as a ReLU net, with deterministic signs, and with straight-through by hand, over ST's."""
    torch.manual_seed(0)
    x, objective = photographs(BATCH)
    net = cifar_net().initialize(x)
    works = {"st": update(net, x, objective, ST()), "psa_rb": update(net, x, objective, PSA())}
    works |= {name: plain_update(net, x, objective.labels, activation, RATE) for name, activation in ACTIVATIONS.items()}
    seconds = fastest(works, repeats=REPEATS)
    return {**{f"{name}_over_st": seconds[name] / seconds["st"] for name in works if name != "st"}, "seconds": seconds}


def _measure_binary() -> dict[str, Any]:
    """The same of the network with binary weights, the signs of latent ones, in all layers but the first, and with norms."""
    torch.manual_seed(0)
    x, objective = photographs(BATCH)
    net = cifar_net(norm="affine", weights="binary").initialize(x)
    errors = {f"{name}_relative_error": error for name, error in rank_one.errors(net).items()}
    works = {name: update(net, x, objective, rule) for name, rule in OF_BINARY_WEIGHTS.items()}
    seconds = fastest(works, repeats=REPEATS)
    right = all(error <= LARGEST_ROUNDING for error in errors.values())
    ratios = {f"{name}_over_st": seconds[name] / seconds["st"] if right else None for name in works if name != "st"}
    return {**ratios, **errors, "seconds": seconds}


def residual_twin(norm: Callable[[int], Norm] = nn.BatchNorm2d, weights: WeightKind = "real") -> Sequential:
    """A residual network with the channels, kernels and strides of the paper's for CIFAR-10, padded to keep sizes.

    Without PReLU, so that flips act on all later layers.
    """
    first, *channels = CIFAR_CHANNELS
    blocks: list[nn.Module] = []
    before = first
    for now, kernel, stride in zip(channels, CIFAR_KERNELS[1:], CIFAR_STRIDES[1:], strict=True):
        options: dict[str, Any] = {"norm": norm(before), "branch_norm": norm(now), "weights": weights}
        blocks.append(ResidualConv2d(before, now, kernel, stride, bias=False, **options))
        before = now
    front = nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first)
    return Sequential(*front, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head=nn.Linear(before, 10))


def _measure_residual() -> dict[str, Any]:
    """The same of the residual twin, whose flips are of the order that the default tolerance asks for, and of the order 3."""
    result: dict[str, Any] = {}
    for name, weights in (("", "real"), ("binary_", "binary")):
        torch.manual_seed(0)
        x, objective = photographs(BATCH)
        net = residual_twin(weights=weights)  # type: ignore[arg-type]
        works = {key: update(net, x, objective, rule) for key, rule in ON_STREAMS.items()}
        seconds = fastest(works, repeats=REPEATS)
        result |= {f"{name}{key}_over_st": seconds[key] / seconds["st"] for key in works if key != "st"}
        result[f"{name}seconds"] = seconds
    return result


def _error(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator, exact: Estimator) -> float:
    """The largest relative error of any layer's gradient against exact sums over flips with the same draw."""
    gradients = []
    for either in (rule, exact):
        loss = net(x, objective, estimator=either, generator=torch.Generator().manual_seed(0)).mean()
        gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    return max(float((g - h).norm() / h.norm()) for g, h in zip(*gradients, strict=True))


def memory() -> dict[str, Any]:
    """Peak memory of a step above that of the process with the network and the data in it, in GB, and the ratios to ST."""
    command = "from flipgrad.benchmarks.step import peak; print(peak({!r}))"

    def in_a_process(name: str) -> float:
        run = [sys.executable, "-c", command.format(name)]
        return float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)

    runs = [{name: in_a_process(name) for name in MEASURED} for _ in range(PROCESSES)]
    peaks = {name: min(run[name] for run in runs) for name in MEASURED}
    ratios = {f"{name}_over_st": peaks[name] / peaks["st"] for name in MEASURED if name != "st"}
    return {"batch": BATCH, "peak_gb": peaks, **ratios}


def peak(name: str) -> float:
    """Gigabytes by which a few steps raise the peak memory of this process."""
    torch.manual_seed(0)
    x, objective = photographs(BATCH)
    net = cifar_net()
    gradient(net, x[:1], CrossEntropy(objective.labels[:1]), ESTIMATORS[name])()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one = update(net, x, objective, ESTIMATORS[name])
    for _ in range(STEPS):
        one()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
