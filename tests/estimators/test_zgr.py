"""ZGR against its formula, ST, ReinMax as its authors write it, and where it is unbiased."""

from __future__ import annotations

import pytest
import torch
from local_checks import NAMES, assert_is, literal, seeded, straight

import flipgrad as fg
import reference
from reference import assert_same, batch, build, chain, fully_connected, gradients, mean_gradient


def density(node, a):
    """F' of the node's noise, by automatic differentiation of the reference cdf."""
    leaf = a.detach().requires_grad_()
    return torch.autograd.grad(node.F(leaf).sum(), leaf)[0]


def weighted(weight):
    """States with the gradient weight(x, p(+1)) * 2F'(a)."""

    def states(node, a, z, _):
        x = reference.states(a, z)
        return straight(x, weight(x, node.F(a)) * 2 * density(node, a), a)

    return states


def at(lam):
    def weight(x, p):
        return (1 - lam) + lam * torch.where(x > 0, 1 / (2 * p), 1 / (2 * (1 - p)))

    return weight


def by_tau(tau):
    def weight(x, p):
        m = 2 * p - 1
        return at(2 * tau * (1 - m**2) / (1 + 2 * tau * (1 - m**2)))(x, p)

    return weight


CASES = {
    "1": (fg.ZGR(), at(1.0)),
    "0.3": (fg.ZGR(0.3), at(0.3)),
    "tau": (fg.ZGR(tau=0.7), by_tau(0.7)),
}


@pytest.mark.parametrize(("estimator", "weight"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula(name, noise, estimator, weight):
    net, x, objective = build(name, noise)
    assert_is(estimator, net, x, objective, objective(literal(chain(net), x, seeded(), weighted(weight))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_st_at_0(name, noise, dtype):
    net, x, objective = build(name, noise)
    net, x = net.to(dtype), x.to(dtype)
    losses = [net(x, objective, estimator=kind, generator=seeded()) for kind in (fg.ZGR(0.0), fg.ST())]
    assert torch.equal(*losses)
    zgr, st = (gradients(loss.sum(), net) for loss in losses)
    # Up to rounding.
    rounding = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(zgr, st, rtol=rounding, atol=rounding)


def test_is_reinmax():
    """Algorithm 2 of Liu et al. for two classes with logits (a, 0), at temperature 1, for the state 2 D - 1."""
    a = torch.linspace(-4, 4, 9, dtype=torch.float64).requires_grad_()
    for x in (1.0, -1.0):
        logits = torch.stack([a, torch.zeros_like(a)], -1)
        D = torch.tensor([1.0, 0.0] if x > 0 else [0.0, 1.0], dtype=a.dtype)
        pi_0 = torch.softmax(logits, -1)
        pi_1 = (D + pi_0) / 2
        pi_1 = torch.softmax((pi_1.log() - logits).detach() + logits, -1)
        pi_2 = 2 * pi_1 - pi_0 / 2
        reinmax = 2 * (pi_2 - pi_2.detach() + D)[..., 0] - 1
        layer = fg.BinaryLinear(1, 1, bias=False).double()
        torch.nn.init.ones_(layer.weight)
        states = layer(a[:, None], estimator=fg.ZGR(), noise=torch.tensor([-1e9 * x]))[:, 0]
        assert_same(states, reinmax)
        assert_same(*(torch.autograd.grad(s.sum(), a)[0] for s in (states, reinmax)))


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize(("estimator", "exact"), [(fg.ZGR(), True), (fg.ZGR(0.5), False), (fg.ST(), False)])
def test_is_unbiased_for_quadratics_in_one_layer(noise, estimator, exact):
    """Squared error of a linear head: quadratic in every unit, with products of units."""
    net = fully_connected(2, 4, 3, noise=reference.NOISES[noise])
    assert_bias(net, estimator, exact)


@pytest.mark.parametrize(
    ("widths", "noise", "exact"),
    [
        # One unit per layer, linear F: the expected loss given a unit is linear in it.
        ((2, 1, 1, 1, 3), fg.Uniform(30.0), True),
        # With a curved F it is not quadratic, and the mean of the slopes at both states is not the difference.
        ((2, 1, 1, 1, 3), fg.Logistic(), False),
    ],
    ids=["linear", "curved"],
)
def test_is_unbiased_with_one_unit_per_layer_where_the_rest_is_quadratic(widths, noise, exact):
    assert_bias(fully_connected(*widths, noise=[noise]), fg.ZGR(), exact)


def assert_bias(net, estimator, exact):
    x, _ = batch((2, 2))
    objective = fg.SquaredError(torch.randn(2, 3, dtype=x.dtype, generator=seeded()))
    truth = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    mean = mean_gradient(net, chain(net), x, objective, estimator)
    if exact:
        assert_same(mean, truth)
    else:
        assert (mean["0.weight"] - truth["0.weight"]).abs().max() > 1e-3


def test_tau_minimises_what_it_says():
    m, tau = torch.linspace(-0.95, 0.95, 20, dtype=torch.float64)[:, None], 0.7
    grid = torch.linspace(0, 1, 100001, dtype=torch.float64)
    cost = grid**2 * m**2 / (1 - m**2) + 2 * tau * (1 - grid) ** 2 * m**2
    best = grid[cost.argmin(1)]
    formula = (2 * tau * (1 - m**2) / (1 + 2 * tau * (1 - m**2)))[:, 0]
    assert_same(best, formula, 1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lam": -0.1}, r"ZGR\(lam=-0\.1\): lam must be in \[0, 1\]"),
        ({"lam": 1.5}, r"lam must be in \[0, 1\]; 0 is ST, 1 is ZGR"),
        ({"lam": float("nan")}, r"lam must be in \[0, 1\]"),
        ({"tau": 0.0}, r"ZGR\(tau=0\.0\): tau must be positive and finite"),
        ({"tau": float("inf")}, r"tau must be positive and finite"),
        ({"lam": 0.5, "tau": 1.0}, r"ZGR\(lam=0\.5, tau=1\.0\): give only one of them"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    with pytest.raises(fg.InputError, match=message):
        fg.ZGR(**arguments)
