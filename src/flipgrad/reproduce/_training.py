"""A cell that trains a network on images by the ordinary loop, and goes on from its own checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from flipgrad import files
from flipgrad.data import DataSet, Split
from flipgrad.errors import InputError
from flipgrad.reproduce._cells import AGAIN, Cell, Place
from flipgrad.training import (
    DivergenceError,
    RunFolder,
    TrainConfig,
    automatic_rate,
    load_data,
    make_net,
    read_checkpoint,
    read_trials,
    train,
)
from flipgrad.training.config import AUTO

RUN, IMAGES = "run", "images"
# The variable that names the folder of data sets.
VARIABLE = "FLIPGRAD_DATA"
# Data sets whose files a person has to bring.
NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}


@final
@dataclass(frozen=True)
class TrainingPlan:
    """How long networks are trained, and on what.

    Attributes:
        data: the data set's name.
        width: the factor on the network's channels.
        images: to train on; None for all.
        held_out: images of the validation part to evaluate after every epoch; None for all.
        watched: training images to evaluate after every epoch.
        epochs: of the training.
        trials: rates that the search tries.
        trial_epochs: the length of each trial.
        trial_images: images of each trial; None for all.
        noise: of all units.
        model: the network, by default the data set's own.
    """

    data: str
    width: float
    images: int | None
    held_out: int | None
    watched: int
    epochs: int
    trials: int
    trial_epochs: int
    trial_images: int | None
    noise: str = "logistic"
    model: str = AUTO

    def cell(self, name: str, estimator: str, augment: str, seed: int, folder: Path | None, rate: float | str = AUTO) -> Cell:
        """The training with one ``estimator``; with a ``rate`` that is a number there is no search."""
        # All that the paper's setting is, but nothing else: results stay good when a configuration learns more fields.
        values = {
            "data": self.data,
            "width": self.width,
            "noise": self.noise,
            "estimator": estimator,
            "epochs": self.epochs,
            "lr": rate,
            "search_trials": self.trials,
            "search_epochs": self.trial_epochs,
            "search_images": self.trial_images,
            "batch_size": 64,
            "optimizer": "sgd",
            "momentum": 0.9,
            "schedule": "constant",
            "augment": augment,
            "validation": 0.1,
            "eval_samples": 10,
            "eval_train": self.watched,
            "seed": seed,
        }
        if self.model != AUTO:
            values["model"] = self.model
        search = self.trials * self.trial_epochs if rate == AUTO else 0
        if self.images and self.trial_images:
            search = math.ceil(search * self.trial_images / self.images)
        settings = {"config": values, "images": self.images, "held_out": self.held_out}
        inputs = {} if folder is None else {IMAGES: str(folder)}
        return Cell(name, train_cell, settings, cost=self.epochs + search, inputs=inputs)


def image_folder(plan: TrainingPlan, given: Path | None) -> Path | None:
    """The folder of the images of ``plan``, None if it needs none.

    Args:
        plan: says which images.
        given: the folder of CIFAR-10. That of MNIST is named by the variable alone.

    Raises:
        InputError: if it needs one, none was given, and no variable names one.
    """
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
        found: dict[str, Any] = {"rate": config.lr, "trials": []}
        share = 0.0
        if config.lr == AUTO:
            share = _search_share(config, len(data.train))
            found = _search(config, data, folder, place, share)
            if found["rate"] is None:
                return {**found, "curves": {}}
        diverged = _train(replace(config, lr=found["rate"]), data, folder, place, share)
        return {**found, "curves": _curves(path / RunFolder.METRICS), "diverged": diverged}


@contextmanager
def _or_anew(folder: Path) -> Iterator[None]:
    """Whatever is wrong with the files of a training here, there is one more way out than a single run has."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; or delete '{folder}', and this training is done anew") from None


def prepared(settings: Mapping[str, Any], place: Place) -> tuple[TrainConfig, DataSet]:
    """The configuration of a training, and its examples."""
    config = TrainConfig.from_json({**settings["config"], "data_folder": place.inputs.get(IMAGES)})
    return config, _fewer(load_data(config), settings["images"], settings["held_out"], config.seed)


def _search(config: TrainConfig, data: DataSet, folder: RunFolder, place: Place, share: float) -> dict[str, Any]:
    """The ``rate`` that was found and the ``trials``; where all of them diverged, no rate, and what ``diverged`` says."""
    try:
        found = automatic_rate(
            config,
            lambda: make_net(config, data),
            data,
            done=read_trials(folder.path, data),
            report=lambda updates, total, trials: place.report(share * updates / total),
            trial_done=lambda trials: folder.write_trials(trials, data),
            stop=place.stop,
        )
    except InputError as error:
        trials = read_trials(folder.path, data)
        if trials and all(trial.diverged for trial in trials):
            return {"rate": None, "trials": [], "diverged": str(error)}
        raise
    return {"rate": found.rate, "trials": [trial.as_json() for trial in found.trials]}


def _train(config: TrainConfig, data: DataSet, folder: RunFolder, place: Place, share: float) -> str | None:
    """Train, or go on; what happened if it diverged."""
    try:
        train(
            config,
            make_net(config, data),
            data,
            folder,
            checkpoint=read_checkpoint(folder.path),
            report=lambda done, total, record: place.report(share + (1 - share) * done / total),
            stop=place.stop,
        )
    except DivergenceError as error:
        return str(error)
    return None


def _search_share(config: TrainConfig, images: int) -> float:
    """The share of a cell's updates that the search takes."""
    search = config.search_trials * config.search_epochs * (config.search_images or images)
    return search / (search + config.epochs * images)


def _fewer(data: DataSet, images: int | None, held_out: int | None, seed: int) -> DataSet:
    validation = None if data.validation is None else _take(data.validation, held_out, seed)
    # The test images have no part in the experiments; the loop evaluates them at its end.
    return replace(data, train=_take(data.train, images, seed), validation=validation, test=_take(data.test, held_out, seed))


def _take(split: Split, count: int | None, seed: int) -> Split:
    """``count`` examples, of all classes alike; all of them if there are no more."""
    if count is None or count >= len(split):
        return split
    return split.divide(count / len(split), seed=seed)[1]


# What figures need of an epoch's record: the method's own objective, and the network's numbers on training and validation
# images.
COLUMNS: dict[str, tuple[str, ...]] = {
    "epoch": ("epoch",),
    "objective": ("objective",),
    "train_loss": ("training", "expected_loss"),
    "train_accuracy": ("training", "accuracy_n"),
    "loss": ("expected_loss",),
    "marginal_loss": ("marginal_loss",),
    "accuracy_1": ("accuracy_1",),
    "accuracy_n": ("accuracy_n",),
    "seconds": ("seconds",),
}


def _curves(metrics: Path) -> dict[str, list[float | None]]:
    records = files.read_json_lines(metrics, missing=AGAIN, broken=AGAIN)
    return {name: [_number(record, path) for record in records] for name, path in COLUMNS.items()}


def _number(record: Any, path: tuple[str, ...]) -> float | None:
    """A value in few digits: a file to be kept."""
    for key in path:
        record = record[key]
    return float(f"{record:.6g}") if math.isfinite(record) else None
