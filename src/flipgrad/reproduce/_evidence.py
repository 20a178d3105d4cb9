"""What several seeds of trainings say: a number with its confidence interval, a verdict, and since which epoch it is so.

A verdict is True, False, or None where the interval leaves it open. Trainings of the same seed are compared in pairs: they have
the same images and begin with the same network.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy import special

from flipgrad.plots.learning import Numbers, Training, smooth

Verdict = bool | None
# The probability with which an interval holds the mean over all seeds.
CONFIDENCE = 0.95
# The largest relative change of a loss that is taken for none.
STANDSTILL = 0.01


@dataclass(frozen=True)
class Evidence:
    """A number for every seed.

    >>> found = Evidence((0.1, 0.2, 0.3))
    >>> found.told(percent), found.above(0.0), found.above(-0.05), found.within(0.5)
    ('+22.1% (95% interval -4.7% to +56.6% over 3 seeds)', None, True, True)
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds; NaN without any."""
        return fmean(self.values) if self.values else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Student's t distribution; of one seed its own number, which is no interval."""
        if len(self.values) < 2:
            return self.mean, self.mean
        error = stdev(self.values) / math.sqrt(len(self.values))
        half = float(special.stdtrit(len(self.values) - 1, (1 + CONFIDENCE) / 2)) * error
        return self.mean - half, self.mean + half

    def above(self, limit: float) -> Verdict:
        """Whether the number is above a limit."""
        low, high = self.interval
        return True if low > limit else False if high <= limit else None

    def below(self, limit: float) -> Verdict:
        """Whether the number is below a limit."""
        return Evidence(tuple(-value for value in self.values)).above(-limit)

    def within(self, limit: float) -> Verdict:
        """Whether the size of the number is below a limit."""
        return every([self.above(-limit), self.below(limit)])

    def told(self, form: Callable[[float], str]) -> str:
        """For a person; ``form`` writes a number."""
        if not self.values:
            return "no numbers"
        if len(self.values) == 1:
            return f"{form(self.mean)} (one seed)"
        low, high = self.interval
        return f"{form(self.mean)} (95% interval {form(low)} to {form(high)} over {len(self.values)} seeds)"


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """Whether all hold: no if one does not, open if one is.

    >>> every([True, True]), every([True, None]), every([None, False])
    (True, None, False)
    """
    found = list(verdicts)
    return False if False in found else None if None in found else True


def percent(log_ratio: float) -> str:
    """A ratio, given by its logarithm, as a difference in percent.

    >>> percent(math.log(1.05))
    '+5.0%'
    """
    return f"{math.expm1(log_ratio):+.1%}"


def points(difference: float) -> str:
    """A difference of shares.

    >>> points(-0.013)
    '-1.3 points'
    """
    return f"{100 * difference:+.1f} points"


def pairs(runs: Sequence[Training], others: Sequence[Training]) -> Iterator[tuple[Training, Training]]:
    """Trainings of the same seed."""
    named = {other.seed: other for other in others}
    return ((run, named[run.seed]) for run in runs if run.seed in named)


def log_ratio(run: Training, key: str, other: Training, other_key: str) -> Numbers:
    """The logarithm of the ratio of two curves, for every epoch that both have."""
    curves = run.curve(key), other.curve(other_key)
    length = min(map(len, curves))
    return np.log(curves[0][:length]) - np.log(curves[1][:length])


def at_the_end(curves: Iterable[Numbers]) -> Evidence:
    """The mean of the last fifth of every seed's curve."""
    return Evidence(tuple(float(curve[-max(1, len(curve) // 5) :].mean()) for curve in curves if len(curve)))


def seed_mean(curves: Iterable[Numbers]) -> Numbers:
    """The mean of the seeds' curves, smoothed, as far as all of them go; empty where there is none."""
    found = [curve for curve in curves if len(curve)]
    length = min(map(len, found), default=0)
    return smooth(np.mean([curve[:length] for curve in found], axis=0), 1.0)[0] if found else np.empty(0)


def rise(mean: Numbers) -> float:
    """How far a smoothed curve ends above its lowest: the logarithm of the ratio.

    >>> percent(rise(np.array([2.0, 1.0, 1.1]))), rise(np.array([2.0, 1.9, 1.0]))
    ('+10.0%', 0.0)
    """
    return math.log(mean[-1] / mean.min())


def since(curves: Iterable[Numbers], holds: Callable[[float], bool]) -> str:
    """From which epoch to the end it holds on average over the seeds, for a text; empty where it does not at the end.

    >>> since([np.array([3.0, 2.0, 1.0, 0.5, 0.4])], lambda value: value < 1.5)
    ', from epoch 3 on'
    """
    good = [holds(value) for value in seed_mean(curves)]
    if not good or not good[-1]:
        return ""
    bad = [number for number, fine in enumerate(good) if not fine]
    return f", from epoch {bad[-1] + 2} on" if bad else ", in every epoch"


def plateaus(*methods: Sequence[Training]) -> str:
    """For how many epochs trainings stay at the loss of guessing, for a text; empty where all learn in the first one.

    >>> quick, slow, never = ([Training("ST", "none", False, False, False, 0.1, [], None, {"train_loss": curve}, 1.0)]
    ...     for curve in ([1.5, 1.2, 1.1], [2.4, 2.3, 1.1], [2.4, 2.3, 2.3]))
    >>> plateaus(quick, slow, never), plateaus(quick)
    ('epochs at the loss of guessing: ST 0, ST 2, ST all 3', '')
    """
    if all(run.plateau == 0 for runs in methods for run in runs):
        return ""
    return "epochs at the loss of guessing: " + ", ".join(
        f"{runs[0].method} {epochs_at_guessing(runs)}" for runs in methods if runs
    )


def epochs_at_guessing(runs: Sequence[Training]) -> str:
    """For how many epochs each training stays at the loss of guessing."""
    counts = [(run.plateau, len(run.curve("train_loss"))) for run in runs]
    return ", ".join(f"all {epochs}" if plateau is None else str(plateau) for plateau, epochs in counts if epochs) or "none"


def course(runs: Sequence[Training], key: str, what: str) -> str:
    """Where a curve is lowest on average over the seeds, and how far above that it ends: whether it still falls.

    >>> falling, rising = ([Training("ST", "none", False, False, False, 0.1, [], None, {"loss": curve}, 1.0)]
    ...     for curve in ([3.0, 2.0, 1.5, 1.2], [3.0, 1.0, 1.5, 2.0, 2.5, 3.0]))
    >>> course(falling, "loss", "the loss"), course(rising, "loss", "the loss")
    ('the loss still falls at the end, after 4 epochs', 'the loss rises after epoch 3 of 6, to +83.0% at the end')
    """
    mean = seed_mean(run.curve(key) for run in runs)
    if not len(mean):
        return f"{what} came to no end of an epoch"
    lowest = int(mean.argmin())
    if lowest >= len(mean) - max(1, len(mean) // 10):
        return f"{what} still falls at the end, after {len(mean)} epochs"
    if rise(mean) < STANDSTILL:
        return f"{what} stands still after epoch {lowest + 1} of {len(mean)}"
    return f"{what} rises after epoch {lowest + 1} of {len(mean)}, to {percent(rise(mean))} at the end"
