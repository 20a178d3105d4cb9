import importlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from command_line import flipgrad, fork_flipgrad
from flipgrad import cli, files
from flipgrad.benchmarks import BENCHMARKS, SECONDS
from flipgrad.estimators import ESTIMATORS, facts
from flipgrad.reproduce import _cells
from flipgrad.training import RunFolder, TrainConfig
from pictures import render_nothing

SMALL = ("--model", "20", "--estimator", "st", "--eval-samples", "1")


@pytest.fixture
def _undrawn(monkeypatch):
    """For those who do not look at pictures."""
    render_nothing(monkeypatch)


def test_train_prints_a_table_and_stores_everything(tmp_path, capsys):
    code, out, err = flipgrad(capsys, "train", "--estimator", "st", "--epochs", "2", "--output", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    for word in ("ST, 2 epochs", "1 sample", "10 samples", "deterministic", "expected", "marginal", "accuracy", "%"):
        assert word in out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    tensors = {"weights.safetensors", "checkpoint.safetensors"}
    assert names == {"config.json", "metrics.jsonl", *tensors, "summary.json", "curve.png", "report.html"}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["epoch"] == 2
    assert summary["accuracy_n"] > 0.5


@pytest.mark.usefixtures("_undrawn")
def test_train_says_when_it_looks_at_the_test_images_every_epoch(tmp_path, capsys):
    told = "Every epoch is measured on the test images, as --validation is 0"
    for share, expected in (("0", True), ("0.5", False)):
        arguments = ("--data", "toy", "--model", "2", "--epochs", "1", "--validation", share, "--output", str(tmp_path / share))
        code, out, _ = flipgrad(capsys, "train", *arguments)
        assert code == 0
        assert (told in out) == expected


@pytest.mark.usefixtures("_undrawn")
def test_train_does_not_touch_the_global_random_state(tmp_path, capsys):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    flipgrad(capsys, "train", "--estimator", "st", "--epochs", "1", "--eval-samples", "1", "--output", str(tmp_path / "run"))
    assert torch.equal(torch.rand(1), expected)


def test_every_field_of_the_configuration_is_an_option_of_train():
    parameters = {parameter.name: parameter for parameter in cli.command("train").params}
    for field in fields(TrainConfig):
        option = parameters[field.name]
        assert option.opts == ["--" + field.name.replace("_", "-")]
        assert option.help == field.metadata["text"]
        # The command chooses the threads by the data set, and takes a rate as text, which may be "auto".
        expected = {"threads": None, "lr": str(field.default)}.get(field.name, field.default)
        assert option.default == expected
    assert set(parameters) > {field.name for field in fields(TrainConfig)}


def test_commands_and_their_workers_keep_the_memory_that_they_free(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(cli.memory, "keep_freed_memory", lambda: kept.append("command"))
    assert flipgrad(capsys, "--version")[0] == 0
    monkeypatch.setattr(_cells, "keep_freed_memory", lambda: kept.append("worker"))
    # In a process of its own it would change how that one is ended.
    monkeypatch.setattr(_cells.signal, "signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    _cells._serve(theirs, Path(), 1)
    assert kept == ["command", "worker"]


def test_estimators_lists_their_facts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = flipgrad(capsys, "estimators")
    assert code == 0
    for word in (*ESTIMATORS, "unbiased", "passes", "relaxed objective", "Shekhovtsov, Yanush, Flach 2020"):
        assert word in out


def test_estimators_fit_into_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = flipgrad(capsys, "estimators")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in out
    # One line each.
    for name in ESTIMATORS:
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    assert "* psa: unbiased with one hidden layer" in lines


def test_estimators_can_be_printed_as_markdown(capsys):
    code, out, _ = flipgrad(capsys, "estimators", "--markdown")
    assert code == 0
    assert out == facts.markdown() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--estimator", "foo"], "unknown estimator 'foo'; give one of "),
        (["train", "--epoch", "3"], "No such option: --epoch"),
        (["train", "--epochs", "many"], "Invalid value for '--epochs'"),
        (["train", "--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["train", "--lr", "-1"], "learning rate is -1.0"),
        (["train", "--lr", "quick"], "Invalid value for '--lr': 'quick' is not a number, and not auto"),
        (["train", "--data", "mnist"], "is read from files: give their folder with --data-folder"),
        (["train", "--model", "not_there:net"], "No module named 'not_there'"),
        (["train", "--checkpoint-minutes", "0"], "checkpoint_minutes is 0.0; it must be positive"),
        (
            ["train", "--resume", "nowhere"],
            "'nowhere/config.json' cannot be read (No such file or directory)",
        ),
        (["train", "--resume", "nowhere", "--lr", "0.1"], "--lr cannot go with --resume: a run goes on as it was"),
        (["evaluate", "nowhere"], "'nowhere/config.json' cannot be read"),
        (["evaluate", "nowhere", "--sample-counts", "1,x"], "--sample-counts '1,x': give whole numbers separated by ','"),
        (["evaluate", "nowhere", "--seed", str(2**70)], "seed is 1180591620717411303424; it must be from 0 to"),
        (["train", "--seed", str(2**70)], "seed is 1180591620717411303424; it must be at most"),
        (["train", "--threads", "1000000"], "threads is 1000000; it must be at most 1024"),
        (["train", "--device", "tpu9"], "device 'tpu9' is not available"),
        (["train", "--device", "meta"], "device 'meta' is not available"),
        (["train", "--device", "hpu"], "device 'hpu' is not available"),
        (["train", "--device", "privateuseone"], "device 'privateuseone' is not available"),
        (["train", "--data", "toy", "--augment", "shift"], "augment 'shift' is for images; the data set 'toy' has none"),
        (["train", "--model", ".x:y"], "--model '.x:y': give package.module:function"),
        (["train", "--model", "os:getcwd"], "--model 'os:getcwd': TypeError: posix.getcwd() takes no arguments (1 given)"),
        (["train", "--model", "1000000-1000000"], "the network's weights need 3,725."),
        (["train", "--model", "1000000000"], "a layer has at most 16,777,216 units; give fewer"),
        (["train", "--model", "9" * 3000], "unknown model '999999999999...9999999999999'; choose from digits"),
        (["train", "--width", "1e9"], "(width=1000000000.0): a layer has at most 16,777,216 units; give a smaller factor"),
        (["train", "--width", "1e300"], "(width=1e+300): a layer has at most 16,777,216 units; give a smaller factor"),
        (["evaluate", "nowhere", "--seed", "-1"], "seed is -1; it must be from 0 to 9223372036854775807"),
        (["dance"], "No such command 'dance'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = flipgrad(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("flipgrad: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_undrawn")
def test_an_existing_run_is_kept_unless_asked(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("precious")
    code, _, err = flipgrad(capsys, "train", "--output", str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "--overwrite" in err
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"
    arguments = ("--estimator", "st", "--epochs", "1", "--eval-samples", "1", "--output", str(tmp_path), "--overwrite")
    assert flipgrad(capsys, "train", *arguments)[0] == 0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["epoch"] == 1


def test_an_unwritable_output_folder_is_bad_input(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = flipgrad(capsys, "train", "--output", str(tmp_path / "file" / "run"))
    assert code == 2
    assert err == f"flipgrad: cannot write to output folder '{tmp_path}/file/run': Not a directory; give another --output\n"


def test_without_arguments_there_is_the_help_and_no_complaint(capsys):
    code, out, err = flipgrad(capsys)
    assert (code, err) == (2, "")
    assert "Usage: flipgrad" in out


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["estimators", "--help"], ["--version"]])
def test_help_and_version(capsys, arguments):
    code, out, _ = flipgrad(capsys, *arguments)
    assert code == 0
    assert "flipgrad" in out


def test_interrupting_saves_what_is_done_and_exits_with_130(tmp_path):
    command = [sys.executable, "-m", "flipgrad", "train", *SMALL, "--epochs", "10000", "--output", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Everything is saved in run; go on with:\n  flipgrad train --resume run\n" in out
    assert "Traceback" not in err
    assert (tmp_path / "run/curve.png").exists()
    assert (tmp_path / "run/weights.safetensors").exists()
    assert all(json.loads(line) for line in metrics.read_text().splitlines())


@pytest.mark.usefixtures("_undrawn")
def test_a_run_goes_on_with_resume(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert flipgrad(capsys, "train", *SMALL, "--epochs", "1", "--output", run)[0] == 0
    code, out, _ = flipgrad(capsys, "train", "--resume", run)
    assert code == 0
    assert "is finished: 1 epoch. More: --epochs N" in out
    code, out, _ = flipgrad(capsys, "train", "--resume", run, "--epochs", "2")
    assert code == 0
    assert "Going on with 1,293 images of digits with ST, 2 epochs" in out
    assert [json.loads(line)["epoch"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1, 2]
    code, _, err = flipgrad(capsys, "train", "--resume", run, "--epochs", "1")
    assert code == 2
    assert "--epochs 1: the run is of 2 epochs already; give more, or leave it out" in err
    # Killed between the last checkpoint and the summary: only that is missing.
    (tmp_path / "run/summary.json").unlink()
    assert flipgrad(capsys, "train", "--resume", run)[0] == 0
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.usefixtures("_undrawn")
def test_the_rate_is_searched_for_and_the_search_goes_on(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    search = ("--lr", "auto", "--search-trials", "3", "--search-epochs", "1", "--search-images", "130")
    code, out, err = flipgrad(capsys, "train", *SMALL, *search, "--epochs", "1", "--output", str(run))
    assert (code, err) == (0, "")
    assert "Searching for the learning rate, 3 trials:\nThe best of 3 rates is" in out
    stored = json.loads((run / "config.json").read_text())
    trials = json.loads((run / "search.json").read_text())["trials"]
    assert stored["config"]["lr"] == min(trials, key=lambda trial: trial["objective"])["rate"]
    weights = (run / "weights.safetensors").read_bytes()
    # As if it had been killed after the first trial.
    stored["config"]["lr"] = "auto"
    files.write_json(run / "config.json", stored)
    searched = files.read_json(run / "search.json", missing="", broken="")
    files.write_json(run / "search.json", {**searched, "trials": trials[:1]})
    for name in ("checkpoint.safetensors", "weights.safetensors", "summary.json"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text("")
    code, out, err = flipgrad(capsys, "train", "--resume", str(run))
    assert (code, err) == (0, "")
    assert json.loads((run / "search.json").read_text())["trials"] == trials
    assert (run / "weights.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("_undrawn")
def test_training_by_the_bound(tmp_path, capsys):
    options = ("--objective", "bound", "--samples", "3", "--epochs", "1", "--output", str(tmp_path / "run"))
    assert flipgrad(capsys, "train", *SMALL, *options)[0] == 0


@pytest.mark.usefixtures("_undrawn")
def test_training_with_antithetic_draws(tmp_path, capsys):
    run = tmp_path / "run"
    options = ("--samples", "2", "--draws", "antithetic", "--epochs", "1", "--output", str(run))
    assert flipgrad(capsys, "train", *SMALL, *options)[0] == 0
    assert json.loads((run / "config.json").read_text())["config"]["draws"] == "antithetic"


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize(
    ("options", "part"), [(("--schedule", "cosine"), "cosine schedule"), (("--warmup", "0.5"), "warm-up")], ids=str
)
def test_a_schedule_that_ends_cannot_be_made_longer(tmp_path, capsys, options, part):
    run = str(tmp_path / "run")
    flipgrad(capsys, "train", *SMALL, "--epochs", "1", *options, "--output", run)
    code, _, err = flipgrad(capsys, "train", "--resume", run, "--epochs", "2")
    assert code == 2
    assert f"--epochs 2: the {part} was made for 1; leave it out" in err


@pytest.mark.usefixtures("_undrawn")
def test_a_damaged_checkpoint_is_one_line(tmp_path, capsys):
    run = tmp_path / "run"
    flipgrad(capsys, "train", *SMALL, "--epochs", "1", "--output", str(run))
    (run / "checkpoint.safetensors").write_bytes((run / "checkpoint.safetensors").read_bytes()[:1000])
    code, _, err = flipgrad(capsys, "train", "--resume", str(run), "--epochs", "2")
    assert code == 2
    assert "checkpoint.safetensors' is truncated or damaged" in err
    assert err.count("\n") == 1


def test_a_full_disk_is_one_line_and_what_to_do(tmp_path, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    run = tmp_path / "run"
    flipgrad(capsys, "train", *SMALL, "--epochs", "1", "--output", str(run))
    monkeypatch.setattr("flipgrad.files.os.fsync", full)
    code, _, err = flipgrad(capsys, "train", "--resume", str(run), "--epochs", "2")
    assert code == 1
    assert "No space left on device; what was stored before is kept; make room, and go on with: flipgrad train --resume" in err
    assert err.count("\n") == 1
    monkeypatch.undo()
    assert flipgrad(capsys, "train", "--resume", str(run), "--epochs", "2")[0] == 0


def test_divergence_is_one_line_and_exit_code_1(tmp_path, capsys):
    code, _, err = flipgrad(capsys, "train", *SMALL, "--lr", "3e38", "--epochs", "3", "--output", str(tmp_path / "run"))
    assert code == 1
    assert "is no longer finite in epoch" in err
    assert "lower the rate, e.g. --lr 1e+38; the last good state is in" in err
    assert err.count("\n") == 1


def test_a_folder_in_use_is_refused_with_the_process(tmp_path, capsys):
    with RunFolder(tmp_path / "run"):
        code, _, err = flipgrad(capsys, "train", *SMALL, "--overwrite", "--output", str(tmp_path / "run"))
    assert code == 2
    assert f"is being written by another run (process {os.getpid()})" in err


def test_evaluate_prints_a_table_and_stores_examples(tmp_path, capsys):
    run = tmp_path / "run"
    flipgrad(capsys, "train", *SMALL, "--epochs", "1", "--output", str(run))
    code, out, err = flipgrad(capsys, "evaluate", str(run), "--samples", "4")
    assert (code, err) == (0, "")
    for word in ("Validation images", "Test images", "4 samples", "deterministic", "accuracy", "cross-entropy"):
        assert word in out
    stored = json.loads((run / "evaluation.json").read_text())
    assert stored["samples"] == 4
    assert stored["splits"].keys() == {"validation", "test"}
    assert 0 < stored["splits"]["test"]["accuracy_n"] <= 1
    assert len(stored["examples"]) == 24
    assert len(stored["examples"][0]["members"]) == 4
    assert sum(stored["disagreement"]["correct"] + stored["disagreement"]["wrong"]) == 360
    assert "4 samples" in (run / "report.html").read_text()
    assert [size["samples"] for size in stored["ensembles"]["sizes"]] == [1, 2, 4, 5]
    assert [diagram["samples"] for diagram in stored["ensembles"]["reliability"]] == [1, 4, None]
    for word in ("ECE", f"{stored['ensembles']['reliability'][1]['error']:.2%}", "Test images, by the number of samples"):
        assert word in out
    code, out, err = flipgrad(capsys, "evaluate", str(run), "--samples", "1", "--sample-counts", "3,1")
    assert (code, err) == (0, "")
    assert [size["samples"] for size in json.loads((run / "evaluation.json").read_text())["ensembles"]["sizes"]] == [1, 3]


@pytest.mark.usefixtures("_undrawn")
def test_gradeval_prints_tables_writes_json_and_draws(tmp_path, capsys):
    # Brackets are no markup.
    folder = tmp_path / "[/out]"
    arguments = (
        "--epochs",
        "0,1",
        "--samples",
        "20",
        "--widths",
        "3-2",
        "--estimators",
        "psa,psa:sampled,concrete:0.1,reinforce+mean",
    )
    code, out, err = flipgrad(capsys, "gradeval", *arguments, "--noise", "normal", "--output", str(folder))
    assert (code, err) == (0, "")
    for word in (
        "PSA",
        "PSA auto",
        "Concrete 0.1",
        "REINFORCE + mean",
        "layer 2",
        "head",
        "RMSE",
        "bias",
        "cosine",
        "Draws per second",
    ):
        assert word in out
    assert max(len(line) for line in out.splitlines()[:-2]) <= 120
    names = {path.name for path in folder.iterdir()}
    figures = {f"{stem}.{kind}" for stem in ("epoch-0-rmse", "epoch-1-rmse", "cosine") for kind in ("png", "pdf")}
    assert names == {"epoch-0.json", "epoch-1.json", *figures}
    stored = json.loads((folder / "epoch-1.json").read_text())
    assert stored["estimators"].keys() == {"PSA", "PSA auto", "Concrete 0.1", "REINFORCE + mean"}
    assert stored["samples"] == 20
    code, _, err = flipgrad(capsys, "gradeval", *arguments, "--output", str(folder))
    assert code == 2
    assert "exists and is not empty; give another --output, or --overwrite" in err


OWN_MODEL = """
import torch, flipgrad as fg
def make():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(3, 20), fg.BinaryLinear(20, 20), head=torch.nn.Linear(20, 2))
    return net, torch.randn(5, 3), fg.CrossEntropy(torch.arange(5) % 2)
def wrong():
    return 3
def broken():
    x = 1
    return x / 0
def misfit():
    net, _, objective = make()
    return net, torch.randn(5, 4), objective
"""


@pytest.mark.usefixtures("_undrawn")
def test_gradeval_measures_a_persons_own_model(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine_for_gradeval.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    own = ("gradeval", "--samples", "10", "--estimators", "psa", "--model")
    code, out, err = flipgrad(capsys, *own, "mine_for_gradeval:make", "--reference-samples", "2000", "--output", "out")
    assert (code, err) == (0, "")
    assert "Compared with the mean of 2,000 draws of DisARM, whose own relative standard error is: layer 1" in out
    assert json.loads((tmp_path / "out/model.json").read_text())["reference"]["kind"] == "draws"
    for model, message in {
        "mine_for_gradeval:wrong": "must return (network, inputs [B, ...], objective), the network a flipgrad.Sequential",
        "mine_for_gradeval:other": "has no attribute 'other'",
        "not_there_at_all:make": "No module named 'not_there_at_all'",
        "mine_for_gradeval": "give package.module:function",
        "mine_for_gradeval:broken": f"ZeroDivisionError: division by zero (line 11 of {tmp_path}/mine_for_gradeval.py)",
        "mine_for_gradeval:misfit": "returned a network that fails on inputs [5, 4]: a fully connected layer with weight",
    }.items():
        code, _, err = flipgrad(capsys, *own, model, "--output", str(tmp_path / "bad"))
        assert code == 2
        assert message in err
    code, _, err = flipgrad(capsys, *own, "mine_for_gradeval:make", "--reference", "exact", "--output", "other")
    assert code == 2
    assert "over the budget" in err


@pytest.mark.usefixtures("_undrawn")
def test_reproduce_lists_and_makes_figures(tmp_path, capsys):
    code, out, _ = flipgrad(capsys, "reproduce", "--list")
    assert code == 0
    assert "Figure 2" in out
    code, out, err = flipgrad(capsys, "reproduce", "rmse", "--scale", "smoke", "--output", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert "PSA is unbiased in the last hidden layer" in out
    assert (tmp_path / "out/rmse.pdf").exists()


def test_bench_prints_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "exact", lambda: {"seconds": {"5-5-5": 0.004}})
    code, out, _ = flipgrad(capsys, "bench", "exact", "--json", "-")
    assert code == 0
    assert json.loads(out)["seconds"] == {"5-5-5": 0.004}
    code, _, _ = flipgrad(capsys, "bench", "exact", "--json", str(tmp_path / "exact.json"))
    assert code == 0
    assert json.loads((tmp_path / "exact.json").read_text())["benchmark"] == "exact"


def test_bench_says_beforehand_how_long_it_takes_and_shows_a_bar(capsys, monkeypatch):
    assert SECONDS.keys() == BENCHMARKS.keys()
    bench = importlib.import_module("flipgrad.cli.bench")
    monkeypatch.setattr(bench, "probe", lambda: 2 * bench.PROBE)
    monkeypatch.setitem(SECONDS, "exact", 100)
    monkeypatch.setitem(BENCHMARKS, "exact", lambda: time.sleep(1.2) or {"seconds": {}})
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = flipgrad(capsys, "bench", "exact")
    assert code == 0
    assert json.loads(out)["benchmark"] == "exact"
    told, _, bar = err.partition("\n")
    # Twice as slow a machine: 200 s.
    assert told == "bench exact: about 3 min on this machine, if nothing else runs on it"
    assert "━" in bar
    assert "0:00:01" in bar
    assert "bench exact took 1." in bar


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gradeval", "--estimators", "psa,pza"], "unknown estimator 'pza'; give one of adf"),
        (["gradeval", "--samples", "0"], "samples=0: give at least 10"),
        (["gradeval", "--widths", "5x5"], "--widths '5x5': give whole numbers separated by '-'"),
        (["gradeval", "--widths", "5-0"], "give the units of every binary layer"),
        (["gradeval", "--epochs", "one"], "--epochs 'one': give whole numbers separated by ','"),
        (["gradeval", "--epochs", "-3"], "give the epochs"),
        (
            ["gradeval", "--noise", "cauchy"],
            "noise 'cauchy': choose logistic, normal, laplace, uniform, with a scale if wanted, e.g. logistic:0.5",
        ),
        (["gradeval", "--reference", "st", "--epochs", "0"], "reference=ST: averaging draws finds the true gradient only"),
        (["gradeval", "--reference", "truth"], "--reference 'truth': give auto, exact"),
        (["gradeval", "--device", "toaster"], "device 'toaster'"),
        (["gradeval", "--device", "meta"], "device 'meta' is not available"),
        (["gradeval", "--seed", "-1"], "seed is -1; it must be from 0 to 9223372036854775807"),
        (["gradeval", "--seed", str(2**64)], "seed is 18446744073709551616; it must be from 0 to"),
        (["gradeval", "--workers", "0"], "workers=0: give from 1 to 1024"),
        (["gradeval", "--workers", "1000000000"], "workers=1000000000: give from 1 to 1024"),
        (["gradeval", "--samples", str(2**63)], "samples=9223372036854775808: give at least 10"),
        (["gradeval", "--reference-samples", "0"], "reference_samples=0: give at least 10"),
        (["gradeval", "--widths", "1000000-1000000"], "the network's weights need 3,725."),
        (
            ["gradeval", "--model", "math:sqrt"],
            "--model 'math:sqrt': TypeError: math.sqrt() takes exactly one argument (0 given)",
        ),
        (["reproduce", "rmse", "--seed", "-1"], "seed is -1; it must be from 0 to"),
        (["reproduce", "rmse", "--seed", str(2**63)], "seed is 9223372036854775808; it must be from 0 to"),
        (["reproduce", "rmse", "--output", "x" * 300], "File name too long; give another --output"),
        (["reproduce", "figure-9"], "no figure 'figure-9'; choose rmse"),
        (["reproduce", "report"], "'results/small' holds no results; make some first"),
        (["reproduce", "rmse", "--workers", "0"], "workers=0: give at least 1"),
        (["reproduce", "rmse", "--scale", "medium"], "rmse has no scale 'medium': choose smoke, small, paper"),
        (["reproduce", "rmse", "--finished"], "rmse cannot be made of parts that are finished or kept: leave out --finished"),
        (["reproduce", "rmse", "--threads", "0"], "threads=0: give from 1 to"),
        (["reproduce", "rmse", "--workers", "2", "--dask", "tcp://x:1"], "--workers and --threads are for processes of this"),
        (["reproduce", "rmse", "--threads", "2", "--dask", "tcp://x:1"], "a cluster has its own: leave them out with --dask"),
        (["reproduce", "rmse", "--scale", "huge"], "scale 'huge': choose smoke, small, medium, paper"),
        (["bench", "everything"], "no benchmark 'everything'; choose exact"),
    ],
)
def test_bad_input_of_the_study_is_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = flipgrad(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_mistakes_are_told_before_the_reference_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flipgrad.cli.gradeval.reference_training", lambda *_, **__: pytest.fail("trained first"))
    for option, value in {"--seed": "-1", "--workers": "0", "--reference": "st", "--reference-samples": "3"}.items():
        code, _, err = flipgrad(capsys, "gradeval", option, value)
        assert code == 2
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes."),
    ],
)
def test_a_lack_of_memory_is_one_line(capsys, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setitem(BENCHMARKS, "exact", fail)
    code, _, err = flipgrad(capsys, "bench", "exact")
    assert code == 1
    assert err.startswith("flipgrad: there is not enough memory for this: make the network, the batch")
    assert err.count("\n") == 1


def test_a_log_on_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout.write", full)
    code, _, err = flipgrad(capsys, "estimators")
    assert code == 1
    assert err == "flipgrad: cannot read or write: [Errno 28] No space left on device\n"


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "exact", lambda: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        cli.main(["bench", "exact"])


def test_letters_that_the_terminal_lacks_do_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    terminal = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    arguments = ["train", "--data", "toy", "--model", "2", "--estimator", "st", "--epochs", "1", "--eval-samples", "1"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--output", "l\u00e4ufe"])
    assert not stop.value.code
    sys.stdout.flush()
    assert b"are in l?ufe" in terminal.getvalue()
    assert (tmp_path / "l\u00e4ufe/summary.json").exists()


def test_reproduce_tells_costs_and_writes_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = flipgrad(capsys, "reproduce", "--list")
    assert code == 0
    assert "≈" in out
    assert "measured, or ≈ estimated from recorded times" in out
    make = ("reproduce", "toy-example", "report", "--scale", "smoke", "--workers", "1", "--output", "made", "--keep", "docs")
    code, out, err = flipgrad(capsys, *make)
    assert (code, err) == (0, "")
    assert "The page is made/report.html" in out
    assert "What is worth keeping is in docs" in out
    assert "toy-example.png" in (tmp_path / "docs/report.html").read_text()
    assert not (tmp_path / "docs/toy-example.pdf").exists()
    code, out, _ = flipgrad(capsys, "reproduce", "report", "--output", "made")
    assert code == 0
    assert "Figures (PNG, PDF)" not in out


def test_a_failed_cell_is_one_line_and_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flipgrad.reproduce.toy.describe", lambda *_: 1 / 0)
    make = ("reproduce", "toy-example", "--scale", "smoke", "--workers", "1", "--output", str(tmp_path / "out"))
    code, _, err = flipgrad(capsys, *make)
    assert code == 1
    assert "flipgrad: 2 cells failed: toy-example-expected (ZeroDivisionError: division by zero)" in err
    assert "the same command tries these again" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
# Since Python 3.12 a fork of a process with threads, which pytest may be, is warned of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_reproduction_keeps_its_cells_and_goes_on(tmp_path, capsys, number):
    arguments = ["reproduce", "toy-training", "--scale", "smoke", "--output", str(tmp_path / "out")]
    process = fork_flipgrad([*arguments, "--workers", "2"], tmp_path / "printed")
    until = time.monotonic() + 120
    while not list(tmp_path.glob("out/cells/*/result.json")) and time.monotonic() < until:
        time.sleep(0.02)
    # As a terminal does it, to all processes at once.
    os.killpg(process, number)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    done = {path: path.read_bytes() for path in tmp_path.glob("out/cells/*/result.json")}
    assert done
    if code:
        assert code == 130
        assert "the same command goes on from there" in (tmp_path / "printed").read_text()
    code, _, _ = flipgrad(capsys, *arguments, "--workers", "1")
    assert code == 0
    assert len(list(tmp_path.glob("out/cells/*/result.json"))) == 4
    assert all(path.read_bytes() == content for path, content in done.items())
