"""Cells: independent pieces of an experiment, each with a folder of its own, done once however often they are begun.

A cell's result is one file, which appears whole when the cell is done. So nothing is counted twice: a cell that was cut, whose
machine died, or that two processes were given, ends with one result.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.machine import threads
from flipgrad.training.lock import FolderLock

RESULT, SPENT, ERROR = "result.json", "spent.json", "error.txt"
# What to do about a file that cannot be read.
AGAIN = "delete it, it is made again"
# Seconds between two attempts to lock a folder that another process holds, and, in runners, between two looks at who watches.
LOOK = 0.2


def read_result(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON file of a reproduction; one that is damaged or lacks a key is an :class:`InputError` that says to delete it."""
    record = files.read_json(path, missing=AGAIN, broken=AGAIN)
    for key in keys:
        if key not in record:
            raise InputError(f"'{path}' is damaged (it has no {key!r}); {AGAIN}")
    return record


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


@final
@dataclass(frozen=True)
class Cell:
    """An independent piece of work.

    Attributes:
        name: of its folder.
        work: makes the result, ready for JSON, from the settings: a function of a module, so that another process knows it.
        settings: what determines the result, ready for JSON.
        cost: how many units of progress it is, such as epochs.
        inputs: where things are that it needs; they do not determine the result.
    """

    name: str
    work: Callable[[Mapping[str, Any], Place], Mapping[str, Any]]
    settings: Mapping[str, Any]
    cost: int = 1
    inputs: Mapping[str, str] = field(default_factory=dict)

    def folder(self, root: Path) -> Path:
        """Its own among those of all cells."""
        # Not every file system takes the colon of "concrete:0.1".
        return root / self.name.replace(":", "-")

    def read(self, root: Path) -> dict[str, Any] | None:
        """Its stored record, None if it is not done; an :class:`InputError` if that is damaged, or of other settings."""
        path = self.folder(root) / RESULT
        if not path.exists():
            return None
        record = read_result(path, "settings", "result")
        if record["settings"] != json.loads(json.dumps(self.settings)):
            raise InputError(f"'{path}' is of other settings; give another --output, or delete it")
        return record


@final
@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a cell that is "done" has its result, one that "stopped" can go on."""

    kind: Literal["done", "stopped", "bad input", "failed"]
    message: str = ""


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
                _work(cell, Place(folder, cell.inputs, stop, report))
    except KeyboardInterrupt:
        return Outcome("stopped")
    except InputError as error:
        return Outcome("bad input", str(error))
    except Exception as error:  # whatever it is, the other cells go on
        with suppress(OSError):
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        return Outcome("failed", f"{type(error).__name__}: {error}")
    return Outcome("done")


def _work(cell: Cell, place: Place) -> None:
    """Do a cell and store its record, whose seconds include those of earlier attempts that were asked to stop."""
    started, before = time.perf_counter(), 0.0
    with suppress(ValueError, TypeError, KeyError):
        before = float(read_result(place.folder / SPENT)["seconds"])
    try:
        result = cell.work(cell.settings, place)
    except KeyboardInterrupt:
        files.write_json(place.folder / SPENT, {"seconds": before + time.perf_counter() - started})
        raise
    seconds = before + time.perf_counter() - started
    record = {"name": cell.name, "settings": dict(cell.settings), "result": dict(result), "seconds": seconds}
    files.write_json(place.folder / RESULT, {**record, **files.provenance()})
    for name in (SPENT, ERROR):
        (place.folder / name).unlink(missing_ok=True)


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
