"""Two processes with half a batch each do what one does with the whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from problems import blobs, config, small_net
from torch import nn

import flipgrad as fg
from flipgrad.estimators import ESTIMATORS, Baseline
from flipgrad.training import Processes, Trainer
from flipgrad.training.processes import connect

HERE = Path(__file__).parent


def torchrun(*arguments, **options):
    """Start two processes on this machine, at a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    paths = [str(HERE), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True, **options
    )


def ended(process, seconds=100):
    """The output of a process, which is not left behind."""
    try:
        return process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_two_processes_are_one(tmp_path):
    _, err = ended(process := torchrun(str(HERE / "two_processes.py"), str(tmp_path)))
    assert process.returncode == 0, err
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        # Only the order of additions differs, in float64.
        assert found["same update"].keys() == {"psa", "st", "reinforce+running", "psa:mean"}
        assert all(distance < 1e-12 for distance in found["same update"].values()), found
        assert found["disagreement"].keys() > ESTIMATORS.keys() - {"flip-cv"}
        assert all(distance == 0 for distance in found["disagreement"].values()), found
        # The largest of some 150 differences, in standard errors of 200 draws: a false alarm in a thousand.
        assert 0.5 < found["deviation"] < 4.6
        assert found["disagreement about drawn weights"] == 0
        assert found["goes on"] == [True, True]


@pytest.mark.slow
def test_ctrl_c_saves_in_all_processes_and_the_printed_command_goes_on(tmp_path):
    options = ("--model", "20", "--estimator", "st", "--eval-samples", "1", "--epochs", "100000")
    process = torchrun("-m", "flipgrad", "train", *options, "--output", "run", cwd=tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    # As a terminal does: torchrun and both of its processes are told.
    os.killpg(process.pid, signal.SIGINT)
    out, err = ended(process)
    command = "torchrun --nproc-per-node 2 -m flipgrad train --resume run"
    assert f"Interrupted. Everything is saved in run; go on with:\n  {command}\n" in out, err
    assert out.count("Interrupted") == 1
    epochs = metrics.read_text().count("\n")
    again = torchrun("-m", "flipgrad", "train", "--resume", "run", cwd=tmp_path)
    deadline = time.monotonic() + 100
    while again.poll() is None and time.monotonic() < deadline and metrics.read_text().count("\n") <= epochs:
        time.sleep(0.1)
    again.terminate()
    out, err = ended(again)
    assert "Going on with 1,293 images of digits with ST, 100000 epochs, 2 processes" in out, err
    numbers = [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > epochs


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parts_of_a_batch_weigh_as_much_as_its_examples(count, size):
    values = torch.randn(20)
    batch = torch.randperm(20)[:count]
    parts = [Processes("cpu", rank, size).share(batch) for rank in range(size)]
    mean = sum(values[mine].sum() * factor for mine, factor in parts) / size
    assert mean == pytest.approx(float(values[batch].mean()))
    assert all(len(mine) for mine, _ in parts)


def test_an_estimator_whose_state_cannot_be_shared_is_refused():
    class Strange(Baseline):
        def forward(self, batch):
            return torch.zeros(len(batch.x))

        def learn(self, batch, losses):
            self.last = losses

    strange = fg.REINFORCE(Strange())
    Processes().check_shareable(strange)
    with pytest.raises(fg.InputError, match="REINFORCE keeps a state in Strange that many processes cannot share"):
        Processes("cpu", 0, 2).check_shareable(strange)
    Processes("cpu", 0, 2).check_shareable(fg.REINFORCE(fg.LearnedBaseline(nn.Linear(2, 1))))


@pytest.mark.parametrize("device", ["cuda:1", "meta"])
def test_many_processes_find_their_devices_themselves(device, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fg.InputError, match=f"device '{device}': many processes take 'cpu' or 'cuda', and a GPU each"):
        connect(device)


def test_one_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = connect("cpu")
    assert alone.first
    assert alone.size == 1
    assert Trainer(config(), small_net(), blobs(), alone).updates == 4
