"""The processor: its cores, how many threads torch uses, how long work takes on it, and which of many processes this is."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_by_torchrun() -> bool:
    """Whether there are other processes that ``torchrun`` started with this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    """The number of this process, before it is brought together with the others."""
    return int(os.environ.get("RANK", "0"))


def load() -> float | None:
    """How many processes of the whole machine were at work, on average over the last minute; None where that is not known."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads inside, and afterwards as many as before."""
    # Who asks for cores alone need not have torch.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest(
    works: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    done: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Seconds of the fastest of ``repeats`` runs of each work, after one that does not count.

    The works take turns, in the order of their names, so that a busy machine slows all of them down alike. With the ``clock``
    ``time.process_time`` the time of this process alone counts. ``done`` is told the name of each work that was run.
    """
    best = dict.fromkeys(works, float("inf"))
    for repeat in range(repeats + 1):
        for name, work in works.items():
            started = clock()
            work()
            if repeat:
                best[name] = min(best[name], clock() - started)
            done(name)
    return best
