"""Options of estimators: their accuracy layer by layer, and the trainings with them over learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite, log, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots._fields import get, is_finite, mapping
from flipgrad.plots.labels import note
from flipgrad.plots.style import GREY, SMALL, defaults, log_ticks, plain, save, style_of, tidy

REWRITE = "run the experiment again to rewrite it"
PAPER = "PSA"
# What the rows of panels show.
ROWS = {"rmse": "relative RMSE", "bias": "relative bias", "equal": "RMSE × √time\nover PSA's"}
# Inches: around the axes, between them, their height, the page, and a line of the legend.
LEFT, RIGHT, ABOVE, BELOW, GAP, UP, PAGE, LINE = 0.6, 0.08, 0.42, 0.52, 0.12, 1.35, 7.2, 0.16
# Columns of the legend.
COLUMNS = 5
# A bias below this share of the largest is not shown apart from others.
SMALLEST = 1e-3


def by_layer(result: Path, output: Path, nets: Sequence[str]) -> list[Path]:
    """Draw errors, biases and errors at equal cost in every layer of some ``nets`` of a result, as ``output``.png and .pdf."""
    return save(by_layer_figure(result, nets), output)


def by_layer_figure(result: Path, nets: Sequence[str]) -> Figure:
    """The figure of `by_layer`: a column for every network; a bias that cannot be told from 0 is hollow."""
    found = {str(get(net, "name", str(result))): net for net in _list(result, "nets")}
    missing = [name for name in nets if name not in found]
    if missing or not nets:
        raise InputError(f"{result}: no network {', '.join(missing) or 'was asked for'}; choose from {', '.join(found)}")
    chosen = [found[name] for name in nets]
    options = list(mapping(chosen[0], "options", str(result)))
    with defaults():
        legend = LINE * -(-(len(options) + 1) // COLUMNS) + 0.06
        # As wide as there are layers.
        room = PAGE - LEFT - RIGHT - (len(chosen) - 1) * GAP
        counts = [len(get(net, "layers", str(result))) for net in chosen]
        widths = [room * count / sum(counts) for count in counts]
        height = ABOVE + len(ROWS) * UP + (len(ROWS) - 1) * GAP + BELOW + legend
        figure = Figure(figsize=(PAGE, height))
        for row, (key, title) in enumerate(ROWS.items()):
            bottom = height - ABOVE - (row + 1) * UP - row * GAP
            line: list[Axes] = []
            for column, net in enumerate(chosen):
                left = LEFT + sum(widths[:column]) + column * GAP
                place = (left / PAGE, bottom / height, widths[column] / PAGE, UP / height)
                axes = figure.add_axes(place, sharey=line[0] if line else None)
                axes.set_yscale("log")
                _layers(axes, net, options, key, str(result))
                axes.tick_params(labelleft=not line, labelbottom=row == len(ROWS) - 1)
                if row == 0:
                    axes.set_title(str(net["title"]), pad=5)
                if row == len(ROWS) - 1:
                    axes.set_xlabel("layer", labelpad=1)
                line.append(axes)
            _limits(line)
            line[0].set_ylabel(title, labelpad=3)
        _legend(figure, options, height, [_hollow()])
        return figure


def _layers(axes: Axes, net: Mapping[str, Any], options: Sequence[str], key: str, where: str) -> None:
    layers = list(get(net, "layers", where))
    for index, option in enumerate(options):
        numbers = mapping(mapping(net, "options", where), option, where)
        values = _numbers(net, numbers, option, key, where)
        style = style_of(option)
        offset = 0.62 * (index / max(len(options) - 1, 1) - 0.5)
        places = [place + offset for place in range(len(layers))]
        shown = [value if value > 0 else nan for value in values]
        axes.plot(places, shown, color=style.colour, linewidth=0.5, alpha=0.5, label=option)
        sure = [key != "bias" or low > 0 for low in get(numbers, "bias_low", where)]
        for face, wanted in ((style.colour, True), ("white", False)):
            axes.plot(
                places,
                [value if certain == wanted else nan for value, certain in zip(shown, sure, strict=True)],
                marker=style.marker,
                markersize=3.4 if option == PAPER else 3.0,
                color=style.colour,
                markerfacecolor=face,
                markeredgewidth=0.5,
                linestyle="",
                zorder=style.zorder,
                label="_",
            )
    if key == "equal":
        axes.axhline(1, color=GREY, linewidth=0.7, zorder=1)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_xticks(range(len(layers)), labels=[layer.removeprefix("layer ") for layer in layers])
    for label in axes.get_xticklabels():
        # Words are wider than the room between two layers.
        label.set_rotation(0 if label.get_text().isdigit() else 90)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    for place in range(len(layers) - 1):
        axes.axvline(place + 0.5, color="#EEEEEE", linewidth=0.6, zorder=0.5)


def _numbers(net: Mapping[str, Any], numbers: Mapping[str, Any], option: str, key: str, where: str) -> list[float]:
    values = get(numbers, "rmse" if key == "equal" else key, where)
    if not isinstance(values, list) or not all(is_finite(value) and value >= 0 for value in values):
        raise InputError(f"{where}: {option!r} has no positive numbers {key!r} in {net['name']}; {REWRITE}")
    if key != "equal":
        return [float(value) for value in values]
    paper = mapping(mapping(net, "options", where), PAPER, where)["rmse"]
    cost = get(mapping(net, "cost", where), option, where)
    return [own / theirs * sqrt(cost) for own, theirs in zip(values, paper, strict=True)]


def _limits(row: Sequence[Axes]) -> None:
    drawn = [np.asarray(line.get_ydata(), float) for axes in row for line in axes.lines if line.get_label() == "_"]
    values = np.concatenate([ys[ys > 0] for ys in drawn])
    high = float(values.max(initial=SMALLEST))
    low = max(float(values.min(initial=high)), SMALLEST * high)
    row[0].set_ylim(low / 1.35, high * 1.35)
    log_ticks(row[0], "y")


def _hollow() -> Line2D:
    return Line2D([], [], color=GREY, marker="o", markersize=4, markerfacecolor="white", linewidth=0, label="not told from 0")


def _legend(figure: Figure, options: Sequence[str], height: float, more: Sequence[Line2D] = ()) -> None:
    handles = []
    for option in options:
        style = style_of(option)
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, markersize=4, linewidth=0.8, label=option))
    figure.legend(
        handles=[*handles, *more],
        loc="lower center",
        bbox_to_anchor=(0.5, 0.03 / height),
        ncols=COLUMNS,
        frameon=False,
        fontsize=SMALL,
        borderpad=0,
        borderaxespad=0,
        labelspacing=0.35,
        columnspacing=1.6,
        handlelength=1.8,
    )


def over_rates(result: Path, output: Path) -> list[Path]:
    """Draw the trainings of a result over learning rates and over time, as ``output``.png and .pdf."""
    return save(over_rates_figure(result), output)


def over_rates_figure(result: Path) -> Figure:
    """The figure of `over_rates`: above, losses at the end against rates (crosses diverged); below, the best over time."""
    grids = _list(result, "grids")
    if not grids:
        raise InputError(f"{result}: holds no trainings; {REWRITE}")
    options = list(dict.fromkeys(str(run["method"]) for grid in grids for run in get(grid, "runs", str(result))))
    with defaults():
        up, gap, between = 1.75, 0.42, 0.5
        legend = LINE * -(-len(options) // COLUMNS) + 0.06
        across = (PAGE - LEFT - RIGHT - (len(grids) - 1) * gap) / len(grids)
        height = 0.3 + 2 * up + between + 0.4 + legend
        figure = Figure(figsize=(PAGE, height))
        for column, grid in enumerate(grids):
            for row, draw in enumerate((_rates, _times)):
                bottom = height - 0.3 - (row + 1) * up - row * between
                place = ((LEFT + column * (across + gap)) / PAGE, bottom / height, across / PAGE, up / height)
                axes = figure.add_axes(place)
                draw(axes, grid, options)
                tidy(axes)
                if column == 0:
                    axes.set_ylabel(("training loss at the end", "training loss, best rate")[row], labelpad=3)
                if row == 0:
                    axes.set_title(str(grid["title"]), pad=5)
        _legend(figure, options, height)
        return figure


def _rates(axes: Axes, grid: Mapping[str, Any], options: Sequence[str]) -> None:
    rates = sorted(grid["rates"])
    top = 1.15 * log(10)
    lowest = min((_final(run) for run in grid["runs"] if isfinite(_final(run))), default=0.0)
    axes.set(xscale="log", ylim=(lowest - 0.06 * (top - lowest), top))
    steps = [after / before for before, after in pairwise(rates)]
    side = min(steps, default=4.0) ** 0.5
    axes.set_xlim(rates[0] / side, rates[-1] * side)
    for index, option in enumerate(options):
        runs = sorted((run for run in grid["runs"] if run["method"] == option), key=lambda run: run["rate"])
        style = style_of(option)
        offset = side ** (0.5 * (index / max(len(options) - 1, 1) - 0.5))
        ends = [(run["rate"] * offset, _final(run)) for run in runs]
        inside = [(rate, loss) for rate, loss in ends if isfinite(loss)]
        if inside:
            axes.plot(
                *zip(*inside, strict=True), color=style.colour, marker=style.marker, markersize=3.6, linewidth=0.8, label=option
            )
        for rate, loss in ends:
            if not loss < top:
                axes.plot([rate], [top - 0.03 * (top - lowest)], marker="x", markersize=4, color=style.colour, label="_")
    if lowest < log(10):
        axes.axhline(log(10), color=GREY, linewidth=0.7, zorder=1)
        height = (log(10) - axes.get_ylim()[0]) / (top - axes.get_ylim()[0])
        note(axes, 0.98, height - 0.01, "guessing", va="top", ha="right")
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate (×: above)", labelpad=2)


def _times(axes: Axes, grid: Mapping[str, Any], options: Sequence[str]) -> None:
    cost = {option: grid["cost"][option] for option in options if option in grid["cost"]}
    unit = min(cost.values())
    for option in cost:
        runs = [run for run in grid["runs"] if run["method"] == option and isfinite(_final(run))]
        if not runs:
            continue
        losses = min(runs, key=_final)["losses"]
        style = style_of(option)
        times = [epoch * cost[option] / unit for epoch in range(1, len(losses) + 1)]
        axes.plot(times, losses, color=style.colour, marker=style.marker, markersize=3.6, linewidth=0.8, label=option)
    axes.axvline(float(grid["epochs"]), color=GREY, linewidth=0.7, zorder=1)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("time, in epochs of the cheapest", labelpad=2)


def _final(run: Mapping[str, Any]) -> float:
    """The loss at the end, none of a training that diverged."""
    losses = run["losses"]
    return float(losses[-1]) if losses and not run["diverged"] else float("nan")


def _list(result: Path, key: str) -> list[Any]:
    record = read_json(result, missing="run the experiment that writes it", broken=REWRITE)
    entries = get(record, key, str(result))
    if not isinstance(entries, list):
        raise InputError(f"{result}: {key!r} must be a list; {REWRITE}")
    return entries
