"""Cells on the workers of a Dask cluster, which share a disk with this machine.

Rocklin. Dask: Parallel Computation with Blocked Algorithms and Task Scheduling. SciPy 2015. Dask runs the task of a worker
that died on another one; there the cell goes on from what the dead worker had stored.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final
from uuid import uuid4

from flipgrad.errors import InputError
from flipgrad.reproduce._cells import GRACE, LOOK, Cell, Ledger, Outcome, attempt

# Seconds to find the scheduler.
CONNECT = 10.0

# A process does one cell at a time, however many threads its worker has: torch's seed and its threads belong to the process.
_BUSY = threading.Lock()


@final
class DaskRunner:
    """Runs cells on an existing cluster.

    Its workers import this version of flipgrad, see the same files at the same paths, and had best have one thread each:
    ``dask worker ADDRESS --nthreads 1 --nworkers 2``.

    Args:
        address: of the scheduler, such as ``tcp://127.0.0.1:8786``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._distributed = _library()

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        root = root.resolve()
        root.mkdir(parents=True, exist_ok=True)
        name = uuid4().hex
        order = root / f".stop-{name}"
        with self._client() as client:
            tasks = {
                client.submit(_on_a_worker, cell, str(root), str(order), key=f"{cell.name}-{name}", pure=False): cell
                for cell in cells
            }
            ledger = Ledger(root, tell)
            try:
                self._follow(tasks, root, ledger)
            except BaseException:
                order.touch()
                self._end(client, tasks)
                raise
            finally:
                order.unlink(missing_ok=True)
        ledger.close()

    def _client(self) -> Any:
        try:
            return self._distributed.Client(self.address, timeout=CONNECT, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"--dask {self.address}: no Dask scheduler answers there ({reason:.200})") from None

    def _follow(self, tasks: dict[Any, Cell], root: Path, ledger: Ledger) -> None:
        pending = set(tasks)
        while pending:
            for task in [task for task in pending if task.done()]:
                pending.remove(task)
                cell, outcome = tasks[task], _outcome(task, tasks[task])
                if outcome.kind == "done" and cell.read(root) is None:
                    raise InputError(
                        f"--dask {self.address}: {cell.name} was done, and its result is not in '{root}'; give an --output on "
                        "a disk that this machine and all workers see at the same path"
                    )
                ledger.end(cell, outcome)
            ledger.look("on the cluster")
            time.sleep(LOOK)

    def _end(self, client: Any, tasks: dict[Any, Cell]) -> None:
        """Wait for the cells that run, which have been told to stop; those that wait are not begun."""
        with suppress(self._distributed.TimeoutError, OSError):
            begun = {key for keys in client.processing().values() for key in keys}
            client.cancel([task for task in tasks if task.key not in begun])
            until = time.monotonic() + GRACE
            while time.monotonic() < until and not all(task.done() for task in tasks if task.key in begun):
                time.sleep(LOOK)


def _outcome(task: Any, cell: Cell) -> Outcome:
    if task.status == "finished":
        outcome: Outcome = task.result()
        return outcome
    if task.status == "cancelled":
        return Outcome(cell.name, "failed", "the cluster forgot it: its scheduler was restarted, or the connection was lost")
    # As when several workers died over it.
    return Outcome(cell.name, "failed", f"{type(task.exception()).__name__}: {task.exception()}")


def _on_a_worker(cell: Cell, root: str, order: str) -> Outcome:
    looked, stopped = 0.0, False

    def stop() -> bool:
        nonlocal looked, stopped
        if not stopped and time.monotonic() - looked > LOOK:
            looked, stopped = time.monotonic(), Path(order).exists()
        return stopped

    with _BUSY:
        return attempt(cell, Path(root), stop, lambda share: None)


def _library() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise InputError("--dask needs Dask's distributed: pip install 'flipgrad[dask]'") from None
