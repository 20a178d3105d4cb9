"""The charts of a run: curves over epochs and how often the members of its ensemble disagree; as files or SVG in a page."""

import colorsys
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flipgrad.errors import InputError
from flipgrad.plots.runs import Disagreement, Epoch, read_metrics
from flipgrad.plots.style import BLUE, GREEN, GREY, GRID, ORANGE, defaults, log_ticks, percent_ticks, tidy, write

# Values that span less than this factor need no logarithmic axis, and would have hardly a tick there.
LOG_FROM = 5
# Shares that are named below the axis of disagreements, at most.
LABELS = 10
# What a colour of a figure is called in the page's style sheet, whether the page is light or dark.
NAMES = {"#000000": "ink", GREY: "muted", GRID: "grid", BLUE: "blue", ORANGE: "orange", GREEN: "green"}


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
    """Lines that share an axis, logarithmic or of shares in ``percent``; ``key`` names the chart in a page."""

    key: str
    title: str
    axis: str
    lines: list[Line]
    percent: bool = False


def charts(epochs: Sequence[Epoch]) -> list[Chart]:
    """The charts of what the epochs say; what they do not say, or say of no epoch, is left out."""
    samples = next((epoch.samples for epoch in reversed(epochs) if epoch.samples), None)
    many = f"{samples} samples" if samples else "many samples"
    losses = [
        _line("training objective", BLUE, {epoch.epoch: epoch.objective for epoch in epochs}),
        _line("expected loss", ORANGE, {epoch.epoch: epoch.expected_loss for epoch in epochs}),
        _line(f"marginal loss ({many})", GREEN, {epoch.epoch: epoch.marginal_loss for epoch in epochs}),
    ]
    accuracies = [
        _line("1 sample", ORANGE, {epoch.epoch: epoch.accuracy_1 for epoch in epochs}),
        _line(many, GREEN, {epoch.epoch: epoch.accuracy_n for epoch in epochs}),
        _line("deterministic", BLUE, {epoch.epoch: epoch.accuracy_deterministic for epoch in epochs}),
    ]
    gradients = _by_layer({epoch.epoch: epoch.gradient_norm for epoch in epochs})
    saturated = _by_layer({epoch.epoch: epoch.saturated for epoch in epochs})
    changed = _by_layer({epoch.epoch: epoch.changed_signs for epoch in epochs})
    undecided = _by_layer({epoch.epoch: epoch.undecided for epoch in epochs})
    rate = _line("learning rate", BLUE, {epoch.epoch: epoch.lr for epoch in epochs})
    every = [
        Chart("losses", "Losses", "cross-entropy", losses),
        Chart("accuracies", "Accuracies", "accuracy", accuracies, percent=True),
        Chart("gradients", "Gradient norm by layer", "gradient norm", gradients),
        Chart("saturated", "Saturated units by layer", "share of units", saturated, percent=True),
        Chart("changed", "Binary weights that changed their sign, by layer", "share of weights", changed, percent=True),
        Chart("undecided", "Undecided binary weights by layer", "share of weights", undecided, percent=True),
        # A constant rate is told by the configuration.
        Chart("rate", "Learning rate", "learning rate", [rate] if len(set(rate.values)) > 1 else []),
    ]
    shown = [replace(chart, lines=[line for line in chart.lines if line.values]) for chart in every]
    return [chart for chart in shown if chart.lines]


def _line(label: str, colour: str, values: Mapping[int, float | None], *, dashed: bool = False) -> Line:
    found = {epoch: value for epoch, value in values.items() if value is not None}
    return Line(label, colour, list(found), list(found.values()), dashed)


def _by_layer(values: Mapping[int, Mapping[str, float | None]]) -> list[Line]:
    """A line for every layer, in the order of the network: from blue to red, every other one dashed."""
    lines = []
    names = list(dict.fromkeys(name for layers in values.values() for name in layers))
    for index, name in enumerate(names):
        own = {epoch: layers.get(name) for epoch, layers in values.items()}
        lines.append(_line(name, _hue(index, len(names)), own, dashed=index % 2 == 1))
    return lines


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
    elif min(values) > 0 and max(values) >= LOG_FROM * min(values):
        axes.set_yscale("log")
        log_ticks(axes.yaxis)


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


