"""ADF against its moments written out, and what it refuses."""

from __future__ import annotations

import moments_reference
import pytest
import torch
from local_checks import NAMES, assert_is, seeded
from torch import nn

import flipgrad as fg
import reference
from flipgrad.contract import Batch
from reference import assert_same, batch, build, chain, concatenated, gradients, randomized

both = pytest.mark.parametrize("estimator", [fg.ADF(), fg.LocalReparam()], ids=["adf", "local-reparam"])


def unit(node, mu, v, generator):
    return 2 * node.F(mu / (1 + v / moments_reference.noise_variance(node.layer.noise)).sqrt()) - 1


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    outputs = moments_reference.outputs(chain(net), x, seeded(), unit)
    assert_is(fg.ADF(), net, x, objective, objective(outputs))


def test_is_its_formula_with_branches():
    net, graph, x, objective = concatenated("mixed", then=False)
    outputs = moments_reference.outputs(graph, x.requires_grad_(), seeded(), unit)
    assert_is(fg.ADF(), net, x, objective, objective(outputs))


class Outputs:
    """An objective that keeps the outputs."""

    def __call__(self, outputs):
        self.outputs = outputs
        return outputs.sum(-1)


def test_outputs_of_one_layer_have_the_exact_moments():
    """The first layer's means are exact, so are mean and variance of a linear head's outputs: it is drawn from these."""
    net = reference.fully_connected(2, 4, 3)
    x, _ = batch((1, 2))
    mean = reference.expectation(chain(net), x, lambda outputs, rows: outputs)
    square = reference.expectation(chain(net), x, lambda outputs, rows: outputs.square())
    drawn = {}
    for epsilon in (0.0, 1.0):
        kept = Outputs()
        fg.ADF().losses(net.network(), Batch(x, kept, lambda noise, a, epsilon=epsilon: torch.full_like(a, epsilon)))
        drawn[epsilon] = kept.outputs
    assert_same(drawn[0], mean)
    assert_same((drawn[1] - drawn[0]).square(), square - mean.square())


@both
@pytest.mark.parametrize("pad", [nn.ZeroPad2d(1), nn.ConstantPad2d(1, 0.0)], ids=["zero", "constant"])
def test_refuses_zeros_among_the_units(estimator, pad):
    first, padded, plain = fg.BinaryConv2d(1, 2, 1), nn.Sequential(pad, fg.BinaryConv2d(2, 2, 3)), fg.BinaryConv2d(2, 2, 1)
    nets = [
        fg.Sequential(first, padded, nn.Flatten(), head=nn.Linear(18, 3)),
        fg.Sequential(first, fg.Concat(padded, plain), nn.Flatten(), head=nn.Linear(36, 3)),
    ]
    x, objective = torch.randn(2, 1, 3, 3), fg.CrossEntropy(torch.tensor([0, 1]))
    for net in nets:
        with pytest.raises(fg.InputError, match=rf"{type(pad).__name__}.* zeros that look like units.*BinaryConv2d"):
            net(x, objective, estimator=estimator)


def padded_net(*modules, units):
    return randomized(fg.Sequential(*modules, nn.Flatten(), head=nn.Linear(units, 3)))


@both
def test_a_module_that_pads_with_states_is_the_convolutions_own_padding(estimator):
    x, objective = batch((2, 1, 3, 3))
    inside = padded_net(fg.BinaryConv2d(1, 2, 1), fg.BinaryConv2d(2, 2, 3, padding=1, padding_value=-1), units=18)
    outside = padded_net(fg.BinaryConv2d(1, 2, 1), nn.ConstantPad2d(1, -1.0), fg.BinaryConv2d(2, 2, 3), units=18)
    assert_same(*(net(x, objective, estimator=estimator, generator=seeded()) for net in (inside, outside)))


@both
def test_zeros_before_all_layers_and_before_the_head_are_no_units(estimator):
    x, objective = batch((2, 1, 3, 3))
    for net in (
        padded_net(nn.ZeroPad2d(1), fg.BinaryConv2d(1, 2, 3), units=18),
        padded_net(fg.BinaryConv2d(1, 2, 1), nn.ZeroPad2d(1), units=50),
    ):
        outputs = moments_reference.outputs(chain(net), x, seeded(), unit)
        assert_same(net(x, objective, estimator=estimator, generator=seeded()), objective(outputs))
    branch = nn.Sequential(nn.ZeroPad2d(1), fg.BinaryConv2d(1, 2, 3))
    net = padded_net(fg.Concat(branch, fg.BinaryConv2d(1, 1, 1)), units=27)
    assert net(x, objective, estimator=estimator).shape == (2,)


@both
def test_refuses_a_head_that_is_not_linear(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(fg.InputError, match=r"linear head from them, the head is Sequential: use torch\.nn\.Linear"):
        net(torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])), estimator=estimator)


