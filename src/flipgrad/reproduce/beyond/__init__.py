"""Beyond the paper: averaging the inputs of weights and of the head, against the paper's estimators.

:mod:`small` measures small networks against the exact gradient, :mod:`wide` wide ones against very many draws, :mod:`cost`
times gradients, :mod:`rates` and :mod:`lasting` train; :mod:`claims` and :mod:`sheets` say what came out.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import final

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, Experiment, Sheet, Workshop
from flipgrad.reproduce.beyond import claims, cost, rates, sheets, small, wide
from flipgrad.reproduce.beyond.lasting import NAME, Lasting
from flipgrad.reproduce.beyond.options import Net

# The small networks in the figure: as many as fit; the table has all.
DRAWN = 5


@final
class Beyond(Experiment):
    """Every option: its accuracy layer by layer, its cost, and how it trains."""

    name = "beyond"
    title = "Beyond the paper: averaged inputs and heads"

    def run(self, shop: Workshop) -> list[Claim]:
        settings = rates.SETTINGS[shop.scale_name]
        costs = cost.measure(shop, settings)
        nets = small.measure(shop, costs)
        grids = rates.train(shop, settings, costs)
        lasting = Lasting.measure(shop)
        nets += wide.measure(shop, settings, costs)
        drawn = [net for net in nets if not net.wide]
        drawn = drawn if len(drawn) <= DRAWN else [*drawn[: DRAWN - 1], drawn[-1]]
        path = shop.store(
            self.name,
            {
                "nets": [asdict(net) for net in nets],
                "grids": [grid.to_json() for grid in grids],
                "drawn": [net.name for net in drawn],
            },
        )
        plots.by_layer(path, shop.folder / self.name, [net.name for net in drawn])
        plots.by_layer(path, shop.folder / f"{self.name}-wide", [net.name for net in nets if net.wide])
        plots.over_rates(path, shop.folder / f"{self.name}-training")
        return [*claims.all_claims(nets, grids), *lasting.claims()]

    def sheets(self, shop: Workshop) -> list[Sheet]:
        stored = shop.load(shop.folder / shop.MEASURED / f"{self.name}.json")
        nets = [Net(**net) for net in stored["nets"]]
        lasting = Lasting.of(shop.load(shop.folder / shop.MEASURED / f"{NAME}.json")["methods"])
        return [*sheets.all_sheets(nets, [rates.Grid.from_json(grid) for grid in stored["grids"]]), lasting.sheet()]
