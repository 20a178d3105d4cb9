"""What a figure of the paper is made of: networks, measurements, a picture, and what the numbers say of the claims."""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from flipgrad import exact, files, gradeval
from flipgrad.data import Split, toy
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import AGAIN, Cell, Runner
from flipgrad.reproduce._local import LocalRunner
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import reference_training

# The kind of the file of a network; changes with the meaning of what is stored.
NETWORK_FORMAT = "network 1"
# Told what is at hand, how much of it is new, and how much it is in all.
Report = Callable[[str, int, int], None]


@final
@dataclass(frozen=True)
class Scale:
    """How much work goes into a figure.

    Attributes:
        samples: draws per estimator where the paper takes 10,000.
        epochs: when the reference training is looked at: the paper's 1, 100 and 2,000, or something quick.
    """

    samples: int
    epochs: tuple[int, int, int]


SCALES = {
    "smoke": Scale(100, (1, 2, 3)),
    "small": Scale(1000, (1, 100, 2000)),
    "paper": Scale(10_000, (1, 100, 2000)),
}


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

    def markdown(self) -> list[str]:
        """Its lines."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return [self.caption, "", *(f"| {' | '.join(line)} |" for line in lines)]


@final
class Workshop:
    """The folder of a reproduction: trained networks and measurements are made once, and found again later.

    Args:
        folder: where everything is kept.
        scale: the name of the scale.
        seed: of data, training and draws.
        report: for a progress bar.
        overwrite: whether results of another scale or seed there may be replaced.
        runner: runs cells; by default one after the other in this process.
        images: the folder of CIFAR-10; by default it is looked for when it is needed.
        augmentations: of the experiment on CIFAR-10; by default those of the scale.
    """

    MARK = "reproduce.json"
    SPENT = "spent.json"
    CELLS, MEASURED, NETWORKS = "cells", "measured", "networks"

    def __init__(
        self,
        folder: Path,
        scale: str,
        seed: int,
        report: Report,
        *,
        overwrite: bool = False,
        runner: Runner | None = None,
        images: Path | None = None,
        augmentations: Sequence[str] | None = None,
    ) -> None:
        if scale not in SCALES:
            raise InputError(f"scale {scale!r}: choose {', '.join(SCALES)}")
        self.scale, self.scale_name, self.seed, self.report = SCALES[scale], scale, seed, report
        self.runner, self.images, self.augmentations = runner or LocalRunner(1), images, augmentations
        settings = {"scale": scale, "seed": seed}
        mark = folder / self.MARK
        found = _read(mark) if os.path.exists(mark) else None
        if found is not None and found != settings and not overwrite:
            raise InputError(
                f"'{folder}' holds results of scale {found.get('scale')!r} and seed {found.get('seed')}; give another "
                "--output, or --overwrite"
            )
        self.folder = files.new_folder(folder, overwrite=overwrite or found is not None)
        if found != settings:
            for old in (*folder.glob("measured/*.json"), *folder.glob("networks/*.safetensors")):
                old.unlink()
            shutil.rmtree(folder / self.CELLS, ignore_errors=True)
            (folder / self.SPENT).unlink(missing_ok=True)
        files.write_json(mark, settings)
        for name in (self.CELLS, self.MEASURED, self.NETWORKS):
            (folder / name).mkdir(exist_ok=True)
        self.data: Split = toy(seed=seed).train

    def network(self, widths: Sequence[int], epoch: int, epochs: Sequence[int], number: int = 0) -> Sequential:
        """The network of these ``widths`` after ``epoch``, trained now (and kept at all ``epochs``) if it is not there yet.

        ``number`` tells several trainings of the same kind apart.
        """
        name = _name(widths) + (f"-number-{number}" if number else "")
        paths = {at: self.folder / "networks" / f"{name}-epoch-{at}.safetensors" for at in epochs}
        if not paths[epoch].exists():
            nets = reference_training(
                self.data,
                widths,
                epochs,
                seed=self.seed + number,
                report=lambda _: self.report(f"train {name}", 1, max(epochs)),
            )
            for at, net in nets.items():
                files.write(paths[at], files.tensors_to_bytes(NETWORK_FORMAT, net.state_dict()))
        net = fully_connected(self.data.x.shape[1], widths, 2)
        try:
            net.load_state_dict(files.read_tensors(paths[epoch], NETWORK_FORMAT, missing=AGAIN, broken=AGAIN)[0])
        except RuntimeError as error:
            raise InputError(f"'{paths[epoch]}' is no network of this kind ({error}); {AGAIN}") from None
        return net

    def measure(
        self,
        widths: Sequence[int],
        epoch: int,
        epochs: Sequence[int],
        estimators: Sequence[str],
        samples: int,
        number: int = 0,
        apart: str = "",
    ) -> Path:
        """The result file with the accuracies of ``estimators``; measured now, those that are not there yet.

        ``apart`` names a file of its own: figures show all estimators that are in theirs.
        """
        name = _name(widths) + (f"-number-{number}" if number else "")
        path = self.folder / "measured" / f"{name}-epoch-{epoch}-{samples}{f'-{apart}' if apart else ''}.json"
        found = _read(path) if path.exists() else {"estimators": {}}
        net, x, objective = self.network(widths, epoch, epochs, number), self.data.x, CrossEntropy(self.data.y)
        named = gradeval.by_name(estimators, lambda: exact.expected_loss(net, x, objective).detach())
        missing = {label: estimator for label, estimator in named.items() if label not in found["estimators"]}
        total = samples * len(missing)
        for label, estimator in missing.items():

            def report(_: str, new: int, label: str = label) -> None:
                self.report(f"{name}, epoch {epoch}: {label}", new, total)

            result = gradeval.evaluate(net, x, objective, {label: estimator}, samples, seed=self.seed, report=report).to_dict()
            found = {**result, "estimators": {**found["estimators"], **result["estimators"]}}
            # After every estimator: an interruption loses one of them at most.
            files.write_json(path, {**found, "widths": list(widths), "epoch": epoch})
        return path

    def cells(self, stage: str, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        """The stored records of ``cells`` by name; those that are not done are done now."""
        root = self.folder / self.CELLS
        missing = [cell for cell in cells if cell.read(root) is None]
        if missing:
            total = sum(cell.cost for cell in missing)
            self.runner.run(missing, root, lambda name, new: self.report(f"{stage}: {name}", new, total))
        records = {cell.name: cell.read(root) for cell in cells}
        return {name: record for name, record in records.items() if record is not None}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time inside to what the experiment has taken so far, also where it is interrupted."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.spent(name) + time.perf_counter() - started
            files.write_json(self.folder / self.SPENT, {**self._all_spent(), name: seconds})

    def spent(self, name: str) -> float:
        """Seconds that an experiment has taken so far, in all commands."""
        return float(self._all_spent().get(name, 0.0))

    def _all_spent(self) -> dict[str, Any]:
        path = self.folder / self.SPENT
        return _read(path) if path.exists() else {}

    def load(self, path: Path) -> dict[str, Any]:
        """What is in a result file."""
        return _read(path)

    def store(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write what a figure is drawn from, and return the file."""
        path = self.folder / self.MEASURED / f"{name}.json"
        # On one line: these are long lists of numbers.
        files.write_json(path, {**value, "scale": self.scale_name, "seed": self.seed}, indent=None)
        return path


