"""Runs attacks in child processes, on all workers at once, and counts what they find."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import final

from torture.attack import Attack, Outcome
from torture.table import Finding, Row
from torture.worker import SETUP, Worker

# Seconds of work that a child process is given at once: enough to be worth its start.
PORTION = 10.0
# Starting a child process and making it ready, in seconds.
START = 0.5


def planned(attack: Attack, minutes: float) -> int:
    """The attempts of an attack in a campaign of so many minutes; 60 is a full one."""
    return max(1, round(attack.full * minutes / 60))


def expected_seconds(rows: Sequence[Row], workers: int) -> float:
    """How long the campaign is going to take on quiet cores."""
    return sum(row.planned * row.attack.seconds * row.attack.cores for row in rows) / workers


@final
class Campaign:
    """Attacks, some at a time.

    Args:
        rows: what to do; they are filled.
        seed: of all random choices.
        workers: processes at a time.
        found: told of every finding at once.
        progress: told the share of all work that is done, and what is being done.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        workers: int,
        found: Callable[[Finding], None] = lambda finding: None,
        progress: Callable[[float, str], None] = lambda share, what: None,
    ) -> None:
        self._rows = {row.attack.name: row for row in rows}
        self._seed, self._free = seed, workers
        self._found, self._progress = found, progress
        self._running: list[Worker] = []

    def run(self, numbers: Sequence[int] | None = None) -> None:
        """Do all attempts, or those of the given ``numbers`` of every attack.

        Raises:
            KeyboardInterrupt: when told to stop; what was done until then is in the rows.
        """
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            shared = {name: Path(folder) / name / "shared" for name in self._rows}
            for path in shared.values():
                path.mkdir(parents=True)
            try:
                self._work([(row.attack, [SETUP]) for row in self._rows.values()], shared)
                portions = [
                    (row.attack, portion)
                    for row in self._rows.values()
                    for portion in _portions(row.attack, list(numbers or range(row.planned)))
                ]
                self._work(_mixed(portions), shared)
            finally:
                for worker in self._running:
                    worker.stop()

    def _work(self, portions: Sequence[tuple[Attack, list[int]]], shared: dict[str, Path]) -> None:
        waiting = deque(portions)
        workers = self._free
        while waiting or self._running:
            while waiting and (not self._running or waiting[0][0].cores <= self._free):
                attack, numbers = waiting.popleft()
                self._free -= attack.cores
                self._running.append(Worker(attack, numbers, self._seed, shared[attack.name]))
            wait([worker.connection for worker in self._running], timeout=1)
            for worker in list(self._running):
                rest = self._listen(worker)
                if rest is not None:
                    worker.stop()
                    self._running.remove(worker)
                    self._free += worker.attack.cores
                    if rest:
                        waiting.appendleft((worker.attack, rest))
        self._free = workers

    def _listen(self, worker: Worker) -> list[int] | None:
        """Hear what a worker has to tell; when it has ended, the numbers of the attempts that it has not done."""
        try:
            while worker.connection.poll():
                what, number, *more = worker.connection.recv()
                if what == "end":
                    self._count(worker, number, more[0])
                worker.current, worker.began = number, time.monotonic()
                if what == "end" and number == worker.numbers[-1]:
                    return []
        except EOFError:
            return self._lost(worker, "crash", worker.death())
        if worker.late:
            return self._lost(worker, "hang", f"no end after {worker.attack.limit:g} seconds")
        return None

    def _lost(self, worker: Worker, kind: str, text: str) -> list[int]:
        """A worker that died or hangs: count the attempt at hand; the others can still be done."""
        self._count(worker, worker.current, Outcome(faults=[(kind, text)]))  # type: ignore[list-item]
        if worker.current == SETUP:
            return []
        return worker.numbers[worker.numbers.index(worker.current) + 1 :]

    def _count(self, worker: Worker, number: int, outcome: Outcome) -> None:
        row = self._rows[worker.attack.name]
        before = len(row.findings)
        row.add(number, outcome, time.monotonic() - worker.began)
        if number == SETUP:
            row.done -= 1
        for finding in row.findings[before:]:
            self._found(finding)
        total = sum(row.planned * row.attack.seconds for row in self._rows.values())
        done = sum(row.done * row.attack.seconds for row in self._rows.values())
        self._progress(done / total, row.attack.title)


def _portions(attack: Attack, numbers: list[int]) -> list[list[int]]:
    size = max(1, round(PORTION / attack.seconds))
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _mixed(portions: Sequence[tuple[Attack, list[int]]]) -> list[tuple[Attack, list[int]]]:
    """All attacks in step, so that a campaign that is stopped has done a share of each; those for all cores come first."""
    of_attack: dict[str, int] = {}
    for attack, _ in portions:
        of_attack[attack.name] = of_attack.get(attack.name, 0) + 1
    order, seen = [], dict.fromkeys(of_attack, 0)
    for index, (attack, _) in enumerate(portions):
        seen[attack.name] += 1
        order.append((-attack.cores, seen[attack.name] / of_attack[attack.name], index))
    return [portions[index] for *_, index in sorted(order)]
