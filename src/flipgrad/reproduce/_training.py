"""Trainings on images: cells that train by the ordinary loop and go on from their own checkpoints, and what they found."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from flipgrad import files, training
from flipgrad.data import DataSet, Split
from flipgrad.errors import InputError
from flipgrad.estimators.names import for_training
from flipgrad.reproduce._cells import AGAIN, Cell, Place
from flipgrad.reproduce._workshop import Workshop
from flipgrad.training import DivergenceError, RunFolder, TrainConfig, load_data, make_net
from flipgrad.training.config import AUTO

RUN, IMAGES = "run", "images"
# The variable that names the folder of data sets.
VARIABLE = "FLIPGRAD_DATA"
# Data sets whose files a person has to bring.
NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
# The loss of guessing one of ten classes.
GUESSING = math.log(10)
# The paper's setting, as far as it is the same for all trainings. Nothing else is given: results stay good when a
# configuration learns more fields.
FIXED = {"batch_size": 64, "optimizer": "sgd", "momentum": 0.9, "schedule": "constant", "validation": 0.1, "eval_samples": 10}
# What figures need of an epoch: the method's own objective, and the network's numbers on training and validation images.
CURVES = ("epoch", "objective", "train_loss", "train_accuracy", "loss", "marginal_loss", "accuracy_1", "accuracy_n", "seconds")


@final
@dataclass(frozen=True)
class TrainingPlan:
    """How long networks are trained, and on what; None stands for all images.

    ``width`` is the factor on the network's channels, ``images`` are trained on. After every epoch, ``held_out`` validation
    images and ``watched`` training images are evaluated. The search for a rate makes ``trials`` of ``trial_epochs`` with
    ``trial_images``. The ``model`` is by default the data set's own.
    """

    data: str
    width: float
    images: int | None
    held_out: int | None
    watched: int
    epochs: int
    trials: int = 2
    trial_epochs: int = 1
    trial_images: int | None = None
    noise: str = "logistic"
    model: str = AUTO

    def cell(self, shop: Workshop, name: str, estimator: str, augment: str, rate: float | str = AUTO) -> Cell:
        """The training with one ``estimator``; with a ``rate`` that is a number there is no search."""
        network = {"data": self.data, "width": self.width, "noise": self.noise, "estimator": estimator}
        search = {"search_trials": self.trials, "search_epochs": self.trial_epochs, "search_images": self.trial_images}
        course = {"epochs": self.epochs, "lr": rate, "augment": augment, "eval_train": self.watched, "seed": shop.seed}
        values = {**FIXED, **network, **search, **course}
        if self.model != AUTO:
            values["model"] = self.model
        trials = self.trials * self.trial_epochs if rate == AUTO else 0
        if self.images and self.trial_images:
            trials = math.ceil(trials * self.trial_images / self.images)
        settings = {"config": values, "images": self.images, "held_out": self.held_out}
        folder = image_folder(self, shop.images)
        inputs = {} if folder is None else {IMAGES: str(folder)}
        return Cell(name, train_cell, settings, self.epochs + trials, inputs)


def image_folder(plan: TrainingPlan, given: Path | None) -> Path | None:
    """The folder of the images of ``plan``, None if it needs none; ``given`` is that of CIFAR-10."""
    if plan.data not in NAMES:
        return None
    if given is not None and plan.data == "cifar10":
        return given.resolve()
    if os.environ.get(VARIABLE):
        return (Path(os.environ[VARIABLE]) / plan.data).resolve()
    ways = f"with --data, or ${VARIABLE}/cifar10" if plan.data == "cifar10" else f"as ${VARIABLE}/{plan.data}"
    raise InputError(f"this scale trains on {NAMES[plan.data]}: give the folder of its files {ways}")


def train_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Search for the learning rate where none is given, and train.

    Returns:
        ``rate``, the ``trials`` of the search, ``curves`` with a number for every epoch, and ``diverged``, which says what
        happened if the training came to no end. A search in which all rates diverge leaves no rate and no curves.
    """
    config, data = prepared(settings, place)
    path = place.folder / RUN
    known = (path / RunFolder.CONFIG).is_file()
    with _or_anew(place.folder), RunFolder.reopen(path) if known else RunFolder(path, overwrite=True) as folder:
        if not known:
            folder.write_config(config)
        found: dict[str, Any] = {"rate": config.lr, "trials": [], "diverged": None}
        # The share of the updates that the search takes.
        share = 0.0
        if config.lr == AUTO:
            search = config.search_trials * config.search_epochs * (config.search_images or len(data.train))
            share = search / (search + config.epochs * len(data.train))
            found |= _search(config, data, folder, place, share)
            if found["rate"] is None:
                return {**found, "curves": {}}
        config = replace(config, lr=found["rate"])
        try:
            training.train(
                config,
                make_net(config, data),
                data,
                folder,
                checkpoint=training.read_checkpoint(folder.path),
                report=lambda done, total, record: place.report(share + (1 - share) * done / total),
                stop=place.stop,
            )
        except DivergenceError as error:
            found["diverged"] = str(error)
        return {**found, "curves": _curves(path / RunFolder.METRICS)}


