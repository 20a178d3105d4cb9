"""Small runs of ``flipgrad train``: how they are drawn, started in a process that can be watched, and compared."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final
from unittest import mock

from flipgrad import cli
from flipgrad.training import RunFolder
from torture.attack import FaultError
from torture.calls import Answer, undrawn

# What differs between two runs that are otherwise the same.
TIMES = ("seconds", "images_per_second", "checksum")

# Told what happens to a file of the run before it does: the number of the event from 1 on, and what it is.
Watch = Callable[[int, str], None]


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, epoch by epoch."""
    return [json.loads(line) for line in (run / RunFolder.METRICS).read_text().splitlines()]


def timeless(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what the clock says."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records(run)]


def difference(run: Path, whole: Path) -> str:
    """What differs between two finished runs, to the bit; empty if nothing does."""
    try:
        if (run / RunFolder.WEIGHTS).read_bytes() != (whole / RunFolder.WEIGHTS).read_bytes():
            return "other weights"
        if timeless(run) != timeless(whole):
            return "other metrics"
        if json.loads((run / RunFolder.SUMMARY).read_text()) != json.loads((whole / RunFolder.SUMMARY).read_text()):
            return "another summary"
    except (OSError, ValueError) as error:
        return f"a file is missing or broken: {error}"
    return ""


def events(run: Path, watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that tells ``watch`` of every file of the run before it is opened to write, renamed or removed."""
    count = 0
    inside = str(run.resolve())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        with contextlib.suppress(TypeError):
            path = os.fsdecode(os.fspath(arguments[0]))
            if os.path.abspath(path) == inside or os.path.abspath(path).startswith(inside + os.sep):
                count += 1
                watch(count, f"{event} {Path(path).name}")

    return hook


@final
@dataclass
class Ended:
    """A command in a process of its own, after its end.

    Attributes:
        code: the exit code, negative if it died of a signal.
        answer: what it said.
        seconds: how long it took.
        told: what its watch told last.
    """

    code: int
    answer: Answer
    seconds: float
    told: int


@final
class Forked:
    """``flipgrad`` in a child of this process, which has imported everything: it starts at once.

    Args:
        arguments: of the command line.
        run: the folder whose files are watched.
        watch: told of what happens to files, in the child.
        draw: whether pictures are drawn.
        ordinary: whether a child of root may do only what any owner of files may.
    """

    def __init__(
        self, arguments: list[str], run: Path, watch: Watch | None = None, *, draw: bool = False, ordinary: bool = False
    ) -> None:
        # What the command needs is imported once, here.
        cli.command(arguments[0])
        context = get_context("fork")
        self._near, far = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(arguments, run, watch, draw, ordinary, far))
        self._began = time.monotonic()
        self._process.start()
        far.close()

    def kill(self) -> None:
        """End it without a warning."""
        self._process.kill()

    def told(self, seconds: float) -> bool:
        """Whether it says something, or ends, within so many seconds."""
        return self._near.poll(seconds)

    def end(self, limit: float = 100.0) -> Ended:
        """Wait for its end."""
        answer, told = Answer(None, "", ""), 0
        deadline = time.monotonic() + limit
        try:
            while self._near.poll(max(0.0, deadline - time.monotonic())):
                said = self._near.recv()
                if isinstance(said, Answer):
                    answer = said
                else:
                    told = said
        except EOFError:
            pass
        else:
            self._process.kill()
            self._process.join()
            raise FaultError("hang", f"no end after {limit:g} seconds")
        self._process.join()
        code = self._process.exitcode or 0
        self._near.close()
        return Ended(code if code < 0 else answer.code or 0, answer, time.monotonic() - self._began, told)


def _run(
    arguments: list[str], run: Path, watch: Watch | None, draw: bool, ordinary: bool, parent: Connection[Any, Any]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A write beyond the largest size of a file is an error, not a death.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    global teller
    teller = parent
    if ordinary and os.getuid() == 0:
        give_up_privileges()
    if watch is not None:
        sys.addaudithook(events(run, watch))
    out, error, trace, code = io.StringIO(), io.StringIO(), "", 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["flipgrad", *arguments]))
        if not draw:
            stack.enter_context(undrawn())
        try:
            cli.main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            code, trace = 1, traceback.format_exc()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    parent.send(Answer(code, out.getvalue(), error.getvalue(), trace))


def give_up_privileges() -> None:
    """Let this process of root be stopped by permissions, as any other: by capset(2), without the capabilities of Linux."""
    version_and_process = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version_and_process, none):
        raise OSError(ctypes.get_errno(), "capset")


# How a watch tells the process that started its own.
teller: Connection[Any, Any] | None = None


def tell_parent(number: int) -> None:
    """Called by a watch: let :meth:`Forked.told` and :meth:`Forked.end` know."""
    if teller is not None:
        teller.send(number)


def resume(run: Path) -> list[str]:
    """The command that goes on with a run."""
    return ["train", "--resume", str(run), "--checkpoint-minutes", "1e-9"]
