"""What goes wrong with a run's files is told with a way out; here somebody takes it."""

from __future__ import annotations

import errno
import json
import random
import re
import shlex
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from command_line import flipgrad
from flipgrad import cli, files
from flipgrad.errors import InputError, StorageError
from flipgrad.plots.runs import read_run
from flipgrad.training import Checkpoint, RunFolder, load_data, read_config, read_trials, read_weights
from pictures import render_nothing

QUICK = ("--data", "toy", "--estimator", "st", "--eval-samples", "2", "--epochs", "2")
SEARCH = ("--lr", "auto", "--search-trials", "2", "--search-epochs", "1")

# In one process: they share a run.
pytestmark = pytest.mark.xdist_group("advice")


def done(capsys, *arguments):
    """The output of a command that must succeed."""
    code, out, err = flipgrad(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments, code=2):
    """The message of a command that must not."""
    found, _, err = flipgrad(capsys, *arguments)
    assert found == code
    assert err.count("\n") <= 1
    return err


def command_in(text):
    """The words of the first command of flipgrad that a text names."""
    (command,) = re.findall(r"flipgrad ((?:train|evaluate) .*?)(?: writes|$|;)", text.strip())
    return shlex.split(command)


@pytest.fixture(autouse=True, scope="module")
def _no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        render_nothing(patch)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with everything in it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    for command in (["train", *QUICK, *SEARCH, "--output", str(path)], ["evaluate", str(path)]):
        with pytest.raises(SystemExit) as stop:
            cli.main(command)
        assert stop.value.code == 0
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "my run")


def flip(path, place=-3):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("weights.safetensors", lambda path: path.unlink()),
        ("weights.safetensors", lambda path: path.write_bytes(path.read_bytes()[:20])),
        ("summary.json", flip),
        ("config.json", flip),
        ("config.json", lambda path: path.unlink()),
    ],
)
def test_a_damaged_or_missing_file_is_written_again_by_resume(run, capsys, name, damage):
    file = run / name
    before, weights = file.read_bytes(), (run / "weights.safetensors").read_bytes()
    damage(file)
    err = refused(capsys, "evaluate", str(run))
    assert name in err
    assert "flipgrad train --resume" in err
    if "delete it" in err:
        file.unlink()
    done(capsys, "train", "--resume", str(run))
    done(capsys, "evaluate", str(run))
    if name == "config.json":
        assert json.loads(file.read_text())["config"] == json.loads(before)["config"]
    else:
        assert file.read_bytes() == before
    assert (run / "weights.safetensors").read_bytes() == weights
    assert "is finished" in done(capsys, "train", "--resume", str(run))


def test_the_advice_for_damaged_weights_is_a_command_that_works(run, capsys):
    flip(run / "weights.safetensors")
    err = refused(capsys, "evaluate", str(run))
    assert "weights.safetensors' is damaged: its checksum is wrong; flipgrad train --resume" in err
    done(capsys, *command_in(err))
    done(capsys, "evaluate", str(run))


def test_metrics_that_are_damaged_can_be_moved_away(run, capsys):
    metrics = run / "metrics.jsonl"
    flip(metrics, 20)
    assert "line 1: was edited or damaged" in refused(capsys, "train", "--resume", str(run), "--epochs", "3")
    metrics.rename(run / "damaged.jsonl")
    done(capsys, "train", "--resume", str(run), "--epochs", "3")
    assert [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()] == [3]


def test_damage_to_any_file_of_a_run_is_noticed_or_harmless(run):
    data = load_data(read_config(run))

    def read(name):
        if name == "search.json":
            return read_trials(run, data)
        if name == "weights.safetensors":
            tensors, fingerprint = read_weights(run)
            return {key: value.tolist() for key, value in tensors.items()}, fingerprint
        return repr(read_run(run))

    draw = random.Random(0)
    for name in ("config.json", "metrics.jsonl", "summary.json", "evaluation.json", "search.json", "weights.safetensors"):
        file = run / name
        content, before = file.read_bytes(), read(name)
        for _ in range(20):
            changed = bytearray(content)
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
            try:
                assert read(name) == before
            except InputError as error:
                assert name in str(error)  # noqa: PT017
        file.write_bytes(content)


