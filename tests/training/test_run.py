import json
import os
import signal
from contextlib import suppress

import pytest
import torch
from problems import blobs, config, resume, run, small_net

import flipgrad as fg
from flipgrad import files
from flipgrad.errors import StorageError
from flipgrad.training import RunFolder, read_checkpoint, read_config
from flipgrad.training.lock import FolderLock
from flipgrad.training.run import LARGEST_CONFIG


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


# Since Python 3.12 a fork of a process with threads, which pytest may be, is warned of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
def test_the_lock_of_a_dead_process_locks_nothing(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            held = FolderLock(tmp_path)
            (tmp_path / "held").touch()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        held.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "held").exists()
    assert (tmp_path / ".lock").exists()
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()


def test_a_lock_that_may_not_be_removed_is_left_behind_and_locks_nothing(tmp_path, monkeypatch):
    def forbidden(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        lock = FolderLock(tmp_path)
        patched.setattr("pathlib.Path.unlink", forbidden)
        lock.release()
    assert (tmp_path / FolderLock.NAME).exists()
    FolderLock(tmp_path).release()


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
        folder.save_weights(net, blobs())
        before = (tmp_path / "run/weights.safetensors").read_bytes()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("flipgrad.files.os.fsync", full)
        with pytest.raises(StorageError, match=r"cannot write '.*weights.safetensors': No space left on device"):
            folder.save_weights(net, blobs())
    assert (tmp_path / "run/weights.safetensors").read_bytes() == before


def test_tied_weights_can_be_saved(tmp_path):
    layer = torch.nn.Linear(3, 3)
    with RunFolder(tmp_path / "run") as folder:
        folder.save_weights(torch.nn.Sequential(layer, layer), blobs())


def test_metrics_are_cut_to_the_checkpoint(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        for epoch in (1, 2, 3):
            folder.append_metrics({"epoch": epoch})
        assert folder.keep_metrics(2) == [{"epoch": 1}, {"epoch": 2}]
        path = tmp_path / "run/metrics.jsonl"
        assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2]
        with pytest.raises(fg.InputError, match=r"metrics.jsonl' does not hold the 3 epochs of the checkpoint; put it back"):
            folder.keep_metrics(3)
        whole = path.read_bytes()
        path.write_bytes(whole[:-10])
        with pytest.raises(fg.InputError, match="does not hold the 2 epochs"):
            folder.keep_metrics(2)
        path.write_bytes(whole.replace(b"2", b"3", 1))
        with pytest.raises(
            fg.InputError, match=r"metrics.jsonl', line 2: was edited or damaged.*; put it back, or move it else"
        ):
            folder.keep_metrics(2)
        # As the message says.
        path.unlink()
        assert folder.keep_metrics(2) == []
        assert path.read_bytes() == b""


def test_only_the_folder_of_a_run_can_be_reopened(tmp_path):
    with pytest.raises(
        fg.InputError, match=r"is no folder of a run: it has no config.json; give the --output of flipgrad train"
    ):
        RunFolder.reopen(tmp_path)


def test_the_configuration_is_read_back(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(config(epochs=9), processes=1)
    assert read_config(tmp_path / "run") == config(epochs=9)
    path = tmp_path / "run/config.json"
    stored = json.loads(path.read_text())
    stored["config"]["device"] = "cuda:77"
    path.write_text(json.dumps(stored))
    with pytest.raises(fg.InputError, match=r"config.json' was edited or damaged.*; put it back as it was, or train anew"):
        read_config(tmp_path / "run")
    files.write_json(path, stored)
    assert read_config(tmp_path / "run", device="cpu").device == "cpu"
    for content in ({}, {"config": 3}):
        files.write_json(path, content)
        with pytest.raises(fg.InputError, match=r"config.json' is not the configuration of a run"):
            read_config(tmp_path / "run")
    with pytest.raises(fg.InputError, match=r"config.json' cannot be read \(No such file or directory\); give the --output of"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"config": {"seed": 1' + "0" * 5000 + "}}", "is not JSON"),
        (" " * (LARGEST_CONFIG + 1), "has more than 16,777,216 bytes"),
        ({"config": {"seed": 2**63}}, "seed is 9223372036854775808; it must be at most 9223372036854775807"),
        ({"config": {"seed": 10**400}}, "seed is 1000"),
        ({"config": {"lr": 10**400}}, "lr is 1000"),
        ({"config": {"threads": 1_000_000}}, "threads is 1000000; it must be at most 1024"),
        ({"config": {"threads": 2**70}}, "threads is 1180591620717411303424; it must be at most 1024"),
        (
            {"config": {"data_folder": "\x1b[2J"}},
            r"data_folder is '\x1b[2J'; it must have at most 4096 characters, and no contr",
        ),
        ({"config": {"estimator": "psa" * 1_000_000}}, "estimator is 'psapsa"),
        ({"config": {"x" * 1_000_000: 3}}, "has an unknown field 'xxx"),
        ({"config": {"data": ["x"] * 1000}}, "data is ['x', 'x'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hostile_configuration_is_one_short_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content) if isinstance(content, str) else files.write_json(path, content)
    with pytest.raises(fg.InputError) as error:
        read_config(tmp_path)
    assert message in str(error.value)
    assert len(str(error.value)) < 700 + len(str(tmp_path))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["config.json", "summary.json", "checkpoint.safetensors", "weights.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_told_and_removing_it_helps(tmp_path, name):
    run(tmp_path / "run", epochs=1)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(
        fg.InputError, match=rf"{name}' is a folder, expected a file|cannot write '.*{name}': it is a folder; rem"
    ):
        resume(tmp_path / "run", epochs=2)
    with pytest.raises(fg.InputError, match=rf"cannot write '.*{name}': it is a folder; remove it"):
        RunFolder(tmp_path / "run", overwrite=True)
    (tmp_path / "run" / name).rmdir()
    RunFolder(tmp_path / "run", overwrite=True).close()


def test_a_link_in_a_run_leads_no_writer_elsewhere(tmp_path):
    path, precious = tmp_path / "run", tmp_path / "precious"
    run(path, epochs=1)
    for name in (".lock", ".weights.safetensors.part", ".probe.part", "metrics.jsonl", "weights.safetensors"):
        precious.write_text("keep")
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(precious)
        with suppress(fg.InputError, StorageError):
            resume(path, epochs=2)
        with suppress(fg.InputError, StorageError), RunFolder(path, overwrite=True) as folder:
            folder.save_weights(small_net(), blobs())
        assert precious.read_text() == "keep"
        (path / name).unlink(missing_ok=True)
        files.new_folder(path, overwrite=True)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    for name in ("config.json", "checkpoint.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(fg.InputError, match="is a device, expected a file"):
        read_config(tmp_path)
    with pytest.raises(fg.InputError, match="is a device, expected a file"):
        read_checkpoint(tmp_path)
