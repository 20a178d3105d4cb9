"""ST against algorithm 2 as printed, and where it is exact."""

from __future__ import annotations

import pytest
import torch

import flipgrad as fg
import reference
from flipgrad.contract import LayerCall
from reference import assert_same, batch, build, chain, fully_connected, gradients, mean_gradient, noise_like


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", reference.NETS)
def test_is_algorithm_2(name, noise):
    net, x, objective = build(name, noise)
    z = noise_like(chain(net), x)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    losses, literal = net(x, objective, estimator=fg.ST(), noise=z), reference.st(chain(net), x, z, objective)
    assert_same(losses, literal)
    expected = gradients(literal @ weights, net, input=x)
    assert all(bool((gradient != 0).any()) for gradient in expected.values())
    assert_same(gradients(losses @ weights, net, input=x), expected)


def test_states_are_exactly_binary():
    layer = reference.randomized(fg.BinaryLinear(3, 50))
    states = layer(torch.randn(20, 3, dtype=torch.float64), estimator=fg.ST())
    assert states.requires_grad
    assert sorted(states.unique().tolist()) == [-1, 1]


@pytest.mark.parametrize("scale", [30.0, 1.0])
def test_is_unbiased_exactly_where_everything_is_linear(scale):
    """Uniform noise with every pre-activation in its support, and a linear head; not with a support that is left."""
    net = fully_connected(2, 3, 3, 3, 2, noise=[fg.Uniform(scale)])
    x, _ = batch((2, 2))
    exact = gradients(reference.expected_loss(chain(net), x, reference.LinearLoss()).sum(), net)
    mean = mean_gradient(net, chain(net), x, reference.LinearLoss(), fg.ST())
    if scale > 10:
        assert_same(mean, exact)
    else:
        assert max((mean[name] - exact[name]).abs().max() for name in exact) > 1e-2


def test_is_biased_in_the_last_layer_with_a_curved_objective():
    net = fully_connected(2, 4, 3)
    x, objective = batch((1, 2))
    exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    mean = mean_gradient(net, chain(net), x, objective, fg.ST())
    assert (mean["0.weight"] - exact["0.weight"]).abs().max() > 1e-2


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST()], ids=["psa", "st"])
def test_states_are_given_away_and_not_copied(estimator, monkeypatch):
    """What was sampled is what comes out, with the gradient of its mean; a change in place is an error and not silent."""
    torch.manual_seed(0)
    layer, x, drawn = fg.BinaryLinear(3, 4).double(), torch.randn(5, 3).double(), []
    sample = LayerCall.sample
    monkeypatch.setattr(LayerCall, "sample", lambda call, a: drawn.append(sample(call, a)) or drawn[-1])
    states = layer(x, estimator=estimator)
    assert states.data_ptr() == drawn[0].data_ptr()
    gradient = torch.autograd.grad(states.sum(), layer.weight, retain_graph=True)[0]
    a = x @ layer.weight.t() + layer.bias
    torch.testing.assert_close(gradient, (2 * layer.noise.pdf(a)).t() @ x)
    with pytest.raises(RuntimeError, match="modified inplace"):
        states.mul_(2)
