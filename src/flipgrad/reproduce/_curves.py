"""What the experiments that train on images share: their cells, their result file, and numbers about curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, final

from flipgrad.estimators.names import for_training
from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._workshop import Workshop
from flipgrad.training.config import AUTO

# The loss of guessing one of ten classes.
GUESSING = log(10)


@final
@dataclass(frozen=True)
class TrainingCurves:
    """One training, as claims look at it; the values of an epoch are where it was reached."""

    method: str
    augment: str
    rate: float | None
    searched: bool
    relaxed: bool
    diverged: str | None
    curves: Mapping[str, Sequence[float | None]]

    def values(self, key: str) -> list[float]:
        """The numbers of a curve, without those that are none."""
        return [value for value in self.curves.get(key, []) if value is not None]

    def last(self, key: str) -> float:
        """The mean of the last fifth of a curve, which is less noisy than its last value; NaN where there is none."""
        values = self.values(key)
        tail = values[-max(1, len(values) // 5) :]
        return sum(tail) / len(tail) if tail else float("nan")

    def told(self, key: str = "train_loss") -> str:
        """The number for a person."""
        return f"{self.method} {self.last(key):.3f}{' (diverged)' if self.diverged else ''}"


def measure(
    shop: Workshop, name: str, cells: Sequence[Cell], facts: Mapping[str, Any], *, starred: bool = False
) -> tuple[list[TrainingCurves], Any]:
    """Do the cells, write the result file, and return the trainings and the file."""
    records = shop.cells(name, cells)
    entries = [_entry(records[cell.name], starred) for cell in cells]
    seconds = sum(record["seconds"] for record in records.values())
    path = shop.store(name, {**facts, "runs": entries, "seconds": seconds})
    keys = ("method", "augment", "rate", "searched", "relaxed", "diverged", "curves")
    return [TrainingCurves(**{key: entry[key] for key in keys}) for entry in entries], path


def _entry(record: Mapping[str, Any], starred: bool) -> dict[str, Any]:
    config, result = record["settings"]["config"], record["result"]
    label, estimator = for_training(config["estimator"], 1)
    return {
        "method": label,
        "augment": config["augment"],
        "searched": config["lr"] == AUTO,
        "starred": starred,
        "relaxed": estimator.relaxed_objective,
        "rate": result["rate"],
        "trials": result["trials"],
        "diverged": result["diverged"],
        "curves": result["curves"],
        "seconds": record["seconds"],
    }
