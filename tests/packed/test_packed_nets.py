"""Packed networks decide every unit as PyTorch does, with and without noise, and their files are what the summary tells."""

from __future__ import annotations

import numpy as np
import safetensors.numpy
import torch
from hypothesis import given
from packed_nets import by_words, convolutional, fully_connected, packed_states, residual, torch_states
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.packed import pack


def check(net: fg.Sequential, x: Tensor) -> None:
    """Bits, outputs, and the file."""
    training = net.training
    packed = pack(net, x)
    assert net.training == training
    content, size = packed.to_bytes()
    assert size == fg.summary(net, x).packed_bytes
    check_content(content, net)
    # Real numbers as exact as they are in packed networks.
    exact = net.eval().double()
    for sample in (None, 0, 7):
        wanted, outputs = torch_states(exact, x.double(), *([] if sample is None else [by_words(3, sample)]))
        found, results = packed_states(packed, x, sample, seed=3)
        assert len(found) == len(wanted) == len(net.binary_layers)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(results, outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed(x.numpy()), exact.deterministic(x.double()).detach(), rtol=1e-5, atol=1e-5)


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


@given(fully_connected())
def test_fully_connected_networks(drawn):
    check(*drawn)


@given(convolutional())
def test_convolutional_networks(drawn):
    check(*drawn)


@given(residual())
def test_residual_networks(drawn):
    check(*drawn)
