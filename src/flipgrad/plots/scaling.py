"""How the time of a training step grows with the size of the network and the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots.style import BLUE, GREEN, GREY, ORANGE, SMALL, defaults, save, tidy

LABELS = {"width": "channels", "depth": "binary layers", "batch": "batch size", "cores": "threads"}
COLOURS = {"ST": ORANGE, "PSA": BLUE, "PSA exact": GREEN}
MARKERS = {"ST": "s", "PSA": "o", "PSA exact": "^"}


def scaling(result: Path, output: Path) -> list[Path]:
    """Draw the result of the benchmark "scaling" as ``output``.png and .pdf: log-log, with the slope of the theory."""
    return save(scaling_figure(result), output)


def scaling_figure(result: Path) -> Figure:
    """The figure of :func:`scaling`: one panel for every axis."""
    try:
        axes_data = read_json(result, missing="run the benchmark that writes it", broken="run it again to rewrite it")["axes"]
    except KeyError as error:
        raise InputError(f"{result}: no result of the benchmark scaling ({error}); run it again to rewrite it") from error
    with defaults():
        figure = Figure(figsize=(7.2, 2.3), layout="constrained")
        every = figure.subplots(1, len(axes_data), sharey=True, squeeze=False)[0]
        for axes, (name, data) in zip(every, axes_data.items(), strict=True):
            _panel(axes, name, data)
        every[0].set_ylabel("milliseconds of a step")
        every[0].legend(frameon=False, loc="upper left")
        return figure


def _panel(axes: Axes, name: str, data: dict[str, Any]) -> None:
    values = data["values"]
    for method, seconds in data["seconds"].items():
        milliseconds = [1e3 * s for s in seconds]
        axes.plot(values, milliseconds, color=COLOURS[method], marker=MARKERS[method], markersize=4, label=method)
    # Below all data, so that slopes can be compared and nothing is crossed.
    growth = [(value / values[0]) ** data["theory"] for value in values]
    level = 0.7e3 * min(s / g for seconds in data["seconds"].values() for s, g in zip(seconds, growth, strict=True))
    axes.plot(values, [level * g for g in growth], color=GREY, linewidth=0.8, linestyle=":")
    axes.text(0.97, 0.04, "dotted: operations", transform=axes.transAxes, color=GREY, ha="right", fontsize=SMALL)
    axes.set(xscale="log", yscale="log", xlabel=LABELS[name])
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    tidy(axes)
