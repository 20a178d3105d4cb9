"""The search of the learning rate: on functions whose minimum is known, resumed, where training diverges, and in earnest."""

from __future__ import annotations

import json
import math

import pytest
import torch

import flipgrad as fg
from flipgrad.data import toy
from flipgrad.training.models import fully_connected
from flipgrad.training.search import Trial, running_mean, search_rate

# Ten evaluations of a golden-section search leave 0.618^9 of the 6 decades; Brent's method is seldom worse.
GOLDEN = 6 * (math.sqrt(5) / 2 - 0.5) ** 9

decades = pytest.mark.parametrize("best", [-5.8, -4.0, -2.5, -1.0, -0.3])


def error(search, best):
    return abs(math.log10(search.rate) - best)


@decades
def test_finds_the_minimum_of_a_parabola(best):
    search = search_rate(lambda rate: 3 + (math.log10(rate) - best) ** 2)
    assert error(search, best) < 1e-6
    assert search.objective == pytest.approx(3)
    # A parabola is known after three points; the rest make sure.
    assert len(search.trials) < 10


@decades
def test_finds_the_minimum_of_a_kink(best):
    search = search_rate(lambda rate: abs(math.log10(rate) - best))
    assert error(search, best) < GOLDEN
    assert len(search.trials) <= 10


@decades
@pytest.mark.parametrize("failure", [math.inf, math.nan, -math.inf, 1e305])
def test_goes_to_the_edge_of_divergence(best, failure):
    """The objective falls with the rate until training diverges: also where the first trials all do."""
    search = search_rate(lambda rate: -math.log10(rate) if math.log10(rate) < best else failure)
    assert math.log10(search.rate) < best
    assert error(search, best) < GOLDEN
    assert any(trial.diverged for trial in search.trials)
    assert all(trial.objective == math.inf for trial in search.trials if math.log10(trial.rate) >= best)


def test_goes_down_as_long_as_everything_diverges():
    rates = []

    def trial(rate):
        rates.append(rate)
        return math.inf

    with pytest.raises(fg.InputError):
        search_rate(trial)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 1.2e-6


def test_stays_on_a_plateau_away_from_divergence():
    """At low rates nothing changes, then training improves a little, then it diverges."""

    def trial(rate):
        return math.inf if rate > 3e-2 else 2.3 - 0.5 / (1 + (1e-3 / rate) ** 2)

    search = search_rate(trial)
    assert 3e-3 < search.rate < 3e-2
    assert search.objective < 1.9


def test_an_exception_is_divergence_if_it_is_said_to_be():
    def trial(rate):
        if rate > 1e-3:
            raise FloatingPointError
        return -rate

    search = search_rate(trial, divergence=FloatingPointError)
    assert 5e-4 < search.rate < 1e-3
    with pytest.raises(FloatingPointError):
        search_rate(trial)


def test_takes_the_first_of_equals_and_the_given_range():
    search = search_rate(lambda rate: 1.0, lowest=1e-3, highest=1e-1, trials=4)
    assert search.rate == search.trials[0].rate
    assert len(search.trials) == 4
    assert all(1e-3 < trial.rate < 1e-1 for trial in search.trials)


def bumpy(rate):
    """A noisy objective, which diverges at high rates."""
    return math.inf if rate > 0.1 else abs(math.log10(rate) + 2.2) + 0.1 * math.sin(1e4 * rate)


@pytest.mark.parametrize("interrupted", range(9))
def test_a_resumed_search_is_the_uninterrupted_one(interrupted):
    whole = search_rate(bumpy)
    assert len(whole.trials) == 8
    stored: list[dict[str, float | None]] = []
    ran = []

    def trial(rate):
        if len(ran) == interrupted:
            raise KeyboardInterrupt
        ran.append(rate)
        return bumpy(rate)

    def store(made):
        stored.append(json.loads(json.dumps(made.as_json(), allow_nan=False)))

    if interrupted < len(whole.trials):
        with pytest.raises(KeyboardInterrupt):
            search_rate(trial, report=store)
    else:
        search_rate(trial, report=store)
    assert len(stored) == interrupted
    done = [Trial.from_json(value) for value in stored]
    later: list[Trial] = []
    assert search_rate(bumpy, done=done, report=later.append) == whole
    assert tuple(done + later) == whole.trials


def test_trials_are_stored_as_json():
    trials = [Trial(0.1, 0.5), Trial(1.0, math.inf)]
    stored = json.loads(json.dumps([trial.as_json() for trial in trials], allow_nan=False))
    assert stored == [{"rate": 0.1, "objective": 0.5}, {"rate": 1.0, "objective": None}]


def test_trials_of_another_search_are_refused():
    done = search_rate(bumpy, highest=0.5).trials[:3]
    with pytest.raises(fg.InputError, match=r"another search: there the rate was 0\.00015.* resume with the same range"):
        search_rate(bumpy, done=done)


def test_a_trial_without_a_rate_is_refused():
    with pytest.raises(fg.InputError, match=r"needs its 'rate' and 'objective', got \{'objective': 1.0\}"):
        Trial.from_json({"objective": 1.0})


def test_divergence_everywhere_is_reported_with_advice():
    with pytest.raises(fg.InputError, match=r"all 10 trials .* diverged, down to 1.1e-06; search lower rates than 1e-06"):
        search_rate(lambda rate: math.nan)


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (1.0, 0.1), (-1.0, 1.0), (1e-3, math.inf), (math.nan, 1.0)])
def test_bad_ranges_are_refused(lowest, highest):
    with pytest.raises(fg.InputError, match="give 0 < lowest < highest"):
        search_rate(bumpy, lowest=lowest, highest=highest)


def test_too_few_trials_are_refused():
    with pytest.raises(fg.InputError, match=r"trials=1: .* at least 2"):
        search_rate(bumpy, trials=1)


def test_the_running_mean_is_the_exponentially_weighted_average():
    values = [3.0, -1.0, 4.0, 1.5, 9.0]
    weights = [0.75**k for k in range(4, -1, -1)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert running_mean(values, window=4) == pytest.approx(mean)


def test_the_running_mean_starts_without_a_value_and_forgets():
    assert math.isnan(running_mean([], window=1))
    assert running_mean([5.0], window=1) == 5.0
    assert running_mean([5.0, 2.0], window=1) == 2.0
    assert running_mean([5.0, 2.0, math.inf], window=1) == math.inf


@pytest.mark.parametrize("window", [0, 0.5, math.inf, math.nan])
def test_a_bad_window_is_refused(window):
    with pytest.raises(fg.InputError, match="give the number of values to remember, at least 1"):
        running_mean([1.0], window=window)


def trial_on_toy(rate):
    """Trains 5 epochs on the toy problem from the same initial weights, in the same order with the same noise."""
    data = toy(300).train
    torch.manual_seed(0)
    net = fully_connected(2, [5, 5], 2)
    net.initialize(data.x, moments=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, nesterov=True, fused=True)
    losses = []
    for _ in range(5):
        for batch in data.batches(50, generator=generator):
            loss = net(batch.x, fg.CrossEntropy(batch.y), estimator=fg.PSA(), generator=generator).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return running_mean(losses, window=12)


def test_finds_a_rate_that_trains():
    search = search_rate(trial_on_toy)
    # One epoch's average of the loss has a standard error of about 0.4 / sqrt(600).
    assert search.objective < min(trial_on_toy(10.0**power) for power in (-3, -2, -1)) + 3 * 0.4 / 600**0.5
    assert search.objective < 0.85 * trial_on_toy(1e-4)
    assert search.objective == trial_on_toy(search.rate)
