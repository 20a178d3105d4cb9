"""The command line called in this process, and what it may answer."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final
from unittest import mock

import torch

from flipgrad import cli, plots
from torture.attack import FaultError
from torture.worker import TimeUpError, last_lines, within

# Exit codes: done, failed with one line, bad input told in one line, interrupted.
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@final
@dataclass(frozen=True)
class Answer:
    """What a command answered.

    Attributes:
        code: its exit code; None where it was still at work when its time was up.
        out: standard output.
        error: standard error.
        trace: the traceback of an exception that nobody caught, else empty.
    """

    code: int | None
    out: str
    error: str
    trace: str = ""

    @property
    def refused(self) -> bool:
        """Whether the input was bad, or the work failed, and one line says so."""
        return self.code in (FAILED, BAD_INPUT)

    def check(self, what: str) -> None:
        """Raise what is wrong with the answer itself.

        Raises:
            FaultError: for a traceback, another exit code, or a refusal that is not one line.
        """
        # An interruption may come where Python ignores exceptions, and prints them.
        ignored = "TimeUpError" in self.error
        if self.trace or ("Traceback (most recent call last)" in self.error and not ignored):
            raise FaultError("traceback", f"{what}: {last_lines(self.trace or self.error)}")
        if self.code not in (None, DONE, FAILED, BAD_INPUT, INTERRUPTED):
            raise FaultError("message", f"{what}: exit code {self.code}: {self.error:.200}")
        lines = self.error.splitlines()
        if self.refused and not ignored and not (len(lines) == 1 and lines[0].startswith("flipgrad: ") and len(lines[0]) > 15):
            raise FaultError("message", f"{what}: not one line: {self.error!r:.400}")


def call(arguments: list[str], *, limit: float = 5.0, draw: bool = False) -> Answer:
    """Run ``flipgrad`` with these arguments in this process.

    Args:
        arguments: of the command line.
        limit: seconds after which it is stopped.
        draw: whether pictures and pages are drawn, which takes longer than everything else.
    """
    out, error, trace = io.StringIO(), io.StringIO(), ""
    code: int | None = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["flipgrad", *arguments]))
        if not draw:
            stack.enter_context(undrawn())
        try:
            with within(limit):
                cli.main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except TimeUpError:
            code = None
            # It may have been stopped between switching gradients off and being able to switch them on again.
            torch.set_grad_enabled(True)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BaseException:
            code, trace = 1, traceback.format_exc()
    return Answer(code, out.getvalue(), error.getvalue(), trace)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Draw no pictures."""
    with contextlib.ExitStack() as stack:
        for name in ("training_curve", "report", "rmse", "cosine"):
            stack.enter_context(mock.patch.object(plots, name))
        yield
