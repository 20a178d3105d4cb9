"""DisARM against its formula on one draw, as the conditional mean of ARM, and against the exact gradient by sampling."""

from __future__ import annotations

import pytest
import torch
from unbiasedness import (
    NOISES,
    assert_less_variance,
    random_net,
)

import flipgrad as fg
import reference
from flipgrad.contract import Batch
from flipgrad.estimators._paths import Path
from flipgrad.sampling import given
from reference import assert_same, build, chain, fully_connected, gradients


def literal(graph, x, z, objective):
    """The surrogate whose gradient is the formula with 0/1 states; ``z`` is every draw in order, the path's first."""
    depth = len(graph.nodes)
    h = reference.sample(graph, x, z[:depth])
    f_tilde = objective(graph.outputs(h))
    total, used = f_tilde, depth
    for k, node in enumerate(graph.nodes, start=1):
        p = node.F(node.a(h))
        u = node.F(z[k - 1])
        b, b_tilde = (u > 1 - p).to(x.dtype), (u < p).to(x.dtype)
        assert_same(2 * b_tilde - 1, h[k])
        changed = [*h[:k], 2 * b - 1]
        for later in graph.nodes[k:]:
            changed.append(reference.states(later.a(changed), z[used]))
            used += 1
        difference = (objective(graph.outputs(changed)) - f_tilde).detach()
        weight = (-1) ** b_tilde * (b != b_tilde) * torch.maximum(p, 1 - p).detach()
        total = total + difference / 2 * (weight * torch.logit(p)).flatten(1).sum(1)
    assert used == len(z)
    return total


@pytest.mark.parametrize("noise", ["logistic", "normal", "mixed"])
@pytest.mark.parametrize("name", ["fc3", "conv", "groups", "pooled", "front"])
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    drawn = []
    generator = torch.Generator().manual_seed(0)

    def draw(distribution, a):
        drawn.append(distribution.sample_like(a, generator=generator))
        return drawn[-1]

    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    losses = fg.DisARM().losses(net.network(), Batch(x, objective, draw))
    expected = gradients(literal(chain(net), x, drawn, objective) @ weights, net, input=x)
    assert_same(gradients(losses @ weights, net, input=x), expected, 1e-9)


@NOISES
@pytest.mark.parametrize("bias", [-0.8, 0.5])
def test_is_the_mean_of_arm_given_the_two_states(noise, bias):
    """One unit, the uniform variable on a fine grid: the theorem behind the lower variance."""
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    net = fully_connected(1, 1, 2, noise=[noise])
    with torch.no_grad():
        net[0].bias.fill_(bias)
    x, y = torch.zeros(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    path = Path.sample(net.network(), Batch(x, fg.CrossEntropy(y), given(noise.icdf(u)[:, None])))
    (arm,), (disarm,) = fg.ARM().gradients(path), fg.DisARM().gradients(path)
    p = noise.cdf(torch.tensor(bias, dtype=torch.float64))
    cells = (u > 1 - p).long() + 2 * (u < p).long()
    assert len(cells.unique()) == 3
    for cell in cells.unique():
        inside = disarm[cells == cell]
        assert_same(inside, inside[:1].expand_as(inside))
        assert_same(arm[cells == cell].mean(), inside.mean(), 1e-3)


@pytest.mark.parametrize(("widths", "noise"), [((3, 4), fg.Logistic()), ((3, 3, 3), fg.Normal(1.5))], ids=str)
def test_has_less_variance_than_arm(widths, noise):
    assert_less_variance(*random_net(widths, noise), fg.DisARM(), fg.ARM())


def test_saturated_units_get_finite_gradients():
    net, x, objective = build("fc3", "mixed")
    with torch.no_grad():
        net[1].weight.mul_(1e3)
    result = gradients(net(x, objective, estimator=fg.DisARM()).sum(), net)
    assert all(bool(torch.isfinite(g).all()) for g in result.values())