@contextmanager
def _or_anew(folder: Path) -> Iterator[None]:
    """Whatever is wrong with the files of a training here, there is one more way out than a single run has."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; or delete '{folder}', and this training is done anew") from None


def prepared(settings: Mapping[str, Any], place: Place) -> tuple[TrainConfig, DataSet]:
    """The configuration of a training, and its examples: as many as the settings say, of all classes alike."""
    config = TrainConfig.from_json({**settings["config"], "data_folder": place.inputs.get(IMAGES)})
    data, held_out = load_data(config), settings["held_out"]

    def some(split: Split, count: int | None) -> Split:
        if count is None or count >= len(split):
            return split
        return split.divide(count / len(split), seed=config.seed)[1]

    validation = None if data.validation is None else some(data.validation, held_out)
    # The test images have no part in the experiments; the loop evaluates them at its end.
    test = some(data.test, held_out)
    return config, replace(data, train=some(data.train, settings["images"]), validation=validation, test=test)


def _search(config: TrainConfig, data: DataSet, folder: RunFolder, place: Place, share: float) -> dict[str, Any]:
    """The ``rate`` that was found and the ``trials``; where all of them diverged, no rate, and what ``diverged`` says."""
    try:
        found = training.automatic_rate(
            config,
            lambda: make_net(config, data),
            data,
            done=training.read_trials(folder.path, data),
            report=lambda updates, total, trials: place.report(share * updates / total),
            trial_done=lambda trials: folder.write_trials(trials, data),
            stop=place.stop,
        )
    except InputError as error:
        trials = training.read_trials(folder.path, data)
        if trials and all(trial.diverged for trial in trials):
            return {"rate": None, "diverged": str(error)}
        raise
    return {"rate": found.rate, "trials": [trial.as_json() for trial in found.trials]}


def _curves(metrics: Path) -> dict[str, list[float | None]]:
    """The :data:`CURVES`, in few digits: a file to be kept."""
    rows = []
    for record in files.read_json_lines(metrics, missing=AGAIN, broken=AGAIN):
        trained = {"train_loss": record["training"]["expected_loss"], "train_accuracy": record["training"]["accuracy_n"]}
        rows.append({**record, **trained, "loss": record["expected_loss"]})
    return {key: [float(f"{row[key]:.6g}") if math.isfinite(row[key]) else None for row in rows] for key in CURVES}


@final
@dataclass(frozen=True)
class TrainingCurves:
    """One training, as it is stored and as claims look at it.

    Figures call its estimator ``method``, mark its rate if that was ``searched`` for and the figure is ``starred``, and draw a
    ``relaxed`` objective beside the loss. The ``rate`` is None if all ``trials`` of the search diverged; ``diverged`` says what
    happened if the training came to no end. The ``curves`` have a number for every epoch, None where it is not finite.
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

    @property
    def end(self) -> float:
        """The training loss at the end."""
        return self.last("train_loss")

    @property
    def told(self) -> str:
        """The training loss at the end for a person."""
        return f"{self.method} {self.end:.3f}{' (diverged)' if self.diverged else ''}"

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
    found = []
    for record in shop.cells(name, cells).values():
        config = record["settings"]["config"]
        label, estimator = for_training(config["estimator"], 1)
        found.append(
            TrainingCurves(
                method=label,
                augment=config["augment"],
                searched=config["lr"] == AUTO,
                starred=starred,
                relaxed=estimator.relaxed_objective,
                **record["result"],
                seconds=record["seconds"],
            )
        )
    seconds = sum(curves.seconds for curves in found)
    return found, shop.store(name, {"plan": asdict(plan), "runs": [asdict(curves) for curves in found], "seconds": seconds})
