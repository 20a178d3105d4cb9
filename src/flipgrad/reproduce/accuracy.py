"""Figures 2 and 3: relative RMSE by layer, and cosine during training, of the paper's estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from flipgrad import plots
from flipgrad.reproduce._experiment import Accuracies, Claim, CoreTime, Experiment
from flipgrad.reproduce._workshop import ToyNet, Workshop

WIDTHS = (5, 5, 5)
LAYERS = ("layer 1", "layer 2", "layer 3")
# The paper's seven, and three more that it trains with.
ESTIMATORS = (
    "reinforce",
    "arm",
    "concrete:0.1",
    "concrete",
    "tanh",
    "st",
    "psa:sampled",
    "adf",
    "local-reparam",
    "hard-st",
)


def rmse_by_layer(shop: Workshop, name: str, estimators: Sequence[str], samples: int) -> Accuracies:
    """Measure a 5-5-5 network after one epoch, and draw RMSE against the number of draws in every layer."""
    path = shop.measure(ToyNet(WIDTHS, shop.scale.epochs[0], shop.scale.epochs), estimators, samples)
    plots.rmse([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / name)
    return Accuracies.read(path)


def cosine_by_epoch(shop: Workshop, name: str, estimators: Sequence[str], samples: int) -> dict[int, Accuracies]:
    """Measure a 5-5-5 network along its training, and draw the cosine in layer 1 against the number of draws."""
    epochs = shop.scale.epochs
    paths = {epoch: shop.measure(ToyNet(WIDTHS, epoch, epochs), estimators, samples) for epoch in epochs}
    panels = [plots.Panel(path, "layer 1", f"after {epoch:,} epoch{'s' * (epoch > 1)}") for epoch, path in paths.items()]
    plots.cosine(panels, shop.folder / name)
    return {epoch: Accuracies.read(path) for epoch, path in paths.items()}


@final
class Rmse(Experiment):
    """RMSE against the number of samples in every layer, after one epoch."""

    name = "rmse"
    title = "Figure 2: relative RMSE of the gradient in layers 1 to 3 of a 5-5-5 network, after 1 epoch"
    place = "Figure 2"
    words = (
        "The error of the estimated gradient in each of three layers of a 5-5-5 network, relative to the gradient's "
        "length, against the number of draws that are averaged, after one epoch of training. Unbiased estimators "
        "improve with every draw; biased ones up to a point, but they start much lower, the more so the further a "
        "layer is from the loss. One draw of PSA is not worse than 1,000 of ARM; PSA is always more accurate than ST, "
        "and unbiased in the last layer."
    )
    cost = CoreTime((3, 215, 320))

    def run(self, shop: Workshop) -> list[Claim]:
        found = rmse_by_layer(shop, self.name, ESTIMATORS, shop.scale.samples)
        return [
            one_draw_against_many(found, "layer 1"),
            unbiased_in_the_last_layer(found, LAYERS[-1]),
            better_than_st(found),
        ]


@final
class Cosine(Experiment):
    """Cosine in layer 1 along the training."""

    name = "cosine"
    title = "Figure 3: cosine similarity of the estimated and the true gradient in layer 1 of a 5-5-5 network"
    place = "Figure 3"
    words = (
        "The cosine between estimated and true gradient in layer 1 after 1, 100 and 2,000 epochs, with the interval "
        "that holds 70 % of the trials. With few draws some estimators have good chances of a direction that does not "
        "descend, some biased ones even with many. PSA is the best with few draws."
    )
    cost = CoreTime((4, 230, 470))

    def run(self, shop: Workshop) -> list[Claim]:
        found = cosine_by_epoch(shop, self.name, ESTIMATORS, shop.scale.samples)
        return [descent_directions(found), negative_cosines(found)]


def one_draw_against_many(table: Accuracies, layer: str) -> Claim:
    """PSA with one draw against ARM with 1,000."""
    many = min(1000, table.most_samples("ARM"))
    psa, arm = table.rmse("PSA", layer), table.rmse("ARM", layer, many)
    return Claim(
        f"PSA with 1 draw is not worse than ARM with {many:,} in {layer} (the paper: 1,000)",
        psa <= arm,
        f"relative RMSE {psa:.3f} against {arm:.3f}",
    )


def unbiased_in_the_last_layer(table: Accuracies, layer: str) -> Claim:
    """The confidence interval of PSA's bias in the last layer."""
    psa, st = (table.layer(name, layer) for name in ("PSA", "ST"))
    return Claim(
        "PSA is unbiased in the last hidden layer (the 95 % interval of its bias contains 0)",
        psa["bias_low"] == 0,
        f"relative bias {psa['bias']:.3f} [{psa['bias_low']:.3f}, {psa['bias_high']:.3f}]; of ST {st['bias']:.3f}",
    )


def better_than_st(table: Accuracies) -> Claim:
    """PSA's RMSE against ST's, in every layer, for every number of draws."""
    ratios = {
        layer: [psa / st for psa, st in zip(table.layer("PSA", layer)["rmse"], table.layer("ST", layer)["rmse"], strict=True)]
        for layer in LAYERS
    }
    return Claim(
        "PSA is always more accurate than ST",
        all(ratio < 1 for layer in ratios.values() for ratio in layer),
        "RMSE of PSA over that of ST with 1 draw and with the most: "
        + "; ".join(f"{layer} {values[0]:.2f}, {values[-1]:.2f}" for layer, values in ratios.items()),
    )


def descent_directions(tables: dict[int, Accuracies]) -> Claim:
    """Whether PSA's interval of cosines stays positive."""
    lows = {epoch: table.layer("PSA", "layer 1")["cosine_low"][0] for epoch, table in tables.items()}
    return Claim(
        "PSA with 1 draw gives descent directions in layer 1 (70 % of the trials have a positive cosine)",
        all(low > 0 for low in lows.values()),
        "lower end of the interval: " + ", ".join(f"{low:.2f} after {epoch:,}" for epoch, low in lows.items()),
    )


def negative_cosines(tables: dict[int, Accuracies]) -> Claim:
    """Who points uphill, with one draw and with many."""
    parts = []
    for epoch, table in tables.items():
        rows = {name: table.layer(name, "layer 1") for name in table.estimators}
        often = [name for name, row in rows.items() if row["cosine_low"][0] < 0]
        always = [name for name, row in rows.items() if row["cosine_mean"][-1] < 0]
        parts.append(
            f"after {epoch:,}: {', '.join(often) or 'none'} with 1 draw"
            + (f"; even with many on average {', '.join(always)}" if always else "")
        )
    return Claim(
        "some estimators have good chances of a negative cosine in layer 1",
        any(not part.endswith("none with 1 draw") for part in parts),
        ". ".join(parts),
    )
