"""PSA against algorithm 1 as printed, against exact expectations over all joint states, and what the paper proves of it."""

from __future__ import annotations

import pytest
import torch
from local_checks import assert_convolution_is_its_matrix
from torch import nn

import flipgrad as fg
import reference
from flipgrad.estimators import _head
from flipgrad.training.models import cifar_net
from reference import (
    assert_same,
    assert_unbiased_by_enumeration,
    batch,
    build,
    chain,
    fully_connected,
    gradients,
    mean_gradient,
    noise_like,
    paper_psa,
)


def compared(net, x, objective, estimator, expected):
    """Assert that ``estimator`` gives the sampled losses and the gradients of the reference ``expected`` for one draw."""
    graph = chain(net)
    z = noise_like(graph, x)
    losses = net(x, objective, estimator=estimator, noise=z)
    assert_same(losses.detach(), objective(graph.outputs(reference.sample(graph, x, z))).detach())
    # Different weights on the examples show that each example's gradient is its own.
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    literal = gradients(expected(graph, x, z, objective) @ weights, net, input=x)
    assert all(bool((gradient != 0).any()) for gradient in literal.values())
    assert_same(gradients(losses @ weights, net, input=x), literal)


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", reference.NETS)
def test_is_algorithm_1(name, noise):
    net, x, objective = build(name, noise)
    compared(net, x, objective, paper_psa(), reference.psa)


@pytest.mark.parametrize("name", ["fc3", "groups", "tail"])
def test_enhanced_head_is_its_formula(name):
    net, x, objective = build(name, "mixed")
    compared(net, x, objective, paper_psa(head="enhanced"), lambda *args: reference.psa(*args, head="enhanced"))


