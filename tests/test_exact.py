"""The exact expectation against the sum over all joint states, finite differences and sampling; a proposition that it shows."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import flipgrad as fg
import reference
from flipgrad import exact
from reference import assert_same, batch, chain, concatenated, fully_connected, gradients, randomized


def conv(z):
    modules = [fg.BinaryConv2d(1, 2, 2, **z), fg.BinaryConv2d(2, 1, 2, padding=(1, 0), stride=2, **z), nn.Flatten()]
    return fg.Sequential(*modules, fg.BinaryLinear(2, 2, **z), head=nn.Linear(2, 3)), (2, 1, 3, 3)


def pooled(z):
    modules = [fg.BinaryConv2d(1, 1, 2, **z), nn.AvgPool2d((1, 2)), nn.Flatten(), fg.BinaryLinear(3, 3, **z)]
    return fg.Sequential(*modules, head=nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))), (2, 1, 4, 3)


def front(z):
    modules = [nn.Linear(2, 4), nn.ReLU(), fg.BinaryLinear(4, 3, **z), fg.BinaryLinear(3, 3, **z)]
    return fg.Sequential(*modules, head=nn.Linear(3, 3)), (2, 2)


def tiny(name, noise):
    """A net of at most 12 units with its graph, inputs and objective."""
    if name.startswith("concat"):
        return concatenated(noise, then=name == "concat")
    if name == "fc":
        net, shape = fully_connected(2, 3, 2, 3, 3, noise=reference.NOISES[noise]), (2, 2)
    else:
        net, shape = {"conv": conv, "pooled": pooled, "front": front}[name]({"noise": reference.NOISES[noise][0]})
    return randomized(net), chain(net), *batch(shape)


NETS = ["fc", "conv", "pooled", "front", "concat", "concat last"]


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", NETS)
def test_is_the_sum_over_all_states(name, noise):
    net, graph, x, objective = tiny(name, noise)
    x.requires_grad_()
    weights = torch.tensor([1.0, 2.0], dtype=x.dtype)

    def check(actual, expected):
        assert_same(actual, expected)
        slopes = gradients(expected @ weights, net, input=x)
        assert all(bool((slope != 0).any()) for slope in slopes.values())
        assert_same(gradients(actual @ weights, net, input=x), slopes)

    check(exact.expected_loss(net, x, objective), reference.expected_loss(graph, x, objective))
    p = reference.expectation(graph, x, lambda outputs, rows: torch.exp(-objective.select(rows)(outputs)))
    check(exact.marginal_loss(net, x, objective), -p.log())
    predictive = exact.predictive(net, x)
    assert_same(predictive, reference.expectation(graph, x, lambda outputs, _: outputs.softmax(-1)))
    assert_same(predictive.sum(1), torch.ones_like(weights))


@pytest.mark.parametrize("loss", [exact.expected_loss, exact.marginal_loss])
@pytest.mark.parametrize("noise", reference.NOISES)
def test_gradient_is_that_of_finite_differences(loss, noise):
    net, _, x, objective = tiny("concat", noise)
    assert torch.autograd.gradcheck(lambda *_: loss(net, x, objective), tuple(net.parameters()))


@pytest.mark.parametrize("loss", [exact.expected_loss, exact.marginal_loss])
def test_parts_of_a_batch_give_the_same(loss, monkeypatch):
    net = fully_connected(2, 3, 2, 3, 3)
    x, objective = batch((10, 2))
    weights = torch.linspace(1, 2, 10, dtype=x.dtype)
    whole = loss(net, x, objective)
    expected = gradients(whole @ weights, net)
    assert_same(loss(net, x, lambda outputs: objective(outputs)), whole)
    predictive = exact.predictive(net, x)
    parts = []
    checkpoint = exact.checkpoint
    monkeypatch.setattr(exact, "BUDGET", 2**8)
    monkeypatch.setattr(exact, "checkpoint", lambda *args, **kwargs: (parts.append(1), checkpoint(*args, **kwargs))[1])
    split = loss(net, x, objective)
    assert len(parts) == 3
    assert_same(split, whole)
    assert_same(gradients(split @ weights, net), expected)
    assert_same(exact.predictive(net, x), predictive)


def test_float32_is_close_to_float64():
    net, _, x, objective = tiny("fc", "logistic")
    reference64 = exact.expected_loss(net, x, objective)
    expected = gradients(reference64.sum(), net)
    net = net.float()
    losses = exact.expected_loss(net, x.float(), objective)
    assert losses.dtype == torch.float32
    assert_same(losses.double(), reference64, 1e-5)
    assert_same({name: g.double() for name, g in gradients(losses.sum(), net).items()}, expected, 1e-5)


@pytest.mark.parametrize("noise", reference.NOISES)
def test_impossible_states_do_no_harm(noise):
    """Pre-activations in the hundreds: probabilities 0 and 1, finite losses and gradients."""
    net = fully_connected(2, 3, 3, 3, noise=reference.NOISES[noise], scale=300.0)
    x, objective = batch((3, 2))
    for loss in (exact.expected_loss, exact.marginal_loss):
        losses = loss(net, x, objective)
        assert bool(torch.isfinite(losses).all())
        assert all(bool(torch.isfinite(g).all()) for g in gradients(losses.sum(), net).values())
    assert_same(exact.predictive(net, x).sum(1), torch.ones(3, dtype=x.dtype))


def test_one_output_is_a_probability_by_the_sigmoid():
    net = fully_connected(2, 3, 2, 1)
    x, _ = batch((4, 2))
    expected = reference.expectation(chain(net), x, lambda outputs, _: outputs.sigmoid())
    assert expected.shape == (4, 1)
    assert_same(exact.predictive(net, x), expected)


def test_sampling_agrees():
    """Fails by chance less than once in 10^5 seeds: 2 x 3 numbers, 5 standard errors each."""
    net, _, x, objective = tiny("concat", "mixed")
    generator = torch.Generator().manual_seed(0)
    samples = 20_000
    rows = torch.arange(2).repeat(samples)
    with torch.no_grad():
        outputs = net(x[rows], generator=generator)
        f = objective.select(rows)(outputs).view(samples, 2)
        for values, expected in [
            (f, exact.expected_loss(net, x, objective)),
            (torch.exp(-f), torch.exp(-exact.marginal_loss(net, x, objective))),
            (outputs.softmax(-1)[:, 0].view(samples, 2), exact.predictive(net, x)[:, 0]),
        ]:
            error = values.std(0) / samples**0.5
            assert bool(((values.mean(0) - expected).abs() < 5 * error).all())
            assert bool((5 * error < 0.1 * expected).all())


def test_says_what_fits():
    x, objective = batch((1, 2))
    net = fully_connected(2, 13, 12, 3)
    for function in (exact.expected_loss, exact.marginal_loss):
        with pytest.raises(fg.InputError, match=r"needs 2\^25 .* budget of 2\^24; .* 24 units together \(12-12-12 fits\)"):
            function(net, x, objective)
    with pytest.raises(fg.InputError, match=r"a layer of 25 units after 1 states"):
        exact.predictive(fully_connected(2, 25, 3), x)
    wide = fg.Sequential(fg.BinaryLinear(2, 9), fg.Concat(nn.Identity(), fg.BinaryLinear(9, 7)), head=nn.Linear(16, 2))
    with pytest.raises(fg.InputError, match=r"needs 2\^25 .*flipgrad\.bounds\.expected_loss"):
        exact.predictive(wide.double(), x)
    # The identity branch alone, 2^26 entries of an identity matrix, is refused before it is made.
    wide = fg.Sequential(fg.BinaryLinear(2, 13), fg.Concat(nn.Identity(), fg.BinaryLinear(13, 1)), head=nn.Linear(14, 2))
    with pytest.raises(fg.InputError, match=r"needs 2\^26"):
        exact.predictive(wide.double(), x)


def test_reshaping_costs_no_transition_matrix(monkeypatch):
    """16 units before nn.Flatten: their identity matrix would take 32 GiB."""
    monkeypatch.setattr(torch, "eye", None)
    net = fg.Sequential(fg.BinaryConv2d(1, 1, 1), nn.Flatten(), fg.BinaryLinear(16, 1), head=nn.Linear(1, 2))
    losses = exact.expected_loss(net, torch.zeros(1, 1, 4, 4), fg.CrossEntropy(torch.tensor([0])))
    assert bool(torch.isfinite(losses).all())


@pytest.mark.parametrize("function", [exact.expected_loss, exact.marginal_loss, lambda net, x, _: exact.predictive(net, x)])
def test_refuses_an_empty_batch(function):
    with pytest.raises(fg.InputError, match="the batch is empty; give at least one example"):
        function(fully_connected(2, 2, 2), torch.zeros(0, 2), fg.CrossEntropy(torch.zeros(0, dtype=torch.long)))


def test_all_states_are_listed_once():
    table = exact.enumerate_states((2, 1, 2), torch.zeros((), dtype=torch.float64))
    assert table.shape == (16, 2, 1, 2)
    assert table.dtype == torch.float64
    assert len(table.flatten(1).unique(dim=0)) == 16
    assert table.abs().unique().tolist() == [1]


def toy(n):
    """The paper's example: one class uniform above 0, the other below cos(x), in [-pi/2, pi/2] x [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(2 * n, 2, generator=generator, dtype=torch.float64)
    horizontal = math.pi * (u[:, 0] - 0.5)
    above, below = u[:n, 1], -1 + u[n:, 1] * (1 + horizontal[n:].cos())
    return torch.stack([horizontal, torch.cat([above, below])], 1), fg.CrossEntropy(torch.arange(2).repeat_interleave(n))


