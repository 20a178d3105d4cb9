"""Trainings with several options: over a grid of learning rates, and long ones on the toy problem.

Over the rates they tell which an option bears, and how far it comes. In a long one, whose losses are known exactly, a bias
shows that short ones on images hide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, final

import numpy as np

from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._training import GUESSING, TrainingPlan
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop
from flipgrad.reproduce.beyond.options import PAPER, RECOMMENDED, named

METHODS = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:mean")
FEWER = ("st:sampled", "psa:sampled", "psa:posterior", "psa:mean")
# Of the long trainings: options, and epochs and networks by scale.
LASTING = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:rao-blackwell", "psa:mean")
LENGTH = {"smoke": (3, 1), "small": (600, 3), "paper": (2000, 10)}


@final
@dataclass(frozen=True)
class Setting:
    """A network and its trainings with several ``methods`` at several ``rates``; cells are named by the ``key``.

    Gradients are measured in the network that was trained at the rate ``looked_at``; None for one that is only trained.
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
        return self.plan.cell(shop, f"beyond-{self.key}-{method}-{rate:g}", method, self.augment, rate)


def _plan(
    data: str, images: int | None, held_out: int | None, watched: int, epochs: int, model: str, width: float = 1.0
) -> TrainingPlan:
    """Rates are given, so nothing is searched for; the noise goes with the root of the width, as in ``cifar``."""
    noise = f"logistic:{width**0.5:g}" if model == "cifar" else "logistic"
    return TrainingPlan(data, width, images, held_out, watched, epochs, noise=noise, model=model)


FOUR, EIGHT = "-".join(["200"] * 4), "-".join(["200"] * 8)
CIFAR = "quarter-width CIFAR net"
GRID, CIFAR_GRID = (0.05, 0.1, 0.2, 0.3), (0.005, 0.015, 0.05)
SETTINGS = {
    "smoke": (
        Setting("fc-4", "4 × 20, digits", _plan("digits", 128, 64, 64, 2, "20-20-20-20"), METHODS, (0.1,), "none"),
        Setting(
            "fc-8", "8 × 20, digits", _plan("digits", 128, 64, 64, 2, "20-20-20-20-20-20-20-20"), FEWER[:3], (0.1, 0.3), "none"
        ),
        Setting("conv", "convolutions, digits", _plan("digits", 128, 64, 64, 1, "digits", 0.25), FEWER, (0.05,), "none", 0.05),
    ),
    "small": (
        Setting("fc-4", "4 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, FOUR), METHODS, GRID, "none", 0.1),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, EIGHT), METHODS, GRID[:3], "none"),
        Setting("conv", CIFAR, _plan("cifar10", 5000, 500, 1000, 3, "cifar", 0.25), FEWER, CIFAR_GRID, "flip-crop", 0.015),
    ),
    "paper": (
        Setting("fc-4", "4 × 200, MNIST", _plan("mnist", None, None, 5000, 20, FOUR), METHODS, (0.02, *GRID), "none", 0.1),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", None, None, 5000, 20, EIGHT), METHODS, (0.02, *GRID), "none"),
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

    def after(self, epochs: float) -> float:
        """The loss after that many epochs, on a line between whole ones, and at most at the end; NaN if it diverged."""
        if self.diverged or not self.losses:
            return nan
        return float(np.interp(epochs, range(1, len(self.losses) + 1), self.losses))

    @property
    def final(self) -> float:
        """The loss at the end; NaN of a training that diverged."""
        return self.after(len(self.losses))


@final
@dataclass(frozen=True)
class Grid:
    """The trainings of one network: ``words`` say on what, the ``cost`` of a gradient is over that of PSA, by option."""

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
        """The trainings with one option."""
        return [run for run in self.runs if run.method == method]

    def largest_stable(self, method: str) -> float:
        """The largest rate at which the training comes to its end with a lower loss than guessing; 0 if none does."""
        return max((run.rate for run in self.of(method) if run.final < GUESSING), default=0.0)

    def best(self, method: str, epochs: float | None = None) -> float:
        """The lowest loss over the rates, after some epochs, by default all."""
        losses = (run.after(epochs or self.epochs) for run in self.of(method))
        return min(filter(isfinite, losses), default=nan)

    def equal_time(self, method: str) -> float:
        """The lowest loss over the rates, after the time that the cheapest option takes for all epochs."""
        return self.best(method, self.epochs * min(self.cost[name] for name in self.methods) / self.cost[method])


def train(shop: Workshop, settings: Sequence[Setting], costs: Mapping[str, Mapping[str, float]]) -> list[Grid]:
    """All trainings of all settings."""
    cells = {
        (setting, method, rate): setting.cell(shop, method, rate)
        for setting in settings
        for method in setting.methods
        for rate in setting.rates
    }
    records = shop.cells("beyond", list(cells.values()))
    runs: dict[Setting, list[Trained]] = {setting: [] for setting in settings}
    for (setting, method, rate), cell in cells.items():
        result = records[cell.name]["result"]
        curve = result["curves"].get("train_loss", [])
        losses = curve[: curve.index(None)] if None in curve else curve
        runs[setting].append(Trained(named(method)[0], rate, losses, result["diverged"]))
    grids = []
    for setting in settings:
        plan = setting.plan
        images = "all" if plan.images is None else f"{plan.images:,}"
        words = f"{images} images, {plan.epochs} epoch{'s' * (plan.epochs > 1)}, {plan.noise} noise"
        cost = {label: costs[setting.key][label] for label in (named(method)[0] for method in setting.methods)}
        grids.append(Grid(setting.title, words, list(setting.rates), plan.epochs, runs[setting], cost))
    return grids


def long_trainings(methods: Mapping[str, Any]) -> list[Claim | Sheet]:
    """Whether options come to a lower exact loss than the paper's PSA in every network, and the losses along the training.

    The ``methods`` are those of :func:`flipgrad.reproduce.toy.trainings`.
    """
    epochs = methods[PAPER]["epochs"]
    losses = {label: [run["expected"] for run in entry["runs"]] for label, entry in methods.items()}
    ends = {label: [run[-1] for run in runs] for label, runs in losses.items()}
    networks = len(ends[PAPER])
    means = ", ".join(f"{label} {np.mean(own):.4f}" for label, own in ends.items())
    claims = [
        Claim(
            f"{option} comes to a lower expected loss than PSA in a long training (5-5-5, toy problem; exact losses, means of "
            f"the last stretch, around epoch {epochs[-1]:,.0f}; every one of {networks} networks)",
            all(ours < theirs for ours, theirs in zip(ends[option], ends[PAPER], strict=True)),
            f"means over networks: {means}",
        )
        for option in (RECOMMENDED, "PSA mean")
    ]
    some = [min(range(len(epochs)), key=lambda k: abs(epochs[k] - epochs[-1] * share)) for share in (0.01, 0.1, 0.3)]
    rows = [
        [label, *(f"{np.mean([run[k] for run in runs]):.4f}" for k in some), *(f"{end:.4f}" for end in ends[label])]
        for label, runs in losses.items()
    ]
    sheet = Sheet(
        "Long trainings of 5-5-5 on the toy problem, at the paper's rate: exact expected losses, means over networks along "
        "the training, and of every network at the end.",
        ["option", *(f"epoch {epochs[k]:,.0f}" for k in some), *(f"end, network {k}" for k in range(1, networks + 1))],
        rows,
    )
    return [*claims, sheet]
