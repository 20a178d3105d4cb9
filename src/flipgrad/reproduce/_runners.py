"""Run cells: in processes of this machine, or on a Dask cluster."""

import importlib
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, final
from uuid import uuid4

from flipgrad.errors import InputError
from flipgrad.machine import cores
from flipgrad.reproduce._cells import ERROR, LOOK, Cell, Outcome, attempt

# Seconds that cells have to save their work when they are stopped, and seconds to find a Dask scheduler.
GRACE, CONNECT = 60.0, 10.0
# The exit code of a process that the system killed.
KILLED = -9
# A Dask worker does one cell at a time, however many threads it has: torch's seed and its threads belong to the process.
_BUSY = threading.Lock()


class CellError(RuntimeError):
    """Cells failed; the results of all others are kept."""


class Runner(Protocol):
    """Runs cells somewhere."""

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        """Do all cells, each in its folder below ``root``.

        Args:
            cells: those that are not done.
            root: the folder of folders.
            tell: told the name of a cell and how many more of its units are done, several times a second; where it raises
                KeyboardInterrupt, all cells are stopped.

        Raises:
            CellError: if a cell failed; the others are done nevertheless.
            InputError: if a cell found its input wrong; then all cells are stopped.
        """


@final
class _Ledger:
    """What has become of the cells of a run: how much of each was told, and which failed."""

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self.tell = tell
        self._told: Counter[str] = Counter()
        self._failures: list[str] = []

    def advance(self, cell: Cell, share: float) -> None:
        """Tell which share of a cell is done."""
        done = round(share * cell.cost)
        new, self._told[cell.name] = done - self._told[cell.name], done
        self.tell(cell.name, new)

    def end(self, cell: Cell, outcome: Outcome) -> None:
        """Note how a cell ended. If it was asked to stop, all are; if its input was wrong, the others would find the same."""
        if outcome.kind == "stopped":
            raise KeyboardInterrupt
        if outcome.kind == "bad input":
            raise InputError(f"{cell.name}: {outcome.message}")
        if outcome.kind == "failed":
            self._failures.append(f"{cell.name} ({outcome.message.splitlines()[0]:.200})")
        self.advance(cell, 1.0)

    def close(self, root: Path) -> None:
        """Raise a :class:`CellError` that names all cells that failed, if there are any."""
        if self._failures:
            raise CellError(
                f"{len(self._failures)} cell{'s' * (len(self._failures) > 1)} failed: {'; '.join(self._failures)}. More is in "
                f"{ERROR} of their folders in {root}; all other results are kept, and the same command tries these again"
            )


