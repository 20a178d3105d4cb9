"""Cells: independent pieces of an experiment, each with a folder of its own, done once however often they are begun.

A cell's result is one file, which appears whole when the cell is done. So nothing is counted twice: a cell that was cut, whose
machine died, or that two processes were given, ends with one result. They run in processes of this machine, or on a Dask
cluster.
"""

import importlib
import json
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

from flipgrad import files
from flipgrad.errors import CellError, InputError
from flipgrad.machine import cores, threads
from flipgrad.memory import keep_freed_memory
from flipgrad.training.config import MOST_THREADS
from flipgrad.training.lock import FolderLock

RESULT, BEGUN, SPENT, ERROR = "result.json", "begun.json", "spent.json", "error.txt"
# What to do about a file that cannot be read.
AGAIN = "delete it, it is made again"
# Seconds between two attempts to lock a folder that another process holds, and, in runners, between two looks at who watches.
LOOK = 0.2
# Seconds that cells have to save their work when they are stopped, and seconds to find a Dask scheduler.
GRACE, CONNECT = 60.0, 10.0
# The exit code of a process that the system killed.
KILLED = -9
# A Dask worker does one cell at a time, however many threads it has: torch's seed and its threads belong to the process.
_BUSY = threading.Lock()


def read_result(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON file of a reproduction; one that is damaged or lacks a key is an :class:`InputError` that says to delete it."""
    record = files.read_json(path, missing=AGAIN, broken=AGAIN)
    for key in keys:
        if key not in record:
            raise InputError(f"'{path}' is damaged (it has no {key!r}); {AGAIN}")
    return record


@dataclass(frozen=True)
class Place:
    """What a cell works with.

    Attributes:
        folder: its own, where it keeps what it needs to go on.
        inputs: see :class:`Cell`.
        stop: whether it has been asked to stop: then it saves what it has and raises KeyboardInterrupt.
        report: told which share of the work is done.
    """

    folder: Path
    inputs: Mapping[str, str]
    stop: Callable[[], bool]
    report: Callable[[float], None]

    def tick(self, share: float) -> None:
        """Tell which share is done, and stop here if asked to; for work that has nothing to save."""
        self.report(share)
        if self.stop():
            raise KeyboardInterrupt


def folder_name(cell: str) -> str:
    """Of the folder of a cell with that name: not every file system takes the colon of "concrete:0.1"."""
    return cell.replace(":", "-")


@dataclass(frozen=True)
class Cell:
    """An independent piece of work.

    Attributes:
        name: of its folder.
        work: makes the result, ready for JSON, from the settings: a function of a module, so that another process knows it.
        settings: what determines the result, ready for JSON.
        cost: how many units of progress it is, such as epochs.
        inputs: where things are that it needs; they do not determine the result.
    """

    name: str
    work: Callable[[Mapping[str, Any], Place], Mapping[str, Any]]
    settings: Mapping[str, Any]
    cost: int = 1
    inputs: Mapping[str, str] = field(default_factory=dict)

    def folder(self, root: Path) -> Path:
        """Its own among those of all cells."""
        return root / folder_name(self.name)

    def read(self, root: Path) -> dict[str, Any] | None:
        """Its stored record, None if it is not done; an :class:`InputError` if that is damaged, or of other settings."""
        path = self.folder(root) / RESULT
        if not path.exists():
            return None
        record = read_result(path, "settings", "result")
        if record["settings"] != json.loads(json.dumps(self.settings)):
            raise InputError(f"'{path}' is of other settings; give another --output, or delete it")
        return record


# How an attempt ended: None of a cell that has its result, KeyboardInterrupt of one that was asked to stop and can go on, an
# InputError, or a CellError whatever else happened.
Outcome = KeyboardInterrupt | InputError | CellError | None


def attempt(
    cell: Cell, root: Path, stop: Callable[[], bool], report: Callable[[float], None], thread_count: int = 1
) -> Outcome:
    """Do a cell, unless it is done or another process is doing it: then wait for that one.

    By default it runs on one thread: cells share the cores, and their numbers do not depend on how many run side by side.
    """
    folder = cell.folder(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with threads(thread_count), ExitStack() as held:
            held.callback(_lock(folder, stop).release)
            if stop():
                raise KeyboardInterrupt
            if cell.read(root) is None:
                _begin(folder, thread_count)
                _work(cell, Place(folder, cell.inputs, stop, report))
    except KeyboardInterrupt:
        return KeyboardInterrupt()
    except InputError as error:
        return InputError(str(error))
    except Exception as error:  # whatever it is, the other cells go on
        with suppress(OSError):
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        return CellError(f"{type(error).__name__}: {error}")
    return None


def _begin(folder: Path, thread_count: int) -> None:
    """Note the number of threads, and refuse to go on with another one, whose sums have other last digits."""
    path = folder / BEGUN
    if not path.exists():
        files.write_json(path, {"threads": thread_count})
    elif (begun := read_result(path, "threads")["threads"]) != thread_count:
        raise InputError(f"'{folder}' was begun with --threads {begun}, and only so goes on as it was: give that, or delete it")


def _work(cell: Cell, place: Place) -> None:
    """Do a cell and store its record, whose seconds include those of earlier attempts that were asked to stop."""
    started, before = time.perf_counter(), 0.0
    with suppress(ValueError, TypeError, KeyError):
        before = float(read_result(place.folder / SPENT)["seconds"])
    try:
        result = cell.work(cell.settings, place)
    except KeyboardInterrupt:
        files.write_json(place.folder / SPENT, {"seconds": before + time.perf_counter() - started})
        raise
    seconds = before + time.perf_counter() - started
    record = {"name": cell.name, "settings": dict(cell.settings), "result": dict(result), "seconds": seconds}
    files.write_json(place.folder / RESULT, {**record, **files.provenance()})
    for name in (BEGUN, SPENT, ERROR):
        (place.folder / name).unlink(missing_ok=True)


def _lock(folder: Path, stop: Callable[[], bool]) -> FolderLock:
    """Hold the folder, once nobody else does. The system lets go of the folders of a process that died."""
    while True:
        try:
            return FolderLock(folder)
        except InputError:
            if stop():
                raise KeyboardInterrupt from None
            time.sleep(LOOK)


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
        if isinstance(outcome, KeyboardInterrupt):
            raise outcome
        if isinstance(outcome, InputError):
            raise InputError(f"{cell.name}: {outcome}")
        if outcome is not None:
            self._failures.append(f"{cell.name} ({str(outcome).splitlines()[0]:.200})")
        self.advance(cell, 1.0)

    def close(self, root: Path) -> None:
        """Raise a :class:`CellError` that names all cells that failed, if there are any."""
        if self._failures:
            raise CellError(
                f"{len(self._failures)} cell{'s' * (len(self._failures) > 1)} failed: {'; '.join(self._failures)}. More is in "
                f"{ERROR} of their folders in {root}; all other results are kept, and the same command tries these again"
            )


class LocalRunner:
    """Runs ``workers`` cells at a time: one in this process, more in new ones.

    Not a pool of ``concurrent.futures`` or joblib: there the death of one process breaks the pool without a word of whose work
    it was, or of its exit code, and processes outlive a parent that is killed. Here each has a pipe, whose end tells both.

    Args:
        workers: how many; by default as many as there are cores for.
        threads: of each. The last digits of numbers depend on it, and so, in the long run, trainings.
    """

    def __init__(self, workers: int | None = None, threads: int = 1) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers={workers}: give at least 1, or leave it out for one per core")
        if not 1 <= threads <= MOST_THREADS:
            raise InputError(f"threads={threads}: give from 1 to {MOST_THREADS}")
        self.workers, self.threads = workers or max(1, cores() // threads), threads

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
        workers, ledger = min(self.workers, len(cells)), _Ledger(tell)
        if workers <= 1:
            _here(cells, root, ledger, self.threads)
        else:
            _in_processes(cells, root, ledger, workers, self.threads)
        ledger.close(root)


def _here(cells: Sequence[Cell], root: Path, ledger: _Ledger, thread_count: int) -> None:
    """One cell after the other in this process."""
    stopped = threading.Event()
    for cell in cells:

        def report(share: float, cell: Cell = cell) -> None:
            try:
                ledger.advance(cell, share)
            except KeyboardInterrupt:
                # Not from here: the cell is to save its work first.
                stopped.set()

        ledger.end(cell, attempt(cell, root, stopped.is_set, report, thread_count))
        if stopped.is_set():
            raise KeyboardInterrupt


def _in_processes(cells: Sequence[Cell], root: Path, ledger: _Ledger, count: int, thread_count: int) -> None:
    """Cells in ``count`` processes; one that dies is replaced, and its cell failed."""
    waiting = deque(cells)
    workers: dict[Any, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                worker = _Worker(root, thread_count)
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


class _Worker:
    """A process, the pipe to it, and the cell it is at."""

    cell: Cell

    def __init__(self, root: Path, thread_count: int) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon, so that it may save its work when this process ends; it ends itself when the pipe does.
        self.process = context.Process(target=_serve, args=(theirs, root, thread_count))
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
            return CellError(why)
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


def _serve(pipe: Connection, root: Path, thread_count: int) -> None:
    """A worker: cells come through the pipe, and the end of the pipe, however it came about, means to stop."""
    terminated = threading.Event()
    # A terminal tells all processes of Ctrl-C; only the first one decides. A polite kill of all of them saves the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    keep_freed_memory()
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
            pipe.send(attempt(pipe.recv(), root, stop, report, thread_count))


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
        """Do all cells, as :meth:`LocalRunner.run` does."""
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
                if outcome is None and cell.read(root) is None:
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
        return CellError("the cluster forgot it: its scheduler was restarted, or the connection was lost")
    # As when several workers died over it.
    return CellError(f"{type(task.exception()).__name__}: {task.exception()}")


def _on_a_worker(cell: Cell, root: Path, order: Path) -> Outcome:
    looked, stopped = 0.0, False

    def stop() -> bool:
        nonlocal looked, stopped
        if not stopped and time.monotonic() - looked > LOOK:
            looked, stopped = time.monotonic(), order.exists()
        return stopped

    with _BUSY:
        return attempt(cell, root, stop, lambda share: None)
