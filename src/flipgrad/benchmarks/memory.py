"""The peak memory of a training step of the paper's CIFAR-10 network, over that with ST, each in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import torch

from flipgrad.benchmarks._steps import PSA_SAMPLED, gradient, photographs, update
from flipgrad.estimators import PSA, ST
from flipgrad.objectives import CrossEntropy
from flipgrad.training.models import cifar_net

BATCH, STEPS = 64, 3
# Processes of each: how much memory the system hands out varies, so the least counts.
REPEATS = 3
# The paper's two, and what averages inputs and head.
METHODS = {"st": ST(), "psa": PSA_SAMPLED, "psa_rb": PSA(inputs="posterior", head="rao-blackwell")}


def memory() -> dict[str, Any]:
    """Peak memory above that of the process with the network and the data in it, in GB, and the ratios."""
    runs = [{name: _in_a_process(name) for name in METHODS} for _ in range(REPEATS)]
    peaks = {name: min(run[name] for run in runs) for name in METHODS}
    ratios = {f"{name}_over_st": peaks[name] / peaks["st"] for name in METHODS if name != "st"}
    return {"batch": BATCH, "peak_gb": peaks, **ratios}


def _in_a_process(name: str) -> float:
    command = f"from flipgrad.benchmarks.memory import peak; print(peak({name!r}))"
    output = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout
    return float(output)


def peak(name: str) -> float:
    """Gigabytes by which a few steps raise the peak memory of this process."""
    torch.manual_seed(0)
    x, objective = photographs(BATCH)
    net = cifar_net()
    gradient(net, x[:1], CrossEntropy(objective.labels[:1]), METHODS[name])()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = update(net, x, objective, METHODS[name])
    for _ in range(STEPS):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
