"""What commands share: a progress bar that is silent when nobody watches, interruptions at a safe place, and tables."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as brief

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from flipgrad.errors import InputError
from flipgrad.training import Ensembles, Evaluation

# How a network of the zoo is named in place of a folder.
ZOO = "zoo:"


def check_no_own_code(model: str | None, estimator: str | None) -> None:
    """Refuse options that repeat code of a run's own where a network of the zoo is named."""
    if model is not None or estimator is not None:
        raise InputError("--model and --estimator repeat code of a run's own, which no network of the zoo has: leave them out")


class Work:
    """A progress bar over work that comes in named portions.

    Attributes:
        interrupted: whether Ctrl-C, or a polite kill, asked to stop.
    """

    def __init__(self, bar: Progress) -> None:
        self.interrupted = False
        self._bar = bar
        self._task = bar.add_task("", total=None, note="")
        self._stage: tuple[str, int] | None = None

    def advance(self, what: str, new: int, total: int) -> None:
        """``new`` more of a portion of ``total``; ``what`` begins with the portion's name, up to a colon. Ctrl-C stops here."""
        if self.interrupted:
            raise KeyboardInterrupt
        stage = (what.partition(":")[0], total)
        if stage != self._stage:
            self._bar.reset(self._task, total=total)
            self._stage = stage
        self._bar.update(self._task, description=what, advance=new)

    def at(self, done: int, total: int, what: str, note: str) -> None:
        """``done`` of ``total`` so far; the caller checks :attr:`interrupted`."""
        self._bar.update(self._task, completed=done, total=total, description=what, note=note)


@contextmanager
def working(console: Console, *, patient: bool = False) -> Iterator[Work]:
    """A progress bar for one piece of work, which Ctrl-C and a polite kill interrupt at a safe place.

    Left to itself, the exception could be raised where Python ignores exceptions, and be lost. A second Ctrl-C acts at once.
    Many processes are ``patient``: they are told twice, by the terminal and by ``torchrun``, and one that left at once would
    keep the others waiting.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    with Progress(*columns, note, console=console, disable=console.quiet or not console.is_terminal) as bar:
        work = Work(bar)

        def interrupt(signum: int, frame: object) -> None:
            if work.interrupted and not patient:
                raise KeyboardInterrupt
            work.interrupted = True

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield work
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def rough(seconds: float) -> str:
    """An estimate of a time, with no more digits than it is worth.

    >>> [rough(seconds) for seconds in (3.2, 130.0, 6000.0, 400000.0)]
    ['3 s', '2 min', '1.7 h', '5 days']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.2g} h" if seconds < 172_800 else f"{seconds / 86_400:,.0f} days"


def whole_numbers(text: str, what: str, separator: str) -> list[int]:
    """The numbers that ``text``, given for the option ``what``, lists."""
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        raise InputError(f"{what} {brief(text)}: give whole numbers separated by {separator!r}") from None


def evaluation_table(evaluations: Mapping[str, Evaluation], ensembles: Mapping[str, Ensembles] | None = None) -> Table:
    """Accuracies and losses on some sets of images, of the same number of samples; calibration errors where there are any."""
    samples = next(iter(evaluations.values())).samples
    columns = [Column(name, justify="right") for name in ("1 sample", f"{samples} samples", "deterministic")]
    caption = "Cross-entropy: expected with 1 sample, marginal with more" + ", ECE: expected calibration error" * bool(
        ensembles
    )
    table = Table("", "", *columns, caption=caption)
    for name, numbers in evaluations.items():
        accuracies = (numbers.accuracy_1, numbers.accuracy_n, numbers.accuracy_deterministic)
        table.add_row(name, "accuracy", *(f"{accuracy:.2%}" for accuracy in accuracies))
        table.add_row("", "cross-entropy", f"{numbers.expected_loss:.4f}", f"{numbers.marginal_loss:.4f}", "")
        if ensembles is not None and name in ensembles:
            errors = {found.samples: f"{found.error:.2%}" for found in ensembles[name].reliability}
            table.add_row("", "ECE", *(errors[kind] for kind in (1, samples, None)))
    return table


def sizes_table(name: str, ensembles: Ensembles) -> Table:
    """Accuracy and loss by the number of samples, each with its standard error."""
    columns = [Column(title, justify="right") for title in ("samples", "accuracy", "marginal cross-entropy")]
    table = Table(*columns, title=f"{name}, by the number of samples", caption="± one standard error")
    for row in ensembles.sizes:
        accuracy, loss = f"{row.accuracy:.2%}", f"{row.loss:.4f}"
        if row.accuracy_error is not None and row.loss_error is not None:
            accuracy, loss = f"{accuracy} ± {row.accuracy_error:.2%}", f"{loss} ± {row.loss_error:.4f}"
        table.add_row(f"{row.samples:,}", accuracy, loss)
    return table
