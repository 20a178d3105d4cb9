"""Every estimator of the library, the newer ones included, at one draw."""

from __future__ import annotations

from typing import final

from flipgrad import plots
from flipgrad.estimators import ESTIMATORS
from flipgrad.reproduce._experiment import Accuracies, Claim, CoreTime, Experiment
from flipgrad.reproduce._workshop import ToyNet, Workshop
from flipgrad.reproduce.accuracy import LAYERS, WIDTHS

# The paper's PSA here; what averages more is the subject of "beyond".
SPECIFICATIONS = (
    *("psa:sampled" if name == "psa" else name for name in ESTIMATORS if name != "exact"),
    "concrete:0.1",
    "reinforce+mean",
    "muprop+mean",
)


@final
class Estimators(Experiment):
    """Bias and standard deviation of all estimators in every layer, in the middle of the training."""

    name = "estimators"
    title = "All estimators: relative bias and standard deviation of one draw, 5-5-5 network, in the middle of its training"
    place = "Not in the paper"
    words = "Bias and spread of every estimator of this library, the newer ones included, with one draw."
    cost = CoreTime((4, 235, 400))

    def run(self, shop: Workshop) -> list[Claim]:
        epochs = shop.scale.epochs
        path = shop.measure(ToyNet(WIDTHS, epochs[1], epochs), SPECIFICATIONS, shop.scale.samples)
        plots.bias_and_spread([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / self.name)
        table = Accuracies.read(path)
        return [says_the_truth(table), disarm_below_arm(table), *(ranking(table, layer) for layer in LAYERS)]


def says_the_truth(table: Accuracies) -> Claim:
    """Estimators that call themselves unbiased, against their measured bias."""
    wrong, intervals = [], 0
    for name, entry in table.estimators.items():
        if entry["unbiased"]:
            intervals += len(LAYERS)
            wrong += [f"{name} ({layer})" for layer in LAYERS if table.layer(name, layer)["bias_low"] > 0]
    return Claim(
        "estimators that are unbiased show no bias (95 % intervals contain 0, but for one in twenty of them by chance)",
        len(wrong) <= 0.15 * intervals,
        f"{intervals - len(wrong)} of {intervals} intervals contain 0" + (f", not {', '.join(wrong)}" if wrong else ""),
    )


def disarm_below_arm(table: Accuracies) -> Claim:
    """The ordering that theory guarantees."""
    ratios = [table.layer("DisARM", layer)["std"] / table.layer("ARM", layer)["std"] for layer in LAYERS]
    return Claim(
        "DisARM varies less than ARM",
        all(ratio < 1 for ratio in ratios),
        "standard deviation of DisARM over that of ARM in layers 1 to 3: " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


def ranking(table: Accuracies, layer: str) -> Claim:
    """The most accurate estimators with one draw."""
    order = sorted(table.estimators, key=lambda name: table.rmse(name, layer))
    return Claim(
        f"PSA is the most accurate with 1 draw in {layer}",
        order[0] == "PSA",
        "relative RMSE: " + ", ".join(f"{name} {table.rmse(name, layer):.2f}" for name in order[:6]),
    )
