"""Options of estimators: their accuracy layer by layer, and the trainings with them over learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.plots.labels import note
from flipgrad.plots.learning import GUESSING
from flipgrad.plots.loading import REWRITE, NotNegative, Positive, load_field
from flipgrad.plots.style import GREY, defaults, fit, grid, legend, log_ticks, plain, style_of

# The paper's estimator: others are measured by it.
PAPER = "PSA"
# The numbers of an option in a layer, all relative to the length of the gradient, of one draw.
KEYS = ("rmse", "bias", "bias_low", "bias_high", "std", "cosine")
# What the rows of panels show.
ROWS = {"rmse": "relative RMSE", "bias": "relative bias", "equal": "RMSE × √time\nover PSA's"}
# A bias below this share of the largest is not shown apart from others.
SMALLEST_SHOWN = 1e-3

# By option and key, a number for every layer.
ByLayer = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Net:
    """One network in one state.

    Tables call it ``name``, figures ``title``. Errors are relative to the exact gradient, in ``wide`` networks to the mean of
    very many draws of PSA; ``reference`` says so. The ``layers`` are "front", "layer 1", ..., "head", and "all" of them. The
    numbers in every layer are by option and key, see :data:`KEYS`, those of several ``draws`` likewise; a bias whose lower
    limit is 0 cannot be told from 0. The ``cost`` is the time of a gradient over that of PSA.
    """

    name: str
    title: str
    wide: bool
    reference: str
    layers: list[str]
    options: ByLayer
    draws: ByLayer
    cost: dict[str, NotNegative]

    def __post_init__(self) -> None:
        for option, numbers in {**self.options, **self.draws}.items():
            if any(len(numbers.get(key, [])) != len(self.layers) for key in KEYS):
                raise InputError(f"'options': {option!r} must have {len(self.layers)} numbers of each kind, one per layer")
        if missing := {PAPER, *self.options} - (self.options.keys() & self.cost.keys()):
            raise InputError(f"'options' and 'cost' must hold {', '.join(sorted(missing))}")

    def value(self, option: str, key: str, layer: str) -> float:
        """One number."""
        found = self.options[option] if option in self.options else self.draws[option]
        return found[key][self.layers.index(layer)]

    def ratio(self, option: str, key: str, layer: str) -> float:
        """A number over PSA's, NaN where that is 0."""
        base = self.value(PAPER, key, layer)
        return self.value(option, key, layer) / base if base else nan

    def std_at_cost(self, option: str, layer: str) -> float:
        """The standard deviation times the root of the cost, in units of PSA's."""
        return self.value(option, "std", layer) * sqrt(self.cost[option])

    def equal_cost(self, option: str, layer: str) -> float:
        """RMSE times the root of the cost, over PSA's: below 1, the same time spent on averaged draws gives a lower error.

        It is so as far as errors are variance; a bias is not averaged away.
        """
        return self.ratio(option, "rmse", layer) * sqrt(self.cost[option])


@dataclass(frozen=True)
class Trained:
    """One training: the training loss after every epoch, as far as it came; the ``seed`` tells repeats apart."""

    method: str
    rate: Positive
    losses: list[float]
    diverged: str | None = None
    seed: int = 0

    def after(self, epochs: float) -> float:
        """The loss after that many epochs, on a line between whole ones, and at most at the end; NaN if it diverged."""
        if self.diverged or not self.losses:
            return nan
        return float(np.interp(epochs, range(1, len(self.losses) + 1), self.losses))

    @property
    def final(self) -> float:
        """The loss at the end; NaN of a training that diverged."""
        return self.after(len(self.losses))


