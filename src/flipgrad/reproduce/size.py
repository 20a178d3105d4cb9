"""Appendix C.1: how accuracy depends on the width and on the depth of the network, in layer 1 after one epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import final

from flipgrad import plots
from flipgrad.gradeval.evaluate import FEWEST
from flipgrad.reproduce._experiment import Accuracies, Claim, CoreTime, Experiment
from flipgrad.reproduce._workshop import ToyNet, Workshop

ESTIMATORS = ("reinforce", "arm", "concrete:0.1", "concrete", "tanh", "st", "psa:sampled")
LAYER = "layer 1"
# One network says little of a width or depth: claims are about the geometric mean over this many trainings.
NETWORKS = 10


@final
class Width(Experiment):
    """Three layers of 3, 5 and 10 units."""

    name = "width"
    title = "Appendix: relative RMSE in layer 1 against the width of the network, after 1 epoch"
    place = "Figure C.5"
    words = (
        "Errors in layer 1 for networks 3-3-3, 5-5-5 and 10-10-10. The bias of PSA and ST is more prominent in small networks."
    )
    cost = CoreTime((9, 32, 320))

    def run(self, shop: Workshop) -> list[Claim]:
        tables = _measure(self, shop, {f"{n}-{n}-{n}": (n,) * 3 for n in (3, 5, 10)})
        return [*(advantage_grows(tables, ours, "width") for ours in ("PSA", "ST")), bias_shrinks(tables)]


@final
class Depth(Experiment):
    """Two, five and seven layers of 5 units."""

    name = "depth"
    title = "Appendix: relative RMSE in layer 1 against the depth of the network, after 1 epoch"
    place = "Figure C.6"
    words = (
        "Errors in layer 1 for 2, 5 and 7 layers of 5 units. The variance of unbiased estimators grows much faster "
        "with the depth."
    )
    cost = CoreTime((11, 43, 430))

    def run(self, shop: Workshop) -> list[Claim]:
        tables = _measure(self, shop, {f"{n} layers": (5,) * n for n in (2, 5, 7)})
        return [advantage_grows(tables, ours, "depth") for ours in ("PSA", "ST")]


def _measure(experiment: Experiment, shop: Workshop, nets: Mapping[str, tuple[int, ...]]) -> dict[str, list[Accuracies]]:
    """Draw the figure of one network of each kind, and return the results of all of them."""
    samples = shop.scale.samples
    first = {name: shop.measure(ToyNet(widths), ESTIMATORS, samples) for name, widths in nets.items()}
    plots.rmse([plots.Panel(path, LAYER, name) for name, path in first.items()], shop.folder / experiment.name)
    few, compared = max(FEWEST, samples // NETWORKS), ("arm", "st", "psa:sampled")

    def measured(widths: tuple[int, ...], number: int) -> Accuracies:
        return Accuracies.read(shop.measure(ToyNet(widths, number=number), compared, few))

    return {name: [measured(widths, number) for number in range(NETWORKS)] for name, widths in nets.items()}


def advantage_grows(tables: Mapping[str, Sequence[Accuracies]], ours: str, what: str) -> Claim:
    """The RMSE of ARM over ours with one draw."""
    ratios = {name: [table.ratio("ARM", ours, LAYER) for table in several] for name, several in tables.items()}
    means = [geometric_mean(values) for values in ratios.values()]
    return Claim(
        f"the advantage of {ours} over ARM grows with the {what}",
        all(small < large for small, large in pairwise(means)),
        f"RMSE of ARM over that of {ours}, 1 draw, geometric mean (and range) over several networks: "
        + ", ".join(
            f"{mean:,.0f} ({min(values):,.0f} to {max(values):,.0f}) for {name}"
            for mean, (name, values) in zip(means, ratios.items(), strict=True)
        ),
    )


def bias_shrinks(tables: Mapping[str, Sequence[Accuracies]]) -> Claim:
    """The biases of PSA and ST against the width."""
    means = {
        name: [fmean(table.layer(ours, LAYER)["bias"] for table in several) for ours in ("PSA", "ST")]
        for name, several in tables.items()
    }
    first, *_, last = means.values()
    return Claim(
        "the bias of PSA and of ST is more prominent in small networks",
        all(small > large for small, large in zip(first, last, strict=True)),
        "mean relative bias of PSA, ST: " + "; ".join(f"{psa:.3f}, {st:.3f} for {name}" for name, (psa, st) in means.items()),
    )
