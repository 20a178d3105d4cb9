"""Benchmarks run, and give no number for a wrong result. They are not timed here."""

from __future__ import annotations

import torch

import flipgrad as fg
from flipgrad.benchmarks.gradeval import _agrees, _rate
from flipgrad.data import toy
from flipgrad.gradeval.draws import Problem, Sampler
from flipgrad.training.models import fully_connected


def sampler(estimator: fg.Estimator) -> Sampler:
    data = toy(10).train
    torch.manual_seed(0)
    net = fully_connected(2, [3, 3], 2)
    return Sampler(Problem(net, data.x, fg.CrossEntropy(data.y)), estimator, [0], 1)


def test_right_draws_get_a_rate():
    right = sampler(fg.ST())
    assert _agrees(right)
    assert _rate(right, 50) > 0


def test_wrong_draws_are_noticed(monkeypatch):
    wrong = sampler(fg.ST())
    draws = wrong.draws

    def shifted(samples: int):
        for some in draws(samples):
            yield 2 * some

    monkeypatch.setattr(wrong, "draws", shifted)
    assert not _agrees(wrong)
