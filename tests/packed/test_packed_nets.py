"""Packed networks decide every unit as PyTorch does, with and without noise, and their files are what the summary tells."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from packed_nets import by_words, convolutional, fully_connected, packed_states, residual, torch_states
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.packed import PackedNetwork, load, pack
from flipgrad.packed.c_source import to_c
from flipgrad.packed.parts import Affine


def check(net: fg.Sequential, x: Tensor) -> None:
    """Bits, outputs, and the file."""
    training = net.training
    packed = pack(net, x)
    assert net.training == training
    content, size = packed.to_bytes()
    assert size == fg.summary(net, x).packed_bytes
    check_content(content, net)
    without_draws = pack(net, x, draws=False)
    check_content(without_draws.to_bytes()[0], net)
    # Real numbers as exact as they are in packed networks.
    exact = net.eval().double()
    for sample in (None, 0, 7):
        wanted, outputs = torch_states(exact, x.double(), *([] if sample is None else [by_words(3, sample)]))
        found, results = packed_states(packed, x, sample, seed=3)
        assert len(found) == len(wanted) == len(net.binary_layers)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(results, outputs, rtol=1e-5, atol=1e-5)
    check_without_draws(without_draws, x, *torch_states(exact, x.double()))
    np.testing.assert_allclose(packed(x.numpy()), exact.deterministic(x.double()).detach(), rtol=1e-5, atol=1e-5)


def check_without_draws(packed: PackedNetwork, x: Tensor, wanted: list[np.ndarray], outputs: np.ndarray) -> None:
    """Its states and outputs, by both engines, also if weights have another sign because their channel falls."""
    found, results = packed_states(packed, x)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(results, outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed(x.numpy()), outputs, rtol=1e-5, atol=1e-5)
    with pytest.raises(fg.InputError, match="packed without draws"):
        packed.members(x.numpy(), 2)


def check_content(content: bytes, net: fg.Sequential) -> None:
    """The package safetensors reads it, and arrays that are those of the network have its names for them."""
    state = net.state_dict()
    for name, values in safetensors.numpy.load(content).items():
        if name in state and values.dtype == np.float32:
            # Binary weights that meet real numbers are stored as their signs.
            kept = np.array_equal(values, state[name]) or np.array_equal(values, np.where(state[name] >= 0, 1, -1))
            assert kept, name
        else:
            assert name.endswith((".bits", ".scale", ".shift")), name


def test_an_empty_batch():
    net = fg.Sequential(fg.BinaryConv2d(1, 2, 1), nn.ChannelShuffle(2), nn.Flatten(), head=nn.Linear(8, 3))
    packed = pack(net, torch.zeros(1, 1, 2, 2))
    for sample in (None, 0):
        states, outputs = packed_states(packed, torch.zeros(0, 1, 2, 2), sample)
        assert states[0].shape == (0, 2, 2, 2)
        assert outputs.shape == (0, 3)


def test_without_draws_a_file_has_two_bytes_for_every_channel(tmp_path):
    torch.manual_seed(0)
    hidden = fg.BinaryLinear(40, 30, weights="binary", norm=nn.BatchNorm1d(30))
    net = fg.Sequential(fg.BinaryLinear(8, 40), hidden, head=nn.Linear(30, 10)).eval()
    with torch.no_grad():
        hidden.norm.weight.normal_()
    x = torch.randn(50, 8)
    packed = pack(net, x, draws=False)
    assert packed.save(tmp_path / "net.safetensors") == fg.summary(net, x).packed_bytes - 6 * 30
    read = load(tmp_path / "net.safetensors")
    assert not read.draws
    np.testing.assert_allclose(read(x.numpy()), net.deterministic(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(fg.InputError, match="packed without draws, and has no noise: leave samples, or pack it again"):
        read(x.numpy(), samples=3)
    with pytest.raises(fg.InputError, match="packed without draws"):
        to_c(read, stochastic=True)
    assert "net_predict" in to_c(read, examples=x.numpy()).source


def test_sums_too_large_for_two_bytes_keep_scale_and_shift():
    hidden = fg.BinaryLinear(2**15, 2, weights="binary")
    net = fg.Sequential(fg.BinaryLinear(1, 2**15), hidden, head=nn.Linear(2, 2))
    x = torch.randn(2, 1)
    packed = pack(net, x, draws=False)
    assert [part.scale is None for part in packed.program if isinstance(part, Affine)] == [False]
    np.testing.assert_allclose(packed(x.numpy()), net.deterministic(x).detach(), rtol=1e-5, atol=1e-5)


@given(fully_connected())
def test_fully_connected_networks(drawn):
    check(*drawn)


@given(convolutional())
def test_convolutional_networks(drawn):
    check(*drawn)


@given(residual())
def test_residual_networks(drawn):
    check(*drawn)
