"""The automatic learning rate: a bounded search of the rate that trains best in a few epochs.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020, appendix
C.2: Brent's bounded method on the logarithm of the rate, on the method's own training objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from flipgrad.errors import InputError

# The search ends when the best rate is known to this many decades (12 %): ten golden sections of 6 decades resolve no less.
TOLERANCE = 0.05
# What scipy is told of a trial that diverged: above every objective, and still finite, as its parabolas need.
DIVERGED = 1e300


@final
@dataclass(frozen=True)
class Trial:
    """One trial: its rate, and the objective that training reached with it, which is inf where it diverged."""

    rate: float
    objective: float

    @property
    def diverged(self) -> bool:
        """Whether training came to no number."""
        return math.isinf(self.objective)

    def as_json(self) -> dict[str, float | None]:
        """The trial for a JSON file, which knows no inf: there the objective is null."""
        return {"rate": self.rate, "objective": None if self.diverged else self.objective}

    @staticmethod
    def from_json(value: Mapping[str, object]) -> Trial:
        """The trial of :meth:`as_json`.

        >>> Trial.from_json(Trial(1.0, math.inf).as_json())
        Trial(rate=1.0, objective=inf)
        """
        rate, objective = value.get("rate"), value.get("objective")
        if not isinstance(rate, float) or not isinstance(objective, float | None):
            raise InputError(f"a trial of the learning rate needs its 'rate' and 'objective', got {dict(value)!s:.100}")
        return Trial(rate, math.inf if objective is None else objective)


@final
@dataclass(frozen=True)
class Search:
    """The result of a search: the best rate, the objective that was reached with it, and all trials in order."""

    rate: float
    objective: float
    trials: tuple[Trial, ...]


def search_rate(
    trial: Callable[[float], float],
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    trials: int = 10,
    done: Sequence[Trial] = (),
    divergence: type[Exception] | tuple[type[Exception], ...] = (),
    report: Callable[[Trial], None] = lambda trial: None,
) -> Search:
    """Find the learning rate from ``lowest`` to ``highest`` for which ``trial`` returns the least; of equal ones the first.

    ``scipy.optimize.minimize_scalar(method="bounded")`` on the decimal logarithm of the rate, with at most ``trials``
    evaluations, as the paper has it; unlike there it also ends when the best rate is known to 12 %.

    A trial that diverges, by returning inf or NaN or by raising ``divergence``, counts as +inf. Brent's method cannot take
    that: parabolas through it are undefined, and of two infinite values it prefers the later one, which may be the higher rate.
    It is told a number above every objective instead, that grows with the rate, so that the search goes down as long as
    everything diverges.

    With the trials already ``done`` an interrupted search asks for the same rates as before and takes their results, so that
    it ends as if it had not been interrupted. ``report`` is told of every new trial.

    >>> round(search_rate(lambda rate: (math.log10(rate) + 2) ** 2).rate, 3)
    0.01
    """
    if not 0 < lowest < highest < math.inf:
        raise InputError(
            f"the learning rate is searched from {lowest} to {highest}; give 0 < lowest < highest, e.g. 1e-6 and 1"
        )
    if trials < 2:
        raise InputError(f"trials={trials}: a search of the learning rate needs at least 2 trials, the paper's has 10")
    # Its import takes long, and few ask for a search.
    from scipy.optimize import minimize_scalar

    bounds = math.log10(lowest), math.log10(highest)
    made: list[Trial] = []

    def objective(log_rate: float) -> float:
        rate = 10.0 ** float(log_rate)
        if len(made) < len(done):
            made.append(_same(done[len(made)], rate))
        else:
            try:
                reached = float(trial(rate))
            except divergence:
                reached = math.inf
            made.append(Trial(rate, reached if abs(reached) < DIVERGED else math.inf))
            report(made[-1])
        position = (log_rate - bounds[0]) / (bounds[1] - bounds[0])
        return DIVERGED * (1 + position) if made[-1].diverged else made[-1].objective

    minimize_scalar(objective, method="bounded", bounds=bounds, options={"maxiter": trials, "xatol": TOLERANCE})
    best = min(made, key=lambda trial: trial.objective)
    if best.diverged:
        raise InputError(
            f"all {len(made)} trials of the learning rate diverged, down to {min(trial.rate for trial in made):.2g}; search "
            f"lower rates than {lowest:g}, check the data for outliers, or choose an estimator with less variance"
        )
    return Search(best.rate, best.objective, tuple(made))


def _same(done: Trial, rate: float) -> Trial:
    # Another machine's logarithm may differ in the last digit.
    if not math.isclose(done.rate, rate, rel_tol=1e-9):
        raise InputError(
            f"the trials handed in are of another search: there the rate was {done.rate:g} where this one asks for {rate:g}; "
            "resume with the same range, or start anew"
        )
    return done


def running_mean(values: Iterable[float], window: float) -> float:
    r"""The exponentially weighted average of ``values``, such as the losses of a training's updates, after the last one.

    .. math:: \bar f_n = \sum_{i \le n} q^{n-i} f_i \Big/ \sum_{i \le n} q^{n-i}, \qquad q = 1 - 1/w.

    The weights add up to 1 from the start, so no initial value counts. The paper does not tell its factor q. Ours is set by the
    ``window`` w, for which the search uses the number of updates in an epoch: every example then counts about once.

    >>> running_mean([4.0, 1.0], window=2)
    2.0
    """
    if not 1 <= window < math.inf:
        raise InputError(f"running_mean(window={window}): give the number of values to remember, at least 1")
    factor, total, weight = 1 - 1 / window, 0.0, 0.0
    for value in values:
        total, weight = factor * total + value, factor * weight + 1
    return total / weight if weight else math.nan
