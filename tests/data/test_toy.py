"""The toy problem is the paper's."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from flipgrad.data import toy
from flipgrad.errors import InputError


def test_points_are_where_the_paper_puts_them():
    x, y = toy(2000, seed=1).train.x, toy(2000, seed=1).train.y
    assert (x[:, 0].abs() <= math.pi / 2).all()
    above, below = x[y == 0], x[y == 1]
    assert len(above) == len(below) == 2000
    assert ((above[:, 1] >= 0) & (above[:, 1] <= 1)).all()
    assert ((below[:, 1] >= -1) & (below[:, 1] <= below[:, 0].cos())).all()


def test_points_are_uniform():
    """Kolmogorov-Smirnov, false alarm one in a thousand: of y above, and of x below, whose density is 1 + cos x."""
    x, y = toy(2000, seed=1).train.x, toy(2000, seed=1).train.y
    assert stats.kstest(x[y == 0][:, 1].numpy(), "uniform").pvalue > 1e-3
    area = math.pi + 2

    def cdf(t):
        return (t + math.pi / 2 + torch.tensor(t).sin().numpy() + 1) / area

    assert stats.kstest(x[y == 1][:, 0].numpy(), cdf).pvalue > 1e-3
    assert stats.kstest(x[y == 1][:, 0].numpy(), lambda t: (t + math.pi / 2) / math.pi).pvalue < 1e-3


def test_seed_and_split():
    one, same, other = toy(seed=1), toy(seed=1), toy(seed=2)
    assert torch.equal(one.train.x, same.train.x)
    assert not torch.equal(one.train.x, other.train.x)
    assert not torch.equal(one.train.x, one.test.x)
    assert (one.name, one.classes, len(one.train), len(one.test)) == ("toy", 2, 200, 200)


def test_no_points_are_refused():
    with pytest.raises(InputError, match="at least one point per class"):
        toy(0)
