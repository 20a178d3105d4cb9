"""How accurate gradient estimates are, against the number of samples; figures 2 and 3 of the paper.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import atan2, degrees, floor, log10
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MultipleLocator

from flipgrad.plots.bias import bias_and_spread
from flipgrad.plots.labels import GAP, LINE, label_ends, note, place, source
from flipgrad.plots.results import ROUNDING, LayerResult, Measurement, Panel, Reference, read_all
from flipgrad.plots.style import (
    BAND,
    FONT,
    GREY,
    SCORE,
    SMALL,
    TINY,
    Style,
    defaults,
    log_ticks,
    save,
    style_of,
    text_width,
    tidy,
)

__all__ = ["Panel", "bias_and_spread", "cosine", "cosine_figure", "rmse", "rmse_figure"]

# Inches: a page's width, room for the axis on the left, above and below the axes, and the least size of the axes.
PAGE, LEFT, ABOVE, BELOW, WIDTH, HEIGHT = 7.2, 0.55, 0.28, 0.55, 1.3, 2.1


def rmse(panels: Sequence[Panel], output: Path, *, estimators: Sequence[str] | None = None, title: str = "") -> list[Path]:
    """Draw the relative root mean squared error over the number of samples, as ``output``.png and .pdf."""
    return save(rmse_figure(panels, estimators=estimators, title=title), output)


def cosine(panels: Sequence[Panel], output: Path, *, estimators: Sequence[str] | None = None, title: str = "") -> list[Path]:
    """Draw the cosine to the true gradient over the number of samples, as ``output``.png and .pdf."""
    return save(cosine_figure(panels, estimators=estimators, title=title), output)


def rmse_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """The figure of `rmse`: log-log, one panel each, with the slope of unbiased estimators for comparison."""
    with defaults():
        results = read_all(panels, estimators)
        figure, every = _row(panels, results, title)
        low, high = _error_limits(results)
        # Where a reference cannot resolve errors, no slope is drawn either.
        resolved = max([low, *(result.reference.error for result in results if result.reference)])
        slope = _slope(results, resolved, high)
        for axes, result in zip(every, results, strict=True):
            axes.set(xscale="log", yscale="log", ylim=(low, high))
            drawn = {name: m for name, m in result.estimators.items() if max(m.rmse) > ROUNDING}
            _limit_samples(axes, result)
            for name, measured in drawn.items():
                _draw_line(axes, name, measured, measured.rmse)
            _draw_slope(axes, slope, resolved)
            if result.reference:
                _shade_reference(axes, result.reference)
            if hidden := [name for name in result.estimators if name not in drawn]:
                note(axes, 0.03, 0.97, f"no error: {', '.join(hidden)}", va="top")
            label_ends(axes, {n: (m.samples[-1], m.rmse[-1], style_of(n, unbiased=m.unbiased)) for n, m in drawn.items()})
        log_ticks(every[0], "y")
        every[0].set_ylabel("relative RMSE")
        return figure


def cosine_figure(panels: Sequence[Panel], *, estimators: Sequence[str] | None = None, title: str = "") -> Figure:
    """The figure of `cosine`: the mean as a line, the interval of most trials shaded."""
    with defaults():
        results = read_all(panels, estimators)
        figure, every = _row(panels, results, title)
        least = min(min(m.cosine_low + m.cosine_mean) for result in results for m in result.estimators.values())
        for axes, result in zip(every, results, strict=True):
            # Zero stays in sight when all is positive; otherwise down to the next quarter.
            axes.set(xscale="log", ylim=(-0.12 if least >= 0 else floor(4 * least) / 4, 1.02))
            axes.yaxis.set_major_locator(MultipleLocator(0.25))
            _limit_samples(axes, result)
            for name, measured in result.estimators.items():
                _draw_line(axes, name, measured, measured.cosine_mean)
                _draw_interval(axes, name, measured)
            _mark_zero(axes)
            if result.reference:
                _note_reference(axes, result.reference)
            ends = {
                n: (m.samples[-1], m.cosine_mean[-1], style_of(n, unbiased=m.unbiased)) for n, m in result.estimators.items()
            }
            label_ends(axes, ends)
        every[0].set_ylabel("cosine to the true gradient")
        return figure


def _row(panels: Sequence[Panel], results: Sequence[LayerResult], title: str) -> tuple[Figure, list[Axes]]:
    """Axes side by side with one y axis, each with room for the names on its right and as wide as the page allows."""
    names = dict.fromkeys(name for result in results for name in result.estimators)
    room = (GAP + max(text_width(name, SMALL, style_of(name).weight) for name in names) + 6) / 72
    across = min(max((PAGE - LEFT) / len(panels) - room, WIDTH), 3.0)
    up = max(HEIGHT, (len(names) + 1) * LINE / 72)
    above = ABOVE + (0.2 if title else 0)
    width, height = LEFT + len(panels) * (across + room), above + up + BELOW
    figure = Figure(figsize=(width, height))
    every: list[Axes] = []
    for index, panel in enumerate(panels):
        place = ((LEFT + index * (across + room)) / width, BELOW / height, across / width, up / height)
        axes = figure.add_axes(place, sharey=every[0] if every else None)
        axes.set_title(panel.title, pad=5)
        axes.set_xlabel("number of samples $M$", labelpad=2)
        axes.tick_params(labelleft=not every)
        tidy(axes)
        every.append(axes)
    if title:
        figure.text(LEFT / width, 1 - 0.07 / height, title, va="top", fontsize=FONT + 1, fontweight="bold")
    _explain_dashes(figure, {style_of(n, unbiased=m.unbiased) for result in results for n, m in result.estimators.items()})
    return figure, every


def _explain_dashes(figure: Figure, styles: Iterable[Style]) -> None:
    """A key to what the line styles mean, where both occur."""
    if len({bool(style.dashes) for style in styles}) == 2:
        handles = [Line2D([], [], color=GREY, lw=1.2), Line2D([], [], color=GREY, lw=1.2, dashes=SCORE)]
        figure.legend(
            handles,
            ["biased", "unbiased"],
            loc="lower right",
            ncols=2,
            frameon=False,
            fontsize=SMALL,
            labelcolor=GREY,
            borderaxespad=0.2,
            handlelength=2.6,
            columnspacing=1.4,
        )


def _draw_line(axes: Axes, name: str, measured: Measurement, values: list[float]) -> None:
    """A line through all values, with a marker at each decade."""
    style = style_of(name, unbiased=measured.unbiased)
    decades = [index for index, samples in enumerate(measured.samples) if log10(samples).is_integer()]
    axes.plot(
        measured.samples,
        values,
        label=name,
        color=style.colour,
        linewidth=style.width,
        dashes=style.dashes or (None, None),
        marker=style.marker,
        markersize=2.6 + style.width / 1.5,
        markeredgecolor="white",
        markeredgewidth=0.35,
        markevery=decades,
        zorder=style.zorder,
        clip_on=False,
    )


def _draw_interval(axes: Axes, name: str, measured: Measurement) -> None:
    """Shade from the lower to the upper cosine, with a hairline at both, as shades of several estimators mix."""
    colour = style_of(name, unbiased=measured.unbiased).colour
    axes.fill_between(measured.samples, measured.cosine_low, measured.cosine_high, color=colour, alpha=0.1, lw=0, zorder=1.5)
    for edge in (measured.cosine_low, measured.cosine_high):
        axes.plot(measured.samples, edge, color=colour, alpha=0.45, lw=0.4, zorder=1.5, gid="edge")


def _limit_samples(axes: Axes, result: LayerResult) -> None:
    """From the least to the greatest number of samples, exactly."""
    every = [samples for measured in result.estimators.values() for samples in measured.samples]
    low, high = min(every), max(every)
    axes.set_xlim((low, high) if low < high else (low / 2, high * 2))
    log_ticks(axes, "x")


def _error_limits(results: Sequence[LayerResult]) -> tuple[float, float]:
    """Limits that hold all errors, and the reference's own error where it is near."""
    every = [value for result in results for m in result.estimators.values() for value in m.rmse if value > ROUNDING] or [1.0]
    references = [result.reference.error for result in results if result.reference]
    low = max(min([min(every) / 1.5, *(error / 2.5 for error in references if error > 0)]), min(every) / 3)
    return low, max(every) * 1.5


