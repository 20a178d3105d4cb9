"""How accurate gradient estimates are: the result files of an evaluation, and their curves over the number of samples.

The curves are figures 2 and 3 of the paper: Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic
Binary Networks. NeurIPS 2020. Files are read and checked, so that a figure is right or not drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import atan2, degrees, floor, log10
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from matplotlib.transforms import offset_copy

from flipgrad.errors import InputError
from flipgrad.plots.labels import Ends, label_ends, note, place
from flipgrad.plots.loading import Count, Natural, NotNegative, Range, build, load
from flipgrad.plots.style import BAND, GREY, SCORE, TINY, defaults, grid, legend, log_ticks, ordered, plain, style_of

# A relative error below this is the rounding of float32: it is drawn as none.
ROUNDING = 1e-6

Cosine = Annotated[float, Range("from -1 to 1", -1, 1)]


class Measured(Protocol):
    """A result as it was measured, :class:`flipgrad.gradeval.Result`."""

    def to_dict(self) -> dict[str, Any]:
        """What its file would hold."""


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows: a layer ("layer 1", "head", "all") of a result or its file, under a title."""

    result: Path | Measured
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


def layers(result: Path | Measured) -> list[str]:
    """The layers in a result or its file, as :class:`Panel` calls them: those of its first estimator."""
    first = next(iter(_load(result).estimators.values()))
    return [layer.name for layer in first.layers]


def panels_of(shown: Sequence[Panel] | Path | Measured) -> Sequence[Panel]:
    """The panels of a figure; of a result or its file alone, one for every hidden layer."""
    if isinstance(shown, Sequence):
        return shown
    names = [name for name in layers(shown) if name.startswith("layer ")]
    return [Panel(shown, name, name) for name in names or layers(shown)]


def read_all(panels: Sequence[Panel], estimators: Sequence[str] | None = None) -> list[LayerResult]:
    """Read what the panels show, of the given estimators or of all; each must be in one of the files."""
    if not panels:
        raise InputError("panels: expected at least one, got none")
    results = [read(panel.result, panel.layer) for panel in panels]
    known = {name for result in results for name in result.estimators}
    chosen = known if estimators is None else set(estimators)
    if not chosen or not chosen <= known:
        files = ", ".join(dict.fromkeys(_called(panel.result) for panel in panels))
        strange = ", ".join(sorted(chosen - known)) or "an empty list"
        raise InputError(f"estimators: {strange} is not in {files}; choose from {', '.join(ordered(known))}")
    return [
        replace(r, estimators={name: r.estimators[name] for name in ordered(r.estimators) if name in chosen}) for r in results
    ]


def read(source: Path | Measured, layer: str) -> LayerResult:
    """Read one layer of a result or its file, or raise an `InputError` that names the file and what to do."""
    file, path = _load(source), _called(source)
    estimators = {
        name: replace(_named(layer, estimator.layers, f"{path}: estimator {name!r}"), unbiased=estimator.unbiased)
        for name, estimator in file.estimators.items()
    }
    if file.reference.kind == "exact":
        return LayerResult(estimators, None)
    error = _named(layer, file.reference.layers, f"{path}: the reference").error
    return LayerResult(estimators, replace(file.reference, error=error))


def _called(source: Path | Measured) -> str:
    return str(source) if isinstance(source, Path) else "the result"


def _load(source: Path | Measured) -> ResultFile:
    missing, broken = "run the evaluation that writes it, or correct the path", "run the evaluation again to rewrite it"
    if isinstance(source, Path):
        return load(source, ResultFile, missing=missing, broken=broken)
    if not hasattr(source, "to_dict"):
        raise InputError(f"result: expected what fg.gradeval.evaluate gives, or a pathlib.Path, got {type(source).__name__}")
    return build(ResultFile, source.to_dict(), where="the result", fix="run the evaluation again")


def _named(name: str, layers: Sequence[Any], where: str) -> Any:
    for layer in layers:
        if layer.name == name:
            return layer
    raise InputError(f"{where} has no layer {name!r}; choose one of {', '.join(repr(layer.name) for layer in layers)}")


@defaults()
def rmse_figure(
    panels: Sequence[Panel] | Path | Measured, *, estimators: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Relative root mean squared errors over the number of samples, log-log, and the slope of unbiased estimators."""
    panels = panels_of(panels)
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
def cosine_figure(
    panels: Sequence[Panel] | Path | Measured, *, estimators: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Cosines to the true gradient over the number of samples: the mean as a line, the interval of most trials shaded."""
    panels = panels_of(panels)
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
