"""The statistics recover what is known: draws with a given bias and variance."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from flipgrad.gradeval.statistics import Tally, sample_grid

LAYERS = {"layer 1": slice(0, 3), "layer 2": slice(3, 10), "all": slice(0, 10)}


def tally(reference: torch.Tensor, draws: torch.Tensor, portions: int = 1) -> Tally:
    result = Tally(reference, LAYERS, len(draws))
    for portion in draws.tensor_split(portions):
        result.add(portion)
    return result


def synthetic(samples: int, offset: float, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(10, dtype=torch.float64, generator=generator)
    return reference, reference + offset + spread * torch.randn(samples, 10, dtype=torch.float64, generator=generator)


def test_known_bias_and_variance_are_recovered():
    """Per layer of n numbers and length g: bias offset sqrt(n) / g, std spread sqrt(n) / g, RMSE^2 = bias^2 + std^2 / M."""
    reference, draws = synthetic(20_000, 0.05, 1.5)
    for accuracy, part in zip(tally(reference, draws).accuracies(), LAYERS.values(), strict=True):
        n, length = part.stop - part.start, reference[part].norm().item()
        bias, std = 0.05 * math.sqrt(n) / length, 1.5 * math.sqrt(n) / length
        assert accuracy.parameters == n
        # Twice the 95 % intervals, for six of them: about four standard errors.
        assert abs(accuracy.bias - bias) <= accuracy.bias_high - accuracy.bias_low
        assert abs(accuracy.std - std) <= accuracy.std_high - accuracy.std_low
        # Four standard errors of a mean of squares: chi-squared with n T / M degrees of freedom.
        for m, rmse in zip(accuracy.samples, accuracy.rmse, strict=True):
            expected = bias**2 + std**2 / m
            assert rmse**2 == pytest.approx(expected, rel=4 * math.sqrt(2 / (n * (20_000 / m))))


def test_cosines_are_those_of_group_means():
    reference, draws = synthetic(40, 0.3, 1.0)
    (_, _, accuracy) = tally(reference, draws).accuracies()
    for i, m in enumerate(accuracy.samples):
        means = draws.view(-1, m, 10).mean(1)
        cosines = torch.nn.functional.cosine_similarity(means, reference[None], 1)
        assert accuracy.cosine_mean[i] == pytest.approx(cosines.mean().item())
        assert accuracy.cosine_low[i] == pytest.approx(cosines.quantile(0.15).item())
        assert accuracy.cosine_high[i] == pytest.approx(cosines.quantile(0.85).item())
        assert accuracy.rmse[i] == pytest.approx(((means - reference).square().sum(1).mean().sqrt() / reference.norm()).item())


@pytest.mark.parametrize("portions", [2, 7, 100])
def test_portions_do_not_matter(portions):
    reference, draws = synthetic(100, 0.3, 1.0)
    whole, parts = tally(reference, draws), tally(reference, draws, portions)
    for one, other in zip(whole.accuracies(), parts.accuracies(), strict=True):
        assert one.rmse == pytest.approx(other.rmse)
        assert one.cosine_low == pytest.approx(other.cosine_low)
        assert (one.bias, one.std, one.bias_high, one.std_low) == pytest.approx(
            (other.bias, other.std, other.bias_high, other.std_low)
        )
    assert torch.allclose(parts.mean(), draws.mean(0))
    expected = [draws[:, part].var(0).sum().item() for part in LAYERS.values()]
    assert parts.variances() == pytest.approx(expected)


def test_unbiased_draws_have_an_interval_that_reaches_zero():
    """And a bias whose square is 0 on average, unlike the squared error of the mean, which holds its variance."""
    squares, naive = [], []
    for seed in range(40):
        reference, draws = synthetic(1000, 0.0, 1.0, seed)
        (_, _, accuracy) = tally(reference, draws).accuracies()
        squares.append(accuracy.bias**2)
        naive.append((draws.mean(0) - reference).norm().item() ** 2 / reference.norm().item() ** 2)
    assert sum(squares) < 0.5 * sum(naive)


def test_intervals_cover_as_often_as_they_say():
    """95 % of 300 intervals, within four standard errors of a binomial."""
    trials, covered = 300, {"bias": 0, "std": 0}
    for seed in range(trials):
        reference, draws = synthetic(200, 0.4, 1.0, seed)
        (_, _, accuracy) = tally(reference, draws).accuracies()
        length = reference.norm().item()
        covered["bias"] += accuracy.bias_low <= 0.4 * math.sqrt(10) / length <= accuracy.bias_high
        covered["std"] += accuracy.std_low <= math.sqrt(10) / length <= accuracy.std_high
    margin = 4 * math.sqrt(0.95 * 0.05 / trials)
    for name, count in covered.items():
        assert count / trials > 0.95 - margin, name
        assert stats.binom.cdf(count, trials, 0.995) < 1 - 1e-9, name


def test_a_deterministic_estimator_has_no_spread():
    reference, _ = synthetic(1, 0, 0)
    constant = (reference * 1.5).expand(50, 10)
    (_, _, accuracy) = tally(reference, constant).accuracies()
    assert accuracy.rmse == pytest.approx([0.5] * len(accuracy.samples))
    assert (accuracy.bias, accuracy.bias_low, accuracy.bias_high) == pytest.approx((0.5, 0.5, 0.5))
    assert accuracy.std == pytest.approx(0, abs=1e-7)
    assert accuracy.cosine_mean == pytest.approx([1.0] * len(accuracy.samples))


def test_an_estimate_of_zero_has_cosine_zero():
    reference, _ = synthetic(1, 0, 0)
    (accuracy, *_) = tally(reference, torch.zeros(20, 10)).accuracies()
    assert accuracy.cosine_mean[0] == 0
    assert accuracy.rmse[0] == pytest.approx(1)


def test_grid_is_logarithmic_and_leaves_ten_groups():
    assert sample_grid(10_000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert sample_grid(10) == [1]
    assert sample_grid(99) == [1, 2, 5]
