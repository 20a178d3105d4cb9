"""How estimators train networks on images: losses, relaxed objectives and accuracies over epochs, smoothed.

Figure 4 and those of appendix C.2 of the paper: Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for
Stochastic Binary Networks. NeurIPS 2020.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots._fields import brief, get, is_finite, mapping
from flipgrad.plots.labels import GAP, LINE, label_ends
from flipgrad.plots.style import SMALL, SOLID, Style, defaults, ordered, save, style_of, text_width, tidy

REWRITE = "run the experiment again to rewrite it"
TITLES = {"none": "no augmentation", "affine": "affine augmentation", "flip-crop": "flip & crop augmentation"}
# Dashes of relaxed objectives and of one-sample accuracies.
DOTS = (1.0, 1.3)
# Inches: room on the left of axes, above and below them, and their height.
LEFT, ABOVE, BELOW, UP, PAGE = 0.52, 0.26, 0.44, 2.15, 7.2

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What a panel shows: one curve of every run, maybe a dotted one as well."""

    label: str
    solid: str
    dotted: str | None = None
    percent: bool = False


LOSS = Kind("training loss", "train_loss", "objective")
ACCURACY = Kind("validation accuracy", "accuracy_n", "accuracy_1", percent=True)
VALIDATION = Kind("validation loss", "loss")
TRAINING = Kind("training accuracy", "train_accuracy", percent=True)


@dataclass(frozen=True)
class Trained:
    """One training: values by epoch (fewer where it diverged), and what its method is called and drawn like."""

    name: str
    label: str
    style: Style
    relaxed: bool
    curves: Mapping[str, Numbers]
    diverged: bool

    def curve(self, key: str) -> Numbers:
        """Empty where the training came to no epoch."""
        return self.curves.get(key, np.empty(0))


def cifar(result: Path, output: Path) -> list[Path]:
    """Draw training losses and validation accuracies, as ``output``.png and .pdf; a column for every augmentation.

    Solid losses are the binary network's expected loss, dotted ones the relaxed objective of the method that has one. Solid
    accuracies average 10 samples, dotted ones are of one.
    """
    return save(learning_figure(result, (LOSS, ACCURACY)), output)


def cifar_extra(result: Path, output: Path) -> list[Path]:
    """Draw validation losses and training accuracies likewise."""
    return save(learning_figure(result, (VALIDATION, TRAINING)), output)


def learning_figure(result: Path, kinds: Sequence[Kind]) -> Figure:
    """The figure of `cifar`: rows of ``kinds``, or one row where there is one augmentation."""
    runs = read(result)
    panels = [(augment, kind) for kind in kinds for augment in runs]
    columns = len(runs) if len(runs) > 1 else len(kinds)
    with defaults():
        figure, every = _grid(panels, columns, runs)
        ends = []
        for axes, (augment, kind) in zip(every, panels, strict=True):
            ends.append(_panel(axes, runs[augment], kind))
            title = TITLES.get(augment, augment)
            axes.set_title(title if len(runs) > 1 else f"{kind.label}, {title}", pad=4)
        for row in range(0, len(every), columns):
            _share_limits(every[row : row + columns] if len(runs) > 1 else [])
        for axes, named in zip(every, ends, strict=True):
            _name(axes, named)
        return figure


def muprop(result: Path, output: Path) -> list[Path]:
    """Draw the training losses of methods at several learning rates, not smoothed, as ``output``.png and .pdf."""
    return save(muprop_figure(result), output)


def muprop_figure(result: Path) -> Figure:
    """The figure of `muprop`; a star marks rates that were found by the search."""
    (runs,) = read(result).values()
    with defaults():
        room = _room(runs)
        width, height = LEFT + 4.2 + room, ABOVE + 2.6 + BELOW
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((LEFT / width, BELOW / height, 4.2 / width, 2.6 / height))
        ends: Ends = {}
        lows, highs = [], []
        for run in _shaded(runs):
            loss = run.curve("train_loss")
            if not len(loss):
                continue
            _line(axes, run, loss, run.style.dashes)
            _cross(axes, run, loss)
            ends[run.label] = (len(loss), float(loss[-1]), run.style)
            lows.append(loss.min())
            highs.append(loss.max())
        if not ends:
            raise InputError(f"{result}: holds no training that came to an end of an epoch; {REWRITE}")
        _epochs(axes, runs)
        axes.set_ylim(_limits(np.array(lows), np.array(highs)))
        axes.set_ylabel("training loss (expected loss)", labelpad=3)
        axes.set_title(TITLES["flip-crop"], pad=4)
        tidy(axes)
        _name(axes, ends)
        return figure


