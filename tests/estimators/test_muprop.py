"""MuProp against its formula, sums over all joint states, and the exact gradient by sampling."""

from __future__ import annotations

import pytest
import torch
from unbiasedness import (
    ERRORS,
    Broken,
    assert_caught,
    assert_less_variance,
    assert_unbiased,
    perfect_baseline,
    random_conv_net,
    random_net,
    with_baselines,
)

import flipgrad as fg
import reference
from reference import (
    assert_same,
    assert_unbiased_by_enumeration,
    batch,
    build,
    chain,
    fully_connected,
    gradients,
    noise_like,
)

BASELINES = {
    "mean field": lambda net, x, y: None,
    "constant": perfect_baseline,
    "running": lambda net, x, y: fg.RunningBaseline(1).double(),
}
nets_and_baselines, each_baseline = with_baselines(BASELINES, varied="running")


@nets_and_baselines
def test_unbiased(widths, noise, baseline):
    problem = random_net(widths, noise)
    assert_unbiased(*problem, fg.MuProp(baseline(*problem)), draws=7000 if len(widths) == 3 else 3000)


@each_baseline
def test_unbiased_with_convolutions(baseline):
    problem = random_conv_net(fg.Logistic())
    assert_unbiased(*problem, fg.MuProp(baseline(*problem)), draws=4000)


@ERRORS
def test_a_broken_variant_is_caught(error, share):
    assert_caught(*random_net((3, 4), fg.Logistic()), Broken(fg.MuProp(), error), draws=4000 * share)


@pytest.mark.parametrize("noise", ["logistic", "normal", "mixed"])
@pytest.mark.parametrize("value", [None, 0.8], ids=["mean field", "constant"])
def test_mean_over_all_joint_states_is_the_exact_gradient(value, noise):
    net = fully_connected(2, 3, 2, 3, 3, noise=reference.NOISES[noise])
    x, objective = batch((2, 2))
    estimator = fg.MuProp(None if value is None else fg.ConstantBaseline(value))
    assert_unbiased_by_enumeration(net, chain(net), x, objective, estimator)


def test_mean_over_all_joint_states_with_concatenated_branches():
    net, graph, x, objective = reference.concatenated("mixed")
    assert_unbiased_by_enumeration(net, graph, x, objective, fg.MuProp())


def literal(graph, x, z, objective):
    """The surrogate whose gradient is the docstring's formula, layer by layer."""
    h = reference.sample(graph, x, z)
    f = objective(graph.outputs(h))
    means = [x.detach()]
    for node in graph.nodes:
        means.append((2 * node.F(node.a(means)) - 1).detach().requires_grad_())
    total = f
    for k, node in enumerate(graph.nodes, start=1):
        # The mean-field loss as a function of layer k's means alone.
        later = means[: k + 1]
        for after in graph.nodes[k:]:
            later = [*later, 2 * after.F(after.a(later)) - 1]
        mean_field = objective(graph.outputs(later))
        (slope,) = torch.autograd.grad(mean_field.sum(), means[k])
        p = node.F(node.a(h))
        log_p = torch.where(h[k] > 0, p, 1 - p).log().flatten(1).sum(1)
        linear = (slope * (h[k] - means[k])).flatten(1).sum(1)
        total = total + (f - mean_field - linear).detach() * log_p + (slope * (2 * p - 1)).flatten(1).sum(1)
    return total


@pytest.mark.parametrize("noise", ["logistic", "mixed"])
@pytest.mark.parametrize("name", ["fc3", "conv", "pooled", "front"])
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    graph = chain(net)
    z = noise_like(graph, x)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    losses = net(x, objective, estimator=fg.MuProp(), noise=z)
    expected = gradients(literal(graph, x, z, objective) @ weights, net, input=x)
    assert_same(gradients(losses @ weights, net, input=x), expected)


def test_is_exact_layer_by_layer_where_the_loss_is_linear():
    """One layer and a linear loss: nothing is left to sample."""
    net = fully_connected(2, 4, 3)
    x, _ = batch((2, 2))
    objective = reference.LinearLoss()
    exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    drawn = gradients(net(x, objective, estimator=fg.MuProp(), noise=noise_like(chain(net), x)).sum(), net)
    assert_same(drawn["0.weight"], exact["0.weight"])


def test_works_with_frozen_layers_and_without_gradients():
    net, x, objective = build("fc3")
    z = noise_like(chain(net), x)
    whole = gradients(net(x, objective, estimator=fg.MuProp(), noise=z).sum(), net)
    net[0].requires_grad_(False)
    net(x.detach(), objective, estimator=fg.MuProp(), noise=z).sum().backward()
    assert net[0].weight.grad is None
    assert_same(net[1].weight.grad, whole["1.weight"])
    with torch.no_grad():
        assert not net(x, objective, estimator=fg.MuProp()).requires_grad


@pytest.mark.parametrize(("widths", "noise"), [((3, 4), fg.Logistic()), ((3, 3, 3), fg.Normal(1.5))], ids=str)
def test_has_less_variance_than_reinforce(widths, noise):
    """No theorem, but so large an effect on these nets that its loss would mean a mistake."""
    problem = random_net(widths, noise)
    assert_less_variance(*problem, fg.MuProp(), fg.REINFORCE())
