"""Appendix C.1: how accuracy depends on the width and on the depth of the network, in layer 1 after one epoch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, Experiment, Table, Workshop

ESTIMATORS = ("reinforce", "arm", "concrete:0.1", "concrete", "tanh", "st", "psa")
LAYER = "layer 1"


@final
class Width(Experiment):
    """Three layers of 3, 5 and 10 units."""

    name = "width"
    title = "Appendix: relative RMSE in layer 1 against the width of the network, after 1 epoch"

    def run(self, shop: Workshop) -> list[Claim]:
        paths = _measure(shop, {f"{n}-{n}-{n}": (n,) * 3 for n in (3, 5, 10)})
        plots.rmse([plots.Panel(path, LAYER, name) for name, path in paths.items()], shop.folder / self.name)
        return [*advantage_grows(paths, "width"), bias_shrinks(paths)]


@final
class Depth(Experiment):
    """Two, five and seven layers of 5 units."""

    name = "depth"
    title = "Appendix: relative RMSE in layer 1 against the depth of the network, after 1 epoch"

    def run(self, shop: Workshop) -> list[Claim]:
        paths = _measure(shop, {f"{n} layers": (5,) * n for n in (2, 5, 7)})
        plots.rmse([plots.Panel(path, LAYER, name) for name, path in paths.items()], shop.folder / self.name)
        return advantage_grows(paths, "depth")


def _measure(shop: Workshop, nets: Mapping[str, Sequence[int]]) -> dict[str, Path]:
    return {name: shop.measure(widths, 1, (1,), ESTIMATORS, shop.scale.samples) for name, widths in nets.items()}


def advantage_grows(paths: Mapping[str, Path], what: str) -> list[Claim]:
    """The RMSE of unbiased estimators over those of PSA and of ST."""
    claims = []
    for ours in ("PSA", "ST"):
        ratios = {}
        for name, path in paths.items():
            table = Table.read(path)
            ratios[name] = table.rmse("ARM", LAYER) / table.rmse(ours, LAYER)
        values = list(ratios.values())
        claims.append(
            Claim(
                f"the advantage of {ours} over ARM grows with the {what}",
                all(small < large for small, large in itertools.pairwise(values)),
                "RMSE of ARM over that of "
                + f"{ours}, 1 draw: {', '.join(f'{value:.1f} ({name})' for name, value in ratios.items())}",
            )
        )
    return claims


def bias_shrinks(paths: Mapping[str, Path]) -> Claim:
    """The biases of PSA and ST against the width."""
    biases = {name: [Table.read(path).layer(ours, LAYER)["bias"] for ours in ("PSA", "ST")] for name, path in paths.items()}
    first, *_, last = biases.values()
    return Claim(
        "the bias of PSA and of ST is more prominent in small networks",
        all(small > large for small, large in zip(first, last, strict=True)),
        "relative bias of PSA, ST: " + "; ".join(f"{psa:.3f}, {st:.3f} ({name})" for name, (psa, st) in biases.items()),
    )
