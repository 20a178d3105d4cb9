"""The command line: parse, call, print."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import TyperException

import flipgrad
from flipgrad import memory
from flipgrad.cli.bench import bench
from flipgrad.cli.estimators import estimators
from flipgrad.cli.evaluate import evaluate
from flipgrad.cli.gradeval import gradeval
from flipgrad.cli.reproduce import reproduce
from flipgrad.cli.train import train
from flipgrad.errors import InputError, StorageError
from flipgrad.reproduce import CellError
from flipgrad.training import DivergenceError
from flipgrad.training.processes import launched_rank

DONE, FAILED, BAD_INPUT = 0, 1, 2

app = typer.Typer(
    help="Stochastic binary networks: train them with gradients one can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, evaluate, gradeval, reproduce, estimators, bench):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input (one line, no traceback), 130 interrupted (by typer)."""
    _never_fail_to_print()
    try:
        code = app(list(arguments) if arguments is not None else None, prog_name="flipgrad", standalone_mode=False)
    except (TyperException, InputError) as error:
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        _complain(message)
        code = BAD_INPUT
    except (DivergenceError, StorageError, CellError) as error:
        _complain(str(error))
        code = FAILED
    except OSError as error:
        # Of what the commands themselves write they say more; this is for instance a log on a full disk.
        _complain(f"cannot read or write: {error}")
        code = FAILED
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error):
            raise
        _complain("there is not enough memory for this: make the network, the batch, the images or the number of draws smaller")
        code = FAILED
    sys.exit(code or DONE)


def _never_fail_to_print() -> None:
    """A letter that the terminal's encoding lacks becomes a question mark: it must not end a command whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _version(wanted: bool) -> None:
    if wanted:
        Console().print(f"flipgrad {flipgrad.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _complain(message: str) -> None:
    # Of many processes one speaks.
    if launched_rank() == 0:
        sys.stderr.write(f"flipgrad: {' '.join(message.splitlines())}\n")
