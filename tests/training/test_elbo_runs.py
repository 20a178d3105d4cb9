"""Runs of latent-variable models: numbers and pictures in the folder, going on, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flipgrad as fg
from flipgrad import cli, training
from flipgrad.training import ElboRun, RunFolder, TrainConfig

QUICK = ["train", "--objective", "elbo", "--width", "0.1"]


def run(*arguments: str) -> SimpleNamespace:
    """Exit code and output of a command; the fixture of a module has no ``capsys``."""
    output = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        cli.main(arguments)
    return SimpleNamespace(exit_code=stop.value.code, output=output.getvalue())


def config(**options) -> TrainConfig:
    return TrainConfig(**{"objective": "elbo", "optimizer": "adam", "lr": 1e-2, "augment": "none", "width": 0.1, **options})


def metrics(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in json.loads(line).items() if name in ("epoch", "elbo", "bound", "split")}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("elbo") / "run"
    result = run(*QUICK, "--epochs", "2", "--lr", "0.01", "--output", str(path))
    assert result.exit_code == 0, result.output
    assert "a model of 1 latent layer of 5 units, 1,293 images of digits with PSA auto, 2 epochs" in " ".join(
        result.output.split()
    )
    assert "log p(x) is at least -" in result.output
    return path


def test_a_run_leaves_numbers_pictures_and_a_page(folder):
    records = metrics(folder)
    assert [record["epoch"] for record in records] == [1, 2]
    assert records[1]["elbo"] > records[0]["elbo"]
    assert all(record["split"] == "validation" and record["bound"] < 0 for record in records)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["samples"], summary["images"], summary["size"]) == (100, 360, [8, 8])
    assert all(len(rows) == 10 and len(rows[0]) == 64 for rows in summary["pictures"].values())
    page = (folder / "report.html").read_text()
    assert page.count("<img ") == 30
    for words in ("PSA on digits: a latent-variable model", "Samples of the model", "Their reconstructions", "objective"):
        assert words in page
    assert (folder / "curve.png").stat().st_size > 1000


def test_the_model_is_read_back(folder):
    model, data = training.load_model(folder)
    assert data.size == (8, 8)
    assert model.reconstruct(data.test[:3].round()).shape == (3, 64)
    summary = json.loads((folder / "summary.json").read_text())
    assert training.elbo.mean_bound(model, data.test, 100) == pytest.approx(summary["bound"], abs=1e-4)


def test_a_finished_run_goes_on_with_more_epochs(folder, tmp_path):
    longer = tmp_path / "longer"
    result = run(*QUICK, "--epochs", "3", "--lr", "0.01", "--output", str(longer))
    assert result.exit_code == 0, result.output
    result = run("train", "--resume", str(folder), "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert metrics(folder) == metrics(longer)


def test_an_interrupted_run_ends_as_another(tmp_path):
    def made(name: str, checkpoint=None, *, stop=lambda: False) -> ElboRun:
        data = training.elbo_data(config(epochs=2))
        folder = RunFolder.reopen(tmp_path / name) if checkpoint else RunFolder(tmp_path / name)
        with folder:
            work = ElboRun(config(epochs=2), training.make_model(config(epochs=2), data), data, folder, checkpoint)
            work.run(lambda done, total, record: None, stop, 5.0)
        return work

    whole = made("whole")
    looks = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        made("cut", stop=lambda: next(looks))
    again = made("cut", training.read_checkpoint(tmp_path / "cut"))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for name, tensor in again.training.state().items():
        torch.testing.assert_close(tensor, whole.training.state()[name], rtol=0, atol=0)


def test_evaluate_says_what_the_run_is(folder):
    result = run("evaluate", str(folder))
    assert result.exit_code == 2
    assert "latent-variable model" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "200-200"], "with the objective elbo choose auto, linear, nonlinear"),
        (["--optimizer", "sgd"], "trained by Adam at a given rate"),
        (["--lr", "auto"], "trained by Adam at a given rate"),
        (["--weights", "binary"], "weights is not for the objective elbo: leave --weights out"),
        (["--label-smoothing", "0.1"], "label_smoothing is not for the objective elbo"),
        (["--augment", "shift"], "augment is not for the objective elbo: give --augment none"),
        (["--data", "toy"], "is for grey images, whose pixels become bits: give --data digits or mnist"),
        (["--estimator", "adf"], "ADF propagates means"),
        (["--tensorboard"], "trained by one process, and without --tensorboard"),
    ],
)
def test_what_a_model_would_ignore_is_refused(options, message, tmp_path):
    result = run(*QUICK, "--output", str(tmp_path / "run"), *options)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_rate_that_is_too_large_is_told(tmp_path):
    result = run(*QUICK, "--lr", "1e38", "--epochs", "2", "--output", str(tmp_path / "run"))
    assert result.exit_code != 0
    assert "smaller --lr" in " ".join(result.output.split())


def test_a_run_of_a_network_is_no_model(tmp_path):
    result = run("train", "--width", "0.25", "--epochs", "1", "--output", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    with pytest.raises(
        fg.InputError, match=r"is of a network, not of a latent-variable model; use flipgrad\.training\.load_run"
    ):
        training.load_model(tmp_path / "run")


def test_mnist_is_trained_too(tmp_path):
    source = os.environ.get("FLIPGRAD_DATA", "")
    if not source or not (Path(source) / "mnist").is_dir():
        pytest.skip("MNIST is not in $FLIPGRAD_DATA/mnist")
    from flipgrad.training import elbo_data

    data = elbo_data(config(data="mnist", data_folder=str(Path(source) / "mnist")))
    assert data.train.shape[1] == 784
    model = training.make_model(config(width=1.0), data)
    assert len(model.prior) == 200
    assert float(model(data.train[:50].round()).mean().detach()) < 784