def smooth(values: Numbers, width: float) -> tuple[Numbers, Numbers]:
    """The local mean of a curve, and the standard deviation of its values about it.

    A line is fitted at every point, with weights that fall off like a normal density of ``width`` points: unlike a running
    average it does not lag behind where a curve falls steeply, as at the beginning of a training.

    >>> mean, deviation = smooth(np.array([3.0, 2.0, 1.0, 0.0]), 1.0)
    >>> bool(np.allclose(mean, [3, 2, 1, 0])), bool(np.allclose(deviation, 0))
    (True, True)
    """
    if len(values) < 3:
        return values, np.zeros_like(values)
    at = np.arange(len(values), dtype=float)
    weights = np.exp(-0.5 * ((at[:, None] - at) / width) ** 2)
    weights /= weights.sum(1, keepdims=True)
    centre = weights @ at
    offset = at - centre[:, None]
    slope = (weights * offset) @ values / (weights * offset**2).sum(1)
    mean = weights @ values + slope * (at - centre)
    return mean, np.sqrt(weights @ (values - mean) ** 2)


def read(result: Path) -> dict[str, list[Trained]]:
    """The trainings in a result file by augmentation, in the order of a legend."""
    record = read_json(result, missing="run the experiment that writes it", broken=REWRITE)
    found: dict[str, list[Trained]] = {}
    entries = get(record, "runs", str(result))
    for entry in entries if isinstance(entries, list) else []:
        found.setdefault(str(get(entry, "augment", str(result))), []).append(_run(entry, str(result)))
    if not found:
        raise InputError(f"{result}: 'runs' holds no training; {REWRITE}")
    for runs in found.values():
        order = ordered({run.name for run in runs})
        runs.sort(key=lambda run: order.index(run.name))
    return {augment: found[augment] for augment in sorted(found, key=lambda a: list(TITLES).index(a) if a in TITLES else 9)}


def _run(entry: Any, where: str) -> Trained:
    name, rate = str(get(entry, "method", where)), get(entry, "rate", where)
    where = f"{where}, {name!r}"
    star = "*" if entry.get("searched") and entry.get("starred") else ""
    label = f"{name}  {rate:.2g}{star}" if is_finite(rate) else f"{name}  no rate"
    curves = {key: _curve(values, f"{where}, {key!r}") for key, values in mapping(entry, "curves", where).items()}
    relaxed = bool(get(entry, "relaxed", where))
    return Trained(name, label, style_of(name), relaxed, curves, bool(get(entry, "diverged", where)))


def _curve(values: Any, where: str) -> Numbers:
    """The numbers up to the first that is none."""
    if not isinstance(values, list) or not all(value is None or is_finite(value) for value in values):
        raise InputError(f"{where}: must be a list of numbers, got {brief(values)}; {REWRITE}")
    whole = values.index(None) if None in values else len(values)
    return np.array(values[:whole], dtype=np.float64)


def _room(runs: Sequence[Trained]) -> float:
    """Inches that the labels to the right of axes need."""
    return (GAP + max(text_width(run.label, SMALL, run.style.weight) for run in runs) + 8) / 72


