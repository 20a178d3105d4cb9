"""Beyond the paper: averaging the inputs of weights and of the head, against the paper's estimators.

:mod:`small` measures small networks against the exact gradient, :mod:`wide` wide ones against very many draws, :mod:`cost`
times gradients, :mod:`rates` and :mod:`lasting` train; :mod:`claims` and :mod:`sheets` say what came out.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar, final

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, CoreTime, Experiment, Sheet
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.beyond import claims, cost, rates, sheets, small, wide
from flipgrad.reproduce.beyond.lasting import Lasting

# The small networks in the figure: as many as fit; the table has all.
DRAWN = 5


@final
class Beyond(Experiment):
    """Every option: its accuracy layer by layer, its cost, and how it trains."""

    name = "beyond"
    title = "Beyond the paper: averaged inputs and heads"
    place = "Beyond the paper"
    words = (
        "PSA averages over paths from a unit to the loss, but the gradient of a weight still multiplies by the sampled "
        "state of its input, and the head's by that of the last layer. These can be averaged, too: given all other "
        "units (rao-blackwell), given the next layer (posterior), or given the layer before (mean). Errors, biases and "
        "errors at equal cost of every option in every layer, against the exact gradient in small networks and against "
        "very many draws of PSA in wide ones; what a gradient costs; and trainings over a grid of learning rates."
    )
    figures: ClassVar = {
        "beyond-wide": "The same in wide networks, relative to PSA's own expectation.",
        "beyond-training": "Training losses over learning rates, and at the best rate over time.",
        "beyond-toy": "Long trainings on the toy problem at the paper's rate: exact losses.",
    }
    cost = CoreTime((15, 3500, 1e5), cells=(2, 2, 8))

    def run(self, shop: Workshop) -> list[Claim | Sheet]:
        settings = rates.SETTINGS[shop.scale_name]
        costs = cost.measure(shop, settings)
        small_nets = small.measure(shop, costs)
        grids = rates.train(shop, settings, costs)
        lasting = Lasting.measure(shop)
        wide_nets = wide.measure(shop, settings, costs)
        nets = [*small_nets, *wide_nets]
        drawn = small_nets if len(small_nets) <= DRAWN else [*small_nets[: DRAWN - 1], small_nets[-1]]
        stored = {
            "nets": [asdict(net) for net in nets],
            "grids": [asdict(grid) for grid in grids],
            "drawn": [net.name for net in drawn],
        }
        path = shop.store(self.name, stored)
        plots.by_layer(path, shop.folder / self.name, [net.name for net in drawn])
        plots.by_layer(path, shop.folder / f"{self.name}-wide", [net.name for net in wide_nets])
        plots.over_rates(path, shop.folder / f"{self.name}-training")
        found = [*claims.all_claims(nets, grids), *lasting.claims()]
        return [*found, *sheets.all_sheets(nets, grids), lasting.sheet()]
