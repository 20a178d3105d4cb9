"""The reference training: the paper's settings, reproducible, and it learns."""

from __future__ import annotations

import pytest
import torch

import flipgrad as fg
from flipgrad.data import toy
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import BATCH_SIZE, MOMENTUM, RATE, reference_training

DATA = toy().train
OBJECTIVE = fg.CrossEntropy(DATA.y)


def expected_loss(net):
    return fg.exact.expected_loss(net, DATA.x, OBJECTIVE).mean().item()


def test_settings_are_the_papers():
    assert (BATCH_SIZE, RATE, MOMENTUM) == (10, 0.03, 0.9)


def test_keeps_the_network_at_the_epochs_and_is_reproducible():
    seen = []
    nets = reference_training(DATA, [3, 3], [0, 1, 2], seed=4, report=seen.append)
    again = reference_training(DATA, [3, 3], [2], seed=4)
    assert list(nets) == [0, 1, 2]
    assert seen == [1, 2]
    assert torch.equal(nets[2].head.weight, again[2].head.weight)
    assert not torch.equal(nets[1].head.weight, nets[2].head.weight)
    other = reference_training(DATA, [3, 3], [2], seed=5)
    assert not torch.equal(nets[2].head.weight, other[2].head.weight)


def test_starts_from_whitened_weights():
    net = reference_training(DATA, [5, 5, 5], [0])[0]
    a = net[0].affine()(DATA.x)
    assert torch.allclose(a.mean(0), torch.zeros(5), atol=1e-5)
    assert torch.allclose(a.var(0, correction=0), torch.ones(5), atol=1e-4)


def test_learns():
    nets = reference_training(DATA, [5], [0, 10], estimator=fg.PSA())
    assert expected_loss(nets[10]) < 0.8 * expected_loss(nets[0])


def test_trains_a_given_network():
    torch.manual_seed(0)
    net = fully_connected(2, [4], 2, noise=fg.Normal())
    assert reference_training(DATA, [4], [1], net=net)[1][0].noise == fg.Normal()


@pytest.mark.parametrize("epochs", [[], [-1, 2]])
def test_bad_epochs_are_refused(epochs):
    with pytest.raises(fg.InputError, match="give the epochs"):
        reference_training(DATA, [3], epochs)


@pytest.mark.parametrize("widths", [[], [3, 0]])
def test_bad_widths_are_refused(widths):
    with pytest.raises(fg.InputError, match="give the units of every binary layer"):
        fully_connected(2, widths, 2)
