"""Appendix C.1: more unbiased estimators in the setting of figures 2 and 3."""

from __future__ import annotations

from typing import final

from flipgrad.reproduce._experiment import Accuracies, Claim, CoreTime, Experiment
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.accuracy import LAYERS, cosine_by_epoch, rmse_by_layer

ESTIMATORS = ("reinforce", "reinforce+mean", "muprop", "muprop+mean", "arm", "psa:sampled")
# The paper takes 2,000 draws here, a fifth of the others.
SHARE = 5


@final
class RmseUnbiased(Experiment):
    """RMSE in every layer, after one epoch."""

    name = "rmse-unbiased"
    title = "Appendix: relative RMSE of unbiased estimators in layers 1 to 3 of a 5-5-5 network, after 1 epoch"
    place = "Figure C.3"
    words = (
        "The setting of figure 2 with more unbiased estimators: REINFORCE with the true expected loss as its "
        "baseline, and MuProp. MuProp's linear baseline does not help in the layers far from the loss."
    )
    cost = CoreTime((2, 220, 300))

    def run(self, shop: Workshop) -> list[Claim]:
        found = rmse_by_layer(shop, self.name, ESTIMATORS, shop.scale.samples // SHARE)
        return [baseline_helps(found), linear_part_helps_late(found)]


@final
class CosineUnbiased(Experiment):
    """Cosine in layer 1 along the training."""

    name = "cosine-unbiased"
    title = "Appendix: cosine similarity in layer 1 of unbiased estimators along the training of a 5-5-5 network"
    place = "Figure C.4"
    words = "The setting of figure 3 with the same estimators. MuProp's linear baseline degrades by the end of the training."
    cost = CoreTime((3, 225, 380))

    def run(self, shop: Workshop) -> list[Claim]:
        return [muprop_degrades(cosine_by_epoch(shop, self.name, ESTIMATORS, shop.scale.samples // SHARE))]


def baseline_helps(table: Accuracies) -> Claim:
    """The true expected loss as a baseline."""
    ratios = [table.ratio("REINFORCE + mean", "REINFORCE", layer) for layer in LAYERS]
    return Claim(
        "the true expected loss as the baseline lowers the variance of REINFORCE in every layer",
        all(ratio < 1 for ratio in ratios),
        "RMSE with it over RMSE without: " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


def linear_part_helps_late(table: Accuracies) -> Claim:
    """MuProp's linear baseline far from the loss, and next to it."""
    ratios = [table.ratio("MuProp + mean", "REINFORCE + mean", layer) for layer in LAYERS]
    return Claim(
        "MuProp's linear baseline does not help in the layers far from the loss (less than 10 % in layer 1)",
        ratios[0] > 0.9,
        "RMSE of MuProp over that of REINFORCE, both with the true mean, in layers 1 to 3: "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


def muprop_degrades(tables: dict[int, Accuracies]) -> Claim:
    """MuProp against REINFORCE with the same constant part, early and late."""
    gains = {epoch: table.ratio("MuProp + mean", "REINFORCE + mean", "layer 1") for epoch, table in tables.items()}
    first, *_, last = gains.values()
    return Claim(
        "MuProp's linear baseline degrades in the course of training",
        last > first,
        "RMSE of MuProp over that of REINFORCE, both with the true mean, in layer 1: "
        + ", ".join(f"{gain:.2f} after {epoch:,}" for epoch, gain in gains.items()),
    )
