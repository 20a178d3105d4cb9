"""What the training loop costs: over bare training steps, with PSA over ST, and the share of loading the images."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flipgrad.benchmarks.step import RATE, photographs, update
from flipgrad.data import AUGMENTATIONS, DataSet, Split
from flipgrad.estimators.names import for_training
from flipgrad.machine import fastest
from flipgrad.network import BinaryNetwork
from flipgrad.objectives import CrossEntropy
from flipgrad.training.config import TrainConfig, augmentation, load_data, make_net
from flipgrad.training.loop import isolated
from flipgrad.training.optimizer import make_optimizer
from flipgrad.training.trainer import Trainer

# Updates timed at once, and how often.
UPDATES = 10
REPEATS = 7


def loop() -> dict[str, Any]:
    """Ratios for the digits' network and the CIFAR-10 network at a quarter of its width, augmentation included."""
    digits = TrainConfig(lr=RATE, validation=0.0)
    cifar = TrainConfig(data="cifar10", width=0.25, lr=RATE)
    return {
        "threads": torch.get_num_threads(),
        "updates": UPDATES,
        "digits": _measure(digits, load_data(digits)),
        "cifar_quarter_width": _measure(cifar, _photographs()),
    }


def _measure(config: TrainConfig, data: DataSet) -> dict[str, Any]:
    names = {"psa": "psa:sampled", "st": "st"}
    with isolated(torch.device("cpu")):
        works: dict[str, Callable[[], None]] = {}
        for name, estimator in names.items():
            settings = replace(config, estimator=estimator)
            works[name] = in_the_loop(Trainer(settings, make_net(settings, data), data))
            works[f"{name}_bare"] = _bare(settings, make_net(settings, data), data)
        works["loading"] = _loading(config, data)
        seconds = fastest({name: partial(_many, work) for name, work in works.items()}, repeats=REPEATS)
    return {
        "loading_share": {name: seconds["loading"] / seconds[name] for name in names},
        "loop_over_bare_step": {name: seconds[name] / seconds[f"{name}_bare"] for name in names},
        "psa_over_st": seconds["psa"] / seconds["st"],
        "seconds": seconds,
    }


def _many(one: Callable[[], None]) -> None:
    for _ in range(UPDATES):
        one()


def in_the_loop(trainer: Trainer) -> Callable[[], None]:
    """One update of a training."""

    def run() -> None:
        if trainer.updates_done == trainer.updates:
            trainer.next_epoch()
        trainer.update()

    return run


def _bare(config: TrainConfig, net: BinaryNetwork, data: DataSet) -> Callable[[], None]:
    """Forward, backward and update for one batch, and nothing else."""
    x, objective = data.train.x[: config.batch_size], CrossEntropy(data.train.y[: config.batch_size])
    net.initialize(data.train.x[:256])
    rule = for_training(config.estimator, len(data.train))[1]
    return update(net, x, objective, rule, make_optimizer(config, net))


def _loading(config: TrainConfig, data: DataSet) -> Callable[[], None]:
    """What comes before an update: a batch of images, moved as in training."""
    generator = torch.Generator().manual_seed(0)
    augment = AUGMENTATIONS[augmentation(config)]

    def run() -> None:
        examples = torch.randint(len(data.train), (config.batch_size,), generator=generator)
        augment(data.train.x[examples], data.background, generator)

    return run


def _photographs() -> DataSet:
    """As large as those of CIFAR-10, without its files."""
    part = Split(photographs(1280)[0], torch.arange(1280) % 10)
    return DataSet("cifar10", part, part, classes=10, background=0.0)
