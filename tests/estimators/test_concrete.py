"""Concrete against its formula, and its limit."""

from __future__ import annotations

import pytest
import torch
from local_checks import NAMES, assert_is, literal, seeded

import flipgrad as fg
import reference
from reference import batch, build, chain, fully_connected, noise_like


@pytest.mark.parametrize("t", [1.0, 0.3])
@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula(name, noise, t):
    net, x, objective = build(name, noise)
    outputs = literal(chain(net), x, seeded(), lambda node, a, z, _: 2 / (1 + torch.exp((z - a) / t)) - 1)
    assert_is(fg.Concrete(t), net, x, objective, objective(outputs))


def test_default_temperature_is_1():
    assert fg.Concrete().t == 1


@pytest.mark.parametrize("noise", reference.NOISES)
def test_approaches_the_sampled_net(noise):
    net = fully_connected(2, 4, 4, 3, noise=reference.NOISES[noise])
    x, objective = batch((20, 2))
    z = noise_like(chain(net), x)
    sampled = objective(chain(net).outputs(reference.sample(chain(net), x, z)))
    far, near, limit = (
        (net(x, objective, estimator=fg.Concrete(t), noise=z) - sampled).abs().mean() for t in (1.0, 0.05, 1e-6)
    )
    assert far > 2 * near
    assert near > limit
    assert limit < 1e-8


def test_is_the_binary_concrete_distribution_for_logistic_noise():
    """Its cdf at s in (0, 1) is that of the logistic noise: P(y <= s) = F(t logit(s) - a).

    A false alarm is 5 standard errors of a frequency, once in 10^6.
    """
    layer = fg.BinaryLinear(1, 1, bias=False).double()
    torch.nn.init.constant_(layer.weight, 0.6)
    y = (layer(torch.ones(20000, 1, dtype=torch.float64), estimator=fg.Concrete(0.5), generator=seeded()) + 1) / 2
    for s in (0.1, 0.5, 0.8):
        p = torch.sigmoid(0.5 * torch.logit(torch.tensor(s)) - 0.6).item()
        assert abs((y <= s).double().mean().item() - p) < 5 * (p * (1 - p) / 20000) ** 0.5


@pytest.mark.parametrize("t", [0.0, -1.0, float("inf"), float("nan")])
def test_refuses_bad_temperatures(t):
    with pytest.raises(fg.InputError, match=rf"Concrete\(t={t}\): the temperature must be positive and finite, e\.g\. 1\.0"):
        fg.Concrete(t)
