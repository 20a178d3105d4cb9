"""Tanh against the network of means, and where that has the expected loss."""

from __future__ import annotations

import pytest
import torch
from local_checks import NAMES, assert_is

import flipgrad as fg
import reference
from reference import assert_same, batch, build, chain, fully_connected, gradients


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_the_network_of_means(name, noise):
    net, x, objective = build(name, noise)
    graph, h = chain(net), [x]
    for node in graph.nodes:
        h.append(2 * node.F(node.a(h)) - 1)
    assert_is(fg.Tanh(), net, x, objective, objective(graph.outputs(h)))


def test_is_tanh_for_logistic_noise():
    layer = fg.BinaryLinear(3, 4).double()
    x, _ = batch((5, 3))
    assert_same(layer(x, estimator=fg.Tanh()), torch.tanh(torch.nn.functional.linear(x, layer.weight, layer.bias) / 2))


@pytest.mark.parametrize("scale", [30.0, 1.0])
def test_is_exact_where_everything_is_linear(scale):
    """Uniform noise with every pre-activation in its support, and a linear objective; not with a support that is left."""
    net = fully_connected(2, 3, 3, 3, 2, noise=[fg.Uniform(scale)])
    x, objective = batch((2, 2))[0], reference.LinearLoss()
    exact = reference.expected_loss(chain(net), x, objective)
    losses = net(x, objective, estimator=fg.Tanh())
    if scale > 10:
        assert_same(losses, exact)
        assert_same(gradients(losses.sum(), net), gradients(exact.sum(), net))
    else:
        assert (losses - exact).abs().max() > 1e-2
