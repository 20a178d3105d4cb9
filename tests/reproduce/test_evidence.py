"""Intervals over seeds, verdicts that may be open, and since when something is so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flipgrad.plots.learning import Training
from flipgrad.reproduce._evidence import Evidence, at_the_end, every, log_ratio, pairs, percent, seed_mean, since


def run(seed: int, losses: list[float | None], key: str = "loss") -> Training:
    return Training("ST", "none", False, False, False, 0.1, [], None, {key: losses}, 1.0, seed)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_interval_is_students(count):
    values = np.random.default_rng(count).normal(1.0, 0.3, count)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert Evidence(tuple(values)).interval == pytest.approx((low, high))


def test_the_interval_holds_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(0.0, 1.0, (2000, 3))
    low, high = np.array([Evidence(tuple(row)).interval for row in draws]).T
    # Five standard errors of the share: a false alarm in 2 million seeds.
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / len(draws)))


def test_a_verdict_is_open_where_the_interval_is_on_both_sides():
    sure, unsure = Evidence((0.1, 0.11, 0.12)), Evidence((-0.1, 0.1, 0.3))
    assert (sure.above(0.05), sure.above(0.2), unsure.above(0.0)) == (True, False, None)
    assert (sure.below(0.2), sure.below(0.05), unsure.below(0.0)) == (True, False, None)
    assert (sure.within(0.2), sure.within(0.05), unsure.within(0.2)) == (True, False, None)
    assert every([]) is True


def test_one_seed_is_called_one_seed_and_none_no_numbers():
    assert Evidence((math.log(1.1),)).told(percent) == "+10.0% (one seed)"
    assert Evidence((0.1,)).above(0.0) is True
    assert Evidence(()).told(percent) == "no numbers"
    assert Evidence(()).above(0.0) is None
    assert math.isnan(Evidence(()).mean)


def test_trainings_are_paired_by_their_seed_and_compared_as_far_as_both_go():
    some, others = [run(0, [2.0, 1.0]), run(2, [3.0, 2.0, 1.0])], [run(2, [6.0, 1.0]), run(1, [1.0])]
    ((one, other),) = pairs(some, others)
    assert (one.seed, other.seed) == (2, 2)
    np.testing.assert_allclose(log_ratio(one, "loss", other, "loss"), np.log([0.5, 2.0]))


@pytest.mark.parametrize(
    ("losses", "plateau", "left"),
    [
        ([2.4, 1.5, 2.35, 1.4], 3, [1.4]),
        ([2.2, 2.1], 0, [2.2, 2.1]),
        # One per cent below guessing is nothing learnt.
        ([2.4, 2.29], None, []),
        # What comes after a number that is none does not count.
        ([2.4, 2.0, None, 2.4], 1, [2.0, None, 2.4]),
        ([], None, []),
    ],
)
def test_a_plateau_is_at_the_loss_of_guessing(losses, plateau, left):
    training = run(0, losses, "train_loss")
    assert training.plateau == plateau
    assert training.after_plateau.curves == {"train_loss": left}


def test_the_end_is_the_last_fifth_and_curves_without_an_epoch_are_left_out():
    found = at_the_end([np.arange(10.0), np.empty(0), np.array([5.0])])
    assert found.values == (8.5, 5.0)
    assert len(seed_mean([])) == 0
    np.testing.assert_allclose(seed_mean([np.array([1.0, 3.0]), np.array([3.0, 5.0, 9.0])]), [2.0, 4.0])


def test_since_when():
    curves = [np.array([5.0, 4.0, 3.0, 2.0, 1.0]), np.array([5.0, 4.0, 3.0, 2.0, 1.0])]
    assert since(curves, lambda value: value < 2.5) == ", from epoch 4 on"
    assert since(curves, lambda value: value < 9) == ", in every epoch"
    assert since(curves, lambda value: value > 2.5) == ""
    assert since([], lambda value: True) == ""
