import pytest
import torch
from torch import nn
from unbiasedness import (
    assert_less_variance,
    assert_unbiased,
    random_net,
)

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators._paths import Path
from flipgrad.estimators.arms import correlation
from flipgrad.sampling import fresh


@pytest.mark.parametrize("samples", [2, 5])
def test_unbiased_with_any_number_of_samples(samples):
    assert_unbiased(*random_net((3, 4), fg.Logistic()), fg.ARMS(samples), draws=4000 // samples)


@pytest.mark.parametrize("noise", [fg.Laplace(), fg.Uniform(1.5)], ids=["laplace", "uniform"])
def test_unbiased_with_other_noise(noise):
    assert_unbiased(*random_net((3, 4), noise), fg.ARMS(), draws=900)


@pytest.mark.parametrize("samples", [2, 3, 4, 6])
def test_correlation_is_that_of_a_simulated_copula(samples):
    """Against a Dirichlet sampler of another origin; 5 standard errors."""
    draws = 200_000
    d = torch.distributions.Dirichlet(torch.ones(samples, dtype=torch.float64)).sample((draws,))
    u = (1 - d[:, :2]) ** (samples - 1)
    for q in (0.02, 0.1, 0.25, 0.4, 0.5):
        first, second = (u < q).double().T
        product = (first - q) * (second - q) / (q * (1 - q))
        error = product.std() / draws**0.5
        expected = correlation(torch.tensor(q, dtype=torch.float64), samples)
        assert (product.mean() - expected).abs() < 5 * error + 1e-12
        assert 5 * error < 0.05
        assert expected < 0


def test_correlation_is_that_of_the_states_used(monkeypatch):
    """Means m(a), and the stated correlation, of units with probabilities on both sides of one half."""
    net, x, y = random_net((4,), fg.Logistic())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.copy_(torch.tensor([-3.0, -0.5, 0.3, 2.0]))
    seen = []
    tail = Path.tail
    monkeypatch.setattr(Path, "tail", lambda self, k, states: (seen.append(states), tail(self, k, states))[1])
    n = 100_000
    path = Path.sample(
        net.network(), Batch(x.expand(n, 2), fg.CrossEntropy(y.expand(n)), fresh(torch.Generator().manual_seed(0)))
    )
    fg.ARMS(3).gradients(path)
    a = path.a[0][0].detach()
    m, rho = torch.tanh(a / 2), correlation(torch.sigmoid(-a.abs()), 3)
    assert len(seen) == 3
    for i in range(3):
        assert bool(((seen[i].mean(0) - m).abs() < 5 * seen[i].std(0) / n**0.5).all())
        product = (seen[i] - m) * (seen[i - 1] - m) / (1 - m**2)
        assert bool(((product.mean(0) - rho).abs() < 5 * product.std(0) / n**0.5).all())


def test_two_samples_are_disarm():
    """The same mean and variance of every gradient: 5 standard errors, and ratios within 5 %, from 100,000 draws each."""
    net, x, y = random_net((3, 4), fg.Logistic())
    # Single draws: the gradient of every example in the pre-activations.
    moments = {}
    for estimator in (fg.ARMS(2), fg.DisARM()):
        generator = torch.Generator().manual_seed(1)
        n = 100_000
        path = Path.sample(net.network(), Batch(x.expand(n, 2), fg.CrossEntropy(y.expand(n)), fresh(generator)))
        g = torch.cat([g.flatten(1) for g in estimator.gradients(path)], 1)
        moments[type(estimator)] = g.mean(0), g.var(0)
    (mean, variance), (other, disarm) = moments.values()
    assert bool(((mean - other).abs() < 5 * ((variance + disarm) / n).sqrt()).all())
    assert bool(((variance / disarm - 1).abs() < 0.05).all())


def test_more_samples_have_less_variance_than_as_many_pairs():
    """Four antithetic samples against the average of two draws of DisARM: what the copula is for."""
    assert_less_variance(*random_net((4,), fg.Logistic(), seed=1), fg.ARMS(4), fg.DisARM(), ratio=0.5)


def test_stays_finite_in_saturated_nets():
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1e4)
    net(torch.randn(50, 2), fg.CrossEntropy(torch.zeros(50, dtype=torch.long)), estimator=fg.ARMS()).sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in net.parameters())


def test_refuses_one_sample():
    with pytest.raises(fg.InputError, match=r"ARMS\(samples=1\): at least two"):
        fg.ARMS(1)


def test_facts():
    assert fg.ARMS.unbiased
    assert fg.ARMS(5).passes(3) == 16
