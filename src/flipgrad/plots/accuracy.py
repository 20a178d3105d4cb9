"""How accurate gradient estimates are, against the number of samples; figures 2 and 3 of the paper.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import atan2, degrees, floor, log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from matplotlib.transforms import offset_copy

from flipgrad.plots.labels import label_ends, note, place
from flipgrad.plots.results import ROUNDING, LayerResult, Measurement, Panel, Reference, read_all
from flipgrad.plots.style import BAND, GREY, SCORE, TINY, Style, defaults, grid, legend, log_ticks, style_of


@defaults()
def rmse_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """Relative root mean squared errors over the number of samples, log-log, and the slope of unbiased estimators."""
    results = read_all(panels, estimators)
    drawn = [{name: m for name, m in result.estimators.items() if max(m.rmse) > ROUNDING} for result in results]
    low, high = _error_limits(results)
    figure, every = grid(1, len(panels), sharey=True, title=title)
    every[0].set(yscale="log", ylim=(low, high), ylabel="relative RMSE")
    log_ticks(every[0].yaxis)
    _draw_lines(figure, every, panels, drawn, "rmse")
    # Where a reference cannot resolve errors, no slope is drawn either.
    resolved = max([low, *(result.reference.error for result in results if result.reference)])
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
            _draw_interval(axes, name, measured)
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
    ends: list[dict[str, tuple[float, float, Style]]] = [{} for _ in panels]
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


def _draw_interval(axes: Axes, name: str, measured: Measurement) -> None:
    """Shade from the lower to the upper cosine, with a hairline at both, as shades of several estimators mix."""
    colour = style_of(name, unbiased=measured.unbiased).colour
    axes.fill_between(measured.samples, measured.cosine_low, measured.cosine_high, color=colour, alpha=0.1, lw=0, zorder=1.5)
    for edge in (measured.cosine_low, measured.cosine_high):
        axes.plot(measured.samples, edge, color=colour, alpha=0.45, lw=0.4, zorder=1.5, gid="edge")


def _error_limits(results: Sequence[LayerResult]) -> tuple[float, float]:
    """Limits that hold all errors, and the reference's own error where it is near."""
    every = [value for result in results for m in result.estimators.values() for value in m.rmse if value > ROUNDING] or [1.0]
    references = [result.reference.error for result in results if result.reference]
    low = max(min([min(every) / 1.5, *(error / 2.5 for error in references if error > 0)]), min(every) / 3)
    return low, max(every) * 1.5


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
