"""Time on shared, noisy machines: the fastest of several repeats."""

from __future__ import annotations

import time
from collections.abc import Callable


def fastest(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Seconds of the fastest of ``repeats`` runs, after one that does not count."""
    work()
    return min(_once(work) for _ in range(repeats))


def _once(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