def _slope(results: Sequence[LayerResult], low: float, high: float) -> float:
    """The constant c of the line c/√M that keeps furthest from all data, in the middle of the axes."""
    curves = [m for result in results for m in result.estimators.values() if max(m.rmse) > ROUNDING]
    samples = np.concatenate([m.samples for m in curves] or [[1.0]])
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
    axes.annotate(
        r"$\propto 1/\sqrt{M}$",
        ((ends[0] * ends[1]) ** 0.5, constant / (ends[0] * ends[1]) ** 0.25),
        xytext=(1, 1),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=degrees(atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        fontsize=TINY,
        color=GREY,
    )


def _shade_reference(axes: Axes, reference: Reference) -> None:
    """Shade the errors that a reference, itself estimated, cannot resolve."""
    if reference.error > axes.get_ylim()[0]:
        axes.axhspan(axes.get_ylim()[0], reference.error, color=BAND, lw=0, zorder=0.5, gid="reference")
        note(axes, 0.03, 0.02, f"grey: below the error of\nthe reference ({source(reference)})", halo=BAND)
    else:
        _note_reference(axes, reference)


def _note_reference(axes: Axes, reference: Reference) -> None:
    """Say how accurate a reference is that is itself estimated."""
    note(axes, 0.03, 0.02, f"reference: {source(reference)},\nits relative error {reference.error:.2g}")


def _mark_zero(axes: Axes) -> None:
    """The line between directions that descend and those that do not."""
    axes.axhline(0, color=GREY, linewidth=0.9, zorder=1.6, gid="zero")
    right = axes.get_xlim()[1]
    axes.annotate(
        "descent direction above",
        (right, 0),
        xytext=(-2, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=TINY,
        fontstyle="italic",
        color=GREY,
        zorder=5,
        path_effects=[withStroke(linewidth=1.4, foreground="white")],
    )
