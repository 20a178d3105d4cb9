"""REINFORCE against sums over all joint states, against the exact gradient by sampling, and with every baseline."""

from __future__ import annotations

import pytest
import torch
from torch import nn
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


def learned(net, x, y):
    """A baseline network that is far from its optimum, which must not matter."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return fg.LearnedBaseline(network)


BASELINES = {
    "none": lambda net, x, y: None,
    "constant": perfect_baseline,
    "running": lambda net, x, y: fg.RunningBaseline(1).double(),
    "learned": learned,
}
# Without a good guess of the loss it takes more draws to see an error.
GOOD = (BASELINES["constant"], BASELINES["running"])
nets_and_baselines, each_baseline = with_baselines(BASELINES, varied="running")


@nets_and_baselines
def test_unbiased(widths, noise, baseline):
    problem = random_net(widths, noise)
    draws = {(4,): (5000, 9000), (3, 4): (3000, 3000), (3, 3, 3): (8000, 25_000)}[widths][baseline not in GOOD]
    assert_unbiased(*problem, fg.REINFORCE(baseline(*problem)), draws)


@each_baseline
def test_unbiased_with_convolutions(baseline):
    problem = random_conv_net(fg.Logistic())
    assert_unbiased(*problem, fg.REINFORCE(baseline(*problem)), draws=8000 if baseline in GOOD else 12_000)


@ERRORS
@pytest.mark.parametrize("baseline", [BASELINES["none"], BASELINES["running"]], ids=["none", "running"])
def test_a_broken_variant_is_caught(baseline, error, share):
    problem = random_net((3, 4), fg.Logistic())
    assert_caught(*problem, Broken(fg.REINFORCE(baseline(*problem)), error), draws=7000 * share)


@pytest.mark.parametrize("noise", ["logistic", "normal", "mixed"])
@pytest.mark.parametrize("value", [None, 0.8], ids=["plain", "baseline"])
def test_mean_over_all_joint_states_is_the_exact_gradient(value, noise):
    net = fully_connected(2, 3, 2, 3, 3, noise=reference.NOISES[noise])
    x, objective = batch((2, 2))
    estimator = fg.REINFORCE(None if value is None else fg.ConstantBaseline(value))
    assert_unbiased_by_enumeration(net, chain(net), x, objective, estimator)


def test_mean_over_all_joint_states_with_concatenated_branches():
    net, graph, x, objective = reference.concatenated("mixed")
    assert_unbiased_by_enumeration(net, graph, x, objective, fg.REINFORCE())


@pytest.mark.parametrize("noise", ["logistic", "mixed"])
@pytest.mark.parametrize("name", ["fc3", "conv", "pooled", "front"])
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    graph = chain(net)
    z = noise_like(graph, x)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    losses = net(x, objective, estimator=fg.REINFORCE(fg.ConstantBaseline(0.25)), noise=z)
    h = reference.sample(graph, x, z)
    f = objective(graph.outputs(h))
    assert_same(losses.detach(), f.detach())
    literal = f + (f.detach() - 0.25) * reference.probability(graph, h).log()
    assert_same(gradients(losses @ weights, net, input=x), gradients(literal @ weights, net, input=x))


@pytest.mark.parametrize(("widths", "noise"), [((3, 4), fg.Logistic()), ((3, 3, 3), fg.Normal(1.5))], ids=str)
def test_the_expected_loss_as_baseline_lowers_the_variance(widths, noise):
    problem = random_net(widths, noise)
    assert_less_variance(*problem, fg.REINFORCE(perfect_baseline(*problem)), fg.REINFORCE())


def test_refuses_what_is_no_baseline():
    with pytest.raises(fg.InputError, match=r"REINFORCE\(baseline=0.5\): give a baseline, such as fg.ConstantBaseline"):
        fg.REINFORCE(0.5)
