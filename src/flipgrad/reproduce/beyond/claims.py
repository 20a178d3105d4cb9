"""What the numbers say about averaging inputs and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite

from flipgrad.reproduce._experiment import Claim
from flipgrad.reproduce.beyond.options import PAPER, RECOMMENDED, WHOLE, Net
from flipgrad.reproduce.beyond.rates import Grid

# What "nearly the same expectation" means, relative to the gradient; and how many draws one is said to be worth.
NEAR, WORTH = 0.1, 3.0
# Exceptions that are told.
TOLD = 4

Where = tuple[Net, str]


def all_claims(nets: Sequence[Net], grids: Sequence[Grid]) -> list[Claim]:
    """Everything, in the order of the text."""
    small, wide = [net for net in nets if not net.wide], [net for net in nets if net.wide]
    found = []
    for kind, several in (("small networks, exactly measured", small), ("wide networks", wide)):
        found += [less_error(several, option, kind) for option in (RECOMMENDED, "PSA rao-blackwell", "PSA mean")]
        found.append(same_mean(several, kind))
    found += [*small_variance_and_bias(small), *least_variance_and_best_direction(nets), near(wide)]
    found += [claim for option in (RECOMMENDED, "PSA mean") for claim in equal_cost(nets, option)]
    found += several_draws(wide)
    for grid in grids:
        found += [largest_rate(grid), equal_epochs(grid), equal_time(grid)]
    return found


def _parts(nets: Iterable[Net]) -> list[Where]:
    return [(net, layer) for net in nets for layer in net.parts]


def _averaged(nets: Iterable[Net]) -> list[Where]:
    return [(net, layer) for net in nets for layer in net.averaged]


def _hidden(places: Iterable[Where]) -> list[Where]:
    return [(net, layer) for net, layer in places if layer != "head"]


def _everywhere(
    text: str,
    places: Sequence[Where],
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


def less_error(nets: Sequence[Net], option: str, kind: str) -> Claim:
    """The RMSE of one draw over PSA's; where no option changes anything, the same ratio tells what chance does."""
    found = _everywhere(
        f"{option} has a lower error than PSA with one draw in every layer with binary inputs, and in the head ({kind}; RMSE "
        "over that of PSA)",
        _averaged(nets),
        lambda net, layer: net.ratio(option, "rmse", layer),
        lambda ratio: ratio < 1,
    )
    chance = [net.ratio(option, "rmse", "layer 1") for net in nets]
    told = f"{found.numbers}. In layer 1, which no option changes: {min(chance):.2f} to {max(chance):.2f}"
    return replace(found, numbers=told)


def same_mean(nets: Sequence[Net], kind: str) -> Claim:
    """Whether the intervals of the biases meet."""
    option = "PSA rao-blackwell"

    def apart(net: Net, layer: str) -> float:
        (low, high), (own_low, own_high) = (
            [net.value(name, key, layer) for key in ("bias_low", "bias_high")] for name in (PAPER, option)
        )
        return max(0.0, own_low - high, low - own_high)

    return _everywhere(
        f"{option} has PSA's expectation ({kind}; the 95 % intervals of their biases meet, told is the gap between them)",
        _averaged(nets),
        apart,
        lambda gap: gap <= 0,
    )


def small_variance_and_bias(nets: Sequence[Net]) -> list[Claim]:
    """PSA's variance over that of its conditional expectation, and the bias of what is recommended against ST's."""
    return [
        _everywhere(
            f"one draw of PSA rao-blackwell is worth {WORTH:.0f} of PSA (small networks; PSA's variance over its variance)",
            _averaged(nets),
            lambda net, layer: net.ratio("PSA rao-blackwell", "std", layer) ** -2,
            lambda ratio: ratio >= WORTH,
            high_is_good=True,
        ),
        _everywhere(
            f"{RECOMMENDED} is less biased than ST in every hidden layer (small networks; its bias minus ST's)",
            _hidden(_parts(nets)),
            lambda net, layer: net.value(RECOMMENDED, "bias", layer) - net.value("ST", "bias", layer),
            lambda difference: difference < 0,
        ),
    ]


