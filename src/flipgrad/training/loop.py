"""The training loop: updates, and what is stored when, so that nothing is lost; and the search for the learning rate."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, TypeVar, final

import torch

from flipgrad import files
from flipgrad.data import DataSet
from flipgrad.errors import DivergenceError, InputError, StorageError
from flipgrad.network import BinaryNetwork
from flipgrad.training.config import TrainConfig
from flipgrad.training.metrics import Evaluation, is_record
from flipgrad.training.processes import Processes
from flipgrad.training.run import Checkpoint, RunFolder
from flipgrad.training.search import Search, Trial, running_mean, search_rate
from flipgrad.training.trainer import Trainer

T = TypeVar("T")

# Updates after which many processes ask one another whether to stop or to save: each time costs a message.
AGREE_EVERY = 10


def train(
    config: TrainConfig,
    net: BinaryNetwork,
    data: DataSet,
    folder: RunFolder | None = None,
    *,
    processes: Processes | None = None,
    checkpoint: Checkpoint | None = None,
    report: Callable[[int, int, Mapping[str, Any]], None] = lambda done, total, record: None,
    epoch_done: Callable[[Mapping[str, Any]], None] = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
    minutes: float = 5.0,
) -> Evaluation:
    """Train ``net`` on ``data`` as ``config`` says, leaving configuration, metrics, weights and checkpoints in ``folder``.

    A checkpoint is stored at the beginning, after every epoch, every few ``minutes``, and when told to stop. A training that
    goes on from one ends with the same weights, to the bit, as one that was never interrupted.

    Args:
        config: what to do.
        net: the network as it was made; it is initialised and trained in place.
        data: the examples.
        folder: of the run; None stores nothing, and is what processes other than the first one give.
        processes: those that train together; by default this one alone.
        checkpoint: where to go on, from the ``folder``.
        report: told after every update how many were done of how many, and the last epoch's record (empty during the first).
        epoch_done: told the metrics of every epoch.
        stop: asked between updates whether to save and stop.
        minutes: between checkpoints within an epoch.

    Returns:
        The evaluation on the test images.

    Raises:
        DivergenceError: if a gradient, a weight or the loss is NaN or infinite, or the loss has exploded; the last checkpoint
            is kept.
        KeyboardInterrupt: when told to stop; everything is saved.
        StorageError: if a file cannot be written; the last checkpoint is kept.
    """
    processes = processes or Processes(config.device)
    with isolated(processes.device):
        trainer = Trainer(config, net, data, processes)
        keeper = _Keeper(trainer, folder, processes, minutes)
        record = keeper.begin(checkpoint)
        total = config.epochs * trainer.updates
        while trainer.epoch < config.epochs:
            while trainer.updates_done < trainer.updates:
                trainer.update()
                report(trainer.total_done, total, record)
                keeper.look(stop)
            record = trainer.finish_epoch()
            epoch_done(record)
            keeper.end_epoch(record)
        return keeper.finish(record)


def automatic_rate(
    config: TrainConfig,
    make_net: Callable[[], BinaryNetwork],
    data: DataSet,
    *,
    processes: Processes | None = None,
    done: Sequence[Trial] = (),
    report: Callable[[int, int, Sequence[Trial]], None] = lambda updates, total, trials: None,
    trial_done: Callable[[Sequence[Trial]], None] = lambda trials: None,
    stop: Callable[[], bool] = lambda: False,
) -> Search:
    """Search for the learning rate that lowers the method's own objective most in a few epochs.

    Args:
        config: of the run; ``search_trials``, ``search_epochs`` and ``search_images`` say how long to search.
        make_net: gives the network with its first weights, always the same.
        data: the examples.
        processes: those that train together.
        done: the first trials of the same search, if it was interrupted.
        report: told after every update how many of all are done, and the trials so far.
        trial_done: told all trials after each: the place to store them.
        stop: asked between updates whether to stop.

    Raises:
        KeyboardInterrupt: when told to stop; the trial at hand is lost.
    """
    processes = processes or Processes(config.device)
    images = config.search_images or len(data.train)
    if images > len(data.train):
        raise InputError(f"search_images is {images}, and there are {len(data.train)}; give fewer, or leave it out")
    if images < len(data.train):
        data = replace(data, train=data.train.divide(images / len(data.train), seed=config.seed)[1])
    trials = list(done)

    def trial(rate: float) -> float:
        with isolated(processes.device):
            trainer = Trainer(replace(config, lr=rate, epochs=config.search_epochs), make_net(), data, processes)
            losses = []
            length = config.search_epochs * trainer.updates
            while trainer.total_done < length:
                trainer.update()
                losses.append(trainer.batch_loss())
                report(len(trials) * length + trainer.total_done, config.search_trials * length, trials)
                if (processes.size == 1 or trainer.total_done % AGREE_EVERY == 0) and processes.any(stop()):
                    raise KeyboardInterrupt
                if trainer.updates_done == trainer.updates:
                    trainer.next_epoch()
            return running_mean(losses, trainer.updates)

    def keep(found: Trial) -> None:
        trials.append(found)
        trial_done(trials)

    return search_rate(trial, trials=config.search_trials, done=done, divergence=DivergenceError, report=keep)


def isolated(device: torch.device) -> AbstractContextManager[None]:
    """A :class:`Trainer` seeds torch's global generators: outside they stay as they were."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@final
