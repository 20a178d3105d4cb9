"""Beyond the paper: averaging the inputs of weights and of the head, against the paper's estimators.

:mod:`networks` measures gradients in small and wide networks, times them and trains; :mod:`results` says what came out.
"""

from dataclasses import asdict
from typing import ClassVar

from flipgrad import plots
from flipgrad.reproduce import toy
from flipgrad.reproduce._workshop import Claim, Experiment, Sheet, Workshop
from flipgrad.reproduce.beyond.networks import SETTINGS, measure_costs, measure_small, measure_wide, train
from flipgrad.reproduce.beyond.results import all_claims, all_sheets, long_trainings

# The long trainings on the toy problem, whose losses are known exactly: there a bias shows that short ones on images hide.
# Options, and epochs and networks by scale.
LASTING = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:rao-blackwell", "psa:mean")
LENGTH = {"smoke": (3, 1), "small": (600, 3), "paper": (2000, 10)}
# The small networks in the figure: as many as fit; the table has all.
DRAWN = 5


class Beyond(Experiment):
    """PSA averages over paths from a unit to the loss, but the gradient of a weight still multiplies by the sampled state of
    its input, and the head's by that of the last layer. These can be averaged, too: given all other units (rao-blackwell),
    given the next layer (posterior), or given the layer before (mean). Errors, biases and errors at equal cost of every option
    in every layer, against the exact gradient in small networks and against very many draws of PSA in wide ones; what a
    gradient costs; and trainings over a grid of learning rates.
    """

    name = "beyond"
    title = "Beyond the paper: averaged inputs and heads"
    place = "Beyond the paper"
    figures: ClassVar = {
        "beyond-wide": "The same in wide networks, relative to PSA's own expectation.",
        "beyond-training": "Training losses over learning rates, and at the best rate over time.",
        "beyond-toy": "Long trainings on the toy problem at the paper's rate: exact losses.",
    }
    seconds = (15, 3500, 1e5)
    cells = (2, 2, 8)

    def run(self, shop: Workshop) -> list[Claim | Sheet]:
        settings = SETTINGS[shop.scale_name]
        costs = measure_costs(shop, settings)
        small = measure_small(shop, costs)
        grids = train(shop, settings, costs)
        lasting = toy.trainings(shop, f"{self.name}-toy", LASTING, *LENGTH[shop.scale_name])
        wide = measure_wide(shop, settings, costs)
        nets = [*small, *wide]
        drawn = [net.name for net in (small if len(small) <= DRAWN else [*small[: DRAWN - 1], small[-1]])]
        stored = {"nets": [asdict(net) for net in nets], "grids": [asdict(grid) for grid in grids], "drawn": drawn}
        path = shop.store(self.name, stored)
        plots.by_layer(path, shop.folder / self.name, drawn)
        plots.by_layer(path, shop.folder / f"{self.name}-wide", [net.name for net in wide])
        plots.over_rates(path, shop.folder / f"{self.name}-training")
        return [*all_claims(nets, grids), *all_sheets(nets, grids), *long_trainings(lasting)]
