"""GumbelRao against its formula on a fixed draw, its conditional noise, and its limit ZGR."""

from __future__ import annotations

import pytest
import torch
from local_checks import NAMES, assert_is, literal, seeded, straight

import flipgrad as fg
import reference
from flipgrad.contract import LayerCall
from flipgrad.estimators._draws import conditional
from flipgrad.native import library, sampling
from flipgrad.sampling import Stream, fresh
from reference import build, chain

compiled = pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")


def states(samples, t):
    """Every term: the noise uniform in cdf below or above F(a), and the slope of the concrete unit at it."""

    def rule(node, a, z, generator):
        x, total = reference.states(a, z), torch.zeros_like(a)
        for base in node.layer.noise.sample((samples, *a.shape), generator=generator, dtype=a.dtype):
            u, p = node.F(base), node.F(a).detach()
            z_k = node.layer.noise.icdf(torch.where(x > 0, u * p, 1 - u * (1 - p)))
            s = 1 / (1 + torch.exp(-(a.detach() - z_k) / t))
            total += 2 * s * (1 - s) / t
        return straight(x, total / samples, a)

    return rule


@pytest.mark.parametrize(("samples", "t"), [(1, 1.0), (4, 0.5)])
@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula(name, noise, samples, t):
    net, x, objective = build(name, noise)
    outputs = literal(chain(net), x, seeded(), states(samples, t))
    assert_is(fg.GumbelRao(samples, t), net, x, objective, objective(outputs))


NOISES = pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5), fg.Laplace(0.8), fg.Uniform(2.0)], ids=str)


@NOISES
def test_conditional_noise_has_its_distribution(noise):
    """Kolmogorov-Smirnov: 3 / sqrt(n) is exceeded by chance once in 10^7; both sides of two pre-activations off 0."""
    n = 20000
    for a in (-0.7, 1.1):
        for x in (-1.0, 1.0):
            pre, state = torch.tensor(a).double(), torch.tensor(x).double()
            z = conditional(noise, pre, state, noise.sample((n,), generator=seeded(), dtype=torch.float64)).sort().values
            assert bool(((pre - z) * x >= 0).all())
            p = noise.cdf(pre)
            cdf = noise.cdf(z) / p if x > 0 else (noise.cdf(z) - p) / (1 - p)
            assert (cdf - (torch.arange(n).double() + 0.5) / n).abs().max() < 3 / n**0.5


@NOISES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conditional_noise_is_finite_and_on_its_side_in_the_tails(noise, dtype):
    a = torch.tensor([-1e4, -300.0, -30.0, -3.0, 0.0, 3.0, 30.0, 300.0, 1e4], dtype=dtype)
    z = noise.sample((1000, 9), generator=seeded(), dtype=dtype)
    for x in (torch.ones_like(a), -torch.ones_like(a)):
        drawn = conditional(noise, a, x, z)
        assert bool(torch.isfinite(drawn).all())
        assert bool(((a - drawn) * x >= 0).all())


def test_tails_keep_their_precision():
    """Given an almost certain state noise is hardly restricted: it must reach as far out in float32 as in float64."""
    z = torch.tensor([-60.0, -20.0, 5.0, 15.0])
    for x in (1.0, -1.0):
        drawn = conditional(fg.Logistic(), torch.tensor(100.0 * x), torch.tensor(x), z)
        torch.testing.assert_close(drawn, x * z, rtol=1e-5, atol=0)


@NOISES
def test_is_zgr_in_the_limit(noise):
    """The mean slope at a small temperature for 12 units, within 5 standard errors and 5 % for the temperature."""
    samples, t = 200_000, 0.02
    layer = reference.randomized(fg.BinaryLinear(3, 12, noise=noise), scale=0.4)
    x, _ = reference.batch((1, 3))

    def slope(estimator):
        return torch.autograd.grad(layer(x, estimator=estimator, generator=seeded()).sum(), layer.bias)[0]

    limit = slope(fg.ZGR())
    # A slope is between 0 and 1 / (2t), so its variance is at most its mean / (2t).
    error = 5 * (limit / (2 * t) / samples).sqrt() + 0.05 * limit
    assert bool(((slope(fg.GumbelRao(samples, t)) - limit).abs() < error).all())
    assert bool((error < 0.5 * limit).all())