def least_variance_and_best_direction(nets: Sequence[Net]) -> list[Claim]:
    """Which option has the least variance, and the mean cosine with one draw."""
    others = (PAPER, RECOMMENDED, "PSA rao-blackwell")
    return [
        _everywhere(
            "PSA mean has the least variance of PSA's options in every hidden layer with binary inputs (its standard deviation "
            "over the least of the others')",
            _hidden(_averaged(nets)),
            lambda net, layer: net.value("PSA mean", "std", layer) / min(net.value(other, "std", layer) for other in others),
            lambda ratio: ratio <= 1,
        ),
        _everywhere(
            f"{RECOMMENDED} points in a better direction than PSA in every layer with binary inputs, and in the head (mean "
            "cosine with one draw, minus PSA's)",
            _averaged(nets),
            lambda net, layer: net.value(RECOMMENDED, "cosine", layer) - net.value(PAPER, "cosine", layer),
            lambda gain: gain > 0,
            high_is_good=True,
        ),
    ]


def near(nets: Sequence[Net]) -> Claim:
    """How far the posterior's mean is from PSA's."""
    return _everywhere(
        f"{RECOMMENDED} has nearly PSA's expectation in wide networks (their distance is below {NEAR:.0%} of the gradient's "
        "length)",
        _averaged(nets),
        lambda net, layer: net.value(RECOMMENDED, "bias", layer),
        lambda distance: distance < NEAR,
    )


def equal_cost(nets: Sequence[Net], option: str) -> list[Claim]:
    """RMSE times the root of the cost: in all layers, in those that an option changes, and in the whole gradient."""
    places = {
        "in every layer of every network": _parts(nets),
        "in every layer with binary inputs, and in the head, of every network": _averaged(nets),
        "in the whole gradient of every network": [(net, WHOLE) for net in nets],
    }
    return [
        _everywhere(
            f"at equal cost {option} is more accurate than PSA {where} (RMSE × √time over PSA's)",
            several,
            lambda net, layer: net.equal_cost(option, layer),
            lambda ratio: ratio < 1,
        )
        for where, several in places.items()
    ]


def several_draws(nets: Sequence[Net]) -> list[Claim]:
    """Antithetic draws against independent ones, and several draws of the last layer against one, at equal cost."""
    compared = {
        f"two antithetic draws of {RECOMMENDED}, Z and −Z in every layer, are better than two independent ones (wide networks; "
        "standard deviation × √time over that of the others)": (f"{RECOMMENDED}, Z and −Z", f"{RECOMMENDED}, 2 draws"),
        "four draws of the last layer's states, the other layers' drawn once, are worth their time (wide networks, PSA mean; "
        "standard deviation × √time over that of one draw)": ("PSA mean, 4 of the last layer", "PSA mean"),
    }

    def over(one: str, other: str) -> Callable[[Net, str], float]:
        return lambda net, layer: net.std_at_cost(one, layer) / net.std_at_cost(other, layer)

    return [_everywhere(text, _parts(nets), over(*pair), lambda ratio: ratio < 1) for text, pair in compared.items()]


def _told(grid: Grid, value: Callable[[str], float], form: str = ".3f") -> str:
    return ", ".join(f"{method} {value(method):{form}}" for method in grid.methods)


def _below(grid: Grid, value: Callable[[str], float]) -> bool:
    """Whether what is recommended has a lower number than PSA and ST, which may have none."""
    ours = value(RECOMMENDED)
    return isfinite(ours) and all(not value(other) <= ours for other in (PAPER, "ST"))


def largest_rate(grid: Grid) -> Claim:
    """The largest rates at which trainings are stable."""
    ours, *theirs = (grid.largest_stable(method) for method in (RECOMMENDED, PAPER, "ST"))
    return Claim(
        f"{RECOMMENDED} bears rates as large as PSA and ST do, or larger: {grid.title} (largest of the grid whose "
        "training comes to its end with a loss below that of guessing; 0: none)",
        ours > 0 and ours >= max(theirs),
        f"of {', '.join(f'{rate:g}' for rate in grid.rates)}: {_told(grid, grid.largest_stable, 'g')}",
    )


def equal_epochs(grid: Grid) -> Claim:
    """The lowest losses after all epochs."""
    return Claim(
        f"{RECOMMENDED} comes to a lower training loss than PSA and ST in the same epochs: {grid.title} (lowest over the "
        f"rates, after {grid.epochs} epochs)",
        _below(grid, grid.best),
        _told(grid, grid.best),
    )


def equal_time(grid: Grid) -> Claim:
    """The lowest losses after the same time."""
    return Claim(
        f"{RECOMMENDED} comes to a lower training loss than PSA and ST in the same time: {grid.title} (lowest over the rates, "
        f"in the time that the cheapest takes for {grid.epochs} epochs, from the measured times of a gradient; losses between "
        "epochs are on a line)",
        _below(grid, grid.equal_time),
        _told(grid, grid.equal_time),
    )
