"""Attempts in a process of their own, so that a crash or a hang is seen and named, and the campaign goes on."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, final

from torture.attack import Attack, FaultError, Outcome, source

# Bytes that an attempt may add to the memory of its process: more is refused by the system, as on a smaller machine.
MEMORY = 3 * 2**30
LAZY_MODULES = (
    *("torch._dynamo", "torch._dynamo.compiled_autograd", "torch._inductor.config", "torch.utils.tensorboard"),
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_pdf", "fontTools.subset"),
    *("sklearn.datasets", "sklearn.model_selection", "scipy.optimize", "torch.distributed", "jinja2"),
    *("PIL.PngImagePlugin", "PIL.JpegImagePlugin"),
)
# Told by a process instead of a number: its set-up.
SETUP = -1


@final
class Worker:
    """A process that makes some attempts of an attack, one after the other.

    Attributes:
        attack: whose attempts.
        current: the number of the attempt at hand, or ``SETUP``.
        began: when it began.
        connection: what the process tells: ("begin", number), then ("end", number, outcome).
    """

    def __init__(self, attack: Attack, numbers: list[int], seed: int, shared: Path) -> None:
        self.attack, self.numbers = attack, numbers
        self.current, self.began = SETUP, time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="attempt-", dir=shared.parent))
        self._log = self._scratch.with_suffix(".log")
        self.connection, far = get_context("fork").Pipe(duplex=False)
        self.process = get_context("fork").Process(
            target=_work, args=(attack, numbers, seed, shared, self._scratch, self._log, far)
        )
        self.process.start()
        far.close()

    @property
    def late(self) -> bool:
        """Whether the attempt at hand has taken too long."""
        return time.monotonic() - self.began > self.attack.limit

    def death(self) -> str:
        """What the process died of, and its last words."""
        self.process.join()
        code = self.process.exitcode or 0
        words = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return " | ".join([cause, *(line.strip() for line in words[-8:])])

    def stop(self) -> None:
        """End the process and all that it started, and remove its files."""
        if self.process.is_alive():
            # Politely first: it ends what it started.
            self.process.terminate()
            self.process.join(5)
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._log.unlink(missing_ok=True)


def _work(
    attack: Attack, numbers: list[int], seed: int, shared: Path, scratch: Path, log: Path, parent: Connection[Any, Any]
) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2, all_threads=False)
    _limit_memory()
    if numbers == [SETUP]:
        parent.send(("begin", SETUP))
        parent.send(("end", SETUP, _outcome(lambda: _set_up(attack, shared))))
        return
    attack.prepare(shared, scratch)
    for number in numbers:
        parent.send(("begin", number))
        parent.send(("end", number, _outcome(partial(attack.attempt, number, source(seed, attack.name, number)))))


def _set_up(attack: Attack, shared: Path) -> Outcome:
    attack.setup(shared)
    return Outcome(tried=0)


def _outcome(attempt: Callable[[], Outcome]) -> Outcome:
    try:
        return attempt()
    except FaultError as fault:
        return Outcome(faults=[(fault.kind, fault.text)])
    except Exception:
        return Outcome(faults=[("traceback", last_lines(traceback.format_exc()))])


def last_lines(text: str) -> str:
    """The end of a traceback in one line: the last two places in the code, and the first line of the message.

    >>> last_lines("Traceback:\\n  File a, line 1\\n    x()\\n    ^^^\\n  File b, line 2\\n    y()\\nValueError: one\\nmore")
    'File a, line 1 | x() | File b, line 2 | y() | ValueError: one'
    """
    lines = [line for line in text.rstrip().splitlines() if line.strip(" ^~")]
    places = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    if not places:
        return " | ".join(line.strip() for line in lines[-5:])
    ends = [index for index, line in enumerate(lines) if index > places[-1] and not line.startswith(" ")]
    return " | ".join(line.strip() for line in lines[places[-2:][0] : (ends[0] + 1 if ends else None)])


def preload() -> None:
    """Import what the library imports when it is needed: a child must not be stopped in the middle of that, nor wait for it."""
    for name in LAZY_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(1)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if os.path.exists("/proc") else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


class TimeUpError(BaseException):
    """No exception that a program would catch."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``TimeUpError`` in what takes longer than so many seconds."""

    def up(signum: int, frame: object) -> NoReturn:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, up)
    # Again and again, as the first one may come where Python ignores exceptions.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
