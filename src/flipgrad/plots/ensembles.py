"""What an evaluation found about ensembles: reliability diagrams, and accuracy and loss by the number of samples."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from flipgrad.plots.runs import EnsembleSize, Reliability
from flipgrad.plots.style import BLUE, GREEN, GREY, ORANGE, log_ticks, percent_ticks, plain, tidy

# Points; the marker of a bin that holds all predictions, and of one that holds next to none.
LARGEST_MARKER, SMALLEST_MARKER = 9.0, 2.5


def name_of(found: Reliability) -> str:
    """What the predictions are by."""
    return "deterministic" if found.samples is None else f"{found.samples:,} sample{'s' * (found.samples != 1)}"


def colour_of(found: Reliability) -> str:
    """As in the chart of accuracies."""
    return {None: BLUE, 1: ORANGE}.get(found.samples, GREEN)


def draw_reliability(figure: Figure, every: Sequence[Reliability]) -> None:
    """Accuracy over confidence in bins, larger markers for more predictions, above the shares of predictions in these bins."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
    for found in every:
        total = max(1, sum(found.count))
        filled = [number for number, count in enumerate(found.count) if count]
        x, y = ([column[number] for number in filled] for column in (found.confidence, found.accuracy))
        shares = np.array([found.count[number] for number in filled]) / total
        colour = colour_of(found)
        # A thin line: between bins of few predictions, which jump by chance, it says little.
        upper.plot(x, y, color=colour, linewidth=0.7, alpha=0.6)
        widths = SMALLEST_MARKER + (LARGEST_MARKER - SMALLEST_MARKER) * np.sqrt(shares)
        upper.scatter(x, y, widths**2, color=colour, zorder=3, clip_on=False)
        lower.stairs(np.array(found.count) / total, found.edges, color=colour, linewidth=1.2)
    # Few predictions of a good network are unsure: on a linear axis they would not be seen.
    lower.set_yscale("log")
    for axes in (upper, lower):
        tidy(axes)
        percent_ticks(axes.yaxis)
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03))
    lower.yaxis.set_minor_locator(NullLocator())
    least = min((count / sum(found.count) for found in every for count in found.count if count), default=1.0)
    lower.set(ylabel="share", xlabel="confidence", ylim=(least / 2, 1.5))
    percent_ticks(lower.xaxis)


def draw_accuracies(axes: Axes, sizes: Sequence[EnsembleSize], deterministic: float | None) -> None:
    """Accuracy by the number of samples with a band of one standard error; the deterministic network's as a dashed line."""
    _draw_sizes(axes, sizes, [size.accuracy for size in sizes], [size.accuracy_error for size in sizes])
    if deterministic is not None:
        axes.axhline(deterministic, color=BLUE, linestyle="--", linewidth=1.2)
    axes.set_ylabel("accuracy")
    percent_ticks(axes.yaxis)


def draw_losses(axes: Axes, sizes: Sequence[EnsembleSize]) -> None:
    """The cross-entropy of the mean probability by the number of samples, with a band of one standard error."""
    _draw_sizes(axes, sizes, [size.loss for size in sizes], [size.loss_error for size in sizes])
    axes.set_ylabel("cross-entropy")


def _draw_sizes(axes: Axes, sizes: Sequence[EnsembleSize], values: list[float], errors: list[float | None]) -> None:
    x, y = [size.samples for size in sizes], np.array(values)
    spread = np.array([error or 0.0 for error in errors])
    axes.plot(x, y, color=GREEN, marker="o", markersize=4)
    axes.fill_between(x, y - spread, y + spread, color=GREEN, alpha=0.2, linewidth=0)
    tidy(axes)
    axes.set_xlabel("samples")
    axes.set_xscale("log")
    # Every size has its own tick; where they are many, decades do.
    if len(x) <= 12:
        axes.xaxis.set_major_locator(FixedLocator(x))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    else:
        log_ticks(axes.xaxis)


def reliability_words(every: Sequence[Reliability]) -> str:
    """What the diagram says, in a sentence for every kind of prediction."""
    return " ".join(_sentence(found) for found in every if sum(found.count))


def _sentence(found: Reliability) -> str:
    """The calibration error, and in which direction the confidence is off on average."""
    total = sum(found.count)
    bins = zip(found.count, found.confidence, found.accuracy, strict=True)
    excess = sum(
        count * (confidence - accuracy)
        for count, confidence, accuracy in bins
        if confidence is not None and accuracy is not None
    )
    direction = "above" if excess > 0 else "below"
    name = f"With {name_of(found)}" if found.samples is not None else "For the deterministic network"
    return (
        f"{name} the expected calibration error is {found.error:.2%}; on average, confidence is {abs(excess) / total:.2%} "
        f"{direction} accuracy."
    )


def sizes_words(sizes: Sequence[EnsembleSize]) -> str:
    """What more samples buy, in a sentence."""
    first, last = sizes[0], sizes[-1]
    if first is last:
        return f"Only one number of samples was measured: {first.samples:,}."
    change = f"from {first.accuracy:.2%} to {last.accuracy:.2%} ({last.accuracy - first.accuracy:+.2%})"
    return (
        f"From {first.samples:,} to {last.samples:,} samples the accuracy goes {change}, "
        f"the loss from {first.loss:.4g} to {last.loss:.4g}."
    )