class _Keeper:
    """Stores what a training leaves behind."""

    def __init__(self, trainer: Trainer, folder: RunFolder | None, processes: Processes, minutes: float) -> None:
        self._trainer, self._folder, self._processes, self._minutes = trainer, folder, processes, minutes
        self._saved_at = time.monotonic()

    def begin(self, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
        """Store the beginning, or go back to the checkpoint; the record of the last whole epoch, if there is one."""
        if checkpoint is not None:
            where = f"'{self._folder.path / RunFolder.CHECKPOINT}'" if self._folder else "the checkpoint"
            self._trainer.restore(checkpoint, where)
            return self._write(self._take_back) or {}
        self._write(self._store_config)
        self._save()
        return {}

    def _take_back(self, folder: RunFolder) -> Mapping[str, Any]:
        """Remove what was stored after the checkpoint, store what may be missing; the record of the last whole epoch."""
        records = folder.keep_metrics(self._trainer.epoch)
        if records and not is_record(records[-1]):
            raise InputError(f"'{folder.path / folder.METRICS}' does not hold the metrics of epochs; put it back, or elsewhere")
        files.remove(folder.path / folder.SUMMARY)
        self._store_config(folder)
        if self._trainer.epoch and not self._trainer.updates_done:
            # They are those of the checkpoint, and may be damaged or missing.
            folder.save_weights(self._trainer.net, self._trainer.data)
        return records[-1] if records else {}

    def _store_config(self, folder: RunFolder) -> None:
        folder.write_config(self._trainer.config, processes=self._processes.size)

    def look(self, stop: Callable[[], bool]) -> None:
        """Between two updates: stop if told to, save if it is time."""
        trainer = self._trainer
        if self._processes.size > 1 and trainer.updates_done % AGREE_EVERY and trainer.updates_done != trainer.updates:
            return
        if self._processes.any(stop()):
            self._save()
            raise KeyboardInterrupt
        if self._processes.any(time.monotonic() - self._saved_at > 60 * self._minutes):
            self._save()

    def end_epoch(self, record: Mapping[str, Any]) -> None:
        def store(folder: RunFolder) -> None:
            folder.append_metrics(record)
            folder.save_weights(self._trainer.net, self._trainer.data)

        self._write(store)
        self._save()

    def finish(self, record: Mapping[str, Any]) -> Evaluation:
        """The numbers on the test images."""
        trainer = self._trainer
        evaluation = trainer.evaluate("test", trainer.epoch)
        held_out = {key: record[key] for key in asdict(evaluation)} if record.get("split") == "validation" else None
        facts = {"epoch": trainer.epoch, "objective": record.get("objective"), **asdict(evaluation), "validation": held_out}
        self._write(lambda folder: folder.write_summary(facts))
        return evaluation

    def _save(self) -> None:
        self._trainer.check_weights()
        state = self._trainer.state()
        self._write(lambda folder: folder.save_checkpoint(state))
        self._saved_at = time.monotonic()

    def _write(self, action: Callable[[RunFolder], T]) -> T | None:
        """The first process writes; if it cannot, all of them stop instead of waiting for it."""
        result = None
        failure: StorageError | InputError | None = None
        if self._folder is not None:
            try:
                result = action(self._folder)
            except (StorageError, InputError) as error:
                failure = error
        if self._processes.any(failure is not None):
            raise failure or StorageError("the first process could not write its files")
        return result
