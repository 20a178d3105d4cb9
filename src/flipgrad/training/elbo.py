"""A run of ``flipgrad train --objective elbo``: a latent-variable model of grey images, binarised anew in every batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from flipgrad.data import DataSet
from flipgrad.errors import DivergenceError, InputError
from flipgrad.estimators.names import for_training
from flipgrad.latent import Variational, check_latent
from flipgrad.training.config import AUTO, TrainConfig, load_data
from flipgrad.training.latents import UNITS, ElboTraining, binarised, latent_model
from flipgrad.training.run import Checkpoint, RunFolder, read_config, read_weights

# What such a run takes where nothing else is said: that of the literature, at ten times its rate.
DEFAULTS: dict[str, Any] = {"lr": "0.001", "optimizer": "adam", "batch_size": 50, "augment": "none"}
# Units of a latent layer for small images, which have fewer pixels than MNIST's.
SMALL_UNITS, SMALL_IMAGE = 50, 200
# Draws per image of the reported bound, images whose bound is measured after every epoch, and pictures of each kind.
BOUND_SAMPLES, WATCHED, SHOWN = 100, 500, 10
# Seeds of the bits and of the noise of measurements.
MEASURED_WITH = 20_000
# Updates between two looks at whether the run is to stop.
LOOK = 20


@final
@dataclass(frozen=True)
class ElboData:
    """Grey images [N, pixels] from 0 to 1: to train with, to watch, and to test; and the size of one, [H, W]."""

    source: DataSet
    train: Tensor
    watched: Tensor
    watched_name: str
    test: Tensor
    size: tuple[int, int]


def elbo_data(config: TrainConfig) -> ElboData:
    """The images of the data set; others than grey ones are refused."""
    data = load_data(config)
    shape = tuple(data.train.x.shape[1:])
    if len(shape) != 3 or shape[0] != 1:
        raise InputError(
            f"objective 'elbo' is for grey images, whose pixels become bits: give --data digits or mnist; '{config.data}' has "
            f"examples of shape {list(shape)}"
        )

    def grey(x: Tensor) -> Tensor:
        return ((x.flatten(1) + 1) / 2).clamp(0, 1)

    watched, name = (data.test, "test") if data.validation is None else (data.validation, "validation")
    return ElboData(data, grey(data.train.x), grey(watched.x), name, grey(data.test.x), (shape[1], shape[2]))


def make_model(config: TrainConfig, data: ElboData) -> Variational:
    """The model with its first weights, which only the seed decides."""
    pixels = data.train.shape[1]
    units = UNITS if pixels > SMALL_IMAGE else SMALL_UNITS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        name = "linear" if config.model == AUTO else config.model
        return latent_model(name, data.train.mean(0), units=max(1, round(config.width * units)))


def load_model(path: Path | str, *, data_folder: str | None = None) -> tuple[Variational, ElboData]:
    """The model of the run in the folder ``path``, with the weights of its last whole epoch, and its images.

    Raises:
        InputError: if a file is missing or damaged, or the run is of a network and not of a latent-variable model.
    """
    path = Path(path)
    config = read_config(path, data_folder=data_folder)
    if config.objective != "elbo":
        raise InputError(f"the run in '{path}' is of a network, not of a latent-variable model; use flipgrad.training.load_run")
    data = elbo_data(config)
    model = make_model(config, data)
    weights, _ = read_weights(path, config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).replace("\n", " ")
        raise InputError(f"'{path / RunFolder.WEIGHTS}' does not fit the model of the configuration ({reason:.200})") from None
    return model.eval(), data


@final
class ElboRun:
    """A training by epochs in the folder of a run, which can go on from its checkpoint to the bit.

    Args:
        config: the configuration.
        model: the model.
        data: the images.
        folder: where everything is stored.
        checkpoint: what to go on from.
    """

    def __init__(
        self, config: TrainConfig, model: Variational, data: ElboData, folder: RunFolder, checkpoint: Checkpoint | None
    ) -> None:
        self.config, self.data, self.folder = config, data, folder
        rule = for_training(config.estimator, len(data.train))[1]
        check_latent(rule, model.network())
        batch = min(config.batch_size, len(data.train))
        self.training = ElboTraining(model, rule, data.train, batch=batch, rate=config.rate, seed=config.seed)
        self.updates = math.ceil(len(data.train) / batch)
        self.epoch, self.total, self.seconds = 0, 0.0, 0.0
        if checkpoint is not None:
            self._load(checkpoint)
        folder.keep_metrics(self.epoch)

    def run(
        self, report: Callable[[int, int, Mapping[str, Any]], None], stop: Callable[[], bool], minutes: float
    ) -> dict[str, Any]:
        """Train to the end; ``report`` is told how many updates are done, of how many, and the last record.

        Raises:
            KeyboardInterrupt: when ``stop`` says so; everything is saved then.
            DivergenceError: where the ELBO is no number any more.
        """
        self.folder.write_config(self.config)
        record: Mapping[str, Any] = {}
        saved = time.monotonic()
        while self.epoch < self.config.epochs:
            while self.training.steps < (self.epoch + 1) * self.updates:
                self._advance()
                report(self.training.steps, self.config.epochs * self.updates, record)
                if stop():
                    self._save()
                    raise KeyboardInterrupt
                if time.monotonic() - saved > 60 * minutes:
                    self._save()
                    saved = time.monotonic()
            record = self._end_epoch()
        return self._summary()

    def _advance(self) -> None:
        started = time.perf_counter()
        for _ in range(min(LOOK, (self.epoch + 1) * self.updates - self.training.steps)):
            loss = self.training.update()
            if not math.isfinite(loss):
                raise DivergenceError(
                    f"the negative ELBO became {loss} in epoch {self.epoch + 1} at learning rate {self.config.rate:g}; try a "
                    "smaller --lr"
                )
            self.total += loss
        self.seconds += time.perf_counter() - started

    def _end_epoch(self) -> dict[str, Any]:
        """Store the epoch's numbers, weights and checkpoint."""
        self.epoch += 1
        watched = self.data.watched[:WATCHED]
        record = {
            "epoch": self.epoch,
            "elbo": -self.total / self.updates,
            "split": self.data.watched_name,
            "bound": mean_bound(self.training.model, watched, self.config.eval_samples),
            "seconds": self.seconds,
        }
        self.total = 0.0
        self.folder.append_metrics(record)
        self.folder.save_weights(self.training.model, self.data.source)
        self._save()
        return record

    def _summary(self) -> dict[str, Any]:
        model = self.training.model
        found = {
            "epoch": self.epoch,
            "bound": mean_bound(model, self.data.test, BOUND_SAMPLES),
            "samples": BOUND_SAMPLES,
            "images": len(self.data.test),
            "seconds": self.seconds,
            "pictures": pictures(model, self.data.test[:SHOWN]),
            "size": list(self.data.size),
        }
        self.folder.write_summary(found)
        return found

    def _save(self) -> None:
        position = {"epoch": self.epoch, "total": self.total, "seconds": self.seconds}
        facts = {**position, "config": self.config.to_json(), "data": self.data.source.fingerprint}
        self.folder.save_checkpoint(Checkpoint(self.training.state(), facts))

    def _load(self, checkpoint: Checkpoint) -> None:
        if checkpoint.facts.get("data") != self.data.source.fingerprint:
            raise InputError("the run was on other data; put them back as they were, or train anew with --overwrite")
        self.training.load(checkpoint.tensors)
        self.epoch, self.total, self.seconds = (checkpoint.facts[key] for key in ("epoch", "total", "seconds"))


def mean_bound(model: Variational, images: Tensor, samples: int) -> float:
    """The mean over images of the lower bound of the log-likelihood of their bits, which are always the same ones."""
    generator = torch.Generator().manual_seed(MEASURED_WITH)
    bits = binarised(images, generator)
    parts = [model.log_likelihood(part, samples, generator=generator) for part in bits.split(100)]
    return float(torch.cat(parts).mean())


def pictures(model: Variational, images: Tensor) -> dict[str, list[list[int]]]:
    """Grey levels of some images, of their reconstructions, and of as many samples."""
    generator = torch.Generator().manual_seed(MEASURED_WITH)
    reconstructed = model.reconstruct(binarised(images, generator), generator=generator)
    kinds = {"data": images, "reconstructions": reconstructed, "samples": model.sample(len(images), generator=generator)}
    return {name: (255 * values).round().long().tolist() for name, values in kinds.items()}
