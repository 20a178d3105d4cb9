"""An estimator from outside the package: in Python, on the command line, and never from a file alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import flipgrad as fg
from command_line import flipgrad
from flipgrad.estimators.names import by_name, for_training, is_user_estimator
from pictures import render_nothing

MODULE = "mine_for_estimators"
CODE = """
import pathlib
import flipgrad as fg

pathlib.Path("imported").touch()


class Mix(fg.LocalEstimator):
    unbiased, citation = False, "here"

    def passes(self, depth):
        return 1

    def states(self, call):
        return (fg.PSA(inputs="sampled") if call.binary else fg.ST()).states(call)


class Score(fg.PathEstimator):
    unbiased, citation = True, "here"

    def passes(self, depth):
        return 1

    def gradients(self, path):
        weights = [path.losses.detach().view(-1, *[1] * (a.dim() - 1)) for a in path.a]
        return [w * call.noise.score(x, a.detach()) for w, call, x, a in zip(weights, path.calls, path.states, path.a)]


def nothing():
    return 7


def failing():
    raise ValueError("not today")
"""
QUICK = ("--data", "toy", "--eval-samples", "2", "--epochs", "1", "--output", "run")


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    """The user's module in the working directory."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    render_nothing(monkeypatch)
    yield
    sys.modules.pop(MODULE, None)


def test_names_of_ours_are_ours():
    assert not any(
        map(is_user_estimator, ("psa", "psa:mean", "PSA:mean", "arms:8", "concrete:0.1", "reinforce+running", "x:0.1"))
    )
    assert is_user_estimator(f"{MODULE}:Mix")
    assert is_user_estimator("package.module:Mix")


def test_it_trains_in_python_like_ours():
    label, mix = for_training(f"{MODULE}:Mix", 1)
    assert label == "Mix"
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2))
    x, objective = torch.randn(8, 2), fg.CrossEntropy(torch.randint(2, (8,)))
    found = []
    for estimator in (mix, fg.PSA(inputs="sampled", head="sampled", flip_head=False)):
        losses = net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(1))
        found.append(torch.autograd.grad(losses.sum(), list(net.parameters())))
    torch.testing.assert_close(found[0], found[1])


def test_a_path_estimator_is_measured_beside_ours():
    estimators = by_name([f"{MODULE}:Score", "reinforce"], lambda: torch.zeros(1))
    assert list(estimators) == ["Score", "REINFORCE"]
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 2))
    result = fg.gradeval.evaluate(net, torch.randn(5, 2), fg.CrossEntropy(torch.arange(5) % 2), estimators, samples=200)
    score, ours = (result.estimators[name].layers[0].rmse[0] for name in estimators)
    assert score == pytest.approx(ours, rel=0.3)


def test_the_command_line_trains_and_goes_on_with_it(capsys):
    name = f"{MODULE}:Mix"
    code, out, err = flipgrad(capsys, "train", *QUICK, "--estimator", name)
    assert (code, err) == (0, "")
    assert "with Mix, 1 epoch" in out
    assert flipgrad(capsys, "train", "--resume", "run", "--epochs", "2", "--estimator", name)[0] == 0
    assert flipgrad(capsys, "evaluate", "run", "--estimator", name)[0] == 0


def test_a_file_alone_runs_no_code(capsys, tmp_path):
    assert flipgrad(capsys, "train", *QUICK, "--estimator", f"{MODULE}:Mix")[0] == 0
    sys.modules.pop(MODULE)
    (tmp_path / "imported").unlink()
    for words in (("evaluate", "run"), ("train", "--resume", "run", "--epochs", "2")):
        code, _, err = flipgrad(capsys, *words)
        assert code == 2
        assert f"names your own code '{MODULE}:Mix' as the estimator" in err
        assert f"if you trust it, add --estimator {MODULE}:Mix (in Python" in err
        assert "a run keeps its own" in flipgrad(capsys, *words, "--estimator", "psa")[2]
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MODULE}:nothing", "what --estimator .*:nothing' gives: got int; give estimators, e.g. fg.PSA()"),
        (f"{MODULE}:failing", "--estimator .*:failing': ValueError: not today"),
        (f"{MODULE}:Absent", "--estimator .*:Absent': AttributeError"),
        ("nowhere:Mix", "--estimator 'nowhere:Mix': ModuleNotFoundError: No module named 'nowhere'"),
        ("psa:absent", "unknown estimator 'psa:absent'; .* or package.module:Name"),
    ],
)
def test_mistakes_are_one_line(name, message, capsys):
    with pytest.raises(fg.InputError, match=message):
        for_training(name, 1)
    code, _, err = flipgrad(capsys, "train", *QUICK, "--estimator", name)
    assert code == 2
    assert err.count("\n") == 1
