"""Time on shared, noisy machines: the fastest of several repeats, of things that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def fastest(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Seconds of the fastest of ``repeats`` runs, after one that does not count."""
    return interleaved({"": work}, repeats=repeats)[""]


def interleaved(works: Mapping[str, Callable[[], object]], *, repeats: int = 5) -> dict[str, float]:
    """Seconds of the fastest of ``repeats`` runs of each, after one that does not count; they take turns."""
    best: dict[str, float] = {}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            best[name] = min(seconds, best.get(name, seconds))
    return best
