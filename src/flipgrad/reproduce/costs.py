"""What every experiment costs on this machine: measured where it was run here, else estimated from recorded times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from flipgrad import files
from flipgrad.estimators import PSA
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import AGAIN, one_thread
from flipgrad.reproduce._local import cores
from flipgrad.training.models import cifar_net


@final
@dataclass(frozen=True)
class Recorded:
    """Seconds of one core, and how many cells they can be divided among.

    Attributes:
        seconds: of one core of the machine whose :data:`PROBE` is recorded.
        cells: how many cores can work at it.
    """

    seconds: float
    cells: int = 1


@final
@dataclass(frozen=True)
class Cost:
    """Seconds on this machine, and whether they were measured on it or are an estimate."""

    seconds: float
    measured: bool


# Seconds of the probe on the machine where the times below were recorded.
PROBE = 0.026
# Processor time of runs of its own, the training of the network that several figures share included. At the paper's scale, and
# in part for muprop and beyond at the small one, it is computed from the times of single updates and draws.
RECORDED: dict[str, dict[str, Recorded]] = {
    "rmse": {"smoke": Recorded(3), "small": Recorded(215), "paper": Recorded(320)},
    "cosine": {"smoke": Recorded(4), "small": Recorded(230), "paper": Recorded(470)},
    "rmse-unbiased": {"smoke": Recorded(2), "small": Recorded(220), "paper": Recorded(300)},
    "cosine-unbiased": {"smoke": Recorded(3), "small": Recorded(225), "paper": Recorded(380)},
    "width": {"smoke": Recorded(9), "small": Recorded(32), "paper": Recorded(320)},
    "depth": {"smoke": Recorded(11), "small": Recorded(43), "paper": Recorded(430)},
    "estimators": {"smoke": Recorded(4), "small": Recorded(235), "paper": Recorded(400)},
    "toy-training": {"smoke": Recorded(4, 4), "small": Recorded(560, 4), "paper": Recorded(5600, 40)},
    "toy-example": {"smoke": Recorded(3, 2), "small": Recorded(200, 2), "paper": Recorded(400, 2)},
    "cifar": {"smoke": Recorded(20, 24), "small": Recorded(12_000, 8), "paper": Recorded(5e6, 24)},
    "muprop": {"smoke": Recorded(5, 7), "small": Recorded(1000, 7), "paper": Recorded(1e7, 7)},
    "timing": {"smoke": Recorded(4), "small": Recorded(120), "paper": Recorded(350)},
    "beyond": {"smoke": Recorded(15, 2), "small": Recorded(3500, 2), "paper": Recorded(1e5, 8)},
}


def probe() -> float:
    """Seconds of one core for a training step of a small network: the fastest of some."""
    estimator = PSA(inputs="sampled", head="sampled")
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, objective = torch.randn(16, 3, 32, 32), CrossEntropy(torch.randint(10, (16,)))
        net = cifar_net(0.125).initialize(x)
        best = float("inf")
        for _ in range(5):
            # The processor's time, as others may be using it.
            started = time.process_time()
            net(x, objective, estimator=estimator).mean().backward()
            best = min(best, time.process_time() - started)
    return best


def cost(name: str, scale: str, folder: Path, speed: float, workers: int | None = None) -> Cost:
    """What an experiment costs.

    Args:
        name: the experiment.
        scale: the scale.
        folder: where results of that scale may be.
        speed: seconds of the probe here over those of :data:`PROBE`.
        workers: how many cells run at a time; by default as many as there are cores.
    """
    try:
        record = files.read_json(folder / f"{name}.json", missing=AGAIN, broken=AGAIN)
        if record["scale"] == scale and _like(record["machine"], files.provenance()["machine"]):
            return Cost(float(record["seconds"]), measured=True)
    except (ValueError, TypeError, KeyError):
        pass
    known = RECORDED[name][scale]
    return Cost(speed * known.seconds / min(workers or cores(), known.cells), measured=False)


def _like(machine: Any, other: Any) -> bool:
    """Whether results may well be of this machine."""
    return all(machine[key] == other[key] for key in ("system", "processor", "cores"))
