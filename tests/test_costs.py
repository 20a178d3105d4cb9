"""What layers cost, counted by hand: in ``Sequential`` and in graphs written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.training.models import cifar_net, fully_connected

BINARY = {"weights": "binary"}


def row(summary: fg.Summary, name: str) -> fg.LayerSummary:
    (found,) = (row for row in summary.rows if row.name == name)
    return found


def test_every_number_of_a_convolutional_network():
    net = fg.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        fg.BinaryConv2d(3, 6, 3, bias=False, norm=nn.BatchNorm2d(6)),
        fg.BinaryConv2d(6, 4, 3, stride=2, groups=2, **BINARY),
        nn.Flatten(),
        fg.BinaryLinear(36, 5, bias=False, norm=fg.ScaleShift(5), **BINARY),
        head=nn.Linear(5, 2),
    )
    found = fg.summary(net, torch.randn(4, 1, 9, 9))
    # Name, class, shape, weights, bits, binary and float multiply-adds, bytes as float32, packed.
    assert found.rows == (
        fg.LayerSummary("0", "Conv2d", (3, 9, 9), 27, 32, 0, 27 * 81, 4 * 30, 4 * 30),
        fg.LayerSummary("1", "BatchNorm2d", (3, 9, 9), 0, 32, 0, 0, 4 * 12, 4 * 12),
        fg.LayerSummary("3", "BinaryConv2d", (6, 7, 7), 162, 32, 0, 162 * 49, 4 * (162 + 24), 4 * (162 + 24)),
        # Weights, biases and the layer's own scales.
        fg.LayerSummary("4", "BinaryConv2d", (4, 3, 3), 108, 1, 108 * 9, 0, 4 * (108 + 8), 14 + 8 * 4),
        # 180 bits are 22.5 bytes.
        fg.LayerSummary("6", "BinaryLinear", (5,), 180, 1, 180, 0, 4 * (180 + 10), 23 + 8 * 5),
        fg.LayerSummary("head", "Linear", (2,), 10, 32, 0, 10, 4 * 12, 4 * 12),
    )
    assert (found.weights, found.binary_weights) == (27 + 162 + 108 + 180 + 10, 108 + 180)
    assert (found.binary_operations, found.float_operations) == (108 * 9 + 180, 27 * 81 + 162 * 49 + 10)
    assert found.float_bytes == sum(row.float_bytes for row in found.rows)
    assert found.packed_bytes == 4 * (30 + 12 + 186 + 12) + 46 + 63


def test_binary_weights_that_are_multiplied_with_real_numbers_are_not_packed():
    pooled = fg.BinaryConv2d(4, 4, 3, **BINARY)
    padded = fg.BinaryConv2d(4, 4, 3, **BINARY)
    layers = (fg.BinaryConv2d(1, 4, 3, **BINARY), nn.AvgPool2d(2), pooled, nn.ZeroPad2d(1), padded, nn.Flatten())
    net = fg.Sequential(*layers, head=nn.Linear(36, 2))
    # Whatever the data are: the first layer's inputs are no units.
    found = fg.summary(net, torch.ones(1, 1, 12, 12))
    assert [(row.name, row.bits, row.binary_operations > 0) for row in found.rows] == [
        ("0", 32, False),
        ("2", 1, True),
        ("4", 1, True),
        ("head", 32, False),
    ]
    assert row(found, "0").packed_bytes == row(found, "0").float_bytes


def test_layers_in_branches():
    branches = fg.Concat(fg.BinaryLinear(6, 3, **BINARY), nn.Identity())
    net = fg.Sequential(fg.BinaryLinear(2, 6), branches, head=nn.Linear(9, 2))
    found = row(fg.summary(net, torch.randn(1, 2)), "1.branches.0")
    assert (found.binary_operations, found.packed_bytes) == (18, 3 + 24)


class Handmade(nn.Module):
    """A skip connection, a layer that is called twice, one that never is, and parameters and products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = fg.BinaryLinear(7, 8), fg.BinaryLinear(8, 8, **BINARY)
        self.last, self.unused, self.mixing = nn.Linear(16, 2), nn.Linear(3, 3), nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        return self.last(torch.cat([a, self.second(self.second(a))], 1)) @ self.mixing


