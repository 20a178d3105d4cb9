"""Bias against standard deviation at one sample: where each estimator's error comes from, for many estimators at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flipgrad.plots.accuracy import ROUNDING, LayerResult, Measured, Measurement, Panel, Reference, panels_of, read_all
from flipgrad.plots.labels import Box, Spot, label_spots, note, text_width, write
from flipgrad.plots.style import BAND, GREY, PALE, Style, defaults, fit, grid, legend, log_ticks, plain, style_of

# Inches: a panel, and the least height of what is not the zone without bias.
WIDTH, HEIGHT, LEAST = 3.0, 3.3, 1.9
# Points: the zone of estimators without randomness, a row of the zone without bias, the space between marker and name.
ZONE, ROW, BESIDE = 20.0, 10.5, 5.5

# By estimator without bias: the row of that zone, from the top, and how the name beside its marker is aligned.
Rows = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Span:
    """A logarithmic axis of ``length`` points whose first ``zone`` points stand for zero."""

    low: float
    high: float
    length: float
    zone: float

    @property
    def start(self) -> float:
        """Where the axis begins, so that ``low`` comes after the zone."""
        return float(self.low * (self.high / self.low) ** (-self.zone / (self.length - self.zone)))

    def at(self, points: float) -> float:
        """The value at a distance from the axis' beginning."""
        return float(self.start * (self.high / self.start) ** (points / self.length))

    def points(self, value: float) -> float:
        """The distance of a value from the axis' beginning."""
        return self.length * log10(value / self.start) / log10(self.high / self.start)

    def place(self, measured: float) -> float:
        """The distance at which a value is drawn: zero in the middle of its zone."""
        return self.points(measured) if measured > ROUNDING else self.zone / 2


