"""Flips of a linear head with a cross-entropy from products with its softmax, against losses evaluated at every flip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.flips import heads


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