@final
class LocalRunner:
    """Runs ``workers`` cells at a time: one in this process, more in new ones, each with one thread.

    Not a pool of ``concurrent.futures`` or joblib: there the death of one process breaks the pool without a word of whose work
    it was, or of its exit code, and processes outlive a parent that is killed. Here each has a pipe, whose end tells both.

    Args:
        workers: how many; by default one for every core.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers={workers}: give at least 1, or leave it out for one per core")
        self.workers = workers or cores()

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        workers, ledger = min(self.workers, len(cells)), _Ledger(tell)
        if workers <= 1:
            _here(cells, root, ledger)
        else:
            _in_processes(cells, root, ledger, workers)
        ledger.close(root)


def _here(cells: Sequence[Cell], root: Path, ledger: _Ledger) -> None:
    """One cell after the other in this process."""
    stopped = threading.Event()
    for cell in cells:

        def report(share: float, cell: Cell = cell) -> None:
            try:
                ledger.advance(cell, share)
            except KeyboardInterrupt:
                # Not from here: the cell is to save its work first.
                stopped.set()

        ledger.end(cell, attempt(cell, root, stopped.is_set, report))
        if stopped.is_set():
            raise KeyboardInterrupt


def _in_processes(cells: Sequence[Cell], root: Path, ledger: _Ledger, count: int) -> None:
    """Cells in ``count`` processes; one that dies is replaced, and its cell failed."""
    waiting = deque(cells)
    workers: dict[Any, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                worker = _Worker(root)
                workers[worker.pipe] = worker
                worker.give(waiting.popleft())
            for pipe in connection.wait(list(workers), LOOK):
                worker = workers[pipe]
                message = worker.hear()
                if isinstance(message, float):
                    ledger.advance(worker.cell, message)
                    continue
                ledger.end(worker.cell, message)
                if waiting and worker.process.is_alive():
                    worker.give(waiting.popleft())
                else:
                    _end([workers.pop(pipe)])
            ledger.tell(next((worker.cell.name for worker in workers.values()), ""), 0)
    finally:
        _end(list(workers.values()))


@final
class _Worker:
    """A process, the pipe to it, and the cell it is at."""

    cell: Cell

    def __init__(self, root: Path) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon, so that it may save its work when this process ends; it ends itself when the pipe does.
        self.process = context.Process(target=_serve, args=(theirs, root))
        self.process.start()
        theirs.close()

    def give(self, cell: Cell) -> None:
        """Hand it the next cell."""
        self.cell = cell
        self.pipe.send(cell)

    def hear(self) -> float | Outcome:
        """The share of its cell that is done, or how that ended; where it died, its cell failed."""
        try:
            message: float | Outcome = self.pipe.recv()
        except (EOFError, OSError):
            _end([self])
            why = f"its process ended with exit code {self.process.exitcode}"
            if self.process.exitcode == KILLED:
                why += ", killed; perhaps memory ran out: try fewer --workers"
            return Outcome("failed", why)
        return message


def _end(workers: Sequence[_Worker]) -> None:
    """Ask them to save their work and end; those that do not are ended."""
    for worker in workers:
        worker.pipe.close()
    until = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(pipe: Connection, root: Path) -> None:
    """A worker: cells come through the pipe, and the end of the pipe, however it came about, means to stop."""
    terminated = threading.Event()
    # A terminal tells all processes of Ctrl-C; only the first one decides. A polite kill of all of them saves the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    reported = 0.0

    def stop() -> bool:
        # While a cell is at work no other comes: what can be heard then is the end of the pipe.
        return terminated.is_set() or bool(connection.wait([pipe], 0))

    def report(share: float) -> None:
        nonlocal reported
        if time.monotonic() - reported > LOOK:
            reported = time.monotonic()
            # Where the other side is gone, the next look at the pipe tells.
            with suppress(OSError):
                pipe.send(float(share))

    with suppress(EOFError, OSError):
        while True:
            pipe.send(attempt(pipe.recv(), root, stop, report))


@final
class DaskRunner:
    """Runs cells on an existing cluster, whose workers share a disk with this machine.

    Its workers import this version of flipgrad, see the same files at the same paths, and had best have one thread each:
    ``dask worker ADDRESS --nthreads 1 --nworkers 2``. Dask runs the task of a worker that died on another one; there the cell
    goes on from what the dead worker had stored. Rocklin. Dask: Parallel Computation with Blocked Algorithms and Task
    Scheduling. SciPy 2015.

    Args:
        address: of the scheduler, such as ``tcp://127.0.0.1:8786``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._distributed: Any = importlib.import_module("distributed")
        except ImportError:
            raise InputError("--dask needs Dask's distributed: pip install 'flipgrad[dask]'") from None

    def run(self, cells: Sequence[Cell], root: Path, tell: Callable[[str, int], None]) -> None:
        root = root.resolve()
        root.mkdir(parents=True, exist_ok=True)
        name = uuid4().hex
        order = root / f".stop-{name}"
        ledger = _Ledger(tell)
        with self._client() as client:
            tasks = {
                client.submit(_on_a_worker, cell, root, order, key=f"{cell.name}-{name}", pure=False): cell for cell in cells
            }
            try:
                self._follow(tasks, root, ledger)
            except BaseException:
                order.touch()
                self._end(client, tasks)
                raise
            finally:
                order.unlink(missing_ok=True)
        ledger.close(root)

    def _client(self) -> Any:
        try:
            return self._distributed.Client(self.address, timeout=CONNECT, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"--dask {self.address}: no Dask scheduler answers there ({reason:.200})") from None

    def _follow(self, tasks: Mapping[Any, Cell], root: Path, ledger: _Ledger) -> None:
        pending = set(tasks)
        while pending:
            for task in [task for task in pending if task.done()]:
                pending.remove(task)
                cell, outcome = tasks[task], _outcome(task)
                if outcome.kind == "done" and cell.read(root) is None:
                    raise InputError(
                        f"--dask {self.address}: {cell.name} was done, and its result is not in '{root}'; give an --output on "
                        "a disk that this machine and all workers see at the same path"
                    )
                ledger.end(cell, outcome)
            ledger.tell("on the cluster", 0)
            time.sleep(LOOK)

    def _end(self, client: Any, tasks: Mapping[Any, Cell]) -> None:
        """Wait for the cells that run, which have been told to stop; those that wait are not begun."""
        with suppress(self._distributed.TimeoutError, OSError):
            begun = {key for keys in client.processing().values() for key in keys}
            client.cancel([task for task in tasks if task.key not in begun])
            until = time.monotonic() + GRACE
            while time.monotonic() < until and not all(task.done() for task in tasks if task.key in begun):
                time.sleep(LOOK)


def _outcome(task: Any) -> Outcome:
    if task.status == "finished":
        outcome: Outcome = task.result()
        return outcome
    if task.status == "cancelled":
        return Outcome("failed", "the cluster forgot it: its scheduler was restarted, or the connection was lost")
    # As when several workers died over it.
    return Outcome("failed", f"{type(task.exception()).__name__}: {task.exception()}")


def _on_a_worker(cell: Cell, root: Path, order: Path) -> Outcome:
    looked, stopped = 0.0, False

    def stop() -> bool:
        nonlocal looked, stopped
        if not stopped and time.monotonic() - looked > LOOK:
            looked, stopped = time.monotonic(), order.exists()
        return stopped

    with _BUSY:
        return attempt(cell, root, stop, lambda share: None)
