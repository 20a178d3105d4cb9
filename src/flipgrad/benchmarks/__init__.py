"""The speeds that flipgrad promises, as numbers measured in one run; ``flipgrad bench`` runs them."""

from collections.abc import Callable
from typing import Any

from flipgrad.benchmarks.flips import flips
from flipgrad.benchmarks.loop import loop
from flipgrad.benchmarks.packed import packed
from flipgrad.benchmarks.scaling import scaling
from flipgrad.benchmarks.step import memory, step
from flipgrad.benchmarks.toy import exact, gradeval
from flipgrad.benchmarks.vae import vae

# By their names on the command line. Each returns plain data.
BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    benchmark.__name__: benchmark for benchmark in (exact, flips, gradeval, loop, memory, packed, scaling, step, vae)
}

# About how many seconds each takes on two quiet cores of the machine of ``flipgrad.reproduce.experiments.PROBE``: from the
# processor time of its parts, by one thread, times how often they are run.
SECONDS = {
    "exact": 10,
    "flips": 20,
    "gradeval": 100,
    "loop": 30,
    "memory": 60,
    "packed": 20,
    "scaling": 50,
    "step": 180,
    "vae": 30,
}

__all__ = ["BENCHMARKS", "SECONDS"]
