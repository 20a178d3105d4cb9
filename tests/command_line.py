"""The command line, in this process."""

from __future__ import annotations

import pytest

from flipgrad import cli


def flipgrad(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code, *capsys.readouterr()
