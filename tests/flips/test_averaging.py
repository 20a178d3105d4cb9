"""Whether averaging a layer's inputs pays: what it leaves of the variance, the choice, and what the choice does."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.flips import averaging
from flipgrad.flips.choice import decided
from flipgrad.flips.plan import Plan

SAMPLED, ALWAYS = fg.PSA(inputs="sampled"), fg.PSA(inputs="posterior")


@pytest.fixture(autouse=True)
def small_layers_are_decided_too(monkeypatch):
    monkeypatch.setattr(averaging, "LEAST_TERMS", 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain(*widths: int, size: float = 1.0, **options: object) -> fg.Sequential:
    """Fully connected layers on 6 real inputs, whose pre-activations are about as large as ``size``."""
    torch.manual_seed(0)
    layers = [fg.BinaryLinear(n, m, **options) for n, m in zip((6, *widths), widths, strict=False)]
    net = fg.Sequential(*layers, head=nn.Linear(widths[-1], 3)).initialize(normal(500, 6))
    with torch.no_grad():
        for layer in net.binary_layers:
            layer.weight *= size
            layer.bias *= size
    return net


def convolutions(size: float) -> fg.Sequential:
    torch.manual_seed(0)
    layers = fg.BinaryConv2d(2, 16, 3), fg.BinaryConv2d(16, 24, 3, stride=2, padding=1), nn.Flatten()
    net = fg.Sequential(*layers, head=nn.Linear(96, 3)).initialize(normal(64, 2, 6, 6))
    with torch.no_grad():
        for layer in net.binary_layers:
            layer.weight *= size
    return net


def gradients(net: fg.Sequential, x: Tensor, estimator: fg.Estimator, seed: int = 1) -> list[Tensor]:
    objective = fg.CrossEntropy(torch.arange(len(x)) % 3)
    loss = net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(seed)).mean()
    return list(torch.autograd.grad(loss, list(net.parameters())))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(g, h) for g, h in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Logistic(0.5), fg.Normal(), fg.Laplace()])
def test_share_that_is_left_is_the_mean_square_of_posterior_means(monkeypatch, noise, size):
    found = {}
    exact = type(SAMPLED)._posterior

    def watched(self, call, *arguments):
        means = exact(self, call, *arguments)
        found[call.layer] = float(means[0].square().mean())
        return means

    monkeypatch.setattr(type(SAMPLED), "_posterior", watched)
    nets = [(chain(*widths, size=size, noise=noise), normal(200, 6)) for widths in ((5, 5, 5), (60, 60), (20, 300))]
    if noise == fg.Logistic():
        nets.append((convolutions(size), normal(32, 2, 6, 6)))
    for net, x in nets:
        gradients(net, x, ALWAYS)
        gradients(net, x, fg.PSA())
        for layer in net.binary_layers[1:]:
            # Weights of five units are no large sample, and the slope of Laplace noise is that of 0 only there.
            assert decided[layer].left == pytest.approx(found[layer], abs=0.15 if noise == fg.Laplace() else 0.12)


def test_information_decides_a_unit():
    shares = [averaging.remaining(s) for s in (0.0, 0.1, 1.0, 4.0, 20.0, 1e4, math.nan)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1, abs=1e-3)
    assert shares[-2:] == [0, 0]
    # Of two normal distributions whose means are s apart, s = 1 standard deviation, by quadrature.
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    first, second = (torch.exp(-((z - mean) ** 2) / 2) for mean in (0.5, -0.5))
    posterior = (first - second) / (first + second)
    assert averaging.remaining(1.0) == pytest.approx(1 - float((first * posterior**2).sum() / first.sum()), abs=1e-3)


def test_averages_are_taken_where_they_pay_and_else_states():
    x = normal(64, 6)
    undecided, wide, certain = chain(40, 40), chain(10, 1000), chain(40, 40, size=20)
    assert same(gradients(undecided, x, fg.PSA()), gradients(undecided, x, ALWAYS))
    for net in (wide, certain):
        assert same(gradients(net, x, fg.PSA()), gradients(net, x, SAMPLED))
        assert not same(gradients(net, x, fg.PSA()), gradients(net, x, ALWAYS))
    assert decided[undecided.binary_layers[1]].pays
    assert not decided[wide.binary_layers[1]].pays
    assert not decided[certain.binary_layers[1]].pays


def test_each_layer_is_decided_alone():
    net, x = chain(40, 40, 1000), normal(64, 6)
    auto, always, sampled = (gradients(net, x, rule) for rule in (fg.PSA(), ALWAYS, SAMPLED))
    assert same(auto[2:3], always[2:3])
    assert not same(auto[2:3], sampled[2:3])
    assert same(auto[4:5], sampled[4:5])


@pytest.mark.parametrize("weights", ["real", "binary"])
def test_layers_with_norms_and_binary_weights_are_decided(weights):
    torch.manual_seed(0)
    layers = [
        fg.BinaryLinear(n, m, bias=False, norm=nn.BatchNorm1d(m), weights=weights) for n, m in ((6, 30), (30, 30), (30, 900))
    ]
    net = fg.Sequential(*layers, head=nn.Linear(900, 3)).initialize(normal(100, 6))
    for mode in (True, False):
        net.train(mode)
        gradients(net, normal(64, 6), fg.PSA())
        assert [decided.pop(layer).pays for layer in layers[1:]] == [True, False]


def test_choice_depends_on_no_state_that_is_averaged_over():
    net = chain(40, 40)
    affine, log_odds = net.binary_layers[1].affine(), normal(64, 40, seed=3)
    found = set()
    for seed in range(5):
        x = torch.sign(normal(64, 40, seed=seed))
        found.add(affine.averaging(x, affine(x).detach(), fg.Logistic(), log_odds, 1e-3))
    assert len(found) == 1


def test_choice_needs_no_memory():
    net, x = chain(40, 40, size=2), normal(64, 6)
    first = gradients(net, x, fg.PSA())
    decided.clear()
    again = chain(40, 40, size=2)
    again.load_state_dict(net.state_dict())
    gradients(again, -x, fg.PSA())
    assert same(first, gradients(again, x, fg.PSA()))


def test_choice_is_made_under_vmap_too():
    for net, rule in ((chain(40, 40), ALWAYS), (chain(10, 1000), SAMPLED)):
        x, objective = normal(32, 6), fg.CrossEntropy(torch.arange(32) % 3)
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        noise = [normal(3, 32, len(layer.weight), seed=k) for k, layer in enumerate(net.binary_layers)]

        def loss(parameters, noise, estimator, net=net, x=x, objective=objective):
            options = {"estimator": estimator, "noise": noise}
            return torch.func.functional_call(net, parameters, (x, objective), options).mean()

        found = [
            torch.vmap(torch.func.grad(lambda p, z, e=estimator: loss(p, z, e)), in_dims=(None, 0))(parameters, noise)
            for estimator in (fg.PSA(), rule)
        ]
        decisions = [decided[layer].pays for layer in net.binary_layers[1:]]
        assert decisions == [rule is ALWAYS]
        assert all(torch.equal(found[0][name], found[1][name]) for name in parameters)


def test_explain_says_what_was_chosen_and_why():
    net = chain(10, 1000)
    layer = net.binary_layers[1]
    assert "inputs" not in fg.flips.explain(layer)
    gradients(net, normal(64, 6), fg.PSA())
    assert re.search(
        r"; inputs are sampled: averages leave about (9\d|100)% of the variance, and pay up to 83%$", fg.flips.explain(layer)
    )
    other = chain(40, 40)
    gradients(other, normal(64, 6), fg.PSA())
    assert "inputs are averaged" in fg.flips.explain(other.binary_layers[1])


def test_log_ratios_that_cost_more_must_save_more():
    x, most = normal(64, 6), {}
    rules = {"approximate": fg.PSA(), "exact": fg.PSA(exact=True)}
    for name, rule in rules.items():
        for kind, options in (("real", {}), ("normal", {"noise": fg.Normal()}), ("binary", {"weights": "binary"})):
            net = chain(40, 40)
            first, second = net.binary_layers[0], fg.BinaryLinear(40, 40, **options)
            other = fg.Sequential(first, second, head=nn.Linear(40, 3))
            gradients(other, x, rule)
            most[kind, name] = decided[second].most
            assert decided[second].pays == (decided[second].left < decided[second].most)
    assert most["binary", "approximate"] == most["binary", "exact"] > most["real", "approximate"]
    assert most["real", "exact"] == most["normal", "approximate"] < most["real", "approximate"]


def test_small_layers_are_averaged_whatever_their_units(monkeypatch):
    monkeypatch.setattr(averaging, "LEAST_TERMS", 64 * 40 * 40 + 1)
    net, x = chain(40, 40, size=20), normal(64, 6)
    assert same(gradients(net, x, fg.PSA()), gradients(net, x, ALWAYS))
    assert "inputs are averaged: the layer is too small" in fg.flips.explain(net.binary_layers[1])
    monkeypatch.setattr(averaging, "LEAST_TERMS", 64 * 40 * 40)
    assert same(gradients(net, x, fg.PSA()), gradients(net, x, SAMPLED))


def test_an_empty_batch_has_nothing_to_average():
    net = chain(4, 4)
    gradients(net, normal(0, 6), fg.PSA())
    assert decided[net.binary_layers[1]] is averaging.ALWAYS
    assert averaging.certainty(torch.zeros(0)) == 1


def test_a_plan_reads_tensors_once_and_anew_when_they_change():
    plan, read = Plan(), []
    weight = normal(4, 4)

    def second(t: Tensor) -> float:
        return plan.once("second", (t,), lambda: read.append(0) or float(t.square().mean()))

    assert second(weight) == second(weight.detach()) == float(weight.square().mean())
    assert len(read) == 1
    weight *= 2
    assert second(weight) == float(weight.square().mean())
    assert second(weight.t()) == float(weight.square().mean())
    assert second(weight.clone()) == float(weight.square().mean())
    assert len(read) == 4
    with torch.inference_mode():
        assert second(torch.ones(3)) == 1


def test_a_step_reads_each_weight_once(monkeypatch):
    net, x = chain(300, 300, 300), normal(64, 6)
    read = []
    monkeypatch.setattr("flipgrad.flips.plan.moments", lambda weight: read.append(weight.shape) or (0.04, 0.003, 3e-5))
    gradients(net, x, ALWAYS)
    assert read == [(300, 300)] * 2
    gradients(net, x, fg.PSA())
    assert read == [(300, 300)] * 4