@defaults()
def bias_and_spread_figure(
    panels: Sequence[Panel] | Path | Measured, *, estimators: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Each estimator at its standard deviation and bias; what cannot be told from zero has a zone of its own on each axis."""
    panels = panels_of(panels)
    results = read_all(panels, estimators)
    everything = [measured for result in results for measured in result.estimators.values()]
    random = [(m.std, m.std_low, m.std_high) for m in everything if m.std > ROUNDING]
    across = _span(random, 72 * WIDTH, ZONE if len(random) < len(everything) else 0)
    rows = [_rows(result, across) for result in results]
    count = max((row + 1 for found in rows for row, _ in found.values()), default=0)
    # Below the rows, the remarks of `_explain_zone`.
    zone = count * ROW + 11.0 * bool(count) + 9.0 * any(result.reference for result in results)
    biased = [(m.bias, m.bias_low, m.bias_high) for m in everything if _is_biased(m)]
    up = _span(biased, max(72 * HEIGHT, zone + 72 * LEAST), zone)
    figure, every = grid(ceil(len(panels) / 2), min(len(panels), 2), count=len(panels), title=title)
    for axes, panel in zip(every, panels, strict=True):
        axes.set_title(panel.title, pad=5)
        axes.set_xlabel("standard deviation of one sample / gradient length", labelpad=2)
        axes.set_ylabel("|bias| / gradient length", labelpad=4)
        axes.set(xscale="log", yscale="log", xlim=(across.start, across.high), ylim=(up.start, up.high))
        _draw_zones(axes, across, up)
    filled: dict[str, Any] = {"color": GREY, "marker": "o", "markersize": 4.2, "linestyle": ""}
    keys = {"biased by construction": filled, "unbiased by construction": {**filled, "markerfacecolor": "white"}}
    legend(figure, keys, labelcolor=GREY, handletextpad=0.1, columnspacing=1.2)
    fit(figure, height=up.length / 72, narrowest=WIDTH, widest=WIDTH)
    for axes, result, found in zip(every, results, rows, strict=True):
        _draw(axes, result, found, across, up)
    return figure


def _is_biased(measured: Measurement) -> bool:
    """Whether a bias is distinguishable from zero."""
    return min(measured.bias, measured.bias_low) > ROUNDING


def _span(intervals: Sequence[tuple[float, float, float]], length: float, zone: float) -> Span:
    """An axis that holds the values and, within reason, their confidence intervals; an interval is a value and its limits."""
    low = min((min(value, max(low, value / 3)) for value, low, _ in intervals), default=0.1)
    high = max((max(value, min(high, value * 3)) for value, _, high in intervals), default=1.0)
    return Span(low / 1.7, high * 2.0, length, zone)


def _rows(result: LayerResult, across: Span) -> Rows:
    """A row of the zone without bias for each estimator there, so that names beside the markers do not collide."""
    rows: Rows = {}
    taken: list[list[tuple[float, float]]] = []
    inside = {name: measured for name, measured in result.estimators.items() if not _is_biased(measured)}
    for name, measured in sorted(inside.items(), key=lambda item: -item[1].std):
        x, width = across.place(measured.std), text_width(name, style_of(name).weight) + BESIDE + 3
        sides = [("left", x - 5, x + width), ("right", x - width, x + 5)]
        fitting = [side for side in sides if side[1] >= 0 and side[2] <= across.length] or sides
        taken.append([])
        rows[name], ends = next(
            ((row, align), (left, right))
            for row, others in enumerate(taken)
            for align, left, right in fitting
            if all(right < a or b < left for a, b in others)
        )
        taken[rows[name][0]].append(ends)
        taken = [others for others in taken if others]
    return rows


def _draw_zones(axes: Axes, across: Span, up: Span) -> None:
    """Shade the zones, and label the ticks: 0 for a zone, decades elsewhere."""
    drawn = ((axes.xaxis, across, axes.axvspan, axes.axvline), (axes.yaxis, up, axes.axhspan, axes.axhline))
    for axis, span, shade, rule in drawn:
        log_ticks(axis)
        values = [float(v) for v in axis.get_majorticklocs() if span.low <= v <= span.high]
        minor = [float(v) for v in axis.get_minorticklocs() if span.low <= v <= span.high]
        axis.set_ticks([span.at(span.zone / 2), *values] if span.zone else values)
        axis.set_ticklabels((["0"] if span.zone else []) + [plain(value) for value in values])
        axis.set_ticks(minor, minor=True)
        if span.zone:
            axis.get_gridlines()[0].set_visible(False)
            shade(span.start, span.low, color=PALE, lw=0, zorder=0.4)
            rule(span.low, color=GREY, lw=0.5, zorder=1)


def _draw(axes: Axes, result: LayerResult, rows: Rows, across: Span, up: Span) -> None:
    """Curves of equal error, points and their names, such that none covers another."""
    spots: list[Spot] = []
    whiskers: list[Box] = []
    for name, measured in result.estimators.items():
        style, x = style_of(name, unbiased=measured.unbiased), across.at(across.place(measured.std))
        if name in rows:
            row, align = rows[name]
            y = up.at(up.zone - (row + 0.7) * ROW)
            beside = BESIDE if align == "left" else -BESIDE
            write(axes, name, across.points(x) + beside, up.points(y), style, ha=align, behind=PALE)
        else:
            y = measured.bias
            spots.append(Spot(across.points(x), up.points(y), name, style))
        whiskers += _draw_whiskers(axes, measured, style, x, y, across, up)
        # A white edge shows filled markers that lie on each other.
        face, edge, line = ("white", style.colour, 0.9) if measured.unbiased else (style.colour, "white", 0.4)
        look: dict[str, Any] = {"markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": line, "linestyle": "none"}
        size = 3.4 + 0.8 * style.width + 2 * (1 - line)
        axes.plot([x], [y], marker=style.marker, markersize=size, label=name, zorder=style.zorder, clip_on=False, **look)
    values = list(_draw_iso(axes, spots, across, up))
    _explain_zone(axes, result.reference, up, bool(rows))
    label_spots(axes, spots, Box(across.zone + 4, up.zone + 1, across.length, up.length), values, whiskers)


def _draw_whiskers(
    axes: Axes, measured: Measurement, style: Style, x: float, y: float, across: Span, up: Span
) -> Iterator[Box]:
    """The confidence intervals of standard deviation and bias; yields what the latter covers."""
    behind: dict[str, Any] = {"color": style.colour, "zorder": style.zorder - 1}
    look = {"lw": 0.5 + 0.15 * style.width, "alpha": 0.6, "solid_capstyle": "butt", "gid": "whisker", **behind}
    if measured.std > ROUNDING:
        axes.plot([max(measured.std_low, across.low), min(measured.std_high, across.high)], [y, y], **look)
    top, bottom = max(min(measured.bias_high, up.high), up.low), max(measured.bias_low, up.low)
    if top > bottom:
        axes.plot([x, x], [bottom, top], **look)
        axes.plot([x], [top], marker="_", markersize=3, alpha=0.65, **behind)
        yield Box(across.points(x) - 0.5, up.points(bottom), across.points(x) + 0.5, up.points(top))


def _draw_iso(axes: Axes, spots: Sequence[Spot], across: Span, up: Span) -> Iterator[Box]:
    """Curves of equal RMSE, √(std² + bias²), each with its value; yields what the values cover."""
    area = Box(across.zone, up.zone, across.length, up.length)
    angles = np.linspace(0.0, np.pi / 2, 200)[1:-1]
    for exponent in range(floor(log10(across.low)), ceil(log10(max(across.high, up.high))) + 1):
        radius = 10.0**exponent
        xs, ys = radius * np.cos(angles), radius * np.sin(angles)
        # Into the zones, where one of the two is zero, the curves go on straight.
        ends = ([radius, *xs, across.start], [up.start, *ys, radius])
        axes.plot(*ends, color="#BBBBBB", lw=0.6, zorder=0.8, gid="iso")
        text = f"RMSE {plain(radius)}"
        half = text_width(text) / 2
        # Nearest to the diagonal, but not over a marker.
        for best in np.argsort(np.abs(np.log(xs / ys))):
            x, y = across.points(xs[best]), up.points(ys[best])
            box = Box(x - half, y - 4, x + half, y + 4)
            if box.within(area) and not any(box.overlaps(spot.marker) for spot in spots):
                note(axes, x / across.length, y / up.length, text, va="center", ha="center")
                yield box
                break


def _explain_zone(axes: Axes, reference: Reference | None, up: Span, zone_is_used: bool) -> None:
    """Say below what is drawn how to read it; shade the biases that a reference, itself estimated, cannot resolve."""
    lines = ["bias not distinguishable from 0 (whiskers: upper limit)"] if zone_is_used else []
    if reference:
        shaded = reference.error > up.low
        what = "dark: below the reference's own error" if shaded else "the reference's own error:"
        lines.append(f"{what} {reference.error:.2g} ({reference.source})")
        if shaded:
            axes.axhspan(up.low, reference.error, color=BAND, lw=0, zorder=0.5, gid="reference")
    if lines:
        note(axes, 0.97, 2 / up.length, "\n".join(lines), ha="right", behind=PALE)
