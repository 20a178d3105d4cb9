"""Training of models written by hand: the twin of a Sequential comes to the same bits; resume, evaluation, command line."""

from __future__ import annotations

import copy
import json
import sys

import problems
import pytest
import torch
from torch import nn

import flipgrad as fg
from command_line import flipgrad
from flipgrad.tensor_files import read_tensors
from flipgrad.training import RunFolder, load_run
from flipgrad.training.run import WEIGHTS_FORMAT
from hand_written import ByHand
from pictures import render_nothing


def by_hand(net: fg.Sequential) -> fg.Graph:
    return fg.Graph(ByHand(copy.deepcopy(net)), problems.blobs().train.x[:2])


def equal(net: fg.Sequential, other: fg.Graph) -> bool:
    return all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"objective": "bound", "samples": 2}, {"samples": 2, "draws": "antithetic"}, {"estimator": "disarm"}],
    ids=["expected", "bound", "antithetic", "disarm"],
)
def test_a_twin_trains_to_the_same_bits(tmp_path, options):
    options = {"estimator": "st", **options}
    expected, net = problems.run(tmp_path / "a", **options)
    found, other = problems.run(tmp_path / "b", by_hand(problems.small_net()), **options)
    assert equal(net, other)
    assert found == expected
    first, second = (json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in "ab")
    assert first["gradient_norm"]["layer 1"] == second["gradient_norm"]["layer 1"]
    assert first["gradient_norm"]["head"] == second["gradient_norm"]["others"]


def test_drawn_binary_weights_train_to_the_same_bits(tmp_path):
    _, net = problems.run(tmp_path / "a", problems.drawn_net(), estimator="st")
    _, other = problems.run(tmp_path / "b", by_hand(problems.drawn_net()), estimator="st")
    assert equal(net, other)


def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path):
    _, whole = problems.run(tmp_path / "whole", by_hand(problems.small_net()))
    with pytest.raises(KeyboardInterrupt):
        problems.run(tmp_path / "run", by_hand(problems.small_net()), arguments={"stop": problems.StopAfter(6)})
    _, resumed = problems.resume(tmp_path / "run", by_hand(problems.small_net()))
    assert equal(whole, resumed)


OWN_MODELS = """
import torch, flipgrad as fg
from torch import nn


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.first = fg.BinaryConv2d(4, 6, 3, stride=2, padding=1)
        self.second, self.head = fg.BinaryConv2d(6, 6, 3, padding=1), nn.Linear(108, 10)

    def forward(self, x):
        a = self.first(self.front(x))
        return self.head(torch.cat([a, self.second(a)], 1).flatten(1))


class Pooled(Skip):
    def forward(self, x):
        a = self.first(self.front(x))
        return self.head(torch.cat([a, self.second(nn.functional.max_pool2d(a, 3, 1, 1))], 1).flatten(1))


def skip(data):
    return Skip()


def pooled(data):
    return Pooled()


def real(data):
    return nn.Linear(3, 3)


def half(data):
    model = Skip()
    model.other = fg.BinaryLinear(3, 3)
    return model


def measured():
    x = torch.rand(5, 1, 8, 8)
    return Skip(), x, fg.CrossEntropy(torch.arange(5))
"""


@pytest.fixture
def _own_models(tmp_path, monkeypatch):
    render_nothing(monkeypatch)
    (tmp_path / "hand_written_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "hand_written_models", raising=False)


TRAIN = ("train", "--estimator", "st", "--eval-samples", "2", "--model", "hand_written_models:skip")


@pytest.mark.usefixtures("_own_models")
def test_the_command_line_trains_resumes_and_evaluates(tmp_path, capsys):
    code, out, err = flipgrad(capsys, *TRAIN, "--epochs", "2", "--output", "whole")
    assert (code, err) == (0, "")
    assert "deterministic" in out
    assert flipgrad(capsys, *TRAIN, "--epochs", "1", "--output", "run")[0] == 0
    code, _, err = flipgrad(capsys, "train", "--resume", "run", "--epochs", "2")
    assert code == 2
    assert "names your own function 'hand_written_models:skip'" in err
    again = ("--model", "hand_written_models:skip")
    assert flipgrad(capsys, "train", "--resume", "run", "--epochs", "2", *again)[0] == 0
    weights = [
        read_tensors(tmp_path / name / RunFolder.WEIGHTS, WEIGHTS_FORMAT, missing="", broken="")[0] for name in ("whole", "run")
    ]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    assert set(weights[0]) == set(weights[1])
    assert json.loads((tmp_path / "run/summary.json").read_text())["accuracy_n"] > 0.5
    code, out, err = flipgrad(capsys, "evaluate", "run", *again)
    assert (code, err) == (0, "")
    assert "model.second BinaryConv2d" in out
    stored = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert len(stored["examples"]) == 24
    assert [row["name"] for row in stored["layers"]][-1] == "model.head"
    loaded = load_run(tmp_path / "run", model="hand_written_models:skip")
    assert isinstance(loaded.net, fg.Graph)
    assert not loaded.net.training


@pytest.mark.usefixtures("_own_models")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "hand_written_models:real"], "Graph: Linear has no binary layer; build it with fg.BinaryLinear"),
        (
            ["--model", "hand_written_models:half"],
            "fails on inputs [2, 1, 8, 8]: Graph: the model does not evaluate its binary",
        ),
        (["--model", "hand_written_models:pooled"], "went through the operation MaxPool2D"),
        (
            ["--model", "hand_written_models:skip", "--estimator", "exact"],
            "exact: the states of a model written by hand are not",
        ),
        (["--model", "hand_written_models:skip", "--width", "2"], "width is for our own networks"),
    ],
)
def test_the_command_line_refuses_before_anything_is_stored(arguments, message, tmp_path, capsys):
    code, _, err = flipgrad(capsys, "train", "--output", "run", *arguments)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_own_models")
def test_the_command_line_measures_gradients_of_a_model_written_by_hand(tmp_path, capsys):
    options = ("--samples", "20", "--estimators", "psa,st", "--reference-samples", "5000", "--output", "out")
    code, out, err = flipgrad(capsys, "gradeval", "--model", "hand_written_models:measured", *options)
    assert (code, err) == (0, "")
    assert "Compared with the mean of 5,000 draws of DisARM" in out
    assert [layer["name"] for layer in json.loads((tmp_path / "out/model.json").read_text())["reference"]["layers"]] == [
        "layer 1",
        "layer 2",
        "others",
        "all",
    ]


def test_a_model_that_moves_to_another_type_stays_what_it_is():
    net = by_hand(problems.small_net()).double()
    x = problems.blobs().train.x[:3].double()
    assert net.predict(x, 2).dtype == torch.float64
    assert isinstance(net.model.head, nn.Linear)
