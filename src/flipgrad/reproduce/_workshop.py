"""What a figure of the paper is, and the folder in which figures are made: networks and measurements are made there once."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flipgrad import exact, files, gradeval, tensor_files
from flipgrad.data import toy
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import AGAIN, RESULT, Cell, DaskRunner, LocalRunner, read_result
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import reference_training

# The kind of the file of a network; changes with the meaning of what is stored.
NETWORK_FORMAT = "network 1"


@dataclass(frozen=True)
class Scale:
    """How much work goes into a figure: ``samples`` draws per estimator where the paper takes 10,000.

    The reference training is looked at after ``epochs``: the paper's 1, 100 and 2,000, or something quick.
    """

    samples: int
    epochs: tuple[int, int, int]


# The sizes of experiments by name. The medium one is that of few experiments, whose small one leaves questions open.
MEDIUM = "medium"
SCALES = {
    "smoke": Scale(100, (1, 2, 3)),
    "small": Scale(1000, (1, 100, 2000)),
    "medium": Scale(1000, (1, 100, 2000)),
    "paper": Scale(10_000, (1, 100, 2000)),
}


@dataclass(frozen=True)
class ToyNet:
    """A network of the toy problem after an ``epoch`` of its training, which is looked at after several ``epochs``.

    The ``number`` tells several trainings of the same kind apart.
    """

    widths: tuple[int, ...]
    epoch: int = 1
    epochs: tuple[int, ...] = (1,)
    number: int = 0

    @property
    def shape(self) -> str:
        """Such as "5-5-5"."""
        return "-".join(map(str, self.widths))

    @property
    def training(self) -> str:
        """The name of its training."""
        return self.shape + (f"-number-{self.number}" if self.number else "")


# From kept measurements, the result and the seconds of cells by their names.
Results = Callable[[Mapping[str, Any]], Mapping[str, tuple[Mapping[str, Any], float]]]


class Workshop:
    """The folder of a reproduction: trained networks and measurements are made once, and found again later.

    Args:
        folder: where everything is kept.
        scale: the name of the scale.
        seed: of data, training and draws.
        report: for a progress bar: told what is at hand, how much of it is new, and how much it is in all.
        overwrite: whether results of another scale or seed there may be replaced.
        runner: runs cells; by default one after the other in this process.
        images: the folder of CIFAR-10; by default it is looked for when it is needed.
        augmentations: of the experiment on CIFAR-10; by default those of the scale.
        finished: do no more work: of cells, only those that are done are looked at.
        kept: a folder of :func:`flipgrad.reproduce.keep`, whose finished cells need not be done again.
    """

    MARK = "reproduce.json"
    SPENT = "spent.json"
    CELLS, MEASURED, NETWORKS = "cells", "measured", "networks"

    def __init__(
        self,
        folder: Path,
        scale: str,
        seed: int,
        report: Callable[[str, int, int], None],
        *,
        overwrite: bool = False,
        runner: LocalRunner | DaskRunner | None = None,
        images: Path | None = None,
        augmentations: Sequence[str] | None = None,
        finished: bool = False,
        kept: Path | None = None,
    ) -> None:
        if scale not in SCALES:
            raise InputError(f"scale {scale!r}: choose {', '.join(SCALES)}")
        self.scale, self.scale_name, self.seed, self.report = SCALES[scale], scale, seed, report
        self.runner, self.images, self.augmentations = runner or LocalRunner(1), images, augmentations
        self.finished, self.kept = finished, kept
        # Seconds of all cells that were looked at.
        self.cell_seconds = 0.0
        settings = {"scale": scale, "seed": seed}
        mark = folder / self.MARK
        found = read_result(mark) if os.path.exists(mark) else None
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
        self.data = toy(seed=seed).train

    def network(self, wanted: ToyNet) -> Sequential:
        """The trained network; its training is done now (and kept at all its epochs) if it is not there yet."""
        paths = {at: self.folder / self.NETWORKS / f"{wanted.training}-epoch-{at}.safetensors" for at in wanted.epochs}
        path = paths[wanted.epoch]
        if not path.exists():
            nets = reference_training(
                self.data,
                wanted.widths,
                wanted.epochs,
                seed=self.seed + wanted.number,
                report=lambda _: self.report(f"train {wanted.training}", 1, max(wanted.epochs)),
            )
            for at, net in nets.items():
                files.write(paths[at], tensor_files.tensors_to_bytes(NETWORK_FORMAT, net.state_dict()))
        net = fully_connected(self.data.x.shape[1], wanted.widths, 2)
        try:
            net.load_state_dict(tensor_files.read_tensors(path, NETWORK_FORMAT, missing=AGAIN, broken=AGAIN)[0])
        except RuntimeError as error:
            raise InputError(f"'{path}' is no network of this kind ({error}); {AGAIN}") from None
        return net

    def measure(self, subject: ToyNet, estimators: Sequence[str], samples: int, apart: str = "") -> Path:
        """The result file with the accuracies of ``estimators``; measured now, those that are not there yet.

        ``apart`` names a file of its own: figures show all estimators that are in theirs.
        """
        path = self.stored(f"{subject.training}-epoch-{subject.epoch}-{samples}{f'-{apart}' if apart else ''}")
        found = read_result(path) if path.exists() else {"estimators": {}}
        net, x, objective = self.network(subject), self.data.x, CrossEntropy(self.data.y)
        named = gradeval.by_name(estimators, lambda: exact.expected_loss(net, x, objective).detach())
        missing = {label: estimator for label, estimator in named.items() if label not in found["estimators"]}

        def report(label: str, new: int) -> None:
            self.report(f"{subject.training}, epoch {subject.epoch}: {label}", new, samples * len(missing))

        for label, estimator in missing.items():
            result = gradeval.evaluate(net, x, objective, {label: estimator}, samples, seed=self.seed, report=report).to_dict()
            found = {**result, "estimators": {**found["estimators"], **result["estimators"]}}
            # After every estimator: an interruption loses one of them at most.
            files.write_json(path, {**found, "widths": list(subject.widths), "epoch": subject.epoch})
        return path

    def cells(self, stage: str, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        """The stored records of ``cells`` by name; those that are not done are done now, or left out if ``finished``."""
        root = self.folder / self.CELLS
        missing = [cell for cell in cells if cell.read(root) is None]
        if missing and not self.finished:
            total = sum(cell.cost for cell in missing)
            self.runner.run(missing, root, lambda name, new: self.report(f"{stage}: {name}", new, total))
        records = {cell.name: record for cell in cells if (record := cell.read(root)) is not None}
        self.cell_seconds += sum(record["seconds"] for record in records.values())
        return records

    def take_over(
        self,
        stem: str,
        plan: Mapping[str, Any],
        cells: Sequence[Cell],
        results: Results,
        *,
        added: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Store what is kept of ``cells``, if anything is, as their results; that of another plan is refused.

        Plans that were kept before something was ``added`` to plans had these values of it.
        """
        if self.kept is None:
            return
        path = self.kept / self.MEASURED / f"{stem}.json"
        if not path.is_file():
            raise InputError(f"no trainings of this scale are kept: there is no '{path}'; leave out --kept")
        stored = read_result(path, "plan", "seed")
        if {**added, **stored["plan"]} != plan:
            raise InputError(f"'{path}' is of trainings of another length or size; leave out --kept")
        made = read_result(self.kept / f"{stem}.json", "versions", "machine")
        root, found = self.folder / self.CELLS, results(stored)
        for cell in cells:
            if cell.name in found and cell.read(root) is None:
                result, seconds = found[cell.name]
                record = {"name": cell.name, "settings": dict(cell.settings), "result": dict(result), "seconds": seconds}
                cell.folder(root).mkdir(parents=True, exist_ok=True)
                path = cell.folder(root) / RESULT
                files.write_json(path, {**record, "versions": made["versions"], "machine": made["machine"]})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time inside to what the experiment has taken so far, also where it is interrupted."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            files.write_json(self.folder / self.SPENT, {**self.spent(), name: self.spent().get(name, 0.0) + seconds})

    def spent(self) -> dict[str, float]:
        """Seconds that experiments have taken so far, in all commands, by name."""
        path = self.folder / self.SPENT
        return read_result(path) if path.exists() else {}

    def stored(self, name: str) -> Path:
        """The file of measurements with that name."""
        return self.folder / self.MEASURED / f"{name}.json"

    def store(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write what a figure is drawn from, and return the file."""
        # On one line: these are long lists of numbers.
        files.write_json(self.stored(name), {**value, "scale": self.scale_name, "seed": self.seed}, indent=None)
        return self.stored(name)


# What is said of a claim in a text.
VERDICTS = {True: "Holds", False: "DOES NOT HOLD", None: "UNDECIDED"}


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, whether it holds here (None: the numbers do not decide it), and the numbers that say so.

    One that is looked at in several places says in short what it is ``about``, ``where`` this is, and over how many ``seeds``.
    """

    text: str
    holds: bool | None
    numbers: str
    about: str = ""
    where: str = ""
    seeds: int = 0

    def as_json(self) -> dict[str, Any]:
        """For a result file, without what is left empty."""
        return {key: value for key, value in asdict(self).items() if key in ("text", "holds", "numbers") or value}

    def __str__(self) -> str:
        return f"- {VERDICTS[self.holds]}{' in one seed' * (self.seeds == 1)}: {self.text}\n  {self.numbers}"


@dataclass(frozen=True)
class Sheet:
    """A table of text; the first column names the rows."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join([self.caption, "", *(f"| {' | '.join(line)} |" for line in lines)])


def unfinished(shop: Workshop, name: str, left: Mapping[str, Sequence[int]], total: int) -> Iterator[Sheet]:
    """Which of an experiment's trainings are ``left`` to be done, with their seeds, and the command that does them."""
    if left:
        count = sum(map(len, left.values()))
        yield Sheet(
            f"Not finished: {count} of {total} trainings are still to be done, and the claims are judged without them. "
            f"`flipgrad reproduce {name} --scale {shop.scale_name} --seed {shop.seed} --kept docs/results` goes on with them.",
            ["training", "seeds to be done"],
            [[training, ", ".join(map(str, seeds))] for training, seeds in left.items()],
        )


# Measures what is missing, draws, and gives what the numbers say: claims, and tables if there are some.
Run = Callable[[Workshop], Iterable[Claim | Sheet]]


@dataclass(frozen=True)
class Experiment:
    """One figure.

    Attributes:
        name: on the command line, and of its files.
        place: the figure or table of the paper.
        run: makes it. The first line of its docstring is the title of the text, the rest says what the paper shows there.
        seconds: by scale, its processor time on one core of the machine of :data:`flipgrad.reproduce.experiments.PROBE`, the
            training of networks that several figures share included. At the paper's scale, and in part for muprop and beyond at
            the small one, it is computed from the times of single updates and draws.
        cells: by scale, how many cores can work at it.
        figures: names and captions of its figures beside the one that is called as the experiment.
        medium: seconds and cores of the medium scale, of an experiment that has one.
        parts: names and costs of its cells by scale, of an experiment whose results may be looked at before it is finished.
    """

    name: str
    place: str
    run: Run
    seconds: tuple[float, float, float]
    cells: tuple[int, int, int] = (1, 1, 1)
    figures: Mapping[str, str] = field(default_factory=dict)
    medium: tuple[float, int] | None = None
    parts: Callable[[str], Mapping[str, int]] | None = None

    def efforts(self) -> dict[str, tuple[float, int]]:
        """Seconds, and how many cores can work at it, by scale."""
        found = dict(zip(("smoke", "small", "paper"), zip(self.seconds, self.cells, strict=True), strict=True))
        return found if self.medium is None else {**found, MEDIUM: self.medium}

    def stem(self, scale: str) -> str:
        """What its files are called: those of the medium scale stand beside others.

        >>> [Experiment("cifar", "", lambda shop: [], (1, 1, 1)).stem(scale) for scale in ("small", "medium")]
        ['cifar', 'cifar-medium']
        """
        return f"{self.name}-{MEDIUM}" if scale == MEDIUM else self.name

    def captions(self, scale: str) -> dict[str, str]:
        """Of its figures by the names of their files, the first of which is called as the experiment."""
        return {figure.replace(self.name, self.stem(scale), 1): words for figure, words in self.figures.items()}

    def check(self, scale: str, *, in_parts: bool) -> None:
        """Refuse a scale that it does not have, and to be looked at or gone on with ``in_parts`` where it has none."""
        if scale not in self.efforts():
            raise InputError(f"{self.name} has no scale {scale!r}: choose {', '.join(self.efforts())}")
        if in_parts and self.parts is None:
            raise InputError(f"{self.name} cannot be made of parts that are finished or kept: leave out --finished and --kept")

    @property
    def title(self) -> str:
        """Of its text."""
        return (self.run.__doc__ or "").partition(".\n")[0]

    @property
    def words(self) -> str:
        """What the paper shows there, for the page."""
        return " ".join((self.run.__doc__ or "").partition(".\n")[2].split())

    def reproduce(self, shop: Workshop) -> str:
        """Run, and write ``NAME.json`` and ``NAME.md`` beside the figure; returns the text."""
        self.check(shop.scale_name, in_parts=shop.finished or shop.kept is not None)
        with shop.timed(self.name):
            found = list(self.run(shop))
        claims = [part for part in found if isinstance(part, Claim)]
        sheets = [part for part in found if isinstance(part, Sheet)]
        record = {
            "figure": self.name,
            "title": self.title,
            "scale": shop.scale_name,
            "claims": [claim.as_json() for claim in claims],
            "sheets": [asdict(sheet) for sheet in sheets],
            # Cells that were done elsewhere took their time there.
            "seconds": shop.cell_seconds if shop.finished or shop.kept else shop.spent()[self.name],
            "seed": shop.seed,
            **files.provenance(),
        }
        text, stem = as_text(record), self.stem(shop.scale_name)
        files.write_json(shop.folder / f"{stem}.json", record)
        files.write(shop.folder / f"{stem}.md", text.encode())
        return text


def as_text(record: Mapping[str, Any]) -> str:
    """The text of a result file: its title, claims and tables."""
    claims = "\n".join(str(Claim(**claim)) for claim in record["claims"])
    sheets = (str(Sheet(**sheet)) for sheet in record["sheets"])
    return "\n\n".join(part for part in (f"# {record['title']}", claims, *sheets) if part) + "\n"


def experiment(name: str, place: str, **facts: Any) -> Callable[[Run], Experiment]:
    """Makes an :class:`Experiment` of the function that it decorates, which runs it."""
    return lambda run: Experiment(name, place, run, **facts)