@both
def test_refuses_handed_in_noise(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), head=nn.Linear(3, 3))
    for noise in ([torch.zeros(1, 3)] * 2, [torch.zeros(7, 9)] * 2):
        with pytest.raises(fg.InputError, match="cannot replay handed-in noise; pass a seeded generator"):
            net(torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])), estimator=estimator, noise=noise)


@both
def test_refuses_means_mixed_with_real_values(estimator):
    first, second = fg.BinaryLinear(2, 3), fg.BinaryLinear(5, 3)
    x = torch.full((1, 2), 4.0)
    with pytest.raises(fg.InputError, match=r"relaxed hidden states that are not in \[-1, 1\] \(for example 4\)"):
        second(torch.cat([first(x, estimator=estimator), x], 1), estimator=estimator)


STATES = fg.ADF(sample="states")


def outputs_of_sampled_states(net, x):
    """Means by the moments, and of the last of them states with the same uniform draw, whose slope in their means is 1."""
    graph, generator = chain(net), seeded()
    h = moments_reference.means(graph, x, generator, unit)
    z = fg.Uniform().sample(h[-1].shape, generator=generator, dtype=x.dtype)
    states = torch.where(z <= h[-1], 1.0, -1.0).to(x.dtype)
    return graph.outputs([*h[:-1], states + (h[-1] - h[-1].detach())])


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NAMES)
def test_sampled_states_are_their_formula(name, noise):
    net, x, objective = build(name, noise)
    assert_is(STATES, net, x, objective, objective(outputs_of_sampled_states(net, x)))


def test_sampled_states_suit_a_head_that_is_not_linear():
    net, x, objective = build("fc3", "logistic")
    net.head = randomized(nn.Sequential(nn.Linear(net.head.in_features, 4), nn.Tanh(), nn.Linear(4, 3)))
    losses = net(x, objective, estimator=STATES, generator=seeded())
    expected = objective(outputs_of_sampled_states(net, x))
    assert_same(losses, expected)
    assert_same(gradients(losses.sum(), net, input=x), gradients(expected.sum(), net, input=x))


def test_sampled_states_of_one_layer_have_the_exact_loss_and_its_gradient_where_it_is_linear():
    """The first layer's means are exact: so is the loss on average, and the gradient of a loss that is linear in the states."""
    net = reference.fully_connected(2, 4, 3)
    x, objective = batch((1, 2))
    slopes = torch.tensor([0.7, -1.3, 0.4], dtype=x.dtype)
    draws = 20_000
    many = x.expand(draws, -1)
    repeated = fg.CrossEntropy(objective.labels.expand(draws))
    losses = net(many, repeated, estimator=STATES, generator=seeded()).detach()
    exact = reference.expected_loss(chain(net), x, objective).detach()
    # Within five standard errors: a false alarm in 2 million seeds.
    assert abs(losses.mean() - exact.mean()) < 5 * losses.std() / draws**0.5
    true = gradients(reference.expectation(chain(net), x, lambda outputs, rows: outputs @ slopes).sum(), net)
    found = gradients(net(x, lambda outputs: outputs @ slopes, estimator=STATES, generator=seeded()).sum(), net)
    # The slope of a linear loss does not depend on the states: no chance in it.
    assert_same({name: found[name] for name in ("0.weight", "0.bias")}, {name: true[name] for name in ("0.weight", "0.bias")})


def test_sampled_states_refuse_graphs_written_by_hand_second_derivatives_and_handed_in_noise():
    layer, x, objective = fg.BinaryLinear(2, 3), torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0]))
    message = r"ADF\(sample='states'\) has a rule of its own for the states before the head.*use fg\.Sequential"
    with pytest.raises(fg.InputError, match=message):
        fg.use(layer, STATES)
    with pytest.raises(fg.InputError, match=message):
        layer(x, estimator=STATES)
    with pytest.raises(fg.InputError, match=message):
        fg.Graph(nn.Sequential(layer, nn.Linear(3, 2)), x)(x, objective, estimator=STATES)
    net = fg.Sequential(layer, head=nn.Linear(3, 2))
    loss = net(x, objective, estimator=STATES).mean()
    with pytest.raises(RuntimeError, match=r"differentiated twice|second derivative"):
        torch.autograd.grad(
            sum(g.sum() for g in torch.autograd.grad(loss, list(net.parameters()), create_graph=True)), [net.head.weight]
        )
    with pytest.raises(fg.InputError, match="cannot replay handed-in noise"):
        net(x, objective, estimator=STATES, noise=[torch.zeros(1, 3)])


def test_an_unknown_way_to_sample_is_refused():
    with pytest.raises(
        fg.InputError, match=r"ADF\(sample='logits'\): choose 'outputs' or, as in the paper's appendix, 'states'"
    ):
        fg.ADF(sample="logits")
