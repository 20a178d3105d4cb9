"""LocalReparam against its formula on a fixed draw, and against Gaussian integrals in the mean."""

from __future__ import annotations

import moments_reference
import pytest
import torch
from local_checks import NAMES, assert_is, seeded

import flipgrad as fg
import reference
from reference import assert_same, build, chain, concatenated, randomized


def unit(node, mu, v, generator):
    return 2 * node.F(moments_reference.normal(mu, v, generator)) - 1


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    outputs = moments_reference.outputs(chain(net), x, seeded(), unit)
    assert_is(fg.LocalReparam(), net, x, objective, objective(outputs))


def test_is_its_formula_with_branches():
    net, graph, x, objective = concatenated("mixed")
    outputs = moments_reference.outputs(graph, x.requires_grad_(), seeded(), unit)
    assert_is(fg.LocalReparam(), net, x, objective, objective(outputs))


def gaussian_mean(function, mu, v):
    """The mean of ``function`` over N(mu, v), by the trapezoidal rule up to 9 standard deviations."""
    epsilon = torch.linspace(-9, 9, 4001, dtype=mu.dtype)
    weight = torch.exp(-(epsilon**2) / 2)
    return (function(mu[..., None] + v.sqrt()[..., None] * epsilon) * weight).sum(-1) / weight.sum()


@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5), fg.Laplace(0.8)], ids=lambda noise: type(noise).__name__)
def test_mean_of_one_layer_is_the_gaussian_integral(noise):
    """6 units at 5 standard errors each: a false alarm in 10^5 seeds. Normal noise has the integral that ADF writes down."""
    layer = randomized(fg.BinaryLinear(4, 6, noise=noise))
    m = torch.tensor([[0.3, -0.9, 0.1, 0.6]], dtype=torch.float64)
    affine = layer.affine()
    expected = gaussian_mean(noise.mean_sign, affine(m), affine.variance(1 - m**2))[0]
    adf = layer(m, estimator=fg.ADF(), binary=True)[0]
    if isinstance(noise, fg.Normal):
        assert_same(adf, expected)
    elif isinstance(noise, fg.Logistic):
        assert (adf - expected).abs().max() < 0.03
    with torch.no_grad():
        draws = layer(m.expand(40000, 4), estimator=fg.LocalReparam(), binary=True, generator=seeded())
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - expected).abs() < 5 * error).all())
    # Tight enough to see that the variance counts.
    assert bool(((noise.mean_sign(affine(m))[0] - expected).abs() > 5 * error).any())


def test_first_layer_draws_nothing():
    layer = randomized(fg.BinaryLinear(2, 3))
    x = torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(layer(x, estimator=fg.LocalReparam()), layer(x, estimator=fg.Tanh()))