class Experiment(ABC):
    """One figure."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def run(self, shop: Workshop) -> list[Claim]:
        """Measure what is missing, draw, and say what the numbers say."""

    def sheets(self, shop: Workshop) -> list[Sheet]:
        """The tables that the text has beside the claims, if there are some."""
        return []

    @final
    def reproduce(self, shop: Workshop) -> str:
        """Run, and write ``NAME.json`` and ``NAME.md`` beside the figure; returns the text."""
        with shop.timed(self.name):
            claims, sheets = self.run(shop), self.sheets(shop)
        tables = [line for sheet in sheets for line in (*sheet.markdown(), "")]
        text = "\n".join([f"# {self.title}", "", *(str(claim) for claim in claims), "", *tables]).rstrip() + "\n"
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
class Table:
    """The accuracies in a result file, looked up by estimator and layer."""

    estimators: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> Table:
        return Table(_read(path)["estimators"])

    def layer(self, estimator: str, layer: str) -> dict[str, Any]:
        """One estimator's accuracy in one layer."""
        (found,) = [entry for entry in self.estimators[estimator]["layers"] if entry["name"] == layer]
        return dict(found)

    def rmse(self, estimator: str, layer: str, samples: int = 1) -> float:
        """The relative RMSE with so many draws, or the most that were measured."""
        entry = self.layer(estimator, layer)
        within = [error for m, error in zip(entry["samples"], entry["rmse"], strict=True) if m <= samples]
        return float(within[-1])

    def most(self, estimator: str) -> int:
        """The largest number of draws in an estimate."""
        return int(self.estimators[estimator]["layers"][0]["samples"][-1])


def _name(widths: Sequence[int]) -> str:
    return "-".join(str(width) for width in widths)


def _read(path: Path) -> dict[str, Any]:
    return files.read_json(path, missing=AGAIN, broken=AGAIN)