def _grid(panels: Sequence[tuple[str, Kind]], columns: int, runs: Mapping[str, Sequence[Trained]]) -> tuple[Figure, list[Axes]]:
    """Axes in rows, each with room for the names on its right."""
    rows = -(-len(panels) // columns)
    room = max(_room(several) for several in runs.values())
    across = max(PAGE / columns - LEFT - room, 1.45)
    up = max(UP, (max(len(several) for several in runs.values()) + 1) * LINE / 72)
    width, height = columns * (LEFT + across + room), rows * (ABOVE + up + BELOW)
    figure = Figure(figsize=(width, height))
    every = []
    for index in range(len(panels)):
        row, column = divmod(index, columns)
        left, bottom = column * (LEFT + across + room) + LEFT, (rows - 1 - row) * (ABOVE + up + BELOW) + BELOW
        every.append(figure.add_axes((left / width, bottom / height, across / width, up / height)))
    return figure, every


# The last points of lines, by what they are called.
Ends = dict[str, tuple[float, float, Style]]


def _panel(axes: Axes, runs: Sequence[Trained], kind: Kind) -> Ends:
    ends: Ends = {}
    lows, highs = [], []
    longest = max(len(run.curve(kind.solid)) for run in runs)
    width = max(1.0, longest / 40)
    dotted = False
    for run in runs:
        values = run.curve(kind.solid)
        if not len(values):
            continue
        mean, deviation = smooth(values, width)
        _line(axes, run, mean, SOLID, deviation)
        _cross(axes, run, mean)
        lows.append(mean.min())
        highs.append(mean.max())
        ends[run.label] = (len(mean), float(mean[-1]), run.style)
        if kind.dotted and (run.relaxed or kind.percent):
            more, spread = smooth(run.curve(kind.dotted), width)
            _line(axes, run, more, DOTS, spread, label=False)
            lows.append(more.min())
            highs.append(more.max())
            dotted = True
    _epochs(axes, runs)
    tidy(axes)
    if lows:
        axes.set_ylim(
            (max(0.0, 0.96 * min(lows)), 1.02 * max(highs)) if kind.percent else _limits(np.array(lows), np.array(highs))
        )
    remark = (" (dotted: 1 sample)" if kind.percent else " (dotted: relaxed)") if dotted else ""
    axes.set_ylabel(kind.label + remark, labelpad=3)
    if kind.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    return ends


def _name(axes: Axes, ends: Ends) -> None:
    """Name the lines; one that has left the axes is named where it left."""
    label_ends(axes, {name: (x, _within(axes, y), style) for name, (x, y, style) in ends.items()})


def _line(
    axes: Axes, run: Trained, mean: Numbers, dashes: Sequence[float], deviation: Numbers | None = None, *, label: bool = True
) -> None:
    """A curve over epochs, and the band of three standard deviations about it."""
    style, epochs = run.style, np.arange(1, len(mean) + 1)
    (line,) = axes.plot(epochs, mean, color=style.colour, linewidth=max(1.0, 0.7 * style.width), zorder=style.zorder)
    line.set_label(run.label if label else "_")
    # A line through one point is invisible.
    line.set_marker("o" if len(mean) == 1 else "")
    line.set_markersize(3)
    if dashes:
        line.set_dashes(list(dashes))
    if deviation is not None and deviation.any():
        low, high = mean - 3 * deviation, mean + 3 * deviation
        axes.fill_between(epochs, low, high, color=style.colour, alpha=0.13, linewidth=0, zorder=style.zorder - 1)


def _cross(axes: Axes, run: Trained, mean: Numbers) -> None:
    """Where a training ended before its time."""
    if run.diverged and len(mean):
        axes.plot([len(mean)], [mean[-1]], marker="x", markersize=5, markeredgewidth=1.4, color=run.style.colour, label="_")


def _epochs(axes: Axes, runs: Sequence[Trained]) -> None:
    most = max(len(run.curve("epoch")) for run in runs)
    axes.set_xlim(1, max(most, 2))
    axes.set_xlabel("epoch", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


def _limits(lows: Numbers, highs: Numbers) -> tuple[float, float]:
    """Of losses: from the lowest to somewhat above that of guessing ten classes, where most are; beyond it lines leave."""
    low, high = float(lows.min()), min(float(highs.max()), 1.3 * log(10))
    margin = 0.05 * max(high - low, 0.02)
    return low - margin, high + margin


def _share_limits(row: Sequence[Axes]) -> None:
    if row:
        low, high = min(axes.get_ylim()[0] for axes in row), max(axes.get_ylim()[1] for axes in row)
        for axes in row:
            axes.set_ylim(low, high)


def _within(axes: Axes, y: float) -> float:
    low, high = axes.get_ylim()
    return min(max(y, low), high)


def _shaded(runs: Sequence[Trained]) -> list[Trained]:
    """The same method at several rates: from its own colour to lighter ones."""
    shaded = []
    for name in dict.fromkeys(run.name for run in runs):
        same = [run for run in runs if run.name == name]
        for index, run in enumerate(same):
            style = replace(run.style, colour=_lighter(run.style.colour, 0.42 * index / max(len(same) - 1, 1)))
            shaded.append(replace(run, style=style))
    return shaded


def _lighter(colour: str, by: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    rgb = colorsys.hls_to_rgb(hue, lightness + by * (1 - lightness), saturation)
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in rgb)
