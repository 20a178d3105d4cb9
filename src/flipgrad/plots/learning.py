"""How estimators train networks on images: losses, relaxed objectives and accuracies over epochs, smoothed.

Figure 4 and those of appendix C.2 of the paper: Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for
Stochastic Binary Networks. NeurIPS 2020.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.plots.labels import Ends, label_ends
from flipgrad.plots.loading import REWRITE, load_field
from flipgrad.plots.style import SOLID, Style, defaults, grid, ordered, percent_ticks, style_of

TITLES = {"none": "no augmentation", "affine": "affine augmentation", "flip-crop": "flip & crop augmentation"}
# Dashes of relaxed objectives and of one-sample accuracies.
DOTS = (1.0, 1.3)

# The loss of guessing one of ten classes, and the loss below which a network has learnt something.
GUESSING = log(10)
LEARNT = 0.99 * GUESSING

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What a panel shows: one curve of every training, maybe a dotted one as well."""

    label: str
    solid: str
    dotted: str | None = None
    percent: bool = False
    smoothed: bool = True


LOSS = Kind("training loss", "train_loss", "objective")
ACCURACY = Kind("validation accuracy", "accuracy_n", "accuracy_1", percent=True)
VALIDATION = Kind("validation loss", "loss")
TRAINING = Kind("training accuracy", "train_accuracy", percent=True)
EXPECTED = Kind("training loss (expected loss)", "train_loss", smoothed=False)


