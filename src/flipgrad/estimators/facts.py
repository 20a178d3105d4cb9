"""The facts that estimators state, as a table: the command line prints it, the documentation shows it."""

from flipgrad.contract import LocalEstimator
from flipgrad.estimators import ESTIMATORS

COLUMNS = ("name", "unbiased", "passes", "relaxed objective", "own graphs", "source")


def rows() -> list[tuple[str, ...]]:
    """One row per estimator: see :data:`COLUMNS`. Passes are a function of the depth L."""
    result = []
    for name, kind in ESTIMATORS.items():
        estimator = kind()
        where = f"no; {kind.unbiased_in}" if kind.unbiased_in else "no"
        unbiased = "yes" if kind.unbiased else where
        passes = kind.cost or _linear(estimator.passes(1), estimator.passes(2))
        flags = (kind.relaxed_objective, issubclass(kind, LocalEstimator))
        result.append((name, unbiased, passes, *("yes" if flag else "no" for flag in flags), kind.citation))
    return result


def markdown() -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _linear(first: int, second: int) -> str:
    """A linear function of the depth, from its values at 1 and 2."""
    slope, constant = second - first, 2 * first - second
    if slope == 0:
        return str(constant)
    return f"{'' if slope == 1 else slope}L" + (f" + {constant}" if constant else "")
