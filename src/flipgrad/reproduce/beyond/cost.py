"""What a gradient of every option costs: all timed in turns in one run, as ratios to PSA."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flipgrad.benchmarks._steps import gradient
from flipgrad.contract import Estimator
from flipgrad.data import DataSet, Split
from flipgrad.machine import fastest, threads
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.beyond import small
from flipgrad.reproduce.beyond.draws import WAYS, of_draws
from flipgrad.reproduce.beyond.options import OPTIONS, PAPER, named
from flipgrad.reproduce.beyond.rates import MEASURED, Setting
from flipgrad.training import TrainConfig, make_net

FILE = "beyond-costs"
# Images of a batch, and repeats, the fastest of which counts, after one that does not.
SCALES = {"smoke": (8, 1), "small": (64, 6), "paper": (64, 10)}
# The factor on repeats in small networks, which take no time.
MORE_REPEATS = 10
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = 10


def measure(shop: Workshop, settings: Sequence[Setting]) -> dict[str, dict[str, float]]:
    """The time of a gradient over that of PSA, by network and option; found again where it was measured before.

    It runs alone and on one thread, as the trainings do.
    """
    path = shop.stored(FILE)
    if not path.exists():
        batch, repeats = SCALES[shop.scale_name]
        several = repeats * MORE_REPEATS if repeats > 1 else 1
        options: dict[str, Estimator] = dict(named(option) for option in OPTIONS)
        ways = {label: of_draws(*way) for label, way in WAYS.items()}
        seconds: dict[str, dict[str, float]] = {}
        for net in small.nets(shop):
            if net.shape not in seconds:
                data = shop.data
                seconds[net.shape] = _time(shop, net.shape, shop.network(net), data.x, data.y, options, several)
        generator = torch.Generator().manual_seed(shop.seed)
        for setting in settings:
            x = torch.randn(batch, *SHAPES[setting.plan.data], generator=generator)
            y = torch.randint(CLASSES, (batch,), generator=generator)
            network = _network(shop, setting, x, y).initialize(x, generator=generator)
            seconds[setting.key] = _time(shop, setting.key, network, x, y, {**options, **ways}, repeats)
        shop.store(FILE, {"seconds": seconds, "batch": batch, "repeats": repeats})
    stored: dict[str, dict[str, float]] = read_result(path)["seconds"]
    return {name: {label: own / times[PAPER] for label, own in times.items()} for name, times in stored.items()}


def _network(shop: Workshop, setting: Setting, x: Tensor, y: Tensor) -> Sequential:
    # The folder of images that the cell's configuration lacks is not needed: nothing is read.
    config = TrainConfig.from_json(setting.cell(shop, MEASURED, setting.rates[0]).settings["config"])
    return make_net(config, DataSet(setting.plan.data, Split(x, y), Split(x, y), classes=CLASSES, background=0.0))


def _time(
    shop: Workshop, name: str, net: Sequential, x: Tensor, y: Tensor, rules: Mapping[str, Estimator], repeats: int
) -> dict[str, float]:
    """Seconds of a gradient by every rule."""
    generator, objective, total = torch.Generator().manual_seed(shop.seed), CrossEntropy(y), (repeats + 1) * len(rules)
    works = {label: gradient(net, x, objective, rule, generator) for label, rule in rules.items()}
    with threads(1):
        # The processor's time, as others may be using it.
        return fastest(
            works,
            repeats=repeats,
            clock=time.process_time,
            done=lambda _: shop.report(f"beyond: time of {name}", 1, total),
        )
