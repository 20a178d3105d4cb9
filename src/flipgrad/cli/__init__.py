"""The command line: parse, call, print."""

import io
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

import flipgrad
from flipgrad import memory
from flipgrad.cli.bench import bench
from flipgrad.cli.estimators import estimators
from flipgrad.cli.evaluate import evaluate
from flipgrad.cli.export import export
from flipgrad.cli.gradeval import gradeval
from flipgrad.cli.reproduce import reproduce
from flipgrad.cli.train import train
from flipgrad.cli.zoo import zoo
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
for command in (train, evaluate, export, gradeval, reproduce, estimators, zoo, bench):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input (one line, no traceback), 130 interrupted (by typer)."""
    for stream in (sys.stdout, sys.stderr):
        # A letter that the terminal's encoding lacks becomes a question mark: it must not end a command whose work is done.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(list(arguments) if arguments is not None else None, prog_name="flipgrad", standalone_mode=False) or DONE)
    except TyperException as error:
        _complain(error.format_message(), BAD_INPUT)
    except InputError as error:
        _complain(str(error), BAD_INPUT)
    except (DivergenceError, StorageError, CellError) as error:
        _complain(str(error), FAILED)
    except OSError as error:
        # Of what the commands themselves write they say more; this is for instance a log on a full disk.
        _complain(f"cannot read or write: {error}", FAILED)
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error):
            raise
        fix = "make the network, the batch, the images or the number of draws smaller"
        _complain(f"there is not enough memory for this: {fix}", FAILED)


def _complain(message: str, code: int) -> NoReturn:
    # Of many processes one speaks.
    if launched_rank() == 0:
        sys.stderr.write(f"flipgrad: {' '.join(message.splitlines())}\n")
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flipgrad {flipgrad.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass
