"""Cells: independent pieces of an experiment, each with a folder of its own, done once however often they are begun.

A cell's result is one file, which appears whole when the cell is done. So nothing is counted twice: a cell that was cut, whose
machine died, or that two processes were given, ends with one result.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, final

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.machine import threads
from flipgrad.training.lock import FolderLock

RESULT, SPENT, ERROR = "result.json", "spent.json", "error.txt"
# What to do about a file that cannot be read.
AGAIN = "delete it, it is made again"
# Seconds between two attempts to lock a folder that another process holds, and, in runners, between two looks at who watches.
LOOK = 0.2
# Seconds that cells have to save their work when they are stopped.
GRACE = 60.0


def read_result(path: Path) -> dict[str, Any]:
    """What is in a JSON file of a reproduction; a damaged one is an :class:`InputError` that says to delete it."""
    return files.read_json(path, missing=AGAIN, broken=AGAIN)


class CellError(RuntimeError):
    """Cells failed; the results of all others are kept."""


@final
@dataclass(frozen=True)
class Place:
    """What a cell works with.

    Attributes:
        folder: its own, where it keeps what it needs to go on.
        inputs: see :class:`Cell`.
        stop: whether it has been asked to stop: then it saves what it has and raises KeyboardInterrupt.
        report: told which share of the work is done.
    """

    folder: Path
    inputs: Mapping[str, str]
    stop: Callable[[], bool]
    report: Callable[[float], None]

    def tick(self, share: float) -> None:
        """Tell which share is done, and stop here if asked to; for work that has nothing to save."""
        self.report(share)
        if self.stop():
            raise KeyboardInterrupt


# What a cell does: a function of a module, so that another process can be told its name.
Work = Callable[[Mapping[str, Any], Place], Mapping[str, Any]]


@final
@dataclass(frozen=True)
class Cell:
    """An independent piece of work.

    Attributes:
        name: of its folder.
        work: makes the result, ready for JSON, from the settings.
        settings: what determines the result, ready for JSON.
        cost: how many units of progress it is, such as epochs.
        inputs: where things are that it needs; they do not determine the result.
    """

    name: str
    work: Work
    settings: Mapping[str, Any]
    cost: int = 1
    inputs: Mapping[str, str] = field(default_factory=dict)

    def folder(self, root: Path) -> Path:
        """Its own among those of all cells."""
        # Not every file system takes the colon of "concrete:0.1".
        return root / self.name.replace(":", "-")

    def read(self, root: Path) -> dict[str, Any] | None:
        """The stored record of this cell, None if it is not done.

        Raises:
            InputError: if the file is damaged, or of other settings.
        """
        path = self.folder(root) / RESULT
        if not path.exists():
            return None
        try:
            record = read_result(path)
            settings = record["settings"]
            dict(record["result"])
        except InputError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"'{path}' is damaged ({error}); {AGAIN}") from None
        if settings != json.loads(json.dumps(self.settings)):
            raise InputError(f"'{path}' is of other settings; give another --output, or delete it")
        return record


@final
@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a cell that is "done" has its result, one that "stopped" can go on."""

    name: str
    kind: Literal["done", "stopped", "bad input", "failed"]
    message: str = ""


class Runner(Protocol):
    """Runs cells somewhere."""

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        """Do all cells, each in its folder below ``root``.

        Args:
            cells: those that are not done.
            root: the folder of folders.
            tell: told the name of a cell and how many more of its units are done, several times a second; where it raises
                KeyboardInterrupt, all cells are stopped.

        Raises:
            CellError: if a cell failed; the others are done nevertheless.
            InputError: if a cell found its input wrong; then all cells are stopped.
        """


@final
class Ledger:
    """What has become of the cells of a run: how much of each was told, and which failed.

    Args:
        root: the folder of the cells' folders.
        tell: see :class:`Runner`.
    """

    def __init__(self, root: Path, tell: Callable[[str, int], None]) -> None:
        self._root, self._tell = root, tell
        self._told: dict[str, int] = {}
        self._failures: list[Outcome] = []

    def advance(self, cell: Cell, share: float) -> None:
        """Tell which share of a cell is done."""
        done = round(share * cell.cost)
        new, self._told[cell.name] = done - self._told.get(cell.name, 0), done
        self._tell(cell.name, new)

    def look(self, what: str) -> None:
        """Say what is at hand; whoever watches may interrupt here."""
        self._tell(what, 0)

    def end(self, cell: Cell, outcome: Outcome) -> None:
        """Note how a cell ended.

        Raises:
            KeyboardInterrupt: if it was asked to stop: then all of them are.
            InputError: if its input was wrong: the other cells would find the same.
        """
        if outcome.kind == "stopped":
            raise KeyboardInterrupt
        if outcome.kind == "bad input":
            raise InputError(f"{cell.name}: {outcome.message}")
        if outcome.kind == "failed":
            self._failures.append(outcome)
        self.advance(cell, 1.0)

    def close(self) -> None:
        """Raise a :class:`CellError` that names all cells that failed, if there are any."""
        if self._failures:
            told = "; ".join(f"{outcome.name} ({outcome.message.splitlines()[0]:.200})" for outcome in self._failures)
            raise CellError(
                f"{len(self._failures)} cell{'s' * (len(self._failures) > 1)} failed: {told}. More is in {ERROR} of their "
                f"folders in {self._root}; all other results are kept, and the same command tries these again"
            )


def attempt(cell: Cell, root: Path, stop: Callable[[], bool], report: Callable[[float], None]) -> Outcome:
    """Do a cell, unless it is done or another process is doing it: then wait for that one.

    It runs on one thread: cells share the cores, and their numbers do not depend on how many run side by side.
    """
    folder = cell.folder(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _held(folder, stop), threads(1):
            if stop():
                raise KeyboardInterrupt
            if cell.read(root) is None:
                _work(cell, folder, stop, report)
    except KeyboardInterrupt:
        return Outcome(cell.name, "stopped")
    except InputError as error:
        return Outcome(cell.name, "bad input", str(error))
    except Exception as error:  # whatever it is, the other cells go on
        with suppress(OSError):
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        return Outcome(cell.name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(cell.name, "done")


def _work(cell: Cell, folder: Path, stop: Callable[[], bool], report: Callable[[float], None]) -> None:
    started, before = time.perf_counter(), _spent(folder)

    def seconds() -> float:
        return before + time.perf_counter() - started

    try:
        result = cell.work(cell.settings, Place(folder, cell.inputs, stop, report))
    except KeyboardInterrupt:
        files.write_json(folder / SPENT, {"seconds": seconds()})
        raise
    record = {"name": cell.name, "settings": dict(cell.settings), "result": dict(result), "seconds": seconds()}
    files.write_json(folder / RESULT, {**record, **files.provenance()})
    for name in (SPENT, ERROR):
        (folder / name).unlink(missing_ok=True)


def _spent(folder: Path) -> float:
    """Seconds of earlier attempts that were asked to stop."""
    try:
        return float(read_result(folder / SPENT)["seconds"])
    except (ValueError, TypeError, KeyError):
        return 0.0


@contextmanager
def _held(folder: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder. The system lets go of the folders of a process that died."""
    lock = None
    while lock is None:
        try:
            lock = FolderLock(folder)
        except InputError:
            if stop():
                raise KeyboardInterrupt from None
            time.sleep(LOOK)
    try:
        yield
    finally:
        lock.release()
