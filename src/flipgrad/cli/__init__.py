"""The command line: parse, call, print."""

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

import flipgrad
from flipgrad import memory
from flipgrad.errors import CellError, DivergenceError, InputError, StorageError
from flipgrad.machine import launched_rank

DONE, FAILED, BAD_INPUT = 0, 1, 2

# The first line of each command's own help. A command is the function of its name in the module of its name.
COMMANDS = {
    "train": "Train a stochastic binary network; store metrics, weights, checkpoints and a picture.",
    "evaluate": "Measure a trained network: accuracies, losses and calibration with one, many and no samples, and what layers "
    "cost.",
    "pack": "Write a trained network with binary weights as a file of bits, which runs without torch.",
    "predict": "Classify images with a packed network, without torch: class, probability, and how much the members disagree.",
    "export": "Write a trained network for other programs: an ONNX file of standard operators, checked by onnxruntime if that "
    "is there.",
    "gradeval": "Measure gradient estimators against the exact gradient: bias, variance, RMSE and cosine per layer.",
    "reproduce": "Reproduce the paper's figures and tables: JSON, PNG and PDF each, and which of its claims the numbers "
    "support.",
    "estimators": "List the gradient estimators and their facts.",
    "zoo": "List the trained networks that come with flipgrad, show the card of one, or add the network of a run.",
    "bench": "Measure the speeds that flipgrad promises: ratios of things that take turns in one run, on all cores.",
}


def command(name: str) -> Any:
    """The command of this name, with all its options: what its module needs, torch mostly, is imported now."""
    alone = typer.Typer(add_completion=False)
    alone.command()(getattr(import_module(f"flipgrad.cli.{name}"), name))
    return typer.main.get_command(alone)


class _Commands(TyperGroup):
    """Knows of every command its line in the help, and imports the module of the one that is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, command(name) if name and found else None, rest


app = typer.Typer(
    cls=_Commands,
    help="Stochastic binary networks: train them with gradients one can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, text in COMMANDS.items():
    app.command(name, help=text)(lambda: None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input (one line, no traceback), 130 interrupted (by typer)."""
    for stream in (sys.stdout, sys.stderr):
        # A letter that the terminal's encoding lacks becomes a question mark: it must not end a command whose work is done.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    memory.keep_freed_memory()
    try:
        sys.exit(app(list(arguments) if arguments is not None else None, prog_name="flipgrad", standalone_mode=False) or DONE)
    except TyperException as error:
        _complain(error.format_message(), BAD_INPUT)
    except InputError as error:
        _complain(str(error), BAD_INPUT)
    except (DivergenceError, StorageError, CellError) as error:
        _complain(str(error), FAILED)
    except ModuleNotFoundError as error:
        # Where packed networks are used, torch need not be installed.
        if (error.name or "flipgrad").partition(".")[0] == "flipgrad":
            raise
        _complain(f"this command needs the package {error.name}: install it, e.g. pip install {error.name}", FAILED)
    except OSError as error:
        # Of what the commands themselves write they say more; this is for instance a log on a full disk.
        _complain(f"cannot read or write: {error}", FAILED)
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error):
            raise
        fix = "make the network, the batch, the images or the number of draws smaller"
        _complain(f"there is not enough memory for this: {fix}", FAILED)


def _complain(message: str, code: int) -> NoReturn:
    # Of many processes one speaks. There is no message where the help was all that was wanted.
    if launched_rank() == 0 and message:
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
