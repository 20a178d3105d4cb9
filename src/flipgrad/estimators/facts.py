"""The facts that estimators state, as a table: the command line prints it, the documentation shows it."""

from flipgrad.contract import Estimator, LocalEstimator
from flipgrad.estimators import ESTIMATORS

COLUMNS = ("name", "unbiased", "passes", "relaxed objective", "own graphs", "source")


def rows() -> list[tuple[str, ...]]:
    """One row per estimator: see :data:`COLUMNS`. Passes are a function of the depth L."""
    return [_row(name, kind()) for name, kind in ESTIMATORS.items()]


def markdown() -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(name: str, estimator: Estimator) -> tuple[str, ...]:
    return (
        name,
        "yes" if estimator.unbiased else f"no; {estimator.unbiased_in}" if estimator.unbiased_in else "no",
        estimator.cost or _linear([estimator.passes(1), estimator.passes(2)]),
        "yes" if estimator.relaxed_objective else "no",
        "yes" if isinstance(estimator, LocalEstimator) else "no",
        estimator.citation,
    )


def _linear(counts: list[int]) -> str:
    """A linear function of the depth, from its values at 1 and 2."""
    slope = counts[1] - counts[0]
    constant = counts[0] - slope
    if slope == 0:
        return str(constant)
    return f"{'' if slope == 1 else slope}L" + (f" + {constant}" if constant else "")
