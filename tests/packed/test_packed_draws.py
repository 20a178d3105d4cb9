"""Draws of packed networks: their frequencies, their independence, and that they depend on nothing but the seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_nets import NOISES, randomise
from torch import nn

import flipgrad as fg
from flipgrad.packed import network, pack, plain
from flipgrad.packed.tables import probabilities

# Standard errors. Of 1,000 numbers one is further away in one of 1,700 tests, and seeds are fixed.
ERRORS = 5


def small_net() -> tuple[fg.Sequential, torch.Tensor]:
    """All noises, a convolution, pooling, and a residual block: 228 units."""
    net = fg.Sequential(
        fg.BinaryConv2d(1, 5, 3, noise=NOISES[0]),
        fg.BinaryConv2d(5, 7, 3, padding=1, weights="binary", noise=NOISES[1], norm=fg.ScaleShift(7)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        fg.BinaryLinear(28, 20, weights="binary", noise=NOISES[2]),
        fg.BinaryLinear(20, 16, weights="binary", noise=NOISES[3]),
        head=nn.Linear(16, 3),
    )
    randomise(net, 1)
    with torch.no_grad():
        net[0].weight.mul_(2)
    return net, torch.randn(1, 1, 6, 6)


def check_frequencies(draws: int, at_once: int) -> None:
    """Every unit is +1 as often as its probability says, given the units before it.

    The sum of x - P(x | before) over draws has the mean 0, and the variance Σ p (1 - p), of all units alike.
    """
    net, x = small_net()
    packed = pack(net, x)
    signs = [part for part in packed.program if part.name == "sign"]
    surplus = [0.0] * len(signs)
    variance = [0.0] * len(signs)
    for sample in range(draws // at_once):
        evaluation = plain.Evaluation(sample, seed=11)
        value, number = np.repeat(x.double().numpy(), at_once, 0), 0
        for part in packed.program:
            before, value = value, plain.evaluate(part, value, evaluation)
            if part.name == "sign":
                p = probabilities(part.noise, before, part.noise_scale)
                surplus[number] = surplus[number] + ((value > 0) - p).sum(0)
                variance[number] = variance[number] + (p * (1 - p)).sum(0)
                number += 1
    units = np.concatenate([each.ravel() for each in surplus]), np.concatenate([each.ravel() for each in variance])
    assert len(units[0]) == 5 * 16 + 7 * 16 + 20 + 16
    unsure = units[1] > 0
    assert unsure.mean() > 0.9
    assert np.abs(units[0][unsure] / np.sqrt(units[1][unsure])).max() < ERRORS
    assert not units[0][~unsure].any()


def test_frequencies_of_every_unit():
    check_frequencies(20_000, 10_000)


@pytest.mark.slow
def test_frequencies_of_every_unit_over_a_million_draws():
    check_frequencies(1_000_000, 20_000)


def test_draws_are_independent_of_each_other():
    """Of units, examples, samples, layers and seeds: the correlation of fair coins, to five standard errors."""
    net = fg.Sequential(fg.BinaryLinear(1, 64), fg.BinaryLinear(64, 64, weights="binary"), head=nn.Linear(64, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    packed = pack(net, torch.zeros(1, 1))
    states = []
    for seed in (0, 1, 2**40):
        for sample in (0, 1):
            plain.run(packed.program, np.zeros((3000, 1)), plain.Evaluation(sample, seed, watch=states.append))
    # [seed, sample and layer; example, unit]
    coins = np.stack(states)
    assert coins.shape == (12, 3000, 64)
    assert np.abs(coins.mean((1, 2))).max() < ERRORS / np.sqrt(3000 * 64)
    pairs = np.einsum("abu,cbu->ac", coins, coins) / (3000 * 64) - np.eye(12)
    assert np.abs(pairs).max() < ERRORS / np.sqrt(3000 * 64)
    shifted = (coins[:, 1:] * coins[:, :-1]).mean((1, 2))
    assert np.abs(shifted).max() < ERRORS / np.sqrt(2999 * 64)
    units = np.einsum("abu,abv->uv", coins, coins) / (12 * 3000) - np.eye(64)
    assert np.abs(units).max() < ERRORS / np.sqrt(12 * 3000)


def test_draws_depend_on_the_seed_the_sample_and_the_examples_number_alone(monkeypatch):
    net, _ = small_net()
    x = torch.randn(7, 1, 6, 6).numpy()
    packed = pack(net, torch.randn(1, 1, 6, 6))
    packed.engine = "numpy"
    members = packed.members(x, 5, seed=9)
    assert members.shape == (5, 7, 3)
    assert members.dtype == np.float32
    np.testing.assert_array_equal(packed.members(x, 3, seed=9), members[:3])
    np.testing.assert_array_equal(packed.members(x[:4], 5, seed=9), members[:, :4])
    # One example at a time, in one call.
    monkeypatch.setattr(network, "VALUES_AT_ONCE", 1)
    np.testing.assert_array_equal(packed.members(x, 5, seed=9), members)
    others = packed.members(x, 5, seed=10)
    assert len({each.tobytes() for each in (*members, *others)}) == 10
    # Equal examples are drawn anew.
    again = packed.members(np.repeat(x[:1], 20, 0), 1, seed=9)[0]
    assert len(np.unique(again, axis=0)) > 1


def test_ensembles_are_means_of_their_members():
    for outputs in (1, 3):
        net = fg.Sequential(fg.BinaryLinear(4, 8), head=nn.Linear(8, outputs))
        x = torch.randn(5, 4)
        packed = pack(net, x)
        members = torch.from_numpy(packed.members(x.numpy(), 6, seed=2)).double()
        shares = members.sigmoid() if outputs == 1 else members.softmax(-1)
        np.testing.assert_allclose(packed(x.numpy(), samples=6, seed=2), shares.mean(0), rtol=1e-6)
        # As many draws as PyTorch's, of the same mean: their difference is within five standard errors.
        many, torchs = packed.members(x.numpy(), 2000, seed=1), torch.stack([net(x) for _ in range(2000)]).detach().numpy()
        error = np.sqrt((many.var(0) + torchs.var(0)) / 2000)
        assert (np.abs(many.mean(0) - torchs.mean(0)) < ERRORS * error + 1e-6).all()


def test_probabilities_of_any_outputs():
    extreme = np.array([[3e38, -3e38], [-3e38, -3e38]], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_array_equal(network.probabilities(extreme), [[1, 0], [0.5, 0.5]])
        np.testing.assert_array_equal(network.probabilities(extreme[:, :1]), [[1], [0]])
