"""The curves of a training run: losses, accuracies, gradient norms, saturated units and the learning rate over epochs."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flipgrad.errors import InputError
from flipgrad.plots.runs import Epoch, read_metrics
from flipgrad.plots.style import BLUE, GREEN, ORANGE, defaults, log_ticks, percent_ticks, tidy, write

# Values that span less than this factor need no logarithmic axis, and would have hardly a tick there.
LOG_FROM = 5


@dataclass(frozen=True)
class Line:
    """Values over the epochs that have one."""

    label: str
    colour: str
    epochs: list[int]
    values: list[float]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share an axis; ``key`` names the chart in a page, ``percent`` means that values are shares."""

    key: str
    title: str
    axis: str
    lines: list[Line]
    percent: bool = False
    log: bool = False


def charts(epochs: Sequence[Epoch]) -> list[Chart]:
    """The charts of what the epochs say; what they do not say, or say of no epoch, is left out."""
    samples = next((epoch.samples for epoch in reversed(epochs) if epoch.samples), None)
    many = f"{samples} samples" if samples else "many samples"
    losses = [
        _line(epochs, "training objective", BLUE, lambda epoch: epoch.objective),
        _line(epochs, "expected loss", ORANGE, lambda epoch: epoch.expected_loss),
        _line(epochs, f"marginal loss ({many})", GREEN, lambda epoch: epoch.marginal_loss),
    ]
    accuracies = [
        _line(epochs, "1 sample", ORANGE, lambda epoch: epoch.accuracy_1),
        _line(epochs, many, GREEN, lambda epoch: epoch.accuracy_n),
        _line(epochs, "deterministic", BLUE, lambda epoch: epoch.accuracy_deterministic),
    ]
    rate = _line(epochs, "learning rate", BLUE, lambda epoch: epoch.lr)
    gradients = _by_layer(epochs, lambda epoch: epoch.gradient_norm)
    saturated = _by_layer(epochs, lambda epoch: epoch.saturated)
    every = [
        Chart("losses", "Losses", "cross-entropy", losses, log=True),
        Chart("accuracies", "Accuracies", "accuracy", accuracies, percent=True),
        Chart("gradients", "Gradient norm by layer", "gradient norm", gradients, log=True),
        Chart("saturated", "Saturated units by layer", "share of units", saturated, percent=True),
        # A constant rate is told by the configuration.
        Chart("rate", "Learning rate", "learning rate", [rate] if len(set(rate.values)) > 1 else [], log=True),
    ]
    shown = [(chart, [line for line in chart.lines if line.values]) for chart in every]
    return [replace(chart, lines=lines) for chart, lines in shown if lines]


def draw(axes: Axes, chart: Chart) -> None:
    """Draw a chart; the caller adds title and legend."""
    for line in chart.lines:
        # A line through one point is invisible; few points deserve to be seen.
        marker = "o" if len(line.epochs) < 3 else ""
        style = "--" if line.dashed else "-"
        axes.plot(line.epochs, line.values, color=line.colour, label=line.label, marker=marker, linestyle=style)
    tidy(axes)
    axes.set(xlabel="epoch", ylabel=chart.axis)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    values = [value for line in chart.lines for value in line.values]
    if chart.percent:
        percent_ticks(axes.yaxis)
    elif chart.log and min(values) > 0 and max(values) >= LOG_FROM * min(values):
        axes.set_yscale("log")
        log_ticks(axes, "y")


@defaults(1.25)
def training_curve(metrics: Path, output: Path) -> None:
    """Draw losses and accuracies over epochs from a run's ``metrics`` (JSON lines) as a PNG."""
    chosen = [chart for chart in charts(read_metrics(metrics)) if chart.key in ("losses", "accuracies")]
    if not chosen:
        raise InputError(f"{metrics}: holds no whole epoch with a loss or an accuracy; train for one first")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        draw(axes, chart)
        axes.legend(frameon=False)
    write(figure, output, dpi=150)


def _line(epochs: Sequence[Epoch], label: str, colour: str, value: Callable[[Epoch], float | None]) -> Line:
    pairs = [(epoch.epoch, found) for epoch in epochs if (found := value(epoch)) is not None]
    return Line(label, colour, [number for number, _ in pairs], [found for _, found in pairs])


def _by_layer(epochs: Sequence[Epoch], values: Callable[[Epoch], dict[str, float | None]]) -> list[Line]:
    """A line for every layer, in the order of the network: from blue to red, every other one dashed."""
    names = list(dict.fromkeys(name for epoch in epochs for name in values(epoch)))

    def of(name: str) -> Callable[[Epoch], float | None]:
        return lambda epoch: values(epoch).get(name)

    lines = [_line(epochs, name, _hue(index, len(names)), of(name)) for index, name in enumerate(names)]
    return [replace(line, dashed=index % 2 == 1) for index, line in enumerate(lines)]


def _hue(index: int, count: int) -> str:
    """The colour of a layer. All are of one luminance, which stands out from white and from black alike."""
    hue = 0.58 * (1 - index / max(1, count - 1))
    low, high = 0.0, 1.0
    for _ in range(20):
        lightness = (low + high) / 2
        rgb = colorsys.hls_to_rgb(hue, lightness, 0.85)
        red, green, blue = (channel**2.2 for channel in rgb)
        low, high = (lightness, high) if 0.21 * red + 0.72 * green + 0.07 * blue < 0.2 else (low, lightness)
    return to_hex(rgb).upper()
