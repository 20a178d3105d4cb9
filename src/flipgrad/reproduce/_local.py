"""Cells in processes of this machine.

Not a pool of ``concurrent.futures`` or joblib: there the death of one process breaks the pool without a word of whose work it
was, or of its exit code, and processes outlive a parent that is killed. Here each has a pipe of its own, whose end tells both.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from flipgrad.errors import InputError
from flipgrad.machine import cores
from flipgrad.reproduce._cells import GRACE, LOOK, Cell, Ledger, Outcome, attempt

# The exit code of a process that the system killed.
KILLED = -9


@final
class LocalRunner:
    """Runs ``workers`` cells at a time: one in this process, more in new ones, each with one thread.

    Args:
        workers: how many; by default one for every core.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers={workers}: give at least 1, or leave it out for one per core")
        self.workers = workers or cores()

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        workers, ledger = min(self.workers, len(cells)), Ledger(root, tell)
        if workers <= 1:
            _here(cells, root, ledger)
        else:
            _in_processes(cells, root, ledger, workers)
        ledger.close()


def _here(cells: Sequence[Cell], root: Path, ledger: Ledger) -> None:
    """One cell after the other in this process."""
    stopped = threading.Event()
    for cell in cells:

        def report(share: float, cell: Cell = cell) -> None:
            try:
                ledger.advance(cell, share)
            except KeyboardInterrupt:
                # Not from here: the cell is to save its work first.
                stopped.set()

        ledger.end(cell, attempt(cell, root, stopped.is_set, report))
        if stopped.is_set():
            raise KeyboardInterrupt


def _in_processes(cells: Sequence[Cell], root: Path, ledger: Ledger, count: int) -> None:
    """Cells in ``count`` processes; one that dies is replaced, and its cell failed."""
    waiting = deque(cells)
    workers: dict[Any, _Worker] = {}

    def hire() -> None:
        worker = _Worker(root)
        workers[worker.pipe] = worker
        worker.give(waiting.popleft())

    try:
        for _ in range(count):
            hire()
        while workers:
            for pipe in connection.wait(list(workers), LOOK):
                worker = workers[pipe]
                message = worker.hear()
                if isinstance(message, float):
                    ledger.advance(worker.cell, message)
                    continue
                ledger.end(worker.cell, message)
                if waiting and worker.process.is_alive():
                    worker.give(waiting.popleft())
                else:
                    _end([workers.pop(pipe)])
                    if waiting:
                        hire()
            ledger.look(next((worker.cell.name for worker in workers.values()), ""))
    finally:
        _end(list(workers.values()))


@final
class _Worker:
    """A process, the pipe to it, and the cell it is at."""

    cell: Cell

    def __init__(self, root: Path) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon, so that it may save its work when this process ends; it ends itself when the pipe does.
        self.process = context.Process(target=_serve, args=(theirs, str(root)))
        self.process.start()
        theirs.close()

    def give(self, cell: Cell) -> None:
        """Hand it the next cell."""
        self.cell = cell
        self.pipe.send(cell)

    def hear(self) -> float | Outcome:
        """The share of its cell that is done, or how that ended; where it died, its cell failed."""
        try:
            message: float | Outcome = self.pipe.recv()
        except (EOFError, OSError):
            _end([self])
            why = f"its process ended with exit code {self.process.exitcode}"
            if self.process.exitcode == KILLED:
                why += ", killed; perhaps memory ran out: try fewer --workers"
            return Outcome(self.cell.name, "failed", why)
        return message


def _end(workers: Sequence[_Worker]) -> None:
    """Ask them to save their work and end; those that do not are ended."""
    for worker in workers:
        worker.pipe.close()
    until = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(pipe: Connection, root: str) -> None:
    """A worker: cells come through the pipe, and the end of the pipe, however it came about, means to stop."""
    stop = threading.Event()
    # A terminal tells all processes of Ctrl-C; only the first one decides. A polite kill of all of them saves the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    inbox: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                inbox.put(pipe.recv())
        stop.set()
        inbox.put(None)

    threading.Thread(target=listen, daemon=True).start()
    reported = 0.0

    def send(message: float | Outcome) -> None:
        # Where the other side is gone, the thread that listens hears of it.
        with suppress(OSError):
            pipe.send(message)

    def report(share: float) -> None:
        nonlocal reported
        if time.monotonic() - reported > LOOK:
            reported = time.monotonic()
            send(float(share))

    while (cell := inbox.get()) is not None:
        send(attempt(cell, Path(root), stop.is_set, report))