def test_more_samples_have_less_variance():
    layer = reference.randomized(fg.BinaryLinear(1, 1))
    x = torch.ones(4000, 1, dtype=torch.float64).requires_grad_()
    spread = {}
    for samples in (1, 20):
        states = layer(x, estimator=fg.GumbelRao(samples, 0.3), generator=seeded())
        spread[samples] = torch.autograd.grad(states.sum(), x)[0].var()
    assert spread[20] < 0.5 * spread[1]


def slopes_and_states(estimator, noise, bias, draw):
    """20,000 independent slopes in the pre-activation ``bias``, and the states they were drawn for."""
    layer = fg.BinaryLinear(1, 1, bias=False, noise=noise)
    torch.nn.init.ones_(layer.weight)
    x = torch.full((20_000, 1), bias, requires_grad=True)
    call = LayerCall(layer, x, False, (), draw)
    states = estimator.states(call)
    return torch.autograd.grad(states.sum(), x)[0].double(), states.detach()


@compiled
@pytest.mark.parametrize("source", [lambda: fresh(seeded()), lambda: Stream(3)], ids=["fresh", "stream"])
@pytest.mark.parametrize(("scale", "t"), [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("bias", [-1.2, 0.0, 4.0])
def test_compiled_slopes_have_the_distribution_of_the_formula(bias, scale, t, source, monkeypatch):
    """Means and mean squares for either state, each within 5 standard errors: 48 comparisons, a false alarm once in 30,000."""
    noise, estimator, kernel, calls = fg.Logistic(scale), fg.GumbelRao(3, t), sampling.mean_slopes, []
    monkeypatch.setattr(sampling, "mean_slopes", lambda *arguments: (calls.append(1), kernel(*arguments))[1])
    fast = slopes_and_states(estimator, noise, bias, source())
    assert calls
    monkeypatch.setattr(library, "_library", None)
    slow = slopes_and_states(estimator, noise, bias, source())
    assert len(calls) == 1
    for x in (1.0, -1.0):
        one, other = (slopes[states == x] for slopes, states in (fast, slow))
        assert min(len(one), len(other)) > 100
        for power in (1, 2):
            a, b = one**power, other**power
            assert (a.mean() - b.mean()).abs() < 5 * (a.var() / len(a) + b.var() / len(b)).sqrt()


def test_float64_and_other_noises_do_without_compiled_code(monkeypatch):
    monkeypatch.setattr(sampling, "mean_slopes", None)
    for dtype, noise in ((torch.float64, fg.Logistic()), (torch.float32, fg.Normal())):
        layer = fg.BinaryLinear(2, 1000, noise=noise).to(dtype)
        layer(torch.ones(1, 2, dtype=dtype), estimator=fg.GumbelRao(), generator=seeded()).sum().backward()


@compiled
def test_the_generator_decides_on_compiled_slopes():
    layer, x = fg.BinaryLinear(2, 1000), torch.ones(1, 2)

    def gradient(seed):
        return torch.autograd.grad(layer(x, estimator=fg.GumbelRao(), generator=seeded(seed)).sum(), layer.bias)[0]

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


def test_refuses_handed_in_noise():
    layer = fg.BinaryLinear(2, 3)
    net = fg.Sequential(layer, head=torch.nn.Linear(3, 2))
    z = torch.zeros(1, 3)
    message = "noise: GumbelRao draws more than every layer's Z, so it cannot replay handed-in noise; pass a seeded generator"
    with pytest.raises(fg.InputError, match=message):
        net(torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])), estimator=fg.GumbelRao(), noise=[z])
    with pytest.raises(fg.InputError, match=message):
        layer(torch.zeros(1, 2), estimator=fg.GumbelRao(), noise=z)


@pytest.mark.parametrize("samples", [0, -1, 2.5])
def test_refuses_bad_sample_counts(samples):
    with pytest.raises(fg.InputError, match=rf"GumbelRao\(samples={samples}\): .* must be a whole number above 0"):
        fg.GumbelRao(samples)


def test_refuses_bad_temperatures():
    with pytest.raises(fg.InputError, match=r"GumbelRao\(t=0\.0\): the temperature must be positive"):
        fg.GumbelRao(t=0.0)
