"""The automatic learning rate of a run: trials of a few epochs, each from the first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flipgrad.data import DataSet
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.training.config import TrainConfig
from flipgrad.training.loop import AGREE_EVERY, isolated
from flipgrad.training.processes import Processes
from flipgrad.training.search import RunningMean, Search, Trial, search_rate
from flipgrad.training.trainer import DivergenceError, Trainer


def automatic_rate(
    config: TrainConfig,
    make_net: Callable[[], Sequential],
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
    images = _fewer(data, config)
    trials = list(done)

    def trial(rate: float) -> float:
        with isolated(processes.device):
            trainer = Trainer(replace(config, lr=rate, epochs=config.search_epochs), make_net(), images, processes)
            mean = RunningMean(trainer.updates)
            length = config.search_epochs * trainer.updates
            while trainer.total_done < length:
                trainer.update()
                mean.add(trainer.batch_loss())
                report(len(trials) * length + trainer.total_done, config.search_trials * length, trials)
                if (processes.size == 1 or trainer.total_done % AGREE_EVERY == 0) and processes.any(stop()):
                    raise KeyboardInterrupt
                if trainer.updates_done == trainer.updates:
                    trainer.next_epoch()
            return mean.value

    def keep(found: Trial) -> None:
        trials.append(found)
        trial_done(trials)

    return search_rate(trial, trials=config.search_trials, done=done, divergence=DivergenceError, report=keep)


def _fewer(data: DataSet, config: TrainConfig) -> DataSet:
    """The data set with the training images of a trial."""
    if config.search_images is None or config.search_images == len(data.train):
        return data
    if config.search_images > len(data.train):
        raise InputError(
            f"search_images is {config.search_images}, and there are {len(data.train)}; give fewer, or leave it out"
        )
    return replace(data, train=data.train.divide(config.search_images / len(data.train), seed=config.seed)[1])
