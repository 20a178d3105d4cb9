"""Beyond the paper: averaging the inputs of weights and of the head, against the paper's estimators.

:mod:`beyond_networks` measures gradients in small and wide networks, times them and trains; here is what the numbers say, as
claims and tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import numpy as np

from flipgrad import plots
from flipgrad.plots.options import PAPER, Grid, Net
from flipgrad.reproduce import toy
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop, experiment
from flipgrad.reproduce.beyond_networks import (
    SETTINGS,
    WAYS,
    grids_of,
    measure_costs,
    measure_small,
    measure_wide,
    of_updates,
    revised,
    train,
)

# The default, which takes the posterior in the layers where that pays; the posterior in all layers, and two others.
RECOMMENDED, POSTERIOR, RAO_BLACKWELL, MEAN = "PSA auto", "PSA posterior", "PSA rao-blackwell", "PSA mean"
UPPER = f"{RECOMMENDED}, Z and −Z of the upper half"
# Parts of a network whose inputs are no sampled states: no option changes their gradient; and the gradient of all parts.
REAL, WHOLE = ("front", "layer 1"), "all"
# What "nearly the same expectation" means, relative to the gradient; and how many draws one is said to be worth.
NEAR, WORTH = 0.1, 3.0
# Exceptions that are told.
TOLD = 4
# The long trainings on the toy problem, whose losses are known exactly: there a bias shows that short ones on images hide.
# Options, and epochs and networks by scale.
LASTING = ("st:sampled", "st:mean", "psa:sampled", "psa:auto", "psa:posterior", "psa:rao-blackwell", "psa:mean")
LENGTH = {"smoke": (3, 1), "small": (600, 3), "paper": (2000, 10)}
# The small networks in the figure: as many as fit; the table has all.
DRAWN = 5


@experiment(
    "beyond",
    "Beyond the paper",
    seconds=(15, 7000, 1.7e5),
    cells=(2, 2, 8),
    figures={
        "beyond-wide": "The same in wide networks, relative to PSA's own expectation.",
        "beyond-training": "Training losses over learning rates, and at the best rate over time.",
        "beyond-toy": "Long trainings on the toy problem at the paper's rate: exact losses.",
    },
)
def averaging(shop: Workshop) -> list[Claim | Sheet]:
    """Beyond the paper: averaged inputs and heads.

    PSA averages over paths from a unit to the loss, but the gradient of a weight still multiplies by the sampled state of its
    input, and the head's by that of the last layer. These can be averaged, too: given all other units (rao-blackwell), given
    the next layer (posterior), or given the layer before (mean). Errors, biases and errors at equal cost of every option in
    every layer, against the exact gradient in small networks and against very many draws of PSA in wide ones; what a gradient
    costs; and trainings over a grid of learning rates.
    """
    settings = SETTINGS[shop.scale_name]
    trained = train(shop, settings)
    costs, how_timed = measure_costs(shop, settings)
    small = measure_small(shop, costs)
    lasting = toy.trainings(shop, "beyond-toy", LASTING, *LENGTH[shop.scale_name], revised)
    wide = measure_wide(shop, settings, costs)
    nets, grids = [*small, *wide], grids_of(shop, settings, trained, costs)
    drawn = [net.name for net in (small if len(small) <= DRAWN else [*small[: DRAWN - 1], small[-1]])]
    stored = {"nets": [asdict(net) for net in nets], "grids": [asdict(grid) for grid in grids], "drawn": drawn}
    path = shop.store("beyond", stored)
    plots.by_layer(path, shop.folder / "beyond", drawn)
    plots.by_layer(path, shop.folder / "beyond-wide", [net.name for net in wide])
    plots.over_rates(path, shop.folder / "beyond-training")
    return [*all_claims(nets, grids), *all_sheets(nets, grids, how_timed), *long_trainings(lasting)]


def all_claims(nets: Sequence[Net], grids: Sequence[Grid]) -> Iterator[Claim]:
    """Everything, in the order of the text."""
    small, wide = [net for net in nets if not net.wide], [net for net in nets if net.wide]
    for kind, several in (("small networks, exactly measured", small), ("wide networks", wide)):
        yield from (_less_error(several, option, kind) for option in (POSTERIOR, RAO_BLACKWELL, MEAN))
        yield _everywhere(
            f"{RAO_BLACKWELL} has PSA's expectation ({kind}; the 95 % intervals of their biases meet, told is the gap between "
            "them)",
            _places(several, *REAL),
            _gap,
            lambda gap: gap <= 0,
        )
    yield from _variance_bias_and_direction(nets, small, wide)
    for option in (RECOMMENDED, MEAN):
        yield from _equal_cost(nets, option)
    yield from _several_draws(wide)
    for grid in grids:
        yield from _training_claims(grid)


def _places(nets: Sequence[Net], *without: str) -> list[tuple[Net, str]]:
    """The layers and the head of all networks, without some; without :data:`REAL` those whose inputs are sampled states."""
    return [(net, layer) for net in nets for layer in net.layers if layer not in (WHOLE, *without)]


def _everywhere(
    text: str,
    places: Sequence[tuple[Net, str]],
    value: Callable[[Net, str], float],
    good: Callable[[float], bool],
    *,
    high_is_good: bool = False,
) -> Claim:
    """A claim about a number in all places; told are its range, and where it fails worst."""
    values = [(value(net, layer), f"{layer} of {net.name}") for net, layer in places]
    bad = sorted((entry for entry in values if not good(entry[0])), reverse=not high_is_good)
    numbers = [number for number, _ in values]
    told = f"{min(numbers):.2f} to {max(numbers):.2f}; it is so in {len(values) - len(bad)} of {len(values)} places"
    shown = ", ".join(f"{number:.2f} in {place}" for number, place in bad[:TOLD])
    more = f" and {len(bad) - TOLD} more" if len(bad) > TOLD else ""
    return Claim(text, not bad, f"{told}, not: {shown}{more}" if bad else told)


def _less_error(nets: Sequence[Net], option: str, kind: str) -> Claim:
    """The RMSE of one draw over PSA's; where no option changes anything, the same ratio tells what chance does."""
    found = _everywhere(
        f"{option} has a lower error than PSA with one draw in every layer with binary inputs, and in the head ({kind}; RMSE "
        "over that of PSA)",
        _places(nets, *REAL),
        lambda net, layer: net.ratio(option, "rmse", layer),
        lambda ratio: ratio < 1,
    )
    chance = [net.ratio(option, "rmse", "layer 1") for net in nets]
    told = f"{found.numbers}. In layer 1, which no option changes: {min(chance):.2f} to {max(chance):.2f}"
    return replace(found, numbers=told)


