"""Flips of a linear head with a cross-entropy from products with its softmax, against losses evaluated at every flip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.flips import heads
from flipgrad.native import library
from random_tensors import normal, states, strided, uniform

needs_library = pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")


def network(classes, factor, bias=True, units=7):
    torch.manual_seed(0)
    layers = fg.BinaryConv2d(1, 3, 2), fg.BinaryConv2d(3, units, 2), nn.AvgPool2d(2), nn.Flatten()
    net = fg.Sequential(*layers, head=nn.Linear(units, classes, bias=bias)).double()
    with torch.no_grad():
        net.head.weight *= factor
    return net, torch.randn(5, 1, 4, 4, dtype=torch.float64)


def gradients(net, x, objective, estimator):
    losses = net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(0.5, 2, len(x), dtype=losses.dtype)
    return losses.detach(), torch.autograd.grad((losses * weights).sum(), list(net.parameters()))


def objectives(classes):
    p = torch.rand(5, classes, dtype=torch.float64) + 0.1
    return fg.CrossEntropy(torch.arange(5) % classes), fg.SoftCrossEntropy(p / p.sum(1, keepdim=True))


@pytest.mark.parametrize("classes", [2, 3, 40])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 5.0])
@pytest.mark.parametrize("head", ["sampled", "rao-blackwell"])
def test_gradients_are_those_of_losses_at_every_flip(classes, factor, head):
    net, x = network(classes, factor, bias=classes != 3)
    for objective in objectives(classes):
        found = gradients(net, x, objective, fg.PSA(head=head))
        # A function of which nothing is known is evaluated at every flip.
        expected = gradients(net, x, lambda out, objective=objective: objective(out), fg.PSA(head=head))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-11 * min(1, factor))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 6.0, 40.0])
def test_in_float32_all_digits_are_kept(factor):
    net, x = network(10, factor, units=40)
    objective = fg.CrossEntropy(torch.arange(5))
    noise = [
        layer.noise.sample_like(torch.empty(5, layer.out_channels, *[4 - k] * 2))
        for k, layer in enumerate(net.binary_layers, 1)
    ]

    def once(net, x, objective):
        losses = net(x, objective, noise=[z.to(x.dtype) for z in noise], estimator=fg.PSA(inputs="sampled", exact=True))
        return torch.autograd.grad(losses.mean(), list(net.parameters()))

    expected = once(net, x, lambda out: objective(out))
    found = once(net.float(), x.float(), objective)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


def test_large_weights_zeros_and_no_examples_are_left_to_evaluation():
    x, weight = torch.ones(3, 4), torch.ones(2, 4)
    outputs, targets = torch.zeros(3, 2), torch.full((3, 2), 0.5)
    assert heads.SoftmaxFlips.of(x, outputs, targets, weight) is not None
    assert heads.SoftmaxFlips.of(x, outputs, targets, 9 * weight) is None
    assert heads.SoftmaxFlips.of(x, outputs, targets, weight * torch.nan) is None
    assert heads.SoftmaxFlips.of(x - 1, outputs, targets, weight) is None
    assert heads.SoftmaxFlips.of(x[:0], outputs[:0], targets[:0], weight) is None
    assert heads.SoftmaxFlips.of(x, outputs, targets, 3 * weight).p.dtype == torch.float64


def test_without_flips_an_averaged_head_evaluates_none():
    """The losses of a function of which nothing is known are then those of the sample, and their gradient is."""
    net, x = network(3, 1.0)
    evaluated = []

    def objective(outputs):
        evaluated.append(outputs.shape)
        return fg.CrossEntropy(torch.arange(5) % 3)(outputs)

    found = gradients(net, x, objective, fg.PSA(flip_head=False))
    assert evaluated == [(5, 3)]
    torch.testing.assert_close(found, gradients(net, x, objective, fg.PSA(flip_head=False, head="sampled")))
    # Where flips are known without evaluating, the head's gradient is averaged, and that in the states is the ordinary one.
    _, known = gradients(net, x, fg.CrossEntropy(torch.arange(5) % 3), fg.PSA(flip_head=False))
    _, averaged = gradients(net, x, fg.CrossEntropy(torch.arange(5) % 3), fg.PSA())
    torch.testing.assert_close(known[-2:], averaged[-2:])
    torch.testing.assert_close(known[:-2], found[1][:-2])


def flips_case(batch, units, outputs, size, seed=0):
    """States, outputs, targets and weights up to a ``size``; probabilities and gradients; all in float32 numbers."""
    x, weight = states(batch, units, seed=seed), size * uniform(outputs, units, seed=seed + 1)
    logits, targets = 3 * normal(batch, outputs, seed=seed + 2), torch.softmax(normal(batch, outputs, seed=seed + 3), 1)
    targets[::2] = torch.eye(outputs, dtype=torch.float64)[torch.arange(len(targets[::2])) % outputs]
    opposite, grad = (uniform(batch, units, seed=seed + 4) + 1) / 2, normal(batch, seed=seed + 5)
    return [t.float() for t in (x, logits, targets, weight, opposite, grad)]


def results(x, logits, targets, weight, opposite, grad):
    flips = heads.SoftmaxFlips.of(x, logits, targets, weight)
    assert flips is not None
    return flips.derivative, *flips.gradients(opposite, grad, of_bias=True)


@needs_library
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("size", [1e-4, 0.3, 2.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 2), (5, 64, 3), (64, 200, 10), (9, 131, 40)])
def test_compiled_flips_are_those_of_tensors(monkeypatch, shape, size, portable):
    monkeypatch.setattr(library, "PORTABLE", portable)
    case, calls, call = flips_case(*shape, size), [], library.call
    monkeypatch.setattr(library, "call", lambda name, *rest, **sizes: calls.append(name) or call(name, *rest, **sizes))
    # What is not written shows.
    torch.use_deterministic_algorithms(True)
    found = results(*case)
    assert calls == ["softmax", "softmax_gradient"]
    expected = results(*(t.double() for t in case))
    torch.use_deterministic_algorithms(False)
    assert len(calls) == 2
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max()
        # What is left of sums that cancel is as exact as what is added up: terms of the size of a weight, or of a gradient.
        least = size if ours is found[0] else float(case[-1].abs().sum())
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6 * (float(scale) + least))


@needs_library
def test_threads_give_the_same_bits():
    case, threads = flips_case(20, 300, 5, 0.5), torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(results(*case))
    torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layouts_that_are_not_compiled_are_computed_by_tensors(monkeypatch):
    case = flips_case(6, 20, 4, 0.5)
    monkeypatch.setattr(library, "call", lambda *rest, **sizes: pytest.fail("compiled"))
    for other in ([strided(t) for t in case], [t.double() for t in case]):
        torch.testing.assert_close(results(*other)[1].double(), results(*(t.double() for t in case))[1], rtol=1e-4, atol=1e-6)


def test_weights_may_change_before_the_way_back():
    case = flips_case(6, 20, 4, 0.5)
    expected = results(*case)
    flips = heads.SoftmaxFlips.of(*case[:4])
    case[3].zero_()
    assert all(torch.equal(a, b) for a, b in zip(flips.gradients(*case[4:], of_bias=True), expected[1:], strict=True))


def test_gradients_of_several_losses_at_once():
    x, logits, targets, weight, opposite, grad = flips_case(6, 20, 4, 0.5)
    weight.requires_grad_()
    bias = torch.zeros(4, requires_grad=True)
    term = heads.SoftmaxFlips.of(x, logits, targets, weight).averaged(opposite, weight, bias)
    every = torch.stack([grad, -2 * grad])
    batched = torch.autograd.grad(term, (weight, bias), every, is_grads_batched=True, retain_graph=True)
    for k, one in enumerate(every):
        torch.testing.assert_close(
            [t[k] for t in batched], list(torch.autograd.grad(term, (weight, bias), one, retain_graph=True))
        )


@needs_library
def test_outputs_that_are_no_numbers_give_none():
    x, logits, *rest = flips_case(3, 20, 4, 0.5)
    logits[1, 2] = torch.nan
    derivative, in_weight, in_bias = results(x, logits, *rest)
    assert derivative[1].isnan().all()
    assert in_weight.isnan().all()
    assert in_bias.isnan().all()
    assert derivative[0].isfinite().all()
