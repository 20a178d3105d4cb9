"""Where a pre-activation is as good as 0, packed networks decide as PyTorch's rounded arithmetic does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_nets import packed_states, torch_states
from torch import nn

import flipgrad as fg
from flipgrad.packed import pack, parts

INPUTS = 48


@pytest.fixture(params=["of this processor", "two roundings"])
def two_roundings(request, monkeypatch):
    """Whether PyTorch rounds the product and the sum, as processors without a fused operation do: then exact signs differ."""
    if request.param == "two roundings":
        monkeypatch.setattr(torch, "addcmul", lambda shift, sums, scale: shift + sums * scale)
    return request.param == "two roundings"


def nearly_zero(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales s and biases b with t s + b = 0 up to the last digits, for many t and both signs of s."""
    random = np.random.default_rng(0)
    decimal = random.choice([0.1, 0.3, 0.7, 1 / 3, 1e-3, 1e-30, 12.3], count)
    scale = np.where(random.random(count) < 0.7, decimal, random.uniform(0.01, 2, count)).astype(np.float32)
    scale *= random.choice([-1, 1], count)
    t = random.integers(-INPUTS // 2, INPUTS // 2 + 1, count) * 2
    bias = (-t.astype(np.float32) * scale).astype(np.float32)
    # As written in decimals, or up to two units in the last place away.
    written = (-t * decimal * np.sign(scale)).astype(np.float32)
    bias = np.where(random.random(count) < 0.5, bias, written)
    for _ in range(2):
        bias = np.where(
            random.random(count) < 0.3, np.nextafter(bias, random.choice([-9e9, 9e9], count).astype(np.float32)), bias
        )
    return torch.from_numpy(scale), torch.from_numpy(bias.astype(np.float32))


def prefixes() -> torch.Tensor:
    """States [INPUTS + 1, INPUTS] of all sums."""
    return torch.where(torch.arange(INPUTS) < torch.arange(INPUTS + 1)[:, None], 1.0, -1.0)


def signs(channels: int) -> fg.BinaryLinear:
    """A layer whose states are the signs of its input."""
    layer = fg.BinaryLinear(channels, channels, bias=False)
    nn.init.eye_(layer.weight)
    return layer


def with_ties(layer: nn.Module) -> nn.Module:
    """The layer with weights that are all +1, or all -1, of a channel, and sums that are as good as 0."""
    scale, bias = nearly_zero(len(layer.weight))
    with torch.no_grad():
        layer.weight.copy_(torch.where(torch.arange(len(scale)) % 3 > 0, 1.0, -1.0).view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.weight_scale.copy_(scale)
        layer.bias.copy_(bias)
    return layer


def shifts_moved(net: fg.Sequential, x: torch.Tensor, layer: nn.Module) -> int:
    """How many channels' shifts differ from the bias."""
    affine = next(part for part in pack(net, x).program if isinstance(part, parts.Affine))
    return int((affine.shift != layer.bias.detach().numpy()).sum())


def test_a_fully_connected_layer(two_roundings):
    layer = with_ties(fg.BinaryLinear(INPUTS, 6000, weights="binary"))
    net = fg.Sequential(signs(INPUTS), layer, head=nn.Linear(6000, 1)).eval()
    x = prefixes()
    packed = pack(net, x)
    for batch in (x, x[:1], x[7:20]):
        np.testing.assert_array_equal(packed_states(packed, batch)[0][1], torch_states(net, batch)[0][1])
    # Exact arithmetic would have decided otherwise.
    assert shifts_moved(net, x, layer) > 100 * two_roundings - 1


@pytest.mark.parametrize("width", [1, 5, 16])
def test_a_convolution(width, two_roundings):
    layer = with_ties(fg.BinaryConv2d(INPUTS, 6000, 1, weights="binary"))
    net = fg.Sequential(
        signs(INPUTS * width), nn.Unflatten(1, (INPUTS, 1, width)), layer, nn.Flatten(), head=nn.Linear(6000 * width, 1)
    ).eval()
    x = prefixes()
    # Other sums at other places.
    x = torch.stack([x.roll(3 * place, 0) for place in range(width)], 2).flatten(1)
    packed = pack(net, x)
    np.testing.assert_array_equal(packed_states(packed, x)[0][1], torch_states(net, x)[0][1])
    assert shifts_moved(net, x, layer) > 100 * two_roundings - 1


def test_averages_of_four_and_a_batch_norm(two_roundings):
    norm = nn.BatchNorm2d(4000)
    layer = fg.BinaryConv2d(INPUTS, 4000, 1, weights="binary", bias=False, norm=norm)
    scale, bias = nearly_zero(4000)
    with torch.no_grad():
        norm.running_var.fill_(1 - 1e-5)
        norm.weight.copy_(scale)
        norm.bias.copy_(bias / 4)
    net = fg.Sequential(
        signs(INPUTS * 4), nn.Unflatten(1, (INPUTS, 2, 2)), nn.AvgPool2d(2), layer, nn.Flatten(), head=nn.Linear(4000, 1)
    ).eval()
    x = torch.stack([prefixes().roll(5 * place, 0) for place in range(4)], 2).flatten(1)
    np.testing.assert_array_equal(packed_states(pack(net, x), x)[0][1], torch_states(net, x)[0][1])


def test_scales_that_no_shift_can_tell_are_refused(monkeypatch):
    layer = with_ties(fg.BinaryLinear(INPUTS, 500, weights="binary"))
    net = fg.Sequential(signs(INPUTS), layer, head=nn.Linear(500, 1))
    monkeypatch.setattr(torch, "addcmul", lambda shift, sums, scale: shift + sums * scale)
    monkeypatch.setattr("flipgrad.packed.packing.MOST_NUDGES", 1)
    with pytest.raises(fg.InputError, match="a layer's scales and shifts are too far apart to be told by float32: train"):
        pack(net, prefixes())
