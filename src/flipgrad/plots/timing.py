"""Running times: ratios to an ordinary network's, the paper's beside ours, and how a step's grows with the size of the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

from flipgrad.errors import InputError
from flipgrad.plots.loading import Count, Positive, load, load_field
from flipgrad.plots.style import BLUE, GREEN, GREY, ORANGE, SMALL, defaults, fit, grid, legend, ordered, style_of

# The panels of the ratios: of the sum of which times.
RATIOS = {
    "forward, one batch": ("forward",),
    "backward, one batch": ("backward",),
    "forward and backward": ("forward", "backward"),
    "training epoch, measured": ("train_epoch",),
}
# The panels of the growth, and the looks of its methods.
SIZES = {"width": "channels", "depth": "binary layers", "batch": "batch size", "cores": "threads"}
LOOKS = {"ST": (ORANGE, "s"), "PSA": (BLUE, "o"), "PSA exact": (GREEN, "^")}


@dataclass(frozen=True)
class Times:
    """Seconds: of a batch forward and backward, of a training epoch and of a validation epoch with measurements."""

    forward: Positive
    backward: Positive
    train_epoch: Positive
    val_epoch: Positive


@dataclass(frozen=True)
class Method:
    """The times of one method."""

    paper: Times
    ours: Times


@dataclass(frozen=True)
class TimingFile:
    """The result file; ratios are to the times of the method ``reference``."""

    methods: dict[str, Method]
    reference: str
    threads: Count

    def __post_init__(self) -> None:
        if self.reference not in self.methods:
            raise InputError(f"'methods' must hold the reference {self.reference!r}")

    def ratio(self, name: str, who: str, keys: tuple[str, ...]) -> float:
        """The sum of times of a method over that of the reference, both ``who`` measured."""
        own, reference = (getattr(self.methods[method], who) for method in (name, self.reference))
        return float(sum(getattr(own, key) for key in keys) / sum(getattr(reference, key) for key in keys))


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
def timing_figure(result: Path) -> Figure:
    """Ratios of running times: open circles are the paper's, filled ones ours."""
    file = load(result, TimingFile)
    names = [name for name in ordered(file.methods) if name != file.reference]
    figure, every = grid(1, len(RATIOS), sharey=True)
    look: dict[str, Any] = {"marker": "o", "markersize": 4.5, "linestyle": ""}
    for axes, (title, times) in zip(every, RATIOS.items(), strict=True):
        axes.axvline(1, color=GREY, linewidth=0.8)
        for row, name in enumerate(names):
            colour = style_of(name).colour
            theirs, ours = file.ratio(name, "paper", times), file.ratio(name, "ours", times)
            axes.plot([theirs, ours], [row, row], color=colour, linewidth=0.8, alpha=0.6)
            axes.plot([theirs], [row], color=colour, markerfacecolor="white", label="_", **look)
            axes.plot([ours], [row], color=colour, label=name, **look)
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axes.set_title(title, pad=4)
        axes.set_xlabel(f"ratio to {file.reference}", labelpad=2)
        axes.tick_params(axis="y", length=0)
    every[0].set_ylim(len(names) - 0.5, -0.5)
    every[0].set_yticks(range(len(names)), labels=names)
    here = f"here, on {file.threads} thread{'s' * (file.threads != 1)} of a processor"
    keys = {"the paper, on a GPU": {"markerfacecolor": "white", "color": GREY, **look}, here: {"color": GREY, **look}}
    legend(figure, keys, loc="outside upper right", handletextpad=0.2)
    fit(figure, height=0.2 * len(names) + 0.15)
    return figure


@defaults()
def scaling_figure(result: Path) -> Figure:
    """How the time of a step grows: log-log, one panel for every size, with the slope of the theory."""
    advice = {"missing": "run the benchmark that writes it", "broken": "run it again to rewrite it"}
    sizes = load_field(result, "axes", dict[str, Growth], **advice)
    figure, every = grid(1, len(sizes), sharey=True)
    for axes, (name, growth) in zip(every, sizes.items(), strict=True):
        values = growth.values
        for method, seconds in growth.seconds.items():
            colour, marker = LOOKS[method]
            axes.plot(values, [1e3 * s for s in seconds], color=colour, marker=marker, markersize=4, label=method)
        # Below all data, so that slopes can be compared and nothing is crossed.
        operations = [(value / values[0]) ** growth.theory for value in values]
        level = 0.7e3 * min(s / g for seconds in growth.seconds.values() for s, g in zip(seconds, operations, strict=True))
        axes.plot(values, [level * g for g in operations], color=GREY, linewidth=0.8, linestyle=":")
        axes.text(0.97, 0.04, "dotted: operations", transform=axes.transAxes, color=GREY, ha="right", fontsize=SMALL)
        axes.set(xscale="log", yscale="log", xlabel=SIZES[name])
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    every[0].set_ylabel("milliseconds of a step")
    every[0].legend(frameon=False, loc="upper left")
    fit(figure, height=1.85)
    return figure