def nonlinear(units):
    return nn.Sequential(nn.Linear(units, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("gradient", ["sampled", "enhanced"])
@pytest.mark.parametrize(("name", "units"), [("fc3", 3), ("tail", 12)])
def test_any_head_is_flipped_exactly(name, units, gradient):
    net, x, objective = build(name, head=nonlinear(units))
    compared(net, x, objective, paper_psa(head=gradient), lambda *args: reference.psa(*args, head=gradient))


@pytest.mark.parametrize("head", [None, nonlinear(3)], ids=["linear", "nonlinear"])
@pytest.mark.parametrize("gradient", ["sampled", "enhanced"])
def test_head_flips_in_chunks(head, gradient, monkeypatch):
    net, x, objective = build("fc3", head=head)
    z = noise_like(chain(net), x)

    def result():
        return gradients(net(x, objective, estimator=paper_psa(head=gradient), noise=z).sum(), net)

    whole = result()
    # One flip of the three at a time.
    monkeypatch.setattr(_head, "NUMBERS_AT_ONCE", 1)
    assert_same(result(), whole)


@pytest.mark.parametrize("head", [None, nonlinear(3)], ids=["linear", "nonlinear"])
def test_unflipped_head_is_differentiated_in_the_ordinary_way(head):
    net, x, objective = build("fc3", "normal", head)
    compared(net, x, objective, paper_psa(flip_head=False), lambda *args: reference.psa(*args, head="linear"))


def test_replays_a_generator():
    net, x, objective = build("conv", "mixed")
    z = noise_like(chain(net), x, seed=3)
    handed_in = gradients(net(x, objective, estimator=paper_psa(), noise=z).sum(), net)
    generator = torch.Generator().manual_seed(3)
    assert_same(gradients(net(x, objective, estimator=paper_psa(), generator=generator).sum(), net), handed_in, 0)


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("widths", [(2, 5, 3), (2, 1, 1, 1, 3), (2, 4, 1, 1, 3)])
def test_is_unbiased(widths, noise):
    """One hidden layer, or one unit in every layer but the first: no product of probabilities is linearised."""
    net = fully_connected(*widths, noise=reference.NOISES[noise])
    x, objective = batch((2, 2))
    assert_unbiased_by_enumeration(net, chain(net), x, objective, paper_psa())


@pytest.mark.parametrize("linear", [True, False])
def test_many_units_in_the_last_layer_need_a_linear_head(linear):
    """The paper says one unit in layers 1..L-1 and any number in layer L: true of a loss that adds up over these units.

    For any other, the probability of layer L's state given layer L-1's is a product, and PSA linearises it.
    """
    net = fully_connected(2, 1, 1, 4, 3)
    x, curved = batch((2, 2))
    objective = reference.LinearLoss() if linear else curved
    exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    mean = mean_gradient(net, chain(net), x, objective, paper_psa())
    if linear:
        assert_same(mean, exact)
    else:
        assert (mean["1.weight"] - exact["1.weight"]).abs().max() > 1e-3


def test_is_unbiased_in_one_layer_with_any_head_and_objective():
    net = fully_connected(2, 4, head=nonlinear(4), scale=1.5)
    x, _ = batch((2, 2))
    objective = fg.SquaredError(torch.randn(2, 3, dtype=x.dtype, generator=torch.Generator().manual_seed(0)))
    assert_unbiased_by_enumeration(net, chain(net), x, objective, paper_psa())


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("head", ["sampled", "enhanced"])
def test_is_unbiased_in_the_last_layer_and_the_head_of_every_net(noise, head):
    net = fully_connected(2, 4, 4, 4, 3, noise=reference.NOISES[noise])
    x, objective = batch((1, 2))
    exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    mean = mean_gradient(net, chain(net), x, objective, paper_psa(head=head))
    for name in ["2.weight", "2.bias", "head.weight", "head.bias"]:
        assert_same(mean[name], exact[name])
    # The same test sees the bias of the layers before.
    assert (mean["1.weight"] - exact["1.weight"]).abs().max() > 1e-3


def test_is_less_biased_than_st():
    """Over random nets with logistic noise, in the layers before the last: the bias relative to the gradient's length."""
    biases = {paper_psa: [], fg.PSA: [], fg.ST: []}
    for seed in range(20):
        net = fully_connected(2, 3, 3, 3, 3, scale=1.0, seed=seed)
        x, objective = batch((1, 2), seed=seed)
        exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
        for kind, bias in biases.items():
            mean = mean_gradient(net, chain(net), x, objective, kind())
            for name in ["0.weight", "1.weight"]:
                bias.append((mean[name] - exact[name]).norm() / exact[name].norm())
    paper, default, st = (torch.stack(bias) for bias in biases.values())
    assert paper.min() > 1e-6
    assert paper.mean() < st.mean() / 2
    assert paper.mean() < default.mean() < 0.6 * st.mean()


@pytest.mark.parametrize("estimator", [paper_psa(), paper_psa(head="enhanced"), fg.ST()], ids=["psa", "enhanced", "st"])
def test_sampling_has_the_enumerated_mean(estimator):
    """Fails by chance less than once in 10^3 seeds: 3 x 29 parameters, 5 standard errors each from 100 batch means."""
    net = fully_connected(2, 3, 3, 2)
    x, objective = batch((1, 2), classes=2)
    expected = mean_gradient(net, chain(net), x, objective, estimator)
    rows = torch.zeros(300, dtype=torch.long)
    generator = torch.Generator().manual_seed(7)
    draws = [
        gradients(net(x[rows], objective.select(rows), estimator=estimator, generator=generator).mean(), net)
        for _ in range(100)
    ]
    for parameter, value in expected.items():
        sampled = torch.stack([draw[parameter] for draw in draws])
        error = sampled.std(0) / len(draws) ** 0.5
        assert bool(((sampled.mean(0) - value).abs() < 5 * error).all()), parameter
        # Tight enough to see a factor of two wherever the gradient is not small.
        assert bool((5 * error < 0.5 * value.abs().max()).all()), parameter


def test_enhanced_head_has_no_larger_variance():
    """Exactly, by enumeration, for every parameter of the head; every other gradient is the same draw by draw."""
    ratios = []
    for seed in range(5):
        net = fully_connected(2, 3, 3, 3, seed=seed, scale=1.0)
        graph = chain(net)
        x, objective = batch((1, 2), seed=seed)
        h = reference.joint_states(graph, x)
        p = reference.probability(graph, h).detach()

        def moments(estimator, net=net, h=h, p=p, objective=objective):
            rows = torch.zeros(len(p), dtype=torch.long)
            losses = net(h[0], objective.select(rows), estimator=estimator, noise=reference.forcing(h))
            heads = [torch.autograd.grad(loss, list(net.head.parameters()), retain_graph=True) for loss in losses]
            g = torch.stack([torch.cat([part.flatten() for part in head]) for head in heads])
            mean = p @ g
            return mean, p @ (g - mean).square(), gradients(losses.sum(), net)

        mean, variance, plain = moments(paper_psa())
        enhanced_mean, enhanced_variance, enhanced = moments(paper_psa(head="enhanced"))
        assert_same(enhanced_mean, mean)
        assert bool((enhanced_variance <= variance + 1e-12).all())
        ratios.append((enhanced_variance / variance).mean())
        for name in ["0.weight", "0.bias", "1.weight", "1.bias"]:
            assert_same(enhanced[name], plain[name])
    assert torch.stack(ratios).mean() < 0.8


@pytest.mark.parametrize("name", ["fc3", "conv", "pooled"])
def test_is_st_where_noise_and_head_are_linear(name):
    """Uniform noise whose support holds every pre-activation and its flips, and an objective linear in the outputs."""
    net, x, _ = build(name, "uniform")
    for layer in net.binary_layers:
        layer.noise = fg.Uniform(200.0)
    z = noise_like(chain(net), x)

    linear = reference.LinearLoss()
    psa, st = (gradients(net(x, linear, estimator=kind, noise=z).sum(), net) for kind in (paper_psa(), fg.ST()))
    assert_same(psa, st, 1e-12)
    # One flip beyond the support, or a curved objective, and they part.
    net.binary_layers[-1].noise = fg.Uniform(1.0)
    outside = [gradients(net(x, linear, estimator=kind, noise=z).sum(), net) for kind in (paper_psa(), fg.ST())]
    assert (outside[0]["0.weight"] - outside[1]["0.weight"]).abs().max() > 1e-6


def test_differs_from_st():
    net, x, objective = build("fc3")
    z = noise_like(chain(net), x)
    psa, st = (gradients(net(x, objective, estimator=kind, noise=z).sum(), net) for kind in (paper_psa(), fg.ST()))
    for name in ["0.weight", "1.weight", "2.weight"]:
        assert (psa[name] - st[name]).abs().max() > 1e-2
    assert_same(psa["head.weight"], st["head.weight"])


def test_convolution_is_the_fully_connected_net_with_its_matrix():
    assert_convolution_is_its_matrix(paper_psa())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stays_finite_in_saturated_nets(dtype):
    net = fully_connected(2, 6, 6, 6, 3, scale=300.0).to(dtype)
    x, objective = batch((4, 2))
    g = gradients(net(x.to(dtype), objective, estimator=paper_psa(head="enhanced")).sum(), net)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in g.values())


def test_notices_a_weight_changed_before_backward():
    net, x, objective = build("fc3")
    loss = net(x, objective, estimator=paper_psa()).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("module", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=lambda module: type(module).__name__)
def test_refuses_a_head_that_mixes_examples(module):
    net, x, objective = build("fc3", head=nn.Sequential(module, nn.Linear(3, 3)))
    with pytest.raises(fg.InputError, match=rf"{type(module).__name__}.*in training mode.*eval mode.*flip_head=False"):
        net(x, objective, estimator=paper_psa())
    assert net(x, objective, estimator=paper_psa(flip_head=False)).shape == (3,)
    net.eval()
    compared(net, x, objective, paper_psa(), reference.psa)


def test_refuses_bad_options():
    with pytest.raises(fg.InputError, match=r"PSA\(head='exact'\): choose 'auto', 'sampled', 'enhanced', 'rao-blackwell'"):
        fg.PSA(head="exact")


def test_enhanced_head_refuses_a_concatenation():
    net = fg.Sequential(fg.BinaryLinear(2, 3), fg.Concat(nn.Identity(), fg.BinaryLinear(3, 2)), head=nn.Linear(5, 2))
    with pytest.raises(fg.InputError, match="needs a binary layer, not Concat, before the head; use head='sampled'"):
        net(torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])), estimator=paper_psa(head="enhanced"))


def test_the_tolerance_bounds_the_error_of_every_layers_gradient(monkeypatch):
    """With separable flips wherever they reach the tolerance of 1e-3, at initialisation and with grown weights."""
    monkeypatch.setitem(fg.flips.choice.CALL, "separable", -1.0)
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    for factor in (1, 3):
        net = cifar_net(0.25).initialize(x, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for layer in net.binary_layers:
                layer.weight *= factor
        # In float32, as in training; the same generator gives the same states.
        near, exact = (
            net(x, fg.CrossEntropy(y), estimator=rule, generator=torch.Generator().manual_seed(2)).sum()
            for rule in (paper_psa(), paper_psa(exact=True))
        )
        assert near == exact
        used = False
        for g, h in zip(gradients(near, net).values(), gradients(exact, net).values(), strict=True):
            error = ((g - h).norm() / h.norm()).item()
            used |= error > 1e-5
            assert error <= 3e-3
        assert used
