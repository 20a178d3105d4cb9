"""The tables of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from flipgrad.reproduce._experiment import Sheet
from flipgrad.reproduce.beyond.draws import WAYS
from flipgrad.reproduce.beyond.options import PAPER, Net
from flipgrad.reproduce.beyond.rates import Grid


def all_sheets(nets: Sequence[Net], grids: Sequence[Grid]) -> list[Sheet]:
    """In the order of the text."""
    small, wide = [net for net in nets if not net.wide], [net for net in nets if net.wide]
    references = "; ".join(f"{net.name}: {net.reference}" for net in wide)
    return [
        accuracy(
            small,
            "Small networks, one draw: relative RMSE / bias / cosine to the exact gradient. A bias in brackets cannot be told "
            "from 0.",
        ),
        accuracy(
            wide,
            "Wide networks, one draw: relative RMSE / bias / cosine to PSA's own expectation, which is not the exact gradient "
            f"but in the last layer and the head. A bias in brackets cannot be told from 0. {references}.",
        ),
        costs(nets, grids),
        equal_cost(nets),
        several_draws(wide),
        trainings(grids),
    ]


def _by_layer(nets: Sequence[Net], names: Sequence[str], entry: Callable[[Net, str, str], str]) -> list[list[str]]:
    return [[f"{net.name}, {layer}", *(entry(net, name, layer) for name in names)] for net in nets for layer in net.layers]


def accuracy(nets: Sequence[Net], caption: str) -> Sheet:
    """The three measures of every option, in every layer."""
    names = list(nets[0].options)

    def entry(net: Net, name: str, layer: str) -> str:
        rmse, bias, low, cosine = (net.value(name, key, layer) for key in ("rmse", "bias", "bias_low", "cosine"))
        return f"{rmse:.3g} / {f'{bias:.2f}' if low > 0 else f'({bias:.2f})'} / {cosine:.2f}"

    return Sheet(caption, ["network, layer", *names], _by_layer(nets, names, entry))


def costs(nets: Sequence[Net], grids: Sequence[Grid]) -> Sheet:
    """The time of a gradient."""
    known = {net.name.partition(",")[0] if not net.wide else net.name.rpartition(",")[0]: net.cost for net in nets}
    known |= {grid.title: grid.cost for grid in grids if grid.title not in known}
    names = list(dict.fromkeys(label for cost in known.values() for label in cost))
    return Sheet(
        "Time of a gradient over that of PSA, on one thread, all timed in turns. In small networks it is that of the calls.",
        ["option", *known],
        [[name, *(f"{cost[name]:.2f}" if name in cost else "" for cost in known.values())] for name in names],
    )


def equal_cost(nets: Sequence[Net]) -> Sheet:
    """RMSE times the root of the cost."""
    names = [name for name in nets[0].options if name != PAPER]
    return Sheet(
        "Equal cost: RMSE × √time over PSA's. Below 1, averaging draws for the same time gives a lower error than PSA, as far "
        "as the error is variance. Layer 1 has real inputs: no option changes its gradient, so that their time is lost there.",
        ["network, layer", *names],
        _by_layer(nets, names, lambda net, name, layer: f"{net.equal_cost(name, layer):.2f}"),
    )


def several_draws(nets: Sequence[Net]) -> Sheet:
    """Standard deviations of estimates from several draws."""
    names = ["PSA posterior", "PSA mean", *WAYS]
    return Sheet(
        "Several draws, wide networks: relative standard deviation, and in brackets times √time (in units of PSA's).",
        ["network, layer", *names],
        _by_layer(
            nets,
            names,
            lambda net, name, layer: f"{net.value(name, 'std', layer):.3g} ({net.std_at_cost(name, layer):.3g})",
        ),
    )


def trainings(grids: Sequence[Grid]) -> Sheet:
    """Losses by rate, and what is made of them."""
    rates = list(dict.fromkeys(f"{rate:g}" for grid in grids for rate in sorted(grid.rates)))
    rates.sort(key=float)

    def row(grid: Grid, method: str) -> list[str]:
        runs = {f"{run.rate:g}": run for run in grid.of(method)}
        losses = [_loss(runs[rate].final) if rate in runs else "" for rate in rates]
        largest = grid.largest_stable(method)
        top = "none" if not largest else f"{'≥ ' if largest == max(grid.rates) else ''}{largest:g}"
        return [f"{grid.title}, {method}", *losses, top, _loss(grid.best(method)), _loss(grid.equal_time(method))]

    return Sheet(
        "Trainings: the training loss after all epochs at every rate (—: diverged), the largest stable rate, the lowest loss "
        "after equal epochs, and that after equal time. Batches of 64, momentum 0.9; "
        + "; ".join(f"{grid.title}: {grid.words}" for grid in grids)
        + ".",
        ["network, option", *(f"rate {rate}" for rate in rates), "largest stable", "equal epochs", "equal time"],
        [row(grid, method) for grid in grids for method in grid.methods],
    )


def _loss(value: float) -> str:
    return f"{value:.3f}" if isfinite(value) else "—"
