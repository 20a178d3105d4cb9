"""Cells are done once: in this process and in others, interrupted, failing and killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from pieces import attempts, counting, die, fail, refuse, silent

import flipgrad as fg
from flipgrad.reproduce._cells import Cell, CellError, LocalRunner, attempt
from flipgrad.training.lock import FolderLock

# Processes of their own take seconds to start, so that few tests have some.
BOTH = pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])


class Teller:
    """What was told of every cell."""

    def __init__(self) -> None:
        self.units: dict[str, int] = {}

    def __call__(self, name: str, new: int) -> None:
        self.units[name] = self.units.get(name, 0) + new


def test_cells_in_this_process(tmp_path):
    cells, tell = [counting(k) for k in range(3)], Teller()
    torch.set_num_threads(2)
    try:
        LocalRunner(1).run(cells, tmp_path, tell)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    for cell in cells:
        check(cell, tmp_path, tell)
        assert attempts(tmp_path, cell) == [str(os.getpid())]


def check(cell: Cell, root: Path, tell: Teller) -> None:
    """A cell was done once, by one thread, and all of it was told."""
    record = cell.read(root)
    assert record["result"] == {"counted": 3, "from": 0, "threads": 1}
    assert record["seconds"] > 0
    assert {"versions", "machine"} <= record.keys()
    assert len(attempts(root, cell)) == 1
    assert tell.units[cell.name] == cell.cost


@pytest.mark.slow
def test_cells_in_two_processes_of_which_one_is_killed(tmp_path):
    """Cells that fail or whose process dies are named; another process takes its place, and the others are done."""
    cells, tell = [counting(k) for k in range(4)], Teller()
    bad = [Cell("victim", die, {}), Cell("broken", fail, {})]
    with pytest.raises(CellError, match="2 cells failed") as caught:
        LocalRunner(2).run([*bad, *cells], tmp_path, tell)
    assert "victim (its process ended with exit code -9, killed; perhaps memory ran out: try fewer --workers)" in str(
        caught.value
    )
    assert "broken (ZeroDivisionError: one over nothing)" in str(caught.value)
    assert "in fail" in (tmp_path / "broken/error.txt").read_text()
    for cell in cells:
        check(cell, tmp_path, tell)
        assert attempts(tmp_path, cell) != [str(os.getpid())]
    LocalRunner(1).run(bad[:1], tmp_path, tell)
    assert bad[0].read(tmp_path)["result"] == {"counted": 1}
    assert len(attempts(tmp_path, bad[0])) == 2


# That other processes save what they have is seen below, and how they are interrupted in test_cli.py.
@BOTH
def test_an_interrupted_cell_goes_on_where_it_was(tmp_path, workers):
    cells = [counting(k, steps=100, seconds=0.02) for k in range(2)]

    def stop(name: str, new: int) -> None:
        if new:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalRunner(workers).run(cells, tmp_path, stop)
    assert all(cell.read(tmp_path) is None for cell in cells)
    begun = [cell for cell in cells if (tmp_path / cell.name / "spent.json").exists()]
    assert begun
    again = Cell(begun[0].name, begun[0].work, {**begun[0].settings, "steps": 5})
    LocalRunner(1).run([again], tmp_path, silent)
    assert again.read(tmp_path)["result"]["from"] > 0
    assert not (tmp_path / again.name / "spent.json").exists()


@BOTH
def test_cells_may_have_threads(tmp_path, workers):
    cells = [counting(k) for k in range(workers)]
    LocalRunner(workers, threads=2).run(cells, tmp_path, silent)
    assert [cell.read(tmp_path)["result"]["threads"] for cell in cells] == [2] * workers
    assert not list(tmp_path.glob("*/begun.json"))


def test_a_cell_goes_on_with_as_many_threads_as_it_was_begun_with(tmp_path):
    cell = counting(0)
    stops = iter([False, True])
    assert isinstance(attempt(cell, tmp_path, lambda: next(stops), lambda share: None, 2), KeyboardInterrupt)
    with pytest.raises(
        fg.InputError, match="was begun with --threads 2, and only so goes on as it was: give that, or delete it"
    ):
        LocalRunner(1).run([cell], tmp_path, silent)
    LocalRunner(1, threads=2).run([cell], tmp_path, silent)
    assert cell.read(tmp_path)["result"] == {"counted": 3, "from": 1, "threads": 2}


@BOTH
def test_bad_input_of_a_cell_ends_the_run(tmp_path, workers):
    cells = [Cell("blind", refuse, {}), *(counting(k) for k in range(workers))]
    with pytest.raises(fg.InputError, match="blind: no such data; bring it"):
        LocalRunner(workers).run(cells, tmp_path, silent)


def test_a_failure_in_this_process_is_named_too(tmp_path):
    with pytest.raises(CellError, match=r"1 cell failed: broken \(ZeroDivisionError: one over nothing\)"):
        LocalRunner(1).run([Cell("broken", fail, {}), counting(0)], tmp_path, silent)
    assert counting(0).read(tmp_path) is not None


def test_two_processes_with_the_same_cell_make_one_result(tmp_path):
    cell = counting(0, steps=20)
    threads = [threading.Thread(target=attempt, args=(cell, tmp_path, lambda: False, lambda share: None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts(tmp_path, cell)) == 1
    assert cell.read(tmp_path)["result"]["counted"] == 20


def test_who_waits_for_another_process_can_be_stopped(tmp_path):
    (tmp_path / "count-0").mkdir()
    lock = FolderLock(tmp_path / "count-0")
    try:
        assert isinstance(attempt(counting(0), tmp_path, lambda: True, lambda share: None), KeyboardInterrupt)
    finally:
        lock.release()
    assert not (tmp_path / "count-0/log.txt").exists()


def test_results_of_other_settings_and_damaged_ones_are_refused(tmp_path):
    cell = counting(0)
    LocalRunner(1).run([cell], tmp_path, silent)
    with pytest.raises(fg.InputError, match="is of other settings; give another --output, or delete it"):
        Cell(cell.name, cell.work, {**cell.settings, "steps": 4}).read(tmp_path)
    # Where the data lies is no setting.
    assert Cell(cell.name, cell.work, cell.settings, inputs={"data": "elsewhere"}).read(tmp_path) is not None
    (tmp_path / "count-0/result.json").write_text('{"settings": ')
    with pytest.raises(fg.InputError, match=r"is not JSON .*; delete it, it is made again"):
        cell.read(tmp_path)
    fg.files.write_json(tmp_path / "count-0/result.json", {"settings": 3})
    with pytest.raises(fg.InputError, match=r"is damaged .*; delete it, it is made again"):
        cell.read(tmp_path)


def test_workers_must_be_positive():
    with pytest.raises(fg.InputError, match="workers=0: give at least 1"):
        LocalRunner(0)
    with pytest.raises(fg.InputError, match=r"threads=0: give from 1 to \d+"):
        LocalRunner(threads=0)
    assert LocalRunner(threads=1000).workers == 1
    assert LocalRunner().workers >= 1


def fork_runner(cells: list[Cell], root: Path) -> int:
    """Starts a copy of this process, which need not import everything again, and runs the cells in two processes of its own."""
    process = os.fork()
    if process == 0:
        try:
            LocalRunner(2).run(cells, root, silent)
        finally:
            os._exit(0)
    return process


# Since Python 3.12 a fork of a process with threads, which pytest may be, is warned of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    """Even where that one is killed without a chance to tell them."""
    process = fork_runner([counting(k, 1000, 0.02) for k in range(2)], tmp_path)
    logs = [tmp_path / f"count-{k}/log.txt" for k in range(2)]
    try:
        wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
        workers = [int(attempts(tmp_path, counting(k))[0]) for k in range(2)]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    wait_for(lambda: not any(alive(worker) for worker in workers))
    # They were told by the end of their pipe, and saved their work.
    assert all((tmp_path / f"count-{k}/spent.json").exists() for k in range(2))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)
