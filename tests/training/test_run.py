import json
import os
import subprocess
import sys

import pytest
import torch
from problems import config, small_net

import flipgrad as fg
from flipgrad.errors import StorageError
from flipgrad.training import RunFolder, read_config
from flipgrad.training.lock import FolderLock


def test_a_run_folder_is_not_overwritten_unless_asked(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("keep")
    (tmp_path / "run/summary.json").write_text("{}")
    with pytest.raises(fg.InputError, match=r"exists and is not empty; give another --output, or --overwrite"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run", overwrite=True).close()
    assert (tmp_path / "run/mine.txt").read_text() == "keep"
    assert not (tmp_path / "run/summary.json").exists()
    with pytest.raises(fg.InputError, match="is a file; give a folder"):
        RunFolder(tmp_path / "run/mine.txt")
    with pytest.raises(fg.InputError, match="cannot write to output folder"):
        RunFolder(tmp_path / "run/mine.txt/inside")


def test_two_runs_cannot_write_one_folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(config())
        message = (
            rf"is being written by another run \(process {os.getpid()}\); wait for it or stop it, or give another --output"
        )
        with pytest.raises(fg.InputError, match=message):
            RunFolder(tmp_path / "run", overwrite=True)
        with pytest.raises(fg.InputError, match="is being written by another run"):
            RunFolder.reopen(tmp_path / "run")
    RunFolder.reopen(tmp_path / "run").close()
    assert not (tmp_path / "run/.lock").exists()


def test_the_lock_of_a_dead_process_locks_nothing(tmp_path):
    code = "import os, sys; from pathlib import Path; from flipgrad.training.lock import FolderLock\n"
    code += "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "held\n"
    assert done.returncode == -9
    assert (tmp_path / ".lock").exists()
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()


def test_a_lock_file_that_was_taken_away_meanwhile_is_made_anew(tmp_path, monkeypatch):
    first = FolderLock(tmp_path)
    opened = []
    really_open = os.open

    def open_late(*arguments):
        descriptor = really_open(*arguments)
        if not opened:
            first.release()
        opened.append(descriptor)
        return descriptor

    monkeypatch.setattr("flipgrad.training.lock.os.open", open_late)
    second = FolderLock(tmp_path)
    assert len(opened) == 2
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    second.release()


def test_a_failed_write_leaves_the_earlier_file_whole(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run") as folder:
        net = small_net()
        folder.save_weights(net)
        before = (tmp_path / "run/weights.safetensors").read_bytes()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("flipgrad.files.os.fsync", full)
        with pytest.raises(StorageError, match=r"cannot write '.*weights.safetensors': No space left on device"):
            folder.save_weights(net)
    assert (tmp_path / "run/weights.safetensors").read_bytes() == before


def test_tied_weights_can_be_saved(tmp_path):
    layer = torch.nn.Linear(3, 3)
    with RunFolder(tmp_path / "run") as folder:
        folder.save_weights(torch.nn.Sequential(layer, layer))


def test_metrics_are_cut_to_the_checkpoint(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        for epoch in (1, 2, 3):
            folder.append_metrics({"epoch": epoch})
        assert folder.keep_metrics(2) == [{"epoch": 1}, {"epoch": 2}]
        assert (tmp_path / "run/metrics.jsonl").read_text() == '{"epoch": 1}\n{"epoch": 2}\n'
        with pytest.raises(fg.InputError, match=r"metrics.jsonl' does not hold the 3 epochs of the checkpoint; put it back"):
            folder.keep_metrics(3)
        (tmp_path / "run/metrics.jsonl").write_text('{"epoch": 1}\n{"ep')
        with pytest.raises(fg.InputError, match="does not hold the 2 epochs"):
            folder.keep_metrics(2)


def test_only_the_folder_of_a_run_can_be_reopened(tmp_path):
    with pytest.raises(
        fg.InputError, match=r"is no folder of a run: it has no config.json; give the --output of flipgrad train"
    ):
        RunFolder.reopen(tmp_path)


def test_the_configuration_is_read_back(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(config(epochs=9), processes=1)
    assert read_config(tmp_path / "run") == config(epochs=9)
    stored = json.loads((tmp_path / "run/config.json").read_text())
    stored["config"]["device"] = "cuda:77"
    (tmp_path / "run/config.json").write_text(json.dumps(stored))
    assert read_config(tmp_path / "run", device="cpu").device == "cpu"
    for content in ("{", "3", "{}", '{"config": 3}'):
        (tmp_path / "run/config.json").write_text(content)
        with pytest.raises(fg.InputError, match=r"config.json' is not the configuration of a run"):
            read_config(tmp_path / "run")
    with pytest.raises(fg.InputError, match=r"is no folder of a run: config.json: No such file"):
        read_config(tmp_path / "nowhere")
