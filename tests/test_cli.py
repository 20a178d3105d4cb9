import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from flipgrad import cli
from flipgrad.estimators import ESTIMATORS, facts


def flipgrad(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    output = capsys.readouterr()
    return stop.value.code, output.out, output.err


def test_train_prints_a_table_and_stores_everything(tmp_path, capsys):
    code, out, err = flipgrad(capsys, "train", "--estimator", "st", "--epochs", "2", "--output", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    for word in ("ST, 2 epochs", "1 sample", "10 samples", "deterministic", "expected", "marginal", "accuracy", "%"):
        assert word in out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "weights.safetensors", "summary.json", "curve.png"}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["epoch"] == 2
    assert summary["accuracy_n"] > 0.5


def test_train_does_not_touch_the_global_random_state(tmp_path, capsys):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    flipgrad(capsys, "train", "--estimator", "st", "--epochs", "1", "--samples", "1", "--output", str(tmp_path / "run"))
    assert torch.equal(torch.rand(1), expected)


def test_estimators_lists_their_facts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = flipgrad(capsys, "estimators")
    assert code == 0
    for word in (*ESTIMATORS, "unbiased", "passes", "relaxed objective", "Shekhovtsov, Yanush, Flach 2020"):
        assert word in out


def test_estimators_can_be_printed_as_markdown(capsys):
    code, out, _ = flipgrad(capsys, "estimators", "--markdown")
    assert code == 0
    assert out == facts.markdown() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--estimator", "foo"], "unknown estimator 'foo'; choose from "),
        (["train", "--epoch", "3"], "No such option: --epoch"),
        (["train", "--epochs", "many"], "Invalid value for '--epochs'"),
        (["train", "--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["train", "--lr", "-1"], "learning rate is -1.0"),
        (["train", "--device", "tpu9"], "device 'tpu9' is not available"),
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


def test_an_existing_run_is_kept_unless_asked(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("precious")
    code, _, err = flipgrad(capsys, "train", "--output", str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "--overwrite" in err
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"
    arguments = ("--estimator", "st", "--epochs", "1", "--samples", "1", "--output", str(tmp_path), "--overwrite")
    assert flipgrad(capsys, "train", *arguments)[0] == 0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["epoch"] == 1


def test_an_unwritable_output_folder_is_bad_input(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = flipgrad(capsys, "train", "--output", str(tmp_path / "file" / "run"))
    assert code == 2
    assert err == f"flipgrad: cannot write to output folder '{tmp_path}/file/run': Not a directory; give another --output\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["estimators", "--help"], ["--version"]])
def test_help_and_version(capsys, arguments):
    code, out, _ = flipgrad(capsys, *arguments)
    assert code == 0
    assert "flipgrad" in out


def test_interrupting_saves_what_is_done_and_exits_with_130(tmp_path):
    command = [sys.executable, "-m", "flipgrad", "train", "--estimator", "st", "--epochs", "10000", "--output", "run"]
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
    assert "Interrupted. Weights and metrics of the whole epochs are in run" in out
    assert "Traceback" not in err
    assert (tmp_path / "run/curve.png").exists()
    assert (tmp_path / "run/weights.safetensors").exists()
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