def draw_disagreement(axes: Axes, found: Disagreement, *, samples: int | None) -> None:
    """Bars over the share of members that disagree, each group's as shares of that group: few errors are seen, too."""
    edges = np.array(found.edges)
    lefts, widths = edges[:-1], np.diff(edges)
    for side, counts, colour in ((0.28, found.correct, GREEN), (0.72, found.wrong, ORANGE)):
        axes.bar(lefts + side * widths, [count / max(1, sum(counts)) for count in counts], 0.4 * widths, color=colour)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="members that disagree with the ensemble", ylabel="share of predictions", xlim=(0, edges[-1]))
    percent_ticks(axes.xaxis)
    percent_ticks(axes.yaxis)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    if _exact(found, samples):
        # Every bin stands for one share, its lower edge: named in its middle.
        step = -(-len(lefts) // LABELS)
        axes.set_xticks(((lefts + edges[1:]) / 2)[::step], labels=[f"{100 * left:.3g}%" for left in lefts[::step]])


def _exact(found: Disagreement, samples: int | None) -> bool:
    """Whether every bin holds one possible share only, so that the first one means: all agree."""
    return samples == len(found.correct)


def meaning(found: Disagreement, *, samples: int | None) -> str:
    """What the histogram of disagreement says about errors, in a sentence or two."""
    total, wrong = sum(found.correct) + sum(found.wrong), sum(found.wrong)
    if samples == 1:
        return "A single member cannot disagree: evaluate with more samples to see how sure the ensemble is."
    if not total:
        return "There were no predictions to compare."
    agreed, agreed_wrong = found.correct[0] + found.wrong[0], found.wrong[0]
    who = f"all {samples} members agree" if _exact(found, samples) else f"fewer than {100 * found.edges[1]:.3g}% disagree"
    if not wrong:
        return f"The ensemble made no error; in {agreed:,} of {total:,} predictions {who}."
    rest = total - agreed
    if not agreed or not rest:
        everywhere = "every" if agreed else "no"
        return f"In {everywhere} one of {total:,} predictions {who}, so that disagreement tells nothing about the errors here."
    sure, unsure = agreed_wrong / agreed, (wrong - agreed_wrong) / rest
    facts = f"Where {who} ({agreed:,} predictions), {sure:.1%} are wrong; of the other {rest:,}, {unsure:.1%} are."
    if unsure > 2 * sure:
        return f"{facts} Disagreement, which needs no labels to be seen, warns of errors."
    return f"{facts} Disagreement is a weak sign of errors here."


def css(colour: str) -> str:
    """A colour of a figure as the page's style sheet calls it; any other colour as it is.

    >>> css(BLUE), css("#123456")
    ('var(--blue)', '#123456')
    """
    return f"var(--{NAMES[colour]})" if colour in NAMES else colour


def inline(figure: Figure, key: str) -> Markup:
    """The figure as an ``<svg>`` element: text stays text, and ids begin with ``key`` so that figures can share a page.

    It holds no strings but those of the figure, which are escaped, and the same bytes each time.
    """
    content = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flipgrad"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(content, format="svg", metadata=nothing, transparent=True)
    text = content.getvalue()
    box = re.findall(r'viewBox="([-\d. ]+)"', text)[0]
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Its rules would hold in the whole page, whose style sheet has them, and its fonts.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = body.replace('xlink:href="#', f'href="#{key}-').replace("url(#", f"url(#{key}-")
    for colour in NAMES:
        body = re.sub(rf"(?<=: ){colour}\b", css(colour), body, flags=re.IGNORECASE)
    return Markup(f'<svg viewBox="{box}" aria-hidden="true" focusable="false">{body}</svg>')
