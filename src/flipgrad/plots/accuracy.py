"""How accurate gradient estimates are: the result files of an evaluation, and their figures.

Curves over the number of samples are figures 2 and 3 of the paper: Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient
Estimators for Stochastic Binary Networks. NeurIPS 2020. Bias against standard deviation at one sample shows where each
estimator's error comes from, for many estimators at once. Files are read and checked, so that a figure is right or not drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import atan2, ceil, degrees, floor, log10
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from matplotlib.transforms import offset_copy

from flipgrad.errors import InputError
from flipgrad.plots.labels import Box, Ends, Spot, label_ends, label_spots, note, place, text_width, write
from flipgrad.plots.loading import Count, Natural, NotNegative, Range, load
from flipgrad.plots.style import (
    BAND,
    GREY,
    PALE,
    SCORE,
    TINY,
    Style,
    defaults,
    fit,
    grid,
    legend,
    log_ticks,
    ordered,
    plain,
    style_of,
)

# A relative error below this is the rounding of float32: it is drawn as none.
ROUNDING = 1e-6
# Of bias against standard deviation, inches: a panel, and the least height of what is not the zone without bias.
WIDTH, HEIGHT, LEAST = 3.0, 3.3, 1.9
# Points: the zone of estimators without randomness, a row of the zone without bias, the space between marker and name.
ZONE, ROW, BESIDE = 20.0, 10.5, 5.5

# By estimator without bias: the row of that zone, from the top, and how the name beside its marker is aligned.
Rows = dict[str, tuple[int, str]]

Cosine = Annotated[float, Range("from -1 to 1", -1, 1)]


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows: a layer ("layer 1", "head", "all") of a result file, under a title."""

    result: Path
    layer: str
    title: str


@dataclass(frozen=True)
class Measurement:
    """One estimator in the layer ``name``; errors are relative to the length of the gradient, curves go over ``samples``."""

    name: str
    samples: list[Count]
    rmse: list[NotNegative]
    cosine_mean: list[Cosine]
    cosine_low: list[Cosine]
    cosine_high: list[Cosine]
    bias: NotNegative
    bias_low: NotNegative
    bias_high: NotNegative
    std: NotNegative
    std_low: NotNegative
    std_high: NotNegative
    # Told by the estimator, not by each of its layers.
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not self.samples or any(after <= before for before, after in pairwise(self.samples)):
            raise InputError(f"'samples' must be increasing and not empty, got {self.samples}")
        for key in ("rmse", "cosine_mean", "cosine_low", "cosine_high"):
            if (count := len(getattr(self, key))) != len(self.samples):
                raise InputError(f"{key!r} must have {len(self.samples)} entries, one per entry of 'samples', got {count}")
        for key, low, high in (("bias", self.bias_low, self.bias_high), ("std", self.std_low, self.std_high)):
            if low > high:
                raise InputError(f"'{key}_low' must not exceed '{key}_high', got {low} and {high}")


@dataclass(frozen=True)
class Estimator:
    """What the file says of one estimator."""

    unbiased: bool
    layers: list[Measurement]


@dataclass(frozen=True)
class LayerError:
    """The relative error of a reference in the layer ``name``."""

    name: str
    error: NotNegative


@dataclass(frozen=True)
class Reference:
    """What estimators were compared with: the exact gradient, or the mean of ``draws`` of an estimator and its ``error``."""

    kind: Literal["exact", "draws"]
    estimator: str = ""
    draws: Natural = 0
    layers: list[LayerError] = field(default_factory=list)
    # Of the layer that is drawn.
    error: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "draws" and not self.draws:
            raise InputError("'draws' must be at least 1, got 0")

    @property
    def source(self) -> str:
        """Where one that is not exact comes from."""
        return f"{self.estimator}, {plain(self.draws)} draws"


@dataclass(frozen=True)
class ResultFile:
    """A whole result file."""

    estimators: dict[str, Estimator]
    reference: Reference

    def __post_init__(self) -> None:
        if not self.estimators:
            raise InputError("'estimators' must hold at least one, got none")


@dataclass(frozen=True)
class LayerResult:
    """One layer of a result file; an exact ``reference`` is None."""

    estimators: dict[str, Measurement]
    reference: Reference | None


def layers(path: Path) -> list[str]:
    """The layers in a result file, as :class:`Panel` calls them: those of its first estimator."""
    first = next(iter(_load(path).estimators.values()))
    return [layer.name for layer in first.layers]


