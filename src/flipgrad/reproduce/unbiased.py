"""Appendix C.1: more unbiased estimators in the setting of figures 2 and 3."""

from __future__ import annotations

from typing import final

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, Experiment, Table, Workshop
from flipgrad.reproduce.accuracy import LAYERS, WIDTHS

ESTIMATORS = ("reinforce", "reinforce+mean", "muprop", "muprop+mean", "arm", "psa:sampled")
# The paper takes 2,000 draws here, a fifth of the others.
SHARE = 5


@final
class RmseUnbiased(Experiment):
    """RMSE in every layer, after one epoch."""

    name = "rmse-unbiased"
    title = "Appendix: relative RMSE of unbiased estimators in layers 1 to 3 of a 5-5-5 network, after 1 epoch"

    def run(self, shop: Workshop) -> list[Claim]:
        epochs = shop.scale.epochs
        path = shop.measure(WIDTHS, epochs[0], epochs, ESTIMATORS, shop.scale.samples // SHARE)
        plots.rmse([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / self.name)
        table = Table.read(path)
        return [baseline_helps(table), linear_part_helps_late(table)]


@final
class CosineUnbiased(Experiment):
    """Cosine in layer 1 along the training."""

    name = "cosine-unbiased"
    title = "Appendix: cosine similarity in layer 1 of unbiased estimators along the training of a 5-5-5 network"

    def run(self, shop: Workshop) -> list[Claim]:
        epochs = shop.scale.epochs
        paths = {epoch: shop.measure(WIDTHS, epoch, epochs, ESTIMATORS, shop.scale.samples // SHARE) for epoch in epochs}
        panels = [plots.Panel(path, "layer 1", f"after {epoch:,} epoch{'s' * (epoch > 1)}") for epoch, path in paths.items()]
        plots.cosine(panels, shop.folder / self.name)
        return [muprop_degrades({epoch: Table.read(path) for epoch, path in paths.items()})]


def baseline_helps(table: Table) -> Claim:
    """The true expected loss as a baseline."""
    ratios = [table.rmse("REINFORCE + mean", layer) / table.rmse("REINFORCE", layer) for layer in LAYERS]
    return Claim(
        "the true expected loss as the baseline lowers the variance of REINFORCE in every layer",
        all(ratio < 1 for ratio in ratios),
        "RMSE with it over RMSE without: " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


def linear_part_helps_late(table: Table) -> Claim:
    """MuProp's linear baseline far from the loss, and next to it."""
    ratios = [table.rmse("MuProp + mean", layer) / table.rmse("REINFORCE + mean", layer) for layer in LAYERS]
    return Claim(
        "MuProp's linear baseline does not help in the layers far from the loss (less than 10 % in layer 1)",
        ratios[0] > 0.9,
        "RMSE of MuProp over that of REINFORCE, both with the true mean, in layers 1 to 3: "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


def muprop_degrades(tables: dict[int, Table]) -> Claim:
    """MuProp against REINFORCE with the same constant part, early and late."""
    gains = {
        epoch: table.rmse("MuProp + mean", "layer 1") / table.rmse("REINFORCE + mean", "layer 1")
        for epoch, table in tables.items()
    }
    first, *_, last = gains.values()
    return Claim(
        "MuProp's linear baseline degrades in the course of training",
        last > first,
        "RMSE of MuProp over that of REINFORCE, both with the true mean, in layer 1: "
        + ", ".join(f"{gain:.2f} after {epoch:,}" for epoch, gain in gains.items()),
    )