@dataclass(frozen=True)
class Training:
    """One training, as it is stored, and as figures and claims look at it.

    Figures call its estimator ``method``, mark its rate if that was ``searched`` for and the figure is ``starred``, and draw a
    ``relaxed`` objective beside the loss. The ``rate`` is None if all ``trials`` of the search diverged; ``diverged`` says what
    happened if the training came to no end. The ``curves`` have a number for every epoch, None where it is not finite.
    Trainings that differ by their ``seed`` alone are drawn as one.
    """

    method: str
    augment: str
    searched: bool
    starred: bool
    relaxed: bool
    rate: float | None
    trials: list[Any]
    diverged: str | None
    curves: dict[str, list[float | None]]
    seconds: float
    seed: int = 0

    @property
    def label(self) -> str:
        """Its method and rate; a star marks a rate that was found by the search."""
        rate = "no rate" if self.rate is None else f"{self.rate:.2g}{'*' * (self.searched and self.starred)}"
        return f"{self.method}  {rate}"

    def curve(self, key: str) -> Numbers:
        """The numbers up to the first that is none; empty where the training came to no epoch."""
        values = np.array([*self.curves.get(key, []), None], dtype=np.float64)
        return values[: np.isnan(values).argmax()]

    def values(self, key: str) -> list[float]:
        """The numbers of a curve, without those that are none."""
        return [value for value in self.curves.get(key, []) if value is not None]

    def last(self, key: str) -> float:
        """The mean of the last fifth of a curve, which is less noisy than its last value; NaN where there is none."""
        values = self.values(key)
        tail = values[-max(1, len(values) // 5) :]
        return sum(tail) / len(tail) if tail else nan

    @property
    def plateau(self) -> int | None:
        """For how many epochs the training loss is that of guessing; None where it still is at the end."""
        losses = self.curve("train_loss")
        guessed = np.flatnonzero(losses >= LEARNT) + 1
        epochs = int(guessed[-1]) if len(guessed) else 0
        return epochs if epochs < len(losses) else None

    @property
    def after_plateau(self) -> Training:
        """Itself without the epochs of its :attr:`plateau`; without any where it does not leave that."""
        start = self.plateau
        return replace(self, curves={key: values[start:] if start is not None else [] for key, values in self.curves.items()})

    @property
    def end(self) -> float:
        """The training loss at the end."""
        return self.last("train_loss")

    @property
    def told(self) -> str:
        """The training loss at the end for a person."""
        return f"{self.method} {self.end:.3f}{' (diverged)' if self.diverged else ''}"

    @property
    def told_rate(self) -> str:
        """The rate for a person."""
        return "none" if self.rate is None else f"{self.rate:.2g}"

    def has_a_tenth_of_the_rate_of(self, other: Training) -> bool:
        """Whether both have a rate, and this one's is a tenth of the other's or less."""
        return self.rate is not None and other.rate is not None and self.rate <= 0.1 * other.rate


# Trainings that are drawn as one, those of several seeds, and what their curves look like.
Styled = Sequence[tuple[Sequence[Training], Style]]


def read(result: Path) -> dict[str, list[Training]]:
    """The trainings in a result file by augmentation, in the order of a legend."""
    trainings = load_field(result, "runs", list[Training])
    if not trainings:
        raise InputError(f"{result}: 'runs' holds no training; {REWRITE}")
    methods = ordered({run.method for run in trainings})
    trainings.sort(key=lambda run: methods.index(run.method))
    augmentations = dict.fromkeys([*TITLES, *(run.augment for run in trainings)])
    found = {augment: [run for run in trainings if run.augment == augment] for augment in augmentations}
    return {augment: runs for augment, runs in found.items() if runs}


def by_method(runs: Sequence[Training]) -> list[list[Training]]:
    """Trainings with the same method, which differ by their seeds."""
    return [[run for run in runs if run.method == method] for method in dict.fromkeys(run.method for run in runs)]


def _label(runs: Sequence[Training]) -> str:
    """The method and its rate; of several seeds the range of their rates."""
    rates = sorted({run.rate for run in runs if run.rate is not None})
    told = list(dict.fromkeys(f"{rate:.2g}" for rate in (rates[:1] + rates[-1:])))
    return runs[0].label if len(told) < 2 else f"{runs[0].method}  {told[0]}–{told[1]}"


@defaults()
def learning_figure(result: Path, kinds: Sequence[Kind] = (LOSS, ACCURACY)) -> Figure:
    """Trainings: a row for every kind of curve and a column for every augmentation, or one row where there is but one.

    Solid losses are the binary network's expected loss, dotted ones the relaxed objective of the method that has one. Solid
    accuracies average 10 samples, dotted ones are of one. Of several seeds the mean is drawn, and their range as a band; of one
    seed the band is three standard deviations of the values about the smoothed curve.
    """
    trainings = read(result)
    several, count = len(trainings) > 1, len(trainings)
    figure, every = grid(len(kinds), count) if several else grid(1, len(kinds))
    styled = [[(same, style_of(same[0].method)) for same in by_method(runs)] for runs in trainings.values()]
    ends = []
    for index, kind in enumerate(kinds):
        row = every[index * count : (index + 1) * count]
        ends += _draw(row, kind, styled)
        for axes, augment in zip(row, trainings, strict=True):
            title = TITLES.get(augment, augment)
            axes.set_title(title if several else f"{kind.label}, {title}", pad=4)
    label_ends(figure, every, ends, height=2.15, narrowest=1.45)
    return figure


@defaults()
def muprop_figure(result: Path) -> Figure:
    """The training losses of methods at several learning rates, not smoothed; a star marks rates found by the search."""
    by_augmentation = read(result)
    if len(by_augmentation) != 1:
        raise InputError(f"'{result}' has {len(by_augmentation)} augmentations, and the figure shows one; measure it again")
    (trainings,) = by_augmentation.values()
    styled = []
    for run in trainings:
        # The same method at several rates goes from its own colour to lighter ones.
        same, style = [other for other in trainings if other.method == run.method], style_of(run.method)
        hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(style.colour))
        lighter = lightness + 0.42 * same.index(run) / max(len(same) - 1, 1) * (1 - lightness)
        styled.append(([run], replace(style, colour=to_hex(colorsys.hls_to_rgb(hue, lighter, saturation)))))
    figure, every = grid(1, 1)
    ends = _draw(every, EXPECTED, [styled])
    if not ends[0]:
        raise InputError(f"{result}: holds no training that came to an end of an epoch; {REWRITE}")
    every[0].set_title(TITLES["flip-crop"], pad=4)
    label_ends(figure, every, ends, height=2.6, narrowest=4.2, widest=4.2)
    return figure


def smooth(values: Numbers, width: float) -> tuple[Numbers, Numbers]:
    """The local mean of a curve, and the standard deviation of its values about it; a ``width`` of 0 leaves it as it is.

    A line is fitted at every point, with weights that fall off like a normal density of ``width`` points: unlike a running
    average it does not lag behind where a curve falls steeply, as at the beginning of a training.

    >>> mean, deviation = smooth(np.array([3.0, 2.0, 1.0, 0.0]), 1.0)
    >>> bool(np.allclose(mean, [3, 2, 1, 0])), bool(np.allclose(deviation, 0))
    (True, True)
    """
    if len(values) < 3 or not width:
        return values, np.zeros_like(values)
    at = np.arange(len(values), dtype=float)
    weights = np.exp(-0.5 * ((at[:, None] - at) / width) ** 2)
    weights /= weights.sum(1, keepdims=True)
    centre = weights @ at
    offset = at - centre[:, None]
    slope = (weights * offset) @ values / (weights * offset**2).sum(1)
    mean = weights @ values + slope * (at - centre)
    return mean, np.sqrt(weights @ (values - mean) ** 2)


def _draw(row: Sequence[Axes], kind: Kind, every: Sequence[Styled]) -> list[Ends]:
    """Panels that share their limits; returns the ends of their lines, of one that has left the axes where it left."""
    ends: list[Ends] = [{} for _ in row]
    curves = []
    for axes, styled, own in zip(row, every, ends, strict=True):
        epochs = max(len(run.curve("epoch")) for runs, _ in styled for run in runs)
        width = max(1.0, max(len(run.curve(kind.solid)) for runs, _ in styled for run in runs) / 40) if kind.smoothed else 0.0
        remark = ""
        for every_seed, style in styled:
            runs = [run for run in every_seed if len(run.curve(kind.solid))]
            if not runs:
                continue
            label = _label(runs)
            solid = [run.curve(kind.solid) for run in runs]
            mean = _draw_curve(axes, label, style, solid, width, SOLID if kind.smoothed else style.dashes)
            curves.append(mean)
            own[label] = (len(mean), float(mean[-1]), style)
            if any(run.diverged for run in runs):
                # It ended before its time.
                axes.plot([len(mean)], mean[-1:], marker="x", markersize=5, markeredgewidth=1.4, color=style.colour, label="_")
            if kind.dotted and (runs[0].relaxed or kind.percent):
                dotted = [run.curve(kind.dotted) for run in runs]
                curves.append(_draw_curve(axes, "_", style, dotted, width, DOTS))
                remark = " (dotted: 1 sample)" if kind.percent else " (dotted: relaxed)"
        axes.set_ylabel(kind.label + remark, labelpad=3)
        axes.set_xlabel("epoch", labelpad=2)
        axes.set_xlim(1, max(2, epochs))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        if kind.percent:
            percent_ticks(axes.yaxis)
    low, high = _limits(kind, np.concatenate([np.empty(0), *curves]))
    for axes in row:
        axes.set_ylim(low, high)
    return [{name: (x, min(max(y, low), high), style) for name, (x, y, style) in own.items()} for own in ends]


def _draw_curve(
    axes: Axes, label: str, style: Style, seeds: Sequence[Numbers], width: float, dashes: Sequence[float]
) -> Numbers:
    """A curve over epochs, smoothed by ``width`` and averaged over the seeds, and the band about it; returns the curve."""
    length = min(map(len, seeds))
    smoothed = [smooth(values, width) for values in seeds]
    mean: Numbers = np.mean([curve[:length] for curve, _ in smoothed], axis=0)
    if len(seeds) > 1:
        low, high = (extreme([curve[:length] for curve, _ in smoothed], axis=0) for extreme in (np.min, np.max))
    else:
        low, high = mean - 3 * smoothed[0][1], mean + 3 * smoothed[0][1]
    look: dict[str, Any] = {"linewidth": max(1.0, 0.7 * style.width), "dashes": dashes or (None, None), "markersize": 3}
    epochs = np.arange(1, len(mean) + 1)
    # A line through one point is invisible.
    marker = "o" if len(mean) == 1 else ""
    axes.plot(epochs, mean, color=style.colour, marker=marker, label=label, zorder=style.zorder, **look)
    if (high > low).any():
        axes.fill_between(epochs, low, high, color=style.colour, alpha=0.13, linewidth=0, zorder=style.zorder - 1)
    return mean


def _limits(kind: Kind, values: Numbers) -> tuple[float, float]:
    """Of losses: from the lowest to somewhat above that of guessing ten classes, where most are; beyond it lines leave."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if kind.percent:
        return max(0.0, 0.96 * low), 1.02 * high
    high = min(high, 1.3 * GUESSING)
    margin = 0.05 * max(high - low, 0.02)
    return low - margin, high + margin
