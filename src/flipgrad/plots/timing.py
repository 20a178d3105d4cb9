"""The running times of methods as ratios to an ordinary network's, the paper's beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flipgrad.errors import InputError
from flipgrad.plots.layout import fit, grid, legend
from flipgrad.plots.loading import Count, Positive, load
from flipgrad.plots.style import GREY, defaults, ordered, saved, style_of


@dataclass(frozen=True)
class Seconds:
    """The times of one method on one machine."""

    forward: Positive
    backward: Positive
    train_epoch: Positive


@dataclass(frozen=True)
class Method:
    """The times of one method."""

    paper: Seconds
    ours: Seconds


@dataclass(frozen=True)
class TimingFile:
    """The result file; ratios are to the times of the method ``reference``."""

    methods: dict[str, Method]
    reference: str
    threads: Count

    def __post_init__(self) -> None:
        if self.reference not in self.methods:
            raise InputError(f"'methods' must hold the reference {self.reference!r}")


PANELS: dict[str, Callable[[Seconds], float]] = {
    "forward, one batch": lambda seconds: seconds.forward,
    "backward, one batch": lambda seconds: seconds.backward,
    "forward and backward": lambda seconds: seconds.forward + seconds.backward,
    "training epoch, measured": lambda seconds: seconds.train_epoch,
}


@defaults()
def timing_figure(result: Path) -> Figure:
    """Ratios of running times: open circles are the paper's, filled ones ours."""
    file = load(result, TimingFile)
    names = [name for name in ordered(file.methods) if name != file.reference]
    figure, every = grid(1, len(PANELS), sharey=True)
    for axes, (title, seconds) in zip(every, PANELS.items(), strict=True):
        _draw(axes, file, names, seconds)
        axes.set_title(title, pad=4)
        axes.set_xlabel(f"ratio to {file.reference}", labelpad=2)
        axes.tick_params(axis="y", length=0)
    every[0].set_ylim(len(names) - 0.5, -0.5)
    every[0].set_yticks(range(len(names)), labels=names)
    here = f"here, on {file.threads} thread{'s' * (file.threads != 1)} of a processor"
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 4.5, "color": GREY}
    keys = [
        Line2D([], [], markerfacecolor=face, label=label, **look)
        for label, face in {"the paper, on a GPU": "white", here: GREY}.items()
    ]
    legend(figure, keys, loc="outside upper right", handletextpad=0.2)
    fit(figure, height=0.2 * len(names) + 0.15)
    return figure


timing = saved(timing_figure)


def _draw(axes: Axes, file: TimingFile, names: list[str], seconds: Callable[[Seconds], float]) -> None:
    reference = file.methods[file.reference]
    axes.axvline(1, color=GREY, linewidth=0.8)
    for row, name in enumerate(names):
        colour, method = style_of(name).colour, file.methods[name]
        theirs, ours = seconds(method.paper) / seconds(reference.paper), seconds(method.ours) / seconds(reference.ours)
        axes.plot([theirs, ours], [row, row], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot([theirs], [row], "o", markersize=4.5, color=colour, markerfacecolor="white", label="_")
        axes.plot([ours], [row], "o", markersize=4.5, color=colour, label=name)
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