class Killed(BaseException):
    """Ends the process at once, as a kill does."""


def killed(*_):
    raise Killed


def test_a_kill_before_the_first_checkpoint_loses_no_search(run, tmp_path, capsys, monkeypatch):
    parts = tmp_path / "parts"
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_checkpoint", killed)
        with pytest.raises(Killed):
            cli.main(["train", *QUICK, *SEARCH, "--output", str(parts)])
    capsys.readouterr()
    assert read_config(parts).lr != "auto"
    assert not (parts / "checkpoint.safetensors").exists()
    assert "Searching" not in done(capsys, "train", "--resume", str(parts))
    for name in ("weights.safetensors", "search.json", "summary.json"):
        assert (parts / name).read_bytes() == (run / name).read_bytes()


def test_a_finished_run_with_damaged_metrics_is_not_called_finished(run, capsys):
    metrics = run / "metrics.jsonl"
    flip(metrics, 20)
    assert "line 1: was edited or damaged" in refused(capsys, "train", "--resume", str(run))
    flip(metrics, 20)
    assert "is finished" in done(capsys, "train", "--resume", str(run))
    whole = metrics.read_bytes()
    for cut in (len(whole) - 9, 20):
        metrics.write_bytes(whole[:cut])
        assert "does not hold the 2 epochs" in refused(capsys, "train", "--resume", str(run))


def test_metrics_facts_and_trials_of_a_wrong_kind_are_one_line(run, capsys):
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    *lines, last = metrics.read_text().splitlines()
    wrong = files.json_line({**json.loads(last), "objective": "low"})
    metrics.write_text("\n".join([*lines, wrong, ""]))
    summary.unlink()
    assert "does not hold the metrics of epochs" in refused(capsys, "train", "--resume", str(run))
    checkpoint = Checkpoint.read(run / "checkpoint.safetensors")
    (run / "checkpoint.safetensors").write_bytes(replace(checkpoint, facts={**checkpoint.facts, "epoch": []}).to_bytes())
    assert "does not tell its epoch" in refused(capsys, "train", "--resume", str(run))
    trials = json.loads((run / "search.json").read_text())
    files.write_json(run / "search.json", {**trials, "trials": [{"rate": "fast", "objective": 1.0}]})
    with pytest.raises(InputError, match="needs its 'rate' and 'objective'"):
        read_trials(run, load_data(read_config(run)))


def full_disk_at(name):
    """What writes files, until one of that name finds the disk full."""
    write = files.write

    def full(path, content):
        if path.name == name:
            raise StorageError(f"cannot write '{path}': No space left on device")
        write(path, content)

    return full


@pytest.mark.parametrize("name", ["curve.png", "report.html"])
def test_what_is_advised_when_the_disk_is_full_at_the_pictures_draws_them(tmp_path, capsys, monkeypatch, name):
    with monkeypatch.context() as patched:
        patched.setattr("flipgrad.files.write", full_disk_at(name))
        err = refused(capsys, "train", *QUICK, "--output", str(tmp_path / "run"), code=1)
    assert not (tmp_path / "run" / name).exists()
    assert "is finished" in done(capsys, *command_in(err))
    assert (tmp_path / "run" / name).exists()


def test_what_is_advised_when_the_disk_is_full_at_the_first_file_works(tmp_path, capsys, monkeypatch):
    command = ("train", *QUICK, "--output", str(tmp_path / "run"))

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ("flipgrad.files.os.replace", "flipgrad.training.lock.os.write"):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            err = refused(capsys, *command, code=1 if "replace" in place else 2)
        assert "make room" in err
        assert "give the same command again" in err
    done(capsys, *command)


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "config.json", "search.json"])
def test_what_is_advised_when_the_disk_is_full_from_the_start_works(tmp_path, capsys, monkeypatch, name):
    command = ("train", *QUICK, *SEARCH, "--output", str(tmp_path / "run"))
    with monkeypatch.context() as patched:
        patched.setattr("flipgrad.files.write", full_disk_at(name))
        err = refused(capsys, *command, code=1)
    if name == "config.json":
        assert err.endswith("make room, and give the same command with --overwrite\n")
        done(capsys, *command, "--overwrite")
    else:
        assert "make room, and go on with: flipgrad train --resume" in err
        done(capsys, *command_in(err))
    done(capsys, "evaluate", str(tmp_path / "run"))


