"""Trainings with several options over a grid of learning rates: which rates they bear, and how far they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, final

import numpy as np

from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._curves import GUESSING
from flipgrad.reproduce._training import TrainingPlan, image_folder
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.beyond.options import named

METHODS = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:mean")
FEWER = ("st:sampled", "psa:sampled", "psa:posterior", "psa:mean")
# Whose trained network is one of those that gradients are measured in.
MEASURED = "psa:sampled"


@final
@dataclass(frozen=True)
class Setting:
    """A network, and the trainings of it.

    Attributes:
        key: for names of cells.
        title: for figures and tables.
        plan: how it is trained.
        methods: options.
        rates: learning rates.
        augment: the augmentation.
        looked_at: the rate of the training whose network gradients are measured in; None for a network that is only trained.
    """

    key: str
    title: str
    plan: TrainingPlan
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    augment: str
    looked_at: float | None = None

    def cell(self, shop: Workshop, method: str, rate: float) -> Cell:
        """One training."""
        name = f"beyond-{self.key}-{method}-{rate:g}"
        return self.plan.cell(name, method, self.augment, shop.seed, image_folder(self.plan, shop.images), rate)


def _plan(
    data: str, images: int | None, held_out: int | None, watched: int, epochs: int, model: str, width: float = 1.0
) -> TrainingPlan:
    """Rates are given, so nothing is searched for; the noise goes with the root of the width, as in ``cifar``."""
    noise = f"logistic:{width**0.5:g}" if model == "cifar" else "logistic"
    trials: dict[str, Any] = {"trials": 2, "trial_epochs": 1, "trial_images": None}
    return TrainingPlan(data, width, images, held_out, watched, epochs, **trials, noise=noise, model=model)


def _layers(count: int, units: int = 200) -> str:
    return "-".join([str(units)] * count)


CIFAR = "quarter-width CIFAR net"
GRID, CIFAR_GRID = (0.05, 0.1, 0.2, 0.3), (0.005, 0.015, 0.05)
SETTINGS = {
    "smoke": (
        Setting("fc-4", "4 × 20, digits", _plan("digits", 128, 64, 64, 2, _layers(4, 20)), METHODS, (0.1,), "none"),
        Setting("fc-8", "8 × 20, digits", _plan("digits", 128, 64, 64, 2, _layers(8, 20)), FEWER[:3], (0.1, 0.3), "none"),
        Setting("conv", "convolutions, digits", _plan("digits", 128, 64, 64, 1, "digits", 0.25), FEWER, (0.05,), "none", 0.05),
    ),
    "small": (
        Setting("fc-4", "4 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, _layers(4)), METHODS, GRID, "none", 0.1),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, _layers(8)), METHODS, GRID[:3], "none"),
        Setting("conv", CIFAR, _plan("cifar10", 5000, 500, 1000, 3, "cifar", 0.25), FEWER, CIFAR_GRID, "flip-crop", 0.015),
    ),
    "paper": (
        Setting(
            "fc-4", "4 × 200, MNIST", _plan("mnist", None, None, 5000, 20, _layers(4)), METHODS, (0.02, *GRID), "none", 0.1
        ),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", None, None, 5000, 20, _layers(8)), METHODS, (0.02, *GRID), "none"),
        Setting(
            "conv", CIFAR, _plan("cifar10", 20_000, 2000, 5000, 18, "cifar", 0.25), METHODS, CIFAR_GRID, "flip-crop", 0.015
        ),
    ),
}


@final
@dataclass(frozen=True)
class Trained:
    """One training: the training loss after every epoch, as far as it came."""

    method: str
    rate: float
    losses: list[float]
    diverged: str | None

    @property
    def stable(self) -> bool:
        """Whether it came to its end, and there has a lower loss than guessing."""
        return self.diverged is None and bool(self.losses) and self.losses[-1] < GUESSING

    @property
    def final(self) -> float:
        """The loss at the end; NaN of a training that diverged."""
        return self.losses[-1] if self.losses and self.diverged is None else nan

    def after(self, epochs: float) -> float:
        """The loss after that many epochs, on a line between whole ones; before the first one, that one's."""
        if self.diverged or not self.losses:
            return nan
        return float(np.interp(epochs, range(1, len(self.losses) + 1), self.losses))


@final
@dataclass(frozen=True)
class Grid:
    """The trainings of one network.

    Attributes:
        title: of the setting.
        words: what is trained on, and how long.
        rates: all that were tried.
        epochs: of every training.
        runs: the trainings.
        cost: the time of a gradient over that of PSA, by option.
    """

    title: str
    words: str
    rates: list[float]
    epochs: int
    runs: list[Trained]
    cost: Mapping[str, float]

    @property
    def methods(self) -> list[str]:
        """Their names."""
        return list(dict.fromkeys(run.method for run in self.runs))

    def of(self, method: str) -> list[Trained]:
        """The trainings with one option, by rate."""
        return sorted((run for run in self.runs if run.method == method), key=lambda run: run.rate)

    def largest_stable(self, method: str) -> float:
        """The largest rate at which the training is stable; 0 if none is."""
        return max((run.rate for run in self.of(method) if run.stable), default=0.0)

    def best(self, method: str) -> float:
        """The lowest loss over the rates, after all epochs."""
        return min((run.final for run in self.of(method) if isfinite(run.final)), default=nan)

    def equal_time(self, method: str) -> float:
        """The lowest loss over the rates, after the time that the cheapest option takes for all epochs."""
        epochs = self.epochs * min(self.cost[name] for name in self.methods) / self.cost[method]
        return min((loss for run in self.of(method) if isfinite(loss := run.after(epochs))), default=nan)


def train(shop: Workshop, settings: Sequence[Setting], costs: Mapping[str, Mapping[str, float]]) -> list[Grid]:
    """All trainings of all settings."""
    cells = {
        (setting.key, method, rate): setting.cell(shop, method, rate)
        for setting in settings
        for method in setting.methods
        for rate in setting.rates
    }
    records = shop.cells("beyond", list(cells.values()))

    def trained(setting: Setting, method: str, rate: float) -> Trained:
        result = records[cells[setting.key, method, rate].name]["result"]
        curve = result["curves"].get("train_loss", [])
        losses = curve[: curve.index(None)] if None in curve else curve
        return Trained(named(method)[0], rate, losses, result["diverged"])

    def grid(setting: Setting) -> Grid:
        plan, labels = setting.plan, [named(method)[0] for method in setting.methods]
        images = "all" if plan.images is None else f"{plan.images:,}"
        words = f"{images} images, {plan.epochs} epoch{'s' * (plan.epochs > 1)}, {plan.noise} noise"
        runs = [trained(setting, method, rate) for method in setting.methods for rate in setting.rates]
        cost = {label: costs[setting.key][label] for label in labels}
        return Grid(setting.title, words, list(setting.rates), plan.epochs, runs, cost)

    return [grid(setting) for setting in settings]
