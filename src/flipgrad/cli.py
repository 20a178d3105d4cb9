"""The command line: parse, call, print."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.exceptions import TyperException

import flipgrad
from flipgrad.data import digits
from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS, facts
from flipgrad.plots import training_curve
from flipgrad.training import DivergenceError, Evaluation, RunFolder, TrainConfig, digits_net
from flipgrad.training import train as run_training

DONE, FAILED, BAD_INPUT = 0, 1, 2

app = typer.Typer(
    help="Stochastic binary networks: train them with gradients one can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULTS = TrainConfig()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input (one line, no traceback), 130 interrupted (by typer)."""
    try:
        code = app(list(arguments) if arguments is not None else None, prog_name="flipgrad", standalone_mode=False)
    except (TyperException, InputError) as error:
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        _complain(message.replace("\n", " "))
        code = BAD_INPUT
    except DivergenceError as error:
        _complain(str(error))
        code = FAILED
    sys.exit(code or DONE)


def _version(wanted: bool) -> None:
    if wanted:
        Console().print(f"flipgrad {flipgrad.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def train(
    estimator: Annotated[str, typer.Option(help=f"Gradient estimator: {', '.join(ESTIMATORS)}.")] = DEFAULTS.estimator,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(help="Images per update.")] = DEFAULTS.batch_size,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = DEFAULTS.lr,
    schedule: Annotated[str, typer.Option(help="Learning rate: constant, or cosine (down to 0).")] = DEFAULTS.schedule,
    momentum: Annotated[float, typer.Option(help="Nesterov momentum.")] = DEFAULTS.momentum,
    shift: Annotated[int, typer.Option(help="Move training images by up to so many pixels.")] = DEFAULTS.shift,
    samples: Annotated[int, typer.Option(help="Draws per image for the reported numbers.")] = DEFAULTS.samples,
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, ...")] = DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="CPU threads; this net is too small to gain from more.")] = DEFAULTS.threads,
    output: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/digits-ESTIMATOR).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.")] = False,
) -> None:
    """Train a small convolutional SBN on handwritten digits; store metrics, weights and a picture."""
    config = TrainConfig(estimator, epochs, batch_size, lr, schedule, momentum, shift, samples, seed, device, threads)
    folder = RunFolder(output or Path("runs") / f"digits-{estimator}", overwrite=overwrite)
    torch.set_num_threads(threads)
    data = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = digits_net(data.classes)
    console = Console()
    console.print(f"Training on {len(data.train)} images of {data.name} with {estimator.upper()}, {epochs} epochs:")
    updates = epochs * -(-len(data.train) // batch_size)
    try:
        with _progress(console) as bar, _interruptible() as interrupted:
            task = bar.add_task("train", total=updates, loss="")

            def report(done: int, record: dict[str, float]) -> None:
                bar.update(task, completed=done, loss=_headline(record))
                if interrupted.is_set():
                    raise KeyboardInterrupt

            evaluation = run_training(config, net, data, folder, report)
    except KeyboardInterrupt:
        _draw(folder)
        console.print(f"Interrupted. Weights and metrics of the whole epochs are in {folder.path}")
        raise
    _draw(folder)
    console.print(_summary(evaluation))
    console.print(f"Weights, metrics and {folder.CURVE} are in {folder.path}", highlight=False)


@app.command()
def estimators(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """List the gradient estimators and their facts."""
    if as_markdown:
        typer.echo(facts.markdown())
        return
    table = Table(title="Gradient estimators of a network with L binary layers")
    for column in facts.COLUMNS:
        table.add_column(column, no_wrap=column in ("name", "passes"))
    for row in facts.rows():
        table.add_row(*row)
    Console().print(table)


def _progress(console: Console) -> Progress:
    """A progress bar that is silent when nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal)


@contextmanager
def _interruptible() -> Iterator[Event]:
    """An event that Ctrl-C and a polite kill set, to be looked at between updates; a second Ctrl-C acts at once.

    Left to itself, the exception could be raised where Python ignores exceptions, and be lost.
    """
    event = Event()

    def note(signum: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _headline(record: dict[str, float]) -> str:
    if not record:
        return ""
    return f"loss {record['train_loss']:.3f}, test accuracy {record['accuracy_n']:.1%}"


def _summary(evaluation: Evaluation) -> Table:
    table = Table(title="Test images")
    table.add_column("")
    table.add_column("1 sample", justify="right")
    table.add_column(f"{evaluation.samples} samples", justify="right")
    table.add_column("deterministic", justify="right")
    table.add_row(
        "accuracy",
        f"{evaluation.accuracy_1:.2%}",
        f"{evaluation.accuracy_n:.2%}",
        f"{evaluation.accuracy_deterministic:.2%}",
    )
    table.add_row(
        "cross-entropy", f"{evaluation.expected_loss:.4f} (expected)", f"{evaluation.marginal_loss:.4f} (marginal)", ""
    )
    return table


def _draw(folder: RunFolder) -> None:
    metrics = folder.path / folder.METRICS
    if metrics.stat().st_size:
        training_curve(metrics, folder.path / folder.CURVE)


def _complain(message: str) -> None:
    sys.stderr.write(f"flipgrad: {message}\n")
