"""The speeds that flipgrad promises, as numbers measured in one run; ``flipgrad bench`` runs them."""

from collections.abc import Callable
from typing import Any

from flipgrad.benchmarks.exact import exact
from flipgrad.benchmarks.gradeval import gradeval

# The names on the command line. Each returns plain data.
BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {"exact": exact, "gradeval": gradeval}

__all__ = ["BENCHMARKS"]