def read_all(panels: Sequence[Panel], estimators: Sequence[str] | None = None) -> list[LayerResult]:
    """Read what the panels show, of the given estimators or of all; each must be in one of the files."""
    if not panels:
        raise InputError("panels: expected at least one, got none")
    results = [read(panel.result, panel.layer) for panel in panels]
    known = {name for result in results for name in result.estimators}
    chosen = known if estimators is None else set(estimators)
    if not chosen or not chosen <= known:
        files = ", ".join(dict.fromkeys(str(panel.result) for panel in panels))
        strange = ", ".join(sorted(chosen - known)) or "an empty list"
        raise InputError(f"estimators: {strange} is not in {files}; choose from {', '.join(ordered(known))}")
    return [
        replace(r, estimators={name: r.estimators[name] for name in ordered(r.estimators) if name in chosen}) for r in results
    ]


def read(path: Path, layer: str) -> LayerResult:
    """Read one layer of a result file, or raise an `InputError` that names the file and what to do."""
    file = _load(path)
    estimators = {
        name: replace(_named(layer, estimator.layers, f"{path}: estimator {name!r}"), unbiased=estimator.unbiased)
        for name, estimator in file.estimators.items()
    }
    if file.reference.kind == "exact":
        return LayerResult(estimators, None)
    error = _named(layer, file.reference.layers, f"{path}: the reference").error
    return LayerResult(estimators, replace(file.reference, error=error))


def _load(path: Path) -> ResultFile:
    missing, broken = "run the evaluation that writes it, or correct the path", "run the evaluation again to rewrite it"
    return load(path, ResultFile, missing=missing, broken=broken)


def _named(name: str, layers: Sequence[Any], where: str) -> Any:
    for layer in layers:
        if layer.name == name:
            return layer
    raise InputError(f"{where} has no layer {name!r}; choose one of {', '.join(repr(layer.name) for layer in layers)}")


@defaults()
def rmse_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """Relative root mean squared errors over the number of samples, log-log, and the slope of unbiased estimators."""
    results = read_all(panels, estimators)
    drawn = [{name: m for name, m in result.estimators.items() if max(m.rmse) > ROUNDING} for result in results]
    errors = [value for shown in drawn for m in shown.values() for value in m.rmse if value > ROUNDING] or [1.0]
    references = [result.reference.error for result in results if result.reference]
    # All errors are inside, and the reference's own error where it is near.
    low = max(min([min(errors) / 1.5, *(error / 2.5 for error in references if error > 0)]), min(errors) / 3)
    high = max(errors) * 1.5
    figure, every = grid(1, len(panels), sharey=True, title=title)
    every[0].set(yscale="log", ylim=(low, high), ylabel="relative RMSE")
    log_ticks(every[0].yaxis)
    _draw_lines(figure, every, panels, drawn, "rmse")
    # Where a reference cannot resolve errors, no slope is drawn either.
    resolved = max([low, *references])
    slope = _slope([measured for shown in drawn for measured in shown.values()], resolved, high)
    for axes, result, shown in zip(every, results, drawn, strict=True):
        _draw_slope(axes, slope, resolved)
        if result.reference and result.reference.error > low:
            axes.axhspan(low, result.reference.error, color=BAND, lw=0, zorder=0.5, gid="reference")
            note(axes, 0.03, 0.02, f"grey: below the error of\nthe reference ({result.reference.source})", behind=BAND)
        elif result.reference:
            _note_reference(axes, result.reference)
        if hidden := [name for name in result.estimators if name not in shown]:
            note(axes, 0.03, 0.97, f"no error: {', '.join(hidden)}", va="top")
    return figure


@defaults()
def cosine_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """Cosines to the true gradient over the number of samples: the mean as a line, the interval of most trials shaded."""
    results = read_all(panels, estimators)
    drawn = [result.estimators for result in results]
    least = min(min(m.cosine_low + m.cosine_mean) for shown in drawn for m in shown.values())
    figure, every = grid(1, len(panels), sharey=True, title=title)
    # Zero stays in sight when all is positive; otherwise down to the next quarter.
    every[0].set(ylim=(-0.12 if least >= 0 else floor(4 * least) / 4, 1.02), ylabel="cosine to the true gradient")
    every[0].yaxis.set_major_locator(MultipleLocator(0.25))
    _draw_lines(figure, every, panels, drawn, "cosine_mean")
    for axes, result in zip(every, results, strict=True):
        for name, measured in result.estimators.items():
            # Shades of several estimators mix, so that both limits have a hairline as well.
            samples, low, high = measured.samples, measured.cosine_low, measured.cosine_high
            look: dict[str, Any] = {"color": style_of(name, unbiased=measured.unbiased).colour, "zorder": 1.5}
            axes.fill_between(samples, low, high, alpha=0.1, lw=0, **look)
            for edge in (low, high):
                axes.plot(samples, edge, alpha=0.45, lw=0.4, gid="edge", **look)
        # The line between directions that descend and those that do not.
        axes.axhline(0, color=GREY, linewidth=0.9, zorder=1.6, gid="zero")
        above = offset_copy(axes.get_yaxis_transform(), figure, x=-2, y=-2, units="points")
        note(axes, 1, 0, "descent direction above", ha="right", va="top", transform=above)
        if result.reference:
            _note_reference(axes, result.reference)
    return figure