def test_a_run_without_its_checkpoint_does_not_begin_anew_unasked(run, capsys):
    (run / "checkpoint.safetensors").unlink()
    err = refused(capsys, "train", "--resume", str(run), "--epochs", "3")
    assert "checkpoint.safetensors' is missing; put the whole file back, or train anew with --overwrite" in err
    done(capsys, "train", *QUICK, "--output", str(run), "--overwrite")


OWN = """
import pathlib
import flipgrad as fg
from torch import nn
pathlib.Path("imported").touch()
def net(data):
    return fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, data.classes))
"""


@pytest.fixture
def _own(tmp_path, monkeypatch):
    (tmp_path / "mine_for_advice.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    # As the installed command is run, which does not look for modules in the working directory.
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", str(tmp_path))])
    yield
    sys.modules.pop("mine_for_advice", None)


@pytest.mark.usefixtures("_own")
def test_code_that_a_run_names_is_run_only_if_it_is_named_again(tmp_path, capsys):
    done(capsys, "train", *QUICK, "--model", "mine_for_advice:net", "--output", "run")
    sys.modules.pop("mine_for_advice")
    sys.path.remove("")
    before = sys.path.copy()
    (tmp_path / "imported").unlink()
    for command in (("evaluate", "run"), ("train", "--resume", "run", "--epochs", "3")):
        err = refused(capsys, *command)
        assert "names your own function 'mine_for_advice:net' as the network" in err
        assert "if you trust it, add --model mine_for_advice:net (in Python" in err
        assert "and not 'digits'; a run keeps its own" in refused(capsys, *command, "--model", "digits")
        assert sys.path == before
        assert not (tmp_path / "imported").exists()
    # The checkpoint is no better a witness than the configuration.
    (tmp_path / "run/config.json").unlink()
    assert "names your own function" in refused(capsys, "train", "--resume", "run")
    assert not (tmp_path / "imported").exists()
    done(capsys, "train", "--resume", "run", "--epochs", "3", "--model", "mine_for_advice:net")
    done(capsys, "evaluate", "run", "--model", "mine_for_advice:net")
    assert (tmp_path / "imported").exists()


@pytest.mark.usefixtures("_own")
def test_the_way_to_go_on_names_a_persons_own_network(capsys, monkeypatch):
    def full(self, *_):
        raise StorageError("cannot write: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append_metrics", full)
        err = refused(capsys, "train", *QUICK, "--model", "mine_for_advice:net", "--output", "run", code=1)
    assert err.endswith("go on with: flipgrad train --resume run --model mine_for_advice:net\n")
    done(capsys, *command_in(err))


@pytest.fixture
def photos(tmp_path):
    """A folder of images of two classes."""
    folder = tmp_path / "photos"
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(draw.integers(0, 256, (4, 4), dtype=np.uint8)).save(folder / name / f"{number}.png")
    return folder


def test_a_run_does_not_go_on_with_other_data(tmp_path, photos, capsys):
    run = str(tmp_path / "run")
    options = ("--data", "images", "--data-folder", str(photos), "--model", "4", "--threads", "1", "--eval-samples", "2")
    done(capsys, "train", *options, "--epochs", "1", "--output", run)
    before = (photos / "cat/3.png").read_bytes()
    shutil.copy(photos / "dog/3.png", photos / "cat/3.png")
    longer = ("train", "--resume", run, "--epochs", "2")
    assert "is of a training on other examples than those of 'photos' now; put the data back" in refused(capsys, *longer)
    # To evaluate on other data may be what one wants, but not without knowing it.
    assert "These are not, to the bit, the data that the network was trained on" in done(capsys, "evaluate", run)
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["same_data"] is False
    (photos / "cat/3.png").write_bytes(before)
    assert "These are not" not in done(capsys, "evaluate", run)
    photos.rename(tmp_path / "moved")
    for command in (("evaluate", run), longer):
        assert "cannot list" in refused(capsys, *command)
        done(capsys, *command, "--data-folder", str(tmp_path / "moved"))
    # The run knows now.
    done(capsys, "evaluate", run)