def _gap(net: Net, layer: str) -> float:
    """How far the intervals of the biases of PSA and of its conditional expectation are apart."""
    low, high = (net.value(PAPER, key, layer) for key in ("bias_low", "bias_high"))
    own_low, own_high = (net.value(RAO_BLACKWELL, key, layer) for key in ("bias_low", "bias_high"))
    return max(0.0, own_low - high, low - own_high)


def _variance_bias_and_direction(nets: Sequence[Net], small: Sequence[Net], wide: Sequence[Net]) -> Iterator[Claim]:
    yield _everywhere(
        f"one draw of {RAO_BLACKWELL} is worth {WORTH:.0f} of PSA (small networks; PSA's variance over its variance)",
        _places(small, *REAL),
        lambda net, layer: net.ratio(RAO_BLACKWELL, "std", layer) ** -2,
        lambda ratio: ratio >= WORTH,
        high_is_good=True,
    )
    yield _everywhere(
        f"{POSTERIOR} is less biased than ST in every hidden layer (small networks; its bias minus ST's)",
        _places(small, "head"),
        lambda net, layer: net.value(POSTERIOR, "bias", layer) - net.value("ST", "bias", layer),
        lambda difference: difference < 0,
    )
    others = (PAPER, RECOMMENDED, POSTERIOR, RAO_BLACKWELL)
    yield _everywhere(
        f"{MEAN} has the least variance of PSA's options in every hidden layer with binary inputs (its standard deviation over "
        "the least of the others')",
        _places(nets, *REAL, "head"),
        lambda net, layer: net.value(MEAN, "std", layer) / min(net.value(other, "std", layer) for other in others),
        lambda ratio: ratio <= 1,
    )
    yield _everywhere(
        f"{POSTERIOR} points in a better direction than PSA in every layer with binary inputs, and in the head (mean cosine "
        "with one draw, minus PSA's)",
        _places(nets, *REAL),
        lambda net, layer: net.value(POSTERIOR, "cosine", layer) - net.value(PAPER, "cosine", layer),
        lambda gain: gain > 0,
        high_is_good=True,
    )
    yield _everywhere(
        f"{POSTERIOR} has nearly PSA's expectation in wide networks (their distance is below {NEAR:.0%} of the gradient's "
        "length)",
        _places(wide, *REAL),
        lambda net, layer: net.value(POSTERIOR, "bias", layer),
        lambda distance: distance < NEAR,
    )


def _equal_cost(nets: Sequence[Net], option: str) -> Iterator[Claim]:
    """RMSE times the root of the cost: in all layers, in those that an option changes, and in the whole gradient."""
    for where, places in (
        ("in every layer of every network", _places(nets)),
        ("in every layer with binary inputs, and in the head, of every network", _places(nets, *REAL)),
        ("in the whole gradient of every network", [(net, WHOLE) for net in nets]),
    ):
        yield _everywhere(
            f"at equal cost {option} is more accurate than PSA {where} (RMSE × √time over PSA's)",
            places,
            lambda net, layer: net.equal_cost(option, layer),
            lambda ratio: ratio < 1,
        )