@dataclass(frozen=True)
class Grid:
    """The trainings of one network: ``words`` say on what, the ``cost`` of an update is over that of PSA, by option."""

    title: str
    words: str
    rates: list[Positive]
    epochs: int
    runs: list[Trained]
    cost: dict[str, Positive]

    def __post_init__(self) -> None:
        if not self.rates or not self.cost:
            raise InputError("'rates' and 'cost' must not be empty")

    @property
    def methods(self) -> list[str]:
        """Their names."""
        return list(dict.fromkeys(run.method for run in self.runs))

    def of(self, method: str) -> list[Trained]:
        """The trainings with one option."""
        return [run for run in self.runs if run.method == method]

    def losses(self, method: str, rate: float, epochs: float | None = None) -> list[float]:
        """The losses of all seeds at one rate, after some epochs, by default all; NaN of those that diverged."""
        return [run.after(epochs or self.epochs) for run in self.of(method) if run.rate == rate]

    def largest_stable(self, method: str) -> float:
        """The largest rate at which the trainings of all seeds end with a lower loss than guessing; 0 if there is none."""
        tried = {run.rate for run in self.of(method)}
        stable = [rate for rate in tried if all(loss < GUESSING for loss in self.losses(method, rate))]
        return max(stable, default=0.0)

    def best_rate(self, method: str, epochs: float | None = None) -> float:
        """The rate with the lowest loss, the mean over seeds, after some epochs; NaN where a seed diverged at each."""
        means = {run.rate: float(np.mean(self.losses(method, run.rate, epochs))) for run in self.of(method)}
        finished = {rate: mean for rate, mean in means.items() if isfinite(mean)}
        return min(finished, key=finished.__getitem__, default=nan)

    def best(self, method: str, epochs: float | None = None) -> float:
        """The lowest loss over the rates, the mean over seeds, after some epochs; NaN where there is none."""
        rate = self.best_rate(method, epochs)
        return float(np.mean(self.losses(method, rate, epochs))) if isfinite(rate) else nan

    def told(self, method: str, rate: float, epochs: float | None = None) -> str:
        """The mean loss over seeds at a ``rate`` and, of several seeds, their standard deviation; a dash where one diverged."""
        losses = self.losses(method, rate, epochs)
        if not losses or not all(map(isfinite, losses)):
            return "—"
        return f"{np.mean(losses):.3f}" + (f" ± {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else "")

    def in_time(self, method: str) -> float:
        """The epochs of an option in the time that the cheapest takes for all."""
        return self.epochs * min(self.cost[name] for name in self.methods) / self.cost[method]

    def equal_time(self, method: str) -> float:
        """The lowest loss over the rates, the mean over seeds, after the time that the cheapest option takes."""
        return self.best(method, self.in_time(method))


@defaults()
def by_layer_figure(result: Path, nets: Sequence[str]) -> Figure:
    """Errors, biases and errors at equal cost in every layer of ``nets``; a bias that cannot be told from 0 is hollow."""
    found = {net.name: net for net in load_field(result, "nets", list[Net])}
    missing = [name for name in nets if name not in found]
    if missing or not nets:
        raise InputError(f"{result}: no network {', '.join(missing) or 'was asked for'}; choose from {', '.join(found)}")
    chosen = [found[name] for name in nets]
    # As wide as there are layers.
    widths = [len(net.layers) for net in chosen]
    figure, every = grid(len(ROWS), len(chosen), sharex="col", sharey="row", width_ratios=widths)
    for index, (key, title) in enumerate(ROWS.items()):
        row = every[index * len(chosen) : (index + 1) * len(chosen)]
        row[0].set_yscale("log")
        drawn = np.concatenate([_draw_layers(axes, net, key) for axes, net in zip(row, chosen, strict=True)])
        high = float(drawn.max(initial=SMALLEST_SHOWN))
        low = max(float(drawn.min(initial=high)), SMALLEST_SHOWN * high)
        row[0].set_ylim(low / 1.35, high * 1.35)
        log_ticks(row[0].yaxis)
        row[0].set_ylabel(title, labelpad=3)
    for above, below, net in zip(every, every[-len(chosen) :], chosen, strict=False):
        above.set_title(net.title, pad=5)
        below.set_xlabel("layer", labelpad=1)
    keys = {option: _look(option, 4) for option in chosen[0].options}
    hollow = {"color": GREY, "marker": "o", "markersize": 4, "markerfacecolor": "white", "linewidth": 0}
    legend(figure, {**keys, "not told from 0": hollow}, loc="outside lower center", columns=5)
    fit(figure, height=1.35)
    return figure


def _draw_layers(axes: Axes, net: Net, key: str) -> NDArray[np.float64]:
    """A row's panel of a network; returns all values that have a marker."""
    drawn = []
    for index, (option, numbers) in enumerate(net.options.items()):
        style = style_of(option)
        offset = 0.62 * (index / max(len(net.options) - 1, 1) - 0.5)
        places = [place + offset for place in range(len(net.layers))]
        values = np.array([net.equal_cost(option, layer) for layer in net.layers] if key == "equal" else numbers[key])
        shown = np.where(values > 0, values, nan)
        axes.plot(places, shown, color=style.colour, linewidth=0.5, alpha=0.5, label=option)
        sure = np.array([key != "bias" or low > 0 for low in numbers["bias_low"]], dtype=bool)
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markeredgewidth": 0.5, "zorder": style.zorder}
        look["markersize"] = 3.4 if option == PAPER else 3.0
        for face, certain in ((style.colour, sure), ("white", ~sure)):
            axes.plot(places, np.where(certain, shown, nan), markerfacecolor=face, linestyle="", label="_", **look)
        drawn.append(values[values > 0])
    if key == "equal":
        axes.axhline(1, color=GREY, linewidth=0.7, zorder=1)
    axes.set_xlim(-0.6, len(net.layers) - 0.4)
    axes.set_xticks(range(len(net.layers)), labels=[layer.removeprefix("layer ") for layer in net.layers])
    for label in axes.get_xticklabels():
        # Words are wider than the room between two layers.
        label.set_rotation(0 if label.get_text().isdigit() else 90)
    axes.grid(visible=False, axis="x")
    for place in range(len(net.layers) - 1):
        axes.axvline(place + 0.5, color="#EEEEEE", linewidth=0.6, zorder=0.5)
    return np.concatenate(drawn)


def _look(option: str, size: float = 3.6) -> dict[str, Any]:
    """A line with a marker at every point."""
    style = style_of(option)
    return {"color": style.colour, "marker": style.marker, "markersize": size, "linewidth": 0.8}


@defaults()
def over_rates_figure(result: Path) -> Figure:
    """Trainings: above, losses at the end against learning rates (crosses diverged); below, the best over time."""
    grids = load_field(result, "grids", list[Grid])
    if not grids:
        raise InputError(f"{result}: holds no trainings; {REWRITE}")
    options = list(dict.fromkeys(method for trainings in grids for method in trainings.methods))
    figure, every = grid(2, len(grids))
    for above, below, trainings in zip(every, every[len(grids) :], grids, strict=False):
        _draw_rates(above, trainings, options)
        _draw_times(below, trainings, options)
        above.set_title(trainings.title, pad=5)
    every[0].set_ylabel("training loss at the end", labelpad=3)
    every[len(grids)].set_ylabel("training loss, best rate", labelpad=3)
    legend(figure, {option: _look(option, 4) for option in options}, loc="outside lower center", columns=5)
    fit(figure, height=1.75)
    return figure


def _draw_rates(axes: Axes, trainings: Grid, options: Sequence[str]) -> None:
    rates = sorted(trainings.rates)
    top = 1.15 * GUESSING
    lowest = min((run.final for run in trainings.runs if isfinite(run.final)), default=0.0)
    low = lowest - 0.06 * (top - lowest)
    side = min((after / before for before, after in pairwise(rates)), default=4.0) ** 0.5
    axes.set(xscale="log", xlim=(rates[0] / side, rates[-1] * side), ylim=(low, top))
    for index, option in enumerate(options):
        offset = side ** (0.5 * (index / max(len(options) - 1, 1) - 0.5))
        tried = sorted({run.rate for run in trainings.of(option)})
        means = {rate: float(np.mean(trainings.losses(option, rate))) for rate in tried}
        if finished := {rate: mean for rate, mean in means.items() if isfinite(mean)}:
            axes.plot([rate * offset for rate in finished], list(finished.values()), label=option, **_look(option))
        for rate, mean in means.items():
            if not mean < top:
                height = top - 0.03 * (top - lowest)
                axes.plot([rate * offset], [height], marker="x", markersize=4, color=style_of(option).colour, label="_")
    if lowest < GUESSING:
        axes.axhline(GUESSING, color=GREY, linewidth=0.7, zorder=1)
        note(axes, 0.98, (GUESSING - low) / (top - low) - 0.01, "guessing", va="top", ha="right")
    axes.set_xticks(rates, labels=map(plain, rates))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("learning rate (×: above)", labelpad=2)


def _draw_times(axes: Axes, trainings: Grid, options: Sequence[str]) -> None:
    cheapest = min(trainings.cost.values())
    for option in options:
        rate = trainings.best_rate(option)
        if isfinite(rate) and option in trainings.cost:
            losses = np.mean([run.losses for run in trainings.of(option) if run.rate == rate], 0)
            times = [epoch * trainings.cost[option] / cheapest for epoch in range(1, len(losses) + 1)]
            axes.plot(times, losses, label=option, **_look(option))
    axes.axvline(trainings.epochs, color=GREY, linewidth=0.7, zorder=1)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("time, in epochs of the cheapest", labelpad=2)
