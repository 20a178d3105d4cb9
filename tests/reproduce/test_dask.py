"""Cells on a Dask cluster: of one worker in this process, and slowly of two in their own, one of which is killed half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pieces import attempts, count, counting, fail, refuse

import flipgrad as fg
from flipgrad.reproduce._cells import Cell, CellError, DaskRunner

distributed = pytest.importorskip("distributed")
# Threads and sockets of the library's event loop are still about when a test ends.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    # In one process: they share the cluster.
    pytest.mark.xdist_group("dask"),
]


def start(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", "from distributed.cli import " + arguments[0] + " as m; m.main()", *arguments[1:]]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module", params=["thread", pytest.param("processes", marks=pytest.mark.slow)])
def cluster(request):
    """The address of a scheduler, and its workers by their processes."""
    if request.param == "processes":
        yield request.getfixturevalue("processes")
        return
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "protocol": "tcp://", "dashboard_address": None}
    with distributed.LocalCluster(host="127.0.0.1", **options) as here:
        yield here.scheduler_address, {os.getpid(): None}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A scheduler and two workers in processes of their own; without nannies, so that nobody replaces a dead one."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    scheduler = start("dask_scheduler", "--scheduler-file", str(file), "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    common = (
        "--scheduler-file",
        str(file),
        "--nthreads",
        "1",
        "--no-nanny",
        "--no-dashboard",
        "--local-directory",
        str(folder),
    )
    workers = [start("dask_worker", *common, "--name", str(k)) for k in range(2)]
    try:
        with distributed.Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        yield address, {worker.pid: worker for worker in workers}
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def test_cells_run_on_the_cluster(tmp_path, cluster):
    address, workers = cluster
    cells = [counting(k) for k in range(6)]
    told: dict[str, int] = {}
    DaskRunner(address).run(cells, tmp_path, lambda name, new: told.update({name: told.get(name, 0) + new}))
    for cell in cells:
        assert cell.read(tmp_path)["result"] == {"counted": 3, "from": 0, "threads": 1}
        assert told[cell.name] == cell.cost
        (process,) = attempts(tmp_path, cell)
        assert int(process) in workers
    assert not list(tmp_path.glob(".stop-*"))


def test_failures_are_named(tmp_path, cluster):
    address, _ = cluster
    with pytest.raises(CellError, match=r"broken \(ZeroDivisionError: one over nothing\)"):
        DaskRunner(address).run([Cell("broken", fail, {}), counting(0)], tmp_path, lambda name, new: None)
    assert counting(0).read(tmp_path) is not None
    with pytest.raises(fg.InputError, match="blind: no such data; bring it"):
        DaskRunner(address).run([Cell("blind", refuse, {})], tmp_path, lambda name, new: None)


def test_an_interruption_stops_the_cells_on_the_cluster(tmp_path, cluster):
    address, workers = cluster
    cells = [counting(k, steps=1000, seconds=0.02) for k in range(3)]

    def tell(name: str, new: int) -> None:
        if sum((tmp_path / cell.name / "kept.txt").exists() for cell in cells) == len(workers):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DaskRunner(address).run(cells, tmp_path, tell)
    assert sum((tmp_path / cell.name / "spent.json").exists() for cell in cells) == len(workers)
    short = [Cell(cell.name, count, {**cell.settings, "steps": 5}) for cell in cells]
    DaskRunner(address).run(short, tmp_path, lambda name, new: None)
    assert sum(cell.read(tmp_path)["result"]["from"] > 0 for cell in short) == len(workers)


# The last one: afterwards the cluster has one worker.
@pytest.mark.slow
def test_the_cells_of_a_killed_worker_are_run_again_and_counted_once(tmp_path, processes):
    address, workers = processes
    cells = [counting(k, steps=40, seconds=0.02) for k in range(4)]
    killed: list[int] = []
    told: dict[str, int] = {}

    def tell(name: str, new: int) -> None:
        told[name] = told.get(name, 0) + new
        kept = tmp_path / "count-0/kept.txt"
        if not killed and kept.exists() and (kept.read_text() or "0") > "0":
            killed.append(int(attempts(tmp_path, cells[0])[0]))
            os.kill(killed[0], signal.SIGKILL)

    DaskRunner(address).run(cells, tmp_path, tell)
    assert killed[0] in workers
    workers[killed[0]].wait()
    first, *again = attempts(tmp_path, cells[0])
    assert int(first) == killed[0]
    assert len(again) == 1
    assert int(again[0]) in workers
    # The other worker went on where the dead one was.
    assert cells[0].read(tmp_path)["result"]["from"] > 0
    for cell in cells:
        assert cell.read(tmp_path)["result"]["counted"] == 40
        assert told[cell.name] == cell.cost
        assert len(list((tmp_path / cell.name).glob("result*.json"))) == 1


def test_no_scheduler_is_bad_input(monkeypatch, tmp_path):
    monkeypatch.setattr("flipgrad.reproduce._cells.CONNECT", 0.3)
    with pytest.raises(fg.InputError, match=r"--dask tcp://127\.0\.0\.1:1: no Dask scheduler answers there"):
        DaskRunner("tcp://127.0.0.1:1").run([counting(0)], tmp_path, lambda name, new: None)


def test_without_dask_the_extra_is_named(monkeypatch):
    def none(name: str, *rest: object) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", none)
    with pytest.raises(fg.InputError, match=r"pip install 'flipgrad\[dask\]'"):
        DaskRunner("tcp://127.0.0.1:8786")