def _note_reference(axes: Axes, reference: Reference) -> None:
    """Say how accurate a reference is that is itself estimated."""
    note(axes, 0.03, 0.02, f"reference: {reference.source},\nits relative error {reference.error:.2g}")


def _draw_lines(
    figure: Figure, every: Sequence[Axes], panels: Sequence[Panel], drawn: Sequence[dict[str, Measurement]], key: str
) -> None:
    """The curves ``key`` of all panels over the number of samples, named on the right."""
    ends: list[Ends] = [{} for _ in panels]
    for axes, panel, shown, own in zip(every, panels, drawn, ends, strict=True):
        axes.set_title(panel.title, pad=5)
        axes.set_xlabel("number of samples $M$", labelpad=2)
        samples = [count for measured in shown.values() for count in measured.samples] or [1]
        low, high = min(samples), max(samples)
        axes.set(xscale="log", xlim=(low, high) if low < high else (low / 2, high * 2))
        log_ticks(axes.xaxis)
        for name, measured in shown.items():
            style, values = style_of(name, unbiased=measured.unbiased), getattr(measured, key)
            own[name] = (measured.samples[-1], values[-1], style)
            line: dict[str, Any] = {"color": style.colour, "linewidth": style.width, "dashes": style.dashes or (None, None)}
            marks: dict[str, Any] = {"marker": style.marker, "markersize": 2.6 + style.width / 1.5, "markeredgecolor": "white"}
            decades = [index for index, count in enumerate(measured.samples) if log10(count).is_integer()]
            marks |= {"markeredgewidth": 0.35, "markevery": decades}
            axes.plot(measured.samples, values, label=name, zorder=style.zorder, clip_on=False, **line, **marks)
    # A key to what the line styles mean, where both occur.
    if len({bool(style.dashes) for own in ends for _, _, style in own.values()}) == 2:
        solid: dict[str, Any] = {"color": GREY, "linewidth": 1.2}
        keys = {"biased": solid, "unbiased": {**solid, "dashes": SCORE}}
        legend(figure, keys, labelcolor=GREY, handlelength=2.6, columnspacing=1.4)
    label_ends(figure, every, ends, height=2.1, narrowest=1.3, widest=3.0)


def _slope(curves: Sequence[Measurement], low: float, high: float) -> float:
    """The constant c of the line c/√M that keeps furthest from all data, in the middle of the axes."""
    samples = np.concatenate([m.samples for m in curves] or [[1]])
    errors = np.concatenate([m.rmse for m in curves] or [[1.0]])
    middle = log10(samples.min() * samples.max()) / 4
    choices = np.linspace(log10(low) + middle + 0.3, log10(high) + middle - 0.02, 200)
    distances = np.abs(choices[:, None] - np.log10(np.maximum(errors, ROUNDING) * np.sqrt(samples)))
    return float(10 ** choices[np.argmax(distances.min(axis=1))])


def _draw_slope(axes: Axes, constant: float, low: float) -> None:
    """A thin line ∝ 1/√M, how unbiased estimators improve, down to ``low``."""
    (left, right), high = axes.get_xlim(), axes.get_ylim()[1]
    ends = max(left, (constant / high) ** 2), min(right, (constant / low) ** 2)
    axes.plot(ends, [constant / x**0.5 for x in ends], color=GREY, lw=0.6, zorder=1.4, gid="slope")
    (x0, y0), (x1, y1) = (place(axes, x, constant / x**0.5) for x in ends)
    middle = (ends[0] * ends[1]) ** 0.5, constant / (ends[0] * ends[1]) ** 0.25
    place_of_text: dict[str, Any] = {"xytext": (1, 1), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    angle = degrees(atan2(y1 - y0, x1 - x0))
    look: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "fontsize": TINY, "color": GREY}
    axes.annotate(r"$\propto 1/\sqrt{M}$", middle, **place_of_text, **look)


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
def bias_and_spread_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """Each estimator at its standard deviation and bias; what cannot be told from zero has a zone of its own on each axis."""
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
        _draw_spots(axes, result, found, across, up)
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


def _draw_spots(axes: Axes, result: LayerResult, rows: Rows, across: Span, up: Span) -> None:
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
