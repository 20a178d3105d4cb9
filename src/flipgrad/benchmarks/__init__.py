"""The speeds that flipgrad promises, as numbers measured in one run; ``flipgrad bench`` runs them."""

from collections.abc import Callable
from typing import Any

from flipgrad.benchmarks.exact import exact
from flipgrad.benchmarks.flips import flips
from flipgrad.benchmarks.gradeval import gradeval
from flipgrad.benchmarks.loop import loop
from flipgrad.benchmarks.memory import memory
from flipgrad.benchmarks.scaling import scaling
from flipgrad.benchmarks.step import step

# The names on the command line. Each returns plain data.
BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    "exact": exact,
    "flips": flips,
    "gradeval": gradeval,
    "loop": loop,
    "memory": memory,
    "scaling": scaling,
    "step": step,
}

__all__ = ["BENCHMARKS"]