def _several_draws(nets: Sequence[Net]) -> Iterator[Claim]:
    """Antithetic draws against independent ones, and several draws of the last layer against one, at equal cost."""

    def below(text: str, one: str, other: str) -> Claim:
        return _everywhere(
            text,
            _places(nets),
            lambda net, layer: net.std_at_cost(one, layer) / net.std_at_cost(other, layer),
            lambda ratio: ratio < 1,
        )

    yield below(
        f"two antithetic draws of {RECOMMENDED}, Z and −Z in every layer, are better than two independent ones (wide networks; "
        "standard deviation × √time over that of the others)",
        f"{RECOMMENDED}, Z and −Z",
        f"{RECOMMENDED}, 2 draws",
    )
    yield below(
        f"two antithetic draws of the upper half of the layers, the others' drawn once, are worth their time (wide networks, "
        f"{RECOMMENDED}; standard deviation × √time over that of one draw)",
        UPPER,
        RECOMMENDED,
    )
    yield _everywhere(
        "at equal cost two antithetic draws of the upper half are more accurate than PSA in every layer, also the first (wide "
        f"networks, {RECOMMENDED}; RMSE × √time over PSA's)",
        _places(nets),
        lambda net, layer: net.equal_cost(UPPER, layer),
        lambda ratio: ratio < 1,
    )
    yield below(
        f"four draws of the last layer's states, the other layers' drawn once, are worth their time (wide networks, {MEAN}; "
        "standard deviation × √time over that of one draw)",
        f"{MEAN}, 4 of the last layer",
        MEAN,
    )


def _training_claims(grid: Grid) -> Iterator[Claim]:
    """The largest rates at which trainings are stable, and the lowest losses after the same epochs and the same time."""
    ours, *theirs = (grid.largest_stable(method) for method in (RECOMMENDED, PAPER, "ST"))
    stable = ", ".join(f"{method} {grid.largest_stable(method):g}" for method in grid.methods)
    yield Claim(
        f"{RECOMMENDED} bears rates as large as PSA and ST do, or larger: {grid.title} (largest of the grid whose training "
        "comes to its end with a loss below that of guessing; 0: none)",
        ours > 0 and ours >= max(theirs),
        f"of {', '.join(f'{rate:g}' for rate in grid.rates)}: {stable}",
    )
    epochs = f"lowest over the rates, after {grid.epochs} epochs"
    time = (
        f"lowest over the rates, in the time that the cheapest takes for {grid.epochs} epochs, from the measured times of an "
        "update at the start; losses between epochs are on a line"
    )
    for after, same, how in ((lambda _: grid.epochs, "epochs", epochs), (grid.in_time, "time", time)):
        losses = {method: grid.best(method, after(method)) for method in grid.methods}
        own = losses[RECOMMENDED]
        yield Claim(
            f"{RECOMMENDED} comes to a lower training loss than PSA and ST in the same {same}: {grid.title} ({how})",
            # The others may have none.
            isfinite(own) and all(not losses[other] <= own for other in (PAPER, "ST")),
            ", ".join(f"{method} {_lowest(grid, method, after(method))}" for method in losses),
        )


def _lowest(grid: Grid, method: str, epochs: float) -> str:
    """The lowest loss over the rates, with its spread over seeds."""
    return grid.told(method, grid.best_rate(method, epochs), epochs)


def all_sheets(nets: Sequence[Net], grids: Sequence[Grid], how_timed: str) -> list[Sheet]:
    """In the order of the text; costs were timed in the way that ``how_timed`` says."""
    small, wide = [net for net in nets if not net.wide], [net for net in nets if net.wide]
    references = "; ".join(f"{net.name}: {net.reference}" for net in wide)
    options = list(nets[0].options)

    def accuracy(net: Net, name: str, layer: str) -> str:
        rmse, bias, low, cosine = (net.value(name, key, layer) for key in ("rmse", "bias", "bias_low", "cosine"))
        return f"{rmse:.3g} / {f'{bias:.2f}' if low > 0 else f'({bias:.2f})'} / {cosine:.2f}"

    return [
        _by_layer(
            "Small networks, one draw: relative RMSE / bias / cosine to the exact gradient. A bias in brackets cannot be told "
            "from 0.",
            small,
            options,
            accuracy,
        ),
        _by_layer(
            "Wide networks, one draw: relative RMSE / bias / cosine to PSA's own expectation, which is not the exact gradient "
            f"but in the last layer and the head. A bias in brackets cannot be told from 0. {references}.",
            wide,
            options,
            accuracy,
        ),
        _costs(nets, grids, how_timed),
        _by_layer(
            "Equal cost: RMSE × √time over PSA's. Below 1, averaging draws for the same time gives a lower error than PSA, as "
            "far as the error is variance. Layer 1 has real inputs: no option changes its gradient, so that their time is lost "
            "there.",
            nets,
            [name for name in options if name != PAPER],
            lambda net, name, layer: f"{net.equal_cost(name, layer):.2f}",
        ),
        _by_layer(
            "Several draws, wide networks: relative standard deviation, and in brackets times √time (in units of PSA's).",
            wide,
            [RECOMMENDED, MEAN, *WAYS],
            lambda net, name, layer: f"{net.value(name, 'std', layer):.3g} ({net.std_at_cost(name, layer):.3g})",
        ),
        _trainings(grids),
    ]


