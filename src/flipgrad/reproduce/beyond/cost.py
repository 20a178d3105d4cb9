"""What a gradient of every option costs: all timed in turns in one run, as ratios to PSA."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flipgrad.data import DataSet, Split
from flipgrad.estimators import Estimator
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import one_thread
from flipgrad.reproduce._experiment import Workshop
from flipgrad.reproduce.beyond import small
from flipgrad.reproduce.beyond.draws import WAYS, made
from flipgrad.reproduce.beyond.options import OPTIONS, PAPER, named
from flipgrad.reproduce.beyond.rates import MEASURED, Setting
from flipgrad.training import TrainConfig, make_net

FILE = "beyond-costs"
# Images of a batch, and repeats, the fastest of which counts, after one that does not; of small networks, which take no time,
# so many times more.
SCALES, MORE = {"smoke": (8, 1), "small": (64, 6), "paper": (64, 10)}, 10
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = 10


@final
@dataclass(frozen=True)
class _Timed:
    """A network, its examples, and what is timed on them."""

    net: Sequential
    x: Tensor
    objective: CrossEntropy
    estimators: Mapping[str, Estimator]


def measure(shop: Workshop, settings: Sequence[Setting]) -> dict[str, dict[str, float]]:
    """The time of a gradient over that of PSA, by network and option; found again where it was measured before.

    It runs alone and on one thread, as the trainings do.
    """
    path = shop.folder / shop.MEASURED / f"{FILE}.json"
    batch, repeats = SCALES[shop.scale_name]
    if not path.exists():
        keys, several = [setting.key for setting in settings], repeats * MORE if repeats > 1 else 1
        seconds = {
            name: _time(shop, name, timed, repeats if name in keys else several)
            for name, timed in _problems(shop, settings, batch).items()
        }
        shop.store(FILE, {"seconds": seconds, "batch": batch, "repeats": repeats})
    stored: dict[str, dict[str, float]] = shop.load(path)["seconds"]
    return {name: {label: own / times[PAPER] for label, own in times.items()} for name, times in stored.items()}


def _problems(shop: Workshop, settings: Sequence[Setting], batch: int) -> dict[str, _Timed]:
    options = dict(named(option) for option in OPTIONS)
    several = {label: made(*way) for label, way in WAYS.items()}
    problems: dict[str, _Timed] = {}
    for one in small.nets(shop):
        network = shop.network(one.widths, one.epoch, one.epochs)
        problems.setdefault(one.shape, _Timed(network, shop.data.x, CrossEntropy(shop.data.y), options))
    generator = torch.Generator().manual_seed(shop.seed)
    for setting in settings:
        x = torch.randn(batch, *SHAPES[setting.plan.data], generator=generator)
        y = torch.randint(CLASSES, (batch,), generator=generator)
        data = DataSet(setting.plan.data, Split(x, y), Split(x, y), classes=CLASSES, background=0.0)
        # The folder of images that the cell's configuration lacks is not needed: nothing is read.
        config = TrainConfig.from_json(setting.cell(shop, MEASURED, setting.rates[0]).settings["config"])
        net = make_net(config, data).initialize(x, generator=generator)
        problems[setting.key] = _Timed(net, x, CrossEntropy(y), {**options, **several})
    return problems


def _time(shop: Workshop, name: str, timed: _Timed, repeats: int) -> dict[str, float]:
    """Seconds of a gradient: the fastest of the repeats."""
    generator = torch.Generator().manual_seed(shop.seed)
    best = dict.fromkeys(timed.estimators, float("inf"))
    with one_thread():
        for repeat in range(repeats + 1):
            for label, estimator in timed.estimators.items():
                timed.net.zero_grad(set_to_none=True)
                # The processor's time, as others may be using it.
                started = time.process_time()
                timed.net(timed.x, timed.objective, estimator=estimator, generator=generator).mean().backward()
                if repeat:
                    best[label] = min(best[label], time.process_time() - started)
            shop.report(f"beyond: time of {name}", 1, repeats + 1)
    return best
