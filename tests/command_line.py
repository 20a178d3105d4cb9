"""The command line, in this process and in a copy of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from flipgrad import cli


def flipgrad(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code, *capsys.readouterr()


def fork_flipgrad(arguments: list[str], output: Path) -> int:
    """Starts a command in a copy of this process, which need not import everything again, as the leader of a group of its own.

    What it prints is written to the file ``output``.
    """
    # What the command needs is imported once, here.
    cli.command(arguments[0])
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            cli.main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)
