"""Real and binary weights: errors of gradients by layer, and trainings."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flipgrad.errors import InputError
from flipgrad.plots.loading import REWRITE, Count, Natural, NotNegative, load_field
from flipgrad.plots.style import GREY, defaults, fit, grid, legend, log_ticks, percent_ticks, style_of

KINDS = ("real", "binary")
# Of lines with real weights.
DASHES = (3.0, 1.5)
# Errors, and whether their axis is logarithmic.
ERRORS = {"bias": ("relative bias", True), "rmse": ("relative RMSE of one draw", True), "cosine": ("cosine of one draw", False)}


@dataclass(frozen=True)
class Accuracy:
    """How accurate an estimator is in networks with one kind of ``weights``, by layer.

    ``unbiased`` counts, of all ``networks``, those in which its bias cannot be told from 0.
    """

    weights: str
    method: str
    layers: list[str]
    bias: list[NotNegative]
    rmse: list[NotNegative]
    cosine: list[float]
    unbiased: list[Natural]
    networks: Count

    def __post_init__(self) -> None:
        if any(len(part) != len(self.layers) for part in (self.bias, self.rmse, self.cosine, self.unbiased)):
            raise InputError(f"'accuracies': {self.method!r} must have {len(self.layers)} numbers of each kind, one per layer")


@dataclass(frozen=True)
class Course:
    """One training: training losses and validation accuracies (10 samples) after every epoch, as far as it came."""

    data: str
    weights: str
    method: str
    rate: NotNegative
    losses: list[float]
    accuracies: list[float]
    diverged: str | None = None

    @property
    def loss(self) -> float:
        """At the end."""
        return self.losses[-1] if self.losses else nan

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.accuracies[-1] if self.accuracies else nan

    @property
    def told(self) -> str:
        """The loss for a person."""
        return f"{self.method} {self.loss:.3f}{' (diverged)' if self.diverged else ''}"


Row = TypeVar("Row", Accuracy, Course)


def of(rows: Sequence[Row], weights: str, method: str) -> Row:
    """The row of one kind of weights and one estimator."""
    return next(row for row in rows if (row.weights, row.method) == (weights, method))


@defaults()
def weights_accuracy_figure(result: Path) -> Figure:
    """Errors of gradients by layer; hollow markers are of real weights, filled ones of binary weights."""
    rows = load_field(result, "accuracies", list[Accuracy])
    if not rows:
        raise InputError(f"{result}: holds no accuracies; {REWRITE}")
    figure, every = grid(1, len(ERRORS))
    for axes, (key, (title, logarithmic)) in zip(every, ERRORS.items(), strict=True):
        _draw_errors(axes, rows, key)
        axes.set_title(title, pad=5)
        if logarithmic:
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
    _keys(figure, list(dict.fromkeys(row.method for row in rows)), lines=False)
    fit(figure, height=2.0)
    return figure


def _draw_errors(axes: Axes, rows: Sequence[Accuracy], key: str) -> None:
    for index, row in enumerate(rows):
        style = style_of(row.method)
        offset = 0.7 * ((index + 0.5) / len(rows) - 0.5)
        face = style.colour if row.weights == "binary" else "white"
        places = [place + offset for place in range(len(row.layers))]
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markerfacecolor": face, "zorder": style.zorder}
        label = f"{row.weights} {row.method}"
        axes.plot(places, getattr(row, key), linestyle="", markersize=4.5, markeredgewidth=0.9, label=label, **look)
    layers = rows[0].layers
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_xticks(range(len(layers)), labels=layers)
    axes.grid(visible=False, axis="x")
    for place in range(len(layers) - 1):
        axes.axvline(place + 0.5, color=GREY, linewidth=0.5, zorder=0.5)


@defaults()
def weights_training_figure(result: Path) -> Figure:
    """Training losses above, validation accuracies below, a column for every data set; real weights are dashed."""
    courses = load_field(result, "courses", list[Course])
    data = list(dict.fromkeys(course.data for course in courses))
    if not data:
        raise InputError(f"{result}: holds no trainings; {REWRITE}")
    figure, every = grid(2, len(data)) if len(data) > 1 else grid(1, 2)
    for index, name in enumerate(data):
        shown = [course for course in courses if course.data == name]
        above, below = every[index], every[index + len(data)]
        _draw_curves(above, shown, "losses")
        above.set_yscale("log")
        log_ticks(above.yaxis)
        above.set_title(f"training loss, {name}", pad=5)
        _draw_curves(below, shown, "accuracies")
        below.set_title(f"validation accuracy of 10 samples, {name}", pad=5)
        ends = [course.accuracy for course in shown if course.accuracies]
        if ends:
            below.set_ylim(max(0.0, 2 * min(ends) - max(ends) - 0.05), min(1.0, max(ends) + 0.01))
        percent_ticks(below.yaxis)
    _keys(figure, list(dict.fromkeys(course.method for course in courses)), lines=True)
    fit(figure, height=2.0, widest=3.2)
    return figure


def _draw_curves(axes: Axes, courses: Sequence[Course], key: str) -> None:
    for course in courses:
        style, values = style_of(course.method), np.array(getattr(course, key))
        dashes = (None, None) if course.weights == "binary" else DASHES
        look: dict[str, Any] = {"color": style.colour, "linewidth": 1.1, "dashes": dashes, "zorder": style.zorder}
        axes.plot(range(1, len(values) + 1), values, label=f"{course.weights} {course.method}", **look)
        if course.diverged and len(values):
            axes.plot([len(values)], values[-1:], marker="x", markersize=5, color=style.colour, label="_")
    axes.set_xlabel("epoch", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


def _keys(figure: Figure, methods: Sequence[str], *, lines: bool) -> None:
    """Colours are estimators; lines or markers tell the kinds of weights apart."""
    looks: dict[str, dict[str, Any]] = {}
    for method in methods:
        style = style_of(method)
        looks[method] = {"color": style.colour, "linewidth": 1.4} if lines else {
            "color": style.colour, "marker": style.marker, "linestyle": "", "markersize": 4.5
        }  # fmt: skip
    if lines:
        looks |= {"binary weights": {"color": GREY}, "real weights": {"color": GREY, "dashes": DASHES}}
    else:
        marker: dict[str, Any] = {"color": GREY, "marker": "o", "linestyle": "", "markersize": 4.5}
        looks |= {"binary weights": marker, "real weights": {**marker, "markerfacecolor": "white"}}
    legend(figure, looks, loc="outside lower center", columns=len(looks))