@pytest.mark.parametrize("estimator", [None, fg.PSA()])
def test_a_network_written_by_hand(estimator):
    model = fg.use(Handmade(), estimator)
    found = fg.summary(model, torch.randn(3, 7))
    assert {(row.name, row.output_shape, row.weights, row.binary_operations, row.float_operations) for row in found.rows} == {
        # The product with its own parameter, beside what its layers do.
        ("", (2,), 4, 0, 4),
        ("first", (8,), 56, 0, 56),
        ("second", (8,), 64, 128, 0),
        ("last", (2,), 32, 0, 32),
        ("unused", None, 9, 0, 0),
    }
    assert found.float_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert row(found, "second").packed_bytes == 8 + 64


def test_products_outside_of_all_layers_have_a_row_of_their_own():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return x @ x.T

    found = fg.summary(Product(), torch.randn(1, 4))
    assert [(row.name, row.float_operations, row.float_bytes) for row in found.rows] == [("layer", 16, 80), ("(others)", 4, 0)]


def test_modules_that_return_more_than_a_tensor():
    found = fg.summary(nn.LSTM(3, 5, batch_first=True), torch.randn(2, 7, 3))
    assert found.rows[0].output_shape == (7, 5)
    assert found.weights == 4 * 5 * (3 + 5)


def test_modules_that_are_one_operator_of_torch_are_counted():
    both_ways = nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)
    assert fg.summary(both_ways, torch.randn(2, 7, 3)).float_operations == 7 * 2 * 4 * 5 * ((3 + 5) + (10 + 5))
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = row(fg.summary(attention, torch.randn(2, 5, 8)), "self_attn")
    # Products with the weights of queries, keys, values and outputs; of queries with keys, and of these with values.
    assert found.float_operations == 5 * 4 * 8 * 8 + 2 * 5 * 5 * 8


def test_a_parameter_that_layers_share_is_counted_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    model = Tied()
    found = fg.summary(model, torch.randn(1, 4))
    assert [(row.weights, row.float_operations, row.float_bytes) for row in found.rows] == [(16, 16, 80), (0, 16, 16)]
    assert found.float_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_binary_weights_that_layers_share_are_packed_once():
    first, second = fg.BinaryLinear(8, 8, **BINARY), fg.BinaryLinear(8, 8, **BINARY)
    second.weight = first.weight
    net = fg.Sequential(fg.BinaryLinear(3, 8), first, second, head=nn.Linear(8, 2))
    found = fg.summary(net, torch.randn(1, 3))
    # Each has its own scales and biases.
    assert [row.packed_bytes for row in found.rows[1:3]] == [8 + 64, 64]
    blocks = [fg.ResidualLinear(8, 8, **BINARY) for _ in range(2)]
    blocks[1].branch.weight = blocks[0].branch.weight
    found = fg.summary(fg.Sequential(nn.Linear(3, 8), *blocks, head=nn.Linear(8, 2)), torch.randn(1, 3))
    assert [row.packed_bytes for row in found.rows[1:3]] == [8 + 64, 64]


def test_nothing_is_changed_by_it():
    net = fully_connected(3, [4, 4], 2, norm="batch", weights="binary", weight_noise=fg.Logistic())
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    fg.summary(net, torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net.training
    assert not net[1].training
    assert not net[0]._forward_hooks


def test_a_table_of_a_large_network_fits_into_100_columns():
    inside = nn.ModuleDict({"a name that is far too long for a terminal to be shown beside all these numbers": cifar_net(0.5)})
    model = nn.Sequential(nn.Identity(), *inside.values())
    lines = str(fg.summary(model, torch.randn(1, 3, 32, 32))).splitlines()
    assert len(lines) == 2 + 9 + 1
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 100
    long = fg.LayerSummary("very." * 40 + "last", "Linear", (10,), 10**7, 32, 10**10, 10**10, 10**7, 10**7)
    table = str(fg.Summary((long,)))
    assert max(map(len, table.splitlines())) <= 100
    assert "…y.last Linear" in table


@pytest.mark.parametrize("x", [torch.randn(0, 2), torch.tensor(1.0), [1.0]])
def test_bad_input_is_refused(x):
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 2))
    with pytest.raises(fg.InputError, match=r"summary\(net, x\) takes a module and a batch of at least one example, got Sequ"):
        fg.summary(net, x)
    with pytest.raises(fg.InputError, match=r"got str and Tensor \[1, 2\]"):
        fg.summary("net", torch.randn(1, 2))
