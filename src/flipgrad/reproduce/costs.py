"""What every experiment costs on this machine: measured where it was run here, else estimated from recorded times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from flipgrad import files
from flipgrad.benchmarks._steps import PSA_SAMPLED, gradient, photographs
from flipgrad.machine import cores, fastest, threads
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._experiment import Experiment
from flipgrad.training.models import cifar_net

# Seconds of the probe on the machine where the costs of experiments were recorded.
PROBE = 0.026


@final
@dataclass(frozen=True)
class Cost:
    """Seconds on this machine, and whether they were measured on it or are an estimate."""

    seconds: float
    measured: bool


def probe() -> float:
    """Seconds of one core for a gradient of a small network: the fastest of some."""
    with threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, objective = photographs(16)
        work = gradient(cifar_net(0.125).initialize(x), x, objective, PSA_SAMPLED)
        # The processor's time, as others may be using it.
        return fastest({"probe": work}, clock=time.process_time)["probe"]


def cost(experiment: Experiment, scale: str, folder: Path, speed: float, workers: int | None = None) -> Cost:
    """What an experiment costs.

    Args:
        experiment: any.
        scale: the name of the scale.
        folder: where results of that scale may be.
        speed: seconds of the probe here over those of :data:`PROBE`.
        workers: how many cells run at a time; by default as many as there are cores.
    """
    try:
        record = read_result(folder / f"{experiment.name}.json")
        if record["scale"] == scale and _like(record["machine"], files.provenance()["machine"]):
            return Cost(float(record["seconds"]), measured=True)
    except (ValueError, TypeError, KeyError):
        pass
    return Cost(speed * experiment.cost.elapsed(scale, workers or cores()), measured=False)


def _like(machine: Any, other: Any) -> bool:
    """Whether results may well be of this machine."""
    return all(machine[key] == other[key] for key in ("system", "processor", "cores"))