def _by_layer(caption: str, nets: Sequence[Net], names: Sequence[str], entry: Callable[[Net, str, str], str]) -> Sheet:
    rows = [[f"{net.name}, {layer}", *(entry(net, name, layer) for name in names)] for net in nets for layer in net.layers]
    return Sheet(caption, ["network, layer", *names], rows)


def _costs(nets: Sequence[Net], grids: Sequence[Grid], how_timed: str) -> Sheet:
    """The times of gradients and of updates."""
    known = {net.name: net.cost for net in nets} | {of_updates(grid.title): grid.cost for grid in grids}
    names = list(dict.fromkeys(label for cost in known.values() for label in cost))
    return Sheet(
        f"Time of a gradient over that of PSA, on one thread, all timed in turns, {how_timed}. In small networks it is that of "
        "the calls. An update of a training at its start is all that trainings do for a batch: images and their augmentation, "
        "the gradient, momentum.",
        ["option", *known],
        [[name, *(f"{cost[name]:.2f}" if name in cost else "" for cost in known.values())] for name in names],
    )


def _trainings(grids: Sequence[Grid]) -> Sheet:
    """Losses by rate, and what is made of them."""
    rates = sorted({rate for grid in grids for rate in grid.rates})

    def row(grid: Grid, method: str) -> list[str]:
        tried = {run.rate for run in grid.of(method)}
        losses = [grid.told(method, rate) if rate in tried else "" for rate in rates]
        largest = grid.largest_stable(method)
        top = "none" if not largest else f"{'≥ ' if largest == max(grid.rates) else ''}{largest:g}"
        ends = (_lowest(grid, method, epochs) for epochs in (grid.epochs, grid.in_time(method)))
        return [f"{grid.title}, {method}", *losses, top, *ends]

    return Sheet(
        "Trainings: the training loss after all epochs at every rate (—: diverged; of several seeds the mean ± the standard "
        "deviation), the largest stable rate, the lowest loss after equal epochs, and that after equal time. Batches of 64, "
        "momentum 0.9; " + "; ".join(f"{grid.title}: {grid.words}" for grid in grids) + ".",
        ["network, option", *(f"rate {rate:g}" for rate in rates), "largest stable", "equal epochs", "equal time"],
        [row(grid, method) for grid in grids for method in grid.methods],
    )


def long_trainings(methods: Mapping[str, Any]) -> list[Claim | Sheet]:
    """Whether options come to a lower exact loss than the paper's PSA in every network, and the losses along the training.

    The ``methods`` are those of :func:`flipgrad.reproduce.toy.trainings`.
    """
    epochs = methods[PAPER]["epochs"]
    losses = {label: [run["expected"] for run in entry["runs"]] for label, entry in methods.items()}
    ends = {label: [run[-1] for run in runs] for label, runs in losses.items()}
    networks = len(ends[PAPER])
    means = ", ".join(f"{label} {np.mean(own):.4f}" for label, own in ends.items())
    claims = [
        Claim(
            f"{option} comes to a lower expected loss than PSA in a long training (5-5-5, toy problem; exact losses, means of "
            f"the last stretch, around epoch {epochs[-1]:,.0f}; every one of {networks} networks)",
            all(ours < theirs for ours, theirs in zip(ends[option], ends[PAPER], strict=True)),
            f"means over networks: {means}",
        )
        for option in (RECOMMENDED, MEAN)
    ]
    some = [min(range(len(epochs)), key=lambda k: abs(epochs[k] - epochs[-1] * share)) for share in (0.01, 0.1, 0.3)]
    rows = [
        [label, *(f"{np.mean([run[k] for run in runs]):.4f}" for k in some), *(f"{end:.4f}" for end in ends[label])]
        for label, runs in losses.items()
    ]
    sheet = Sheet(
        "Long trainings of 5-5-5 on the toy problem, at the paper's rate: exact expected losses, means over networks along "
        "the training, and of every network at the end.",
        ["option", *(f"epoch {epochs[k]:,.0f}" for k in some), *(f"end, network {k}" for k in range(1, networks + 1))],
        rows,
    )
    return [*claims, sheet]
