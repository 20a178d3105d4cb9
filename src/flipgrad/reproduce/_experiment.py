"""What a figure of the paper is: how it is made, where it stands, what it costs, and what the numbers say of the claims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from flipgrad import files
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._workshop import SCALES, Workshop


@final
@dataclass(frozen=True)
class CoreTime:
    """The processor time of an experiment.

    Attributes:
        seconds: by scale, on one core of the machine of :data:`flipgrad.reproduce.costs.PROBE`, the training of networks that
            several figures share included. At the paper's scale, and in part for muprop and beyond at the small one, it is
            computed from the times of single updates and draws.
        cells: by scale, how many cores can work at it.
    """

    seconds: tuple[float, float, float]
    cells: tuple[int, int, int] = (1, 1, 1)

    def elapsed(self, scale: str, cores: int) -> float:
        """Seconds at a scale, with that many cores."""
        number = list(SCALES).index(scale)
        return self.seconds[number] / min(cores, self.cells[number])


@final
@dataclass(frozen=True)
class Claim:
    """A statement of the paper, whether it holds here, and the numbers that say so."""

    text: str
    holds: bool
    numbers: str

    def __str__(self) -> str:
        return f"- {'Holds' if self.holds else 'DOES NOT HOLD'}: {self.text}\n  {self.numbers}"


@final
@dataclass(frozen=True)
class Sheet:
    """A table of text; the first column names the rows."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join([self.caption, "", *(f"| {' | '.join(line)} |" for line in lines)])


class Experiment(ABC):
    """One figure.

    Attributes:
        name: on the command line, and of its files.
        title: of its text.
        place: the figure or table of the paper.
        words: what the paper shows there, and what it says of it.
        figures: names and captions of its figures beside the one that is called as the experiment.
        cost: its processor time.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    place: ClassVar[str]
    words: ClassVar[str]
    figures: ClassVar[Mapping[str, str]] = {}
    cost: ClassVar[CoreTime]

    @abstractmethod
    def run(self, shop: Workshop) -> Sequence[Claim | Sheet]:
        """Measure what is missing, draw, and return what the numbers say: the claims, then tables if there are some."""

    @final
    def reproduce(self, shop: Workshop) -> str:
        """Run, and write ``NAME.json`` and ``NAME.md`` beside the figure; returns the text."""
        with shop.timed(self.name):
            found = self.run(shop)
        claims = [part for part in found if isinstance(part, Claim)]
        sheets = [part for part in found if isinstance(part, Sheet)]
        text = "\n\n".join([f"# {self.title}", "\n".join(map(str, claims)), *map(str, sheets)]) + "\n"
        record = {
            "figure": self.name,
            "title": self.title,
            "scale": shop.scale_name,
            "claims": [asdict(claim) for claim in claims],
            "sheets": [asdict(sheet) for sheet in sheets],
            "seconds": shop.spent(self.name),
        }
        files.write_json(shop.folder / f"{self.name}.json", {**record, "seed": shop.seed, **files.provenance()})
        files.write(shop.folder / f"{self.name}.md", text.encode())
        return text


@final
@dataclass(frozen=True)
class Accuracies:
    """The accuracies in a result file, looked up by estimator and layer."""

    estimators: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> Accuracies:
        return Accuracies(read_result(path)["estimators"])

    def layer(self, estimator: str, layer: str) -> dict[str, Any]:
        """One estimator's accuracy in one layer."""
        (found,) = [entry for entry in self.estimators[estimator]["layers"] if entry["name"] == layer]
        return dict(found)

    def rmse(self, estimator: str, layer: str, samples: int = 1) -> float:
        """The relative RMSE with ``samples`` draws, or the most below that were measured."""
        entry = self.layer(estimator, layer)
        within = [error for m, error in zip(entry["samples"], entry["rmse"], strict=True) if m <= samples]
        return float(within[-1])

    def ratio(self, estimator: str, other: str, layer: str) -> float:
        """The RMSE of one estimator over that of another, with one draw."""
        return self.rmse(estimator, layer) / self.rmse(other, layer)

    def most_samples(self, estimator: str) -> int:
        """The largest number of draws in an estimate."""
        return int(self.estimators[estimator]["layers"][0]["samples"][-1])
