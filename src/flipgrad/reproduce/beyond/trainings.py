"""Trainings with several options over a grid of learning rates: which an option bears, and how far it comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from flipgrad.estimators.names import for_training
from flipgrad.plots.options import Grid, Trained
from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.learning import TrainingPlan

METHODS = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:mean")
FEWER = ("st:sampled", "psa:sampled", "psa:posterior", "psa:mean")


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
        runs[setting].append(Trained(for_training(method, 1)[0], rate, losses, result["diverged"]))
    grids = []
    for setting in settings:
        plan = setting.plan
        images = "all" if plan.images is None else f"{plan.images:,}"
        words = f"{images} images, {plan.epochs} epoch{'s' * (plan.epochs > 1)}, {plan.noise} noise"
        cost = {label: costs[setting.key][label] for label in (for_training(method, 1)[0] for method in setting.methods)}
        grids.append(Grid(setting.title, words, list(setting.rates), plan.epochs, runs[setting], cost))
    return grids
