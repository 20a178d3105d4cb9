"""Figures 2 and 3: relative RMSE by layer, and cosine during training, of the paper's estimators."""

from __future__ import annotations

from typing import final

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, Experiment, Table, Workshop

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


@final
class Rmse(Experiment):
    """RMSE against the number of samples in every layer, after one epoch."""

    name = "rmse"
    title = "Figure 2: relative RMSE of the gradient in layers 1 to 3 of a 5-5-5 network, after 1 epoch"

    def run(self, shop: Workshop) -> list[Claim]:
        epochs = shop.scale.epochs
        path = shop.measure(WIDTHS, epochs[0], epochs, ESTIMATORS, shop.scale.samples)
        plots.rmse([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / self.name)
        table = Table.read(path)
        return [
            one_draw_against_many(table, "layer 1"),
            unbiased_in_the_last_layer(table, LAYERS[-1]),
            better_than_st(table),
        ]


@final
class Cosine(Experiment):
    """Cosine in layer 1 along the training."""

    name = "cosine"
    title = "Figure 3: cosine similarity of the estimated and the true gradient in layer 1 of a 5-5-5 network"

    def run(self, shop: Workshop) -> list[Claim]:
        epochs = shop.scale.epochs
        paths = {epoch: shop.measure(WIDTHS, epoch, epochs, ESTIMATORS, shop.scale.samples) for epoch in epochs}
        panels = [plots.Panel(path, "layer 1", f"after {epoch:,} epoch{'s' * (epoch > 1)}") for epoch, path in paths.items()]
        plots.cosine(panels, shop.folder / self.name)
        tables = {epoch: Table.read(path) for epoch, path in paths.items()}
        return [descent_directions(tables), negative_cosines(tables)]


def one_draw_against_many(table: Table, layer: str) -> Claim:
    """PSA with one draw against ARM with 1,000."""
    many = min(1000, table.most("ARM"))
    psa, arm = table.rmse("PSA", layer), table.rmse("ARM", layer, many)
    return Claim(
        f"PSA with 1 draw is not worse than ARM with {many:,} in {layer} (the paper: 1,000)",
        psa <= arm,
        f"relative RMSE {psa:.3f} against {arm:.3f}",
    )


def unbiased_in_the_last_layer(table: Table, layer: str) -> Claim:
    """The confidence interval of PSA's bias in the last layer."""
    psa, st = (table.layer(name, layer) for name in ("PSA", "ST"))
    return Claim(
        "PSA is unbiased in the last hidden layer (the 95 % interval of its bias contains 0)",
        psa["bias_low"] == 0,
        f"relative bias {psa['bias']:.3f} [{psa['bias_low']:.3f}, {psa['bias_high']:.3f}]; of ST {st['bias']:.3f}",
    )


def better_than_st(table: Table) -> Claim:
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


def descent_directions(tables: dict[int, Table]) -> Claim:
    """Whether PSA's interval of cosines stays positive."""
    lows = {epoch: table.layer("PSA", "layer 1")["cosine_low"][0] for epoch, table in tables.items()}
    return Claim(
        "PSA with 1 draw gives descent directions in layer 1 (70 % of the trials have a positive cosine)",
        all(low > 0 for low in lows.values()),
        "lower end of the interval: " + ", ".join(f"{low:.2f} after {epoch:,}" for epoch, low in lows.items()),
    )


def negative_cosines(tables: dict[int, Table]) -> Claim:
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
