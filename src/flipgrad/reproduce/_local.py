"""Cells in processes of this machine."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, final

from flipgrad.errors import InputError
from flipgrad.reproduce._cells import Cell, Outcome, attempt, complain

# Seconds: between two looks at the person who watches, between two reports of a cell, and that a cell has to save its work.
LOOK, REPORT, GRACE = 0.2, 0.2, 60.0
# The exit code of a process that was not asked.
KILLED = -9


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@final
class LocalRunner:
    """Runs so many cells at a time: one in this process, more in new ones, each with one thread.

    Args:
        workers: how many; by default one for every core.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers={workers}: give at least 1, or leave it out for one per core")
        self.workers = workers or cores()

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        if min(self.workers, len(cells)) <= 1:
            _here(cells, root, tell)
        else:
            _Team(cells, root, tell).run(min(self.workers, len(cells)))


def _here(cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
    """One cell after the other in this process."""
    stopped = threading.Event()
    failures = []
    for cell in cells:
        told = 0

        def report(share: float, cell: Cell = cell) -> None:
            nonlocal told
            new = round(share * cell.cost) - told
            told += new
            try:
                tell(cell.name, new)
            except KeyboardInterrupt:
                # Not from here: the cell is to save its work first.
                stopped.set()

        outcome = attempt(cell, root, stopped.is_set, report)
        if outcome.kind == "stopped":
            raise KeyboardInterrupt
        report(1.0)
        if stopped.is_set():
            raise KeyboardInterrupt
        if outcome.kind != "done":
            failures.append(outcome)
        if outcome.kind == "bad input":
            break
    complain(failures, root)


@final
@dataclass
class _Worker:
    """A process, the pipe to it, and the cell it is at."""

    process: SpawnProcess
    pipe: Connection
    cell: Cell | None = None
    told: int = 0


@final
class _Team:
    """Processes that are handed one cell after the other."""

    def __init__(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        self._waiting, self._root, self._tell = deque(cells), root, tell
        self._workers: dict[Connection, _Worker] = {}
        self._failures: list[Outcome] = []

    def run(self, size: int) -> None:
        try:
            for _ in range(size):
                self._hire()
            while self._workers:
                for pipe in connection.wait(list(self._workers), LOOK):
                    if isinstance(pipe, Connection):
                        self._hear(self._workers[pipe])
                busy = next((worker.cell.name for worker in self._workers.values() if worker.cell), "")
                self._tell(busy, 0)
        finally:
            self._dismiss()
        complain(self._failures, self._root)

    def _hire(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        # Not a daemon, so that it may save its work when this process ends; it ends itself when the pipe does.
        process = context.Process(target=_serve, args=(theirs, str(self._root)))
        process.start()
        theirs.close()
        worker = self._workers[ours] = _Worker(process, ours)
        self._hand(worker)

    def _hand(self, worker: _Worker) -> None:
        """The next cell, or nothing more to do."""
        worker.cell, worker.told = None, 0
        if self._waiting:
            worker.cell = self._waiting.popleft()
            worker.pipe.send(worker.cell)
        else:
            self._release(worker)

    def _release(self, worker: _Worker) -> None:
        del self._workers[worker.pipe]
        worker.pipe.close()
        worker.process.join(GRACE)

    def _hear(self, worker: _Worker) -> None:
        cell = worker.cell
        if cell is None:
            return
        try:
            message: float | Outcome = worker.pipe.recv()
        except (EOFError, OSError):
            self._mourn(worker, cell)
            return
        share = message if isinstance(message, float) else 1.0
        new = round(share * cell.cost) - worker.told
        worker.told += new
        self._tell(cell.name, new)
        if isinstance(message, Outcome):
            if message.kind == "stopped":
                # Someone told this process alone to stop: then all of them.
                raise KeyboardInterrupt
            if message.kind != "done":
                self._failures.append(message)
            if message.kind == "bad input":
                # The others would find the same.
                self._waiting.clear()
            self._hand(worker)

    def _mourn(self, worker: _Worker, cell: Cell) -> None:
        """A process ended without a word: its cell failed, and another process takes its place."""
        self._release(worker)
        why = f"its process ended with exit code {worker.process.exitcode}"
        if worker.process.exitcode == KILLED:
            why += ", killed; perhaps memory ran out: try fewer --workers"
        self._failures.append(Outcome(cell.name, "failed", why))
        if self._waiting:
            self._hire()

    def _dismiss(self) -> None:
        """Ask all that are left to save their work and end; those that do not are ended."""
        for worker in self._workers.values():
            worker.pipe.close()
        until = time.monotonic() + GRACE
        for worker in self._workers.values():
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _serve(pipe: Connection, root: str) -> None:
    """A process of the team: cells come through the pipe, and the end of the pipe, however it came about, means to stop."""
    stop = threading.Event()
    # A terminal tells all processes of Ctrl-C; only the first one decides. A polite kill of all of them saves the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    inbox: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                inbox.put(pipe.recv())
        except (EOFError, OSError):
            stop.set()
            inbox.put(None)

    threading.Thread(target=listen, daemon=True).start()
    reported = 0.0

    def report(share: float) -> None:
        nonlocal reported
        if time.monotonic() - reported > REPORT:
            reported = time.monotonic()
            _send(pipe, float(share))

    while (cell := inbox.get()) is not None:
        _send(pipe, attempt(cell, Path(root), stop.is_set, report))


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError:
        # The other side is gone; that the pipe ended is heard by whoever listens.
        return
