"""What every experiment costs on this machine: measured where it was run here, else estimated from recorded times."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flipgrad import files
from flipgrad.benchmarks.step import PSA_SAMPLED, gradient, photographs
from flipgrad.machine import cores, fastest, threads
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._workshop import SCALES, Experiment
from flipgrad.training.models import cifar_net

# Seconds of the probe on the machine where the costs of experiments were recorded.
PROBE = 0.026


class Cost(NamedTuple):
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
    """What an experiment costs at a ``scale``, whose results may be in ``folder``.

    ``speed`` is the seconds of the probe here over :data:`PROBE`; ``workers`` cells run at a time, by default one per core.
    """
    try:
        record = read_result(folder / f"{experiment.name}.json")
        here: Any = files.provenance()["machine"]
        if record["scale"] == scale and all(record["machine"][key] == here[key] for key in ("system", "processor", "cores")):
            return Cost(float(record["seconds"]), measured=True)
    except (ValueError, TypeError, KeyError):
        pass
    number = list(SCALES).index(scale)
    seconds = experiment.seconds[number] / min(workers or cores(), experiment.cells[number])
    return Cost(speed * seconds, measured=False)
