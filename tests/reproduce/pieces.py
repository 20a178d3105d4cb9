"""Work for the cells of tests, functions of a module, as other processes need them; and where they work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import flipgrad as fg
from flipgrad.reproduce._cells import Cell, Place


def silent(*_: object) -> None:
    """Nobody watches."""


def place(folder: Path, stop=lambda: False, report=lambda share: None, **inputs: str) -> Place:
    """Where a cell works, alone in this process."""
    folder.mkdir(exist_ok=True)
    return Place(folder, inputs, stop, report)


def _note(place: Place, line: str) -> None:
    """Who worked, in a file that every attempt adds to."""
    with (place.folder / "log.txt").open("a") as file:
        file.write(f"{line} {os.getpid()}\n")


def count(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Counts slowly, and goes on where an earlier attempt had got to."""
    _note(place, "begun")
    kept = place.folder / "kept.txt"
    start = int(kept.read_text()) if kept.exists() else 0
    for done in range(start, settings["steps"]):
        time.sleep(settings.get("seconds", 0.01))
        kept.write_text(str(done + 1))
        place.tick((done + 1) / settings["steps"])
    return {"counted": settings["steps"], "from": start, "threads": torch.get_num_threads()}


def fail(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    raise ZeroDivisionError("one over nothing")


def refuse(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    raise fg.InputError("no such data; bring it")


def die(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Killed the first time, as by a machine that runs out of memory."""
    _note(place, "begun")
    if not (place.folder / "died").exists():
        (place.folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"counted": 1}


def counting(number: int, steps: int = 3, seconds: float = 0.01) -> Cell:
    return Cell(f"count-{number}", count, {"number": number, "steps": steps, "seconds": seconds}, cost=steps)


def attempts(root: Path, cell: Cell) -> list[str]:
    """The processes that began a cell."""
    return [line.split()[1] for line in (root / cell.name / "log.txt").read_text().splitlines()]