def test_some_deterministic_net_is_no_worse_than_a_trained_stochastic_one():
    """The appendix's proposition, with the best of many noise realisations z* for the best of all."""
    x, objective = toy(60)
    net = fully_connected(2, 4, 4, 2, seed=2)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    start = exact.expected_loss(net, x, objective).mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        loss = exact.expected_loss(net, x, objective).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        stochastic = exact.expected_loss(net, x, objective).mean().item()
        assert stochastic < 0.8 * start
        generator = torch.Generator().manual_seed(0)
        members = [net.member(x, generator=generator) for _ in range(300)]
        losses = [objective(member(x)).mean().item() for member in members]
        # The members are the stochastic net, so the best of them is better than their mean.
        best = losses.index(min(losses))
        scale = 1e6
        fixed = copy.deepcopy(net)
        for layer, z in zip(fixed.binary_layers, members[best].noise, strict=True):
            layer.bias.sub_(z[0]).mul_(scale)
            layer.weight.mul_(scale)
        deterministic = exact.expected_loss(fixed, x, objective).mean().item()
    assert deterministic == pytest.approx(losses[best], abs=1e-3)
    assert deterministic < stochastic


@pytest.mark.parametrize("function", [exact.expected_loss, exact.marginal_loss])
def test_refuses_what_is_no_sequential(function):
    model = fg.use(nn.Sequential(fg.BinaryLinear(2, 3), nn.Linear(3, 2)), fg.PSA())
    with pytest.raises(
        fg.InputError, match=r"exact takes a flipgrad.Sequential, .* build the network as fg.Sequential\(\*layers"
    ):
        function(model, torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])))
