"""How the time of a training step grows with the size of the network and the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from flipgrad.errors import InputError
from flipgrad.plots.layout import fit, grid
from flipgrad.plots.loading import Positive, load_field
from flipgrad.plots.style import BLUE, GREEN, GREY, ORANGE, SMALL, defaults, saved

LABELS = {"width": "channels", "depth": "binary layers", "batch": "batch size", "cores": "threads"}
COLOURS = {"ST": ORANGE, "PSA": BLUE, "PSA exact": GREEN}
MARKERS = {"ST": "s", "PSA": "o", "PSA exact": "^"}


@dataclass(frozen=True)
class Growth:
    """The times of a step over ``values`` of a size, by method, and the power of it with which operations grow."""

    values: list[Positive]
    seconds: dict[str, list[Positive]]
    theory: float

    def __post_init__(self) -> None:
        if not self.values or not self.seconds or any(len(times) != len(self.values) for times in self.seconds.values()):
            raise InputError("'seconds' must hold methods with as many times as there are 'values'")


@defaults()
def scaling_figure(result: Path) -> Figure:
    """How the time of a step grows: log-log, one panel for every size, with the slope of the theory."""
    advice = {"missing": "run the benchmark that writes it", "broken": "run it again to rewrite it"}
    sizes = load_field(result, "axes", dict[str, Growth], **advice)
    figure, every = grid(1, len(sizes), sharey=True)
    for axes, (name, growth) in zip(every, sizes.items(), strict=True):
        _draw(axes, name, growth)
    every[0].set_ylabel("milliseconds of a step")
    every[0].legend(frameon=False, loc="upper left")
    fit(figure, height=1.85)
    return figure


scaling = saved(scaling_figure)


def _draw(axes: Axes, name: str, growth: Growth) -> None:
    values = growth.values
    for method, seconds in growth.seconds.items():
        milliseconds = [1e3 * s for s in seconds]
        axes.plot(values, milliseconds, color=COLOURS[method], marker=MARKERS[method], markersize=4, label=method)
    # Below all data, so that slopes can be compared and nothing is crossed.
    operations = [(value / values[0]) ** growth.theory for value in values]
    level = 0.7e3 * min(s / g for seconds in growth.seconds.values() for s, g in zip(seconds, operations, strict=True))
    axes.plot(values, [level * g for g in operations], color=GREY, linewidth=0.8, linestyle=":")
    axes.text(0.97, 0.04, "dotted: operations", transform=axes.transAxes, color=GREY, ha="right", fontsize=SMALL)
    axes.set(xscale="log", yscale="log", xlabel=LABELS[name])
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
