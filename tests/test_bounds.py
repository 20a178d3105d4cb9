"""Sampled losses and the multi-sample bound."""

from __future__ import annotations

import pytest
import torch

import flipgrad as fg
import reference
from flipgrad import bounds, exact
from reference import assert_same, batch, chain, fully_connected


@pytest.fixture
def problem():
    return fully_connected(2, 3, 3, 3, scale=1.5), *batch((3, 2))


def test_losses_are_those_of_sampled_passes(problem):
    net, x, objective = problem
    losses = bounds.sampled_losses(net, x, objective, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    assert_same(losses, torch.stack([objective(net(x, generator=generator)).detach() for _ in range(4)]), 0)
    assert not losses.requires_grad


def test_estimates_are_made_of_the_losses(problem):
    net, x, objective = problem

    def seeded(function):
        return function(net, x, objective, 5, generator=torch.Generator().manual_seed(0))

    losses = seeded(bounds.sampled_losses)
    assert losses.shape == (5, 3)
    assert_same(seeded(bounds.expected_loss), losses.mean(0))
    assert_same(seeded(bounds.marginal_loss), -torch.exp(-losses).mean(0).log())


def test_estimates_approach_the_exact_losses(problem):
    """Fails by chance less than once in 10^5 seeds: 2 x 3 numbers, 5 standard errors each."""
    net, x, objective = problem
    samples = 3000
    f = bounds.sampled_losses(net, x, objective, samples, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = f.std(0) / samples**0.5
        assert bool(((f.mean(0) - exact.expected_loss(net, x, objective)).abs() < 5 * error).all())
        p = torch.exp(-f)
        # By the delta method, the error of a logarithm is the relative error.
        error = p.std(0) / p.mean(0) / samples**0.5
        assert bool(((bounds.multi_sample_bound(f) - exact.marginal_loss(net, x, objective)).abs() < 5 * error).all())


def test_bound_lies_between_the_expected_and_the_marginal_loss(problem):
    """In expectation, computed over all states, and closer to the marginal loss the more samples."""
    net, x, objective = problem
    graph = chain(net)
    h = reference.joint_states(graph, x[:1])
    with torch.no_grad():
        p = reference.probability(graph, h)
        f = objective.select(torch.zeros(len(p), dtype=torch.long))(graph.outputs(h))
        one = p @ bounds.multi_sample_bound(f[None])
        two = p @ bounds.multi_sample_bound(torch.stack(torch.broadcast_tensors(f[:, None], f))) @ p
        expected, marginal = (
            loss(net, x[:1], objective.select(slice(1)))[0] for loss in (exact.expected_loss, exact.marginal_loss)
        )
    assert_same(one, expected)
    assert marginal + 0.05 < two < expected - 0.05


def test_bound_neither_overflows_nor_underflows():
    assert_same(bounds.multi_sample_bound(torch.tensor([[1e4, -1e4], [1e4, -1e4]])), torch.tensor([1e4, -1e4]))


@pytest.mark.parametrize("function", [bounds.sampled_losses, bounds.expected_loss, bounds.marginal_loss])
def test_refuses_no_samples(problem, function):
    with pytest.raises(fg.InputError, match="samples=0: at least one sample is needed"):
        function(*problem, 0)
