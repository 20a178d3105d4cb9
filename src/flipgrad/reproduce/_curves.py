"""What the experiments that train on images share: their cells, their result file, and numbers about curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any, final

from flipgrad.estimators.names import for_training
from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._training import TrainingPlan
from flipgrad.reproduce._workshop import Workshop
from flipgrad.training.config import AUTO

# The loss of guessing one of ten classes.
GUESSING = log(10)


@final
@dataclass(frozen=True)
class TrainingCurves:
    """One training, as it is stored and as claims look at it.

    Attributes:
        method: what figures call its estimator.
        augment: the augmentation.
        searched: whether the rate was searched for.
        starred: whether figures mark rates that were searched for.
        relaxed: whether the estimator has an objective of its own.
        rate: the learning rate; None if all trials of the search diverged.
        trials: of the search.
        diverged: what happened if it came to no end.
        curves: numbers of every epoch, None where they are not finite.
        seconds: that it took.
    """

    method: str
    augment: str
    searched: bool
    starred: bool
    relaxed: bool
    rate: float | None
    trials: Sequence[Mapping[str, Any]]
    diverged: str | None
    curves: Mapping[str, Sequence[float | None]]
    seconds: float

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

    @property
    def told_rate(self) -> str:
        """The rate for a person."""
        return "none" if self.rate is None else f"{self.rate:.2g}"

    def has_a_tenth_of_the_rate_of(self, other: TrainingCurves) -> bool:
        """Whether both have a rate, and this one's is a tenth of the other's or less."""
        return self.rate is not None and other.rate is not None and self.rate <= 0.1 * other.rate


def measure(
    shop: Workshop, name: str, plan: TrainingPlan, cells: Sequence[Cell], *, starred: bool = False
) -> tuple[list[TrainingCurves], Path]:
    """Do the cells, write the result file, and return the trainings and the file."""
    records = shop.cells(name, cells)
    found = [_curves(records[cell.name], starred) for cell in cells]
    seconds = sum(record["seconds"] for record in records.values())
    return found, shop.store(name, {"plan": asdict(plan), "runs": [asdict(curves) for curves in found], "seconds": seconds})


def _curves(record: Mapping[str, Any], starred: bool) -> TrainingCurves:
    config, result = record["settings"]["config"], record["result"]
    label, estimator = for_training(config["estimator"], 1)
    return TrainingCurves(
        method=label,
        augment=config["augment"],
        searched=config["lr"] == AUTO,
        starred=starred,
        relaxed=estimator.relaxed_objective,
        **{key: result[key] for key in ("rate", "trials", "diverged", "curves")},
        seconds=record["seconds"],
    )
