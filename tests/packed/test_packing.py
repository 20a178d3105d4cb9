"""What is packed, and what is refused by name with the way out; inputs of packed networks; the networks of the zoo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_nets import packed_states, randomise, torch_states
from torch import nn

import flipgrad as fg
from flipgrad.data import mnist
from flipgrad.packed import Facts, load, pack, parts

BINARY: dict[str, Any] = {"weights": "binary"}
DATA = Path(os.environ.get("FLIPGRAD_DATA", Path(__file__).parents[2] / "../shared/data"))


def small(*modules: nn.Module, head: nn.Module | None = None) -> fg.Sequential:
    """Six inputs, eight units, ``modules``, and a head."""
    return fg.Sequential(fg.BinaryLinear(6, 8), *modules, head=head or nn.Linear(8, 2))


def images(*modules: nn.Module, head: nn.Module | None = None) -> fg.Sequential:
    """Images [1, 4, 4], of which binary layers see two channels."""
    return fg.Sequential(fg.BinaryConv2d(1, 2, 1), *modules, head=head or nn.Sequential(nn.Flatten(), nn.LazyLinear(2)))


def refused(net: Any, message: str, x: Any = None) -> None:
    with pytest.raises(fg.InputError, match=message) as caught:
        pack(net, torch.zeros(1, 6) if x is None else x)
    assert "\n" not in str(caught.value)


def test_real_weights_behind_states():
    refused(
        small(fg.BinaryLinear(8, 8)), "BinaryLinear '1' has real weights behind states, which no bits can hold: train it with"
    )
    net = fg.Sequential(nn.Linear(6, 8), fg.ResidualLinear(8, 8), head=nn.Linear(8, 2))
    refused(net, "ResidualLinear '1' has real weights behind states.*or export it: flipgrad export RUN --to onnx")


def test_other_networks():
    model = nn.Sequential(fg.BinaryLinear(6, 8), nn.Linear(8, 2))
    refused(fg.Graph(model, torch.zeros(1, 6)), "pack takes a flipgrad.Sequential, .* got Graph: build the network as")
    refused(model, "pack takes a flipgrad.Sequential")
    for x in (torch.zeros(0, 6), torch.zeros(6), [[0.0] * 6]):
        refused(small(), r"pack\(net, example\) takes at least one example, \[B, n\] or", x)
    refused(small(), r"the network cannot be packed for inputs \[7\]: linear of \[7\] needs numbers \[6\]", torch.zeros(1, 7))


def test_modules_that_are_not_known():
    refused(
        small(head=nn.Sequential(nn.GELU(), nn.Linear(8, 2))), r"GELU 'head.0' .*cannot be packed: packed networks know linear"
    )
    x = torch.zeros(1, 1, 4, 4)
    pooled = nn.MaxPool2d(2, dilation=2)
    refused(images(head=nn.Sequential(pooled, nn.Flatten(), nn.Linear(2, 2))), "cannot be packed: use dilation=1 and return", x)
    refused(small(head=nn.Sequential(nn.Softplus(2.0), nn.Linear(8, 2))), "Softplus .*cannot be packed: use beta=1")
    cut = nn.Sequential(nn.ZeroPad2d(-1), nn.Flatten(), nn.Linear(8, 2))
    refused(images(head=cut), "cuts pixels off, and cannot be packed: cut them before the network", x)
    wide = nn.Sequential(nn.ConstantPad2d(1, float("inf")), nn.Flatten(), nn.Linear(72, 2))
    refused(images(head=wide), "pads with a number that is not finite, and cannot be packed: pad with another", x)
    negative = nn.Sequential(nn.AvgPool2d(4, divisor_override=-2), nn.Flatten(), nn.Linear(2, 2))
    refused(images(head=negative), "has a negative divisor, and cannot be packed: use a positive divisor_override", x)
    mixed = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, 8)), nn.Linear(8, 2))
    refused(small(head=mixed), "mixes examples, and cannot be packed: start at dimension 1")
    refused(
        small(head=nn.Sequential(nn.AvgPool2d(1), nn.Linear(8, 2))), r"pools images \[channels, height, width\], and is given"
    )
    refused(images(head=nn.Identity()), r"a network must end with outputs \[K\], this one ends with \[2, 4, 4\]", x)


def test_averages_that_are_padded():
    pool, flat = nn.AvgPool2d(2), nn.Flatten()
    layer = fg.BinaryLinear(32, 3, **BINARY)
    x = torch.randn(3, 1, 4, 4)
    net = images(pool, nn.ConstantPad2d(1, 1.0), flat, layer, head=nn.Linear(3, 2))
    refused(net, "padding of averages with 1 cannot be packed: pad before the average pooling, or with 0", x)
    net = images(pool, nn.ZeroPad2d(1), flat, layer, head=nn.Linear(3, 2)).eval()
    found, wanted = packed_states(pack(net, x), x)[0], torch_states(net, x)[0]
    np.testing.assert_array_equal(found[1], wanted[1])


def test_concatenation():
    class Batch(fg.Concat):
        pass

    refused(fg.Sequential(Batch(nn.Identity()), fg.BinaryLinear(6, 8), head=nn.Linear(8, 2)), "Batch '0' cannot be packed")
    both = fg.Concat(nn.Identity(), nn.Identity(), dim=0)
    refused(fg.Sequential(both, fg.BinaryLinear(6, 8), head=nn.Linear(8, 2)), r"Concat\(dim=0\) of 2 dimensions mixes examples")
    # Of real numbers, and along the last dimension of other shapes than the input's.
    real = fg.Concat(nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), dim=-1)
    net = fg.Sequential(real, fg.BinaryLinear(19, 4), head=nn.Linear(4, 2))
    x = torch.randn(3, 1, 4, 4)
    np.testing.assert_allclose(pack(net, x)(x), net.deterministic(x).detach(), atol=1e-5)


def test_hooks():
    message = "has hooks, or a forward of its own, which would not run in a packed network: remove them"
    net = small()
    net.head.register_forward_hook(lambda *_: None)
    refused(net, f"Linear 'head' .*{message}")
    net = small(fg.BinaryLinear(8, 8, **BINARY))
    net[1].register_forward_pre_hook(lambda *_: None)
    refused(net, f"BinaryLinear '1' {message}")
    net = fg.Sequential(nn.Linear(6, 8), fg.ResidualLinear(8, 8, **BINARY), head=nn.Linear(8, 2))
    net[1].branch.register_forward_hook(lambda *_: None)
    refused(net, f"ResidualLinear '1' {message}")


def test_noise_of_ones_own():
    class Cauchy(fg.Noise):
        _cdf = _log_cdf = _icdf = _mean_sign = lambda self, t: t
        _pdf = lambda self, t, order: t  # noqa: E731
        _variance = lambda self: 1.0  # noqa: E731

    net = small(fg.BinaryLinear(8, 8, noise=Cauchy(), **BINARY))
    refused(net, r"BinaryLinear '1' has .*Cauchy.*, whose probabilities a packed network does not know; use fg.Logistic\(\)")


def test_norms_without_statistics():
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    refused(small(fg.BinaryLinear(8, 8, norm=norm, **BINARY)), "statistics")
    refused(small(head=nn.Sequential(norm, nn.Linear(8, 2))), "statistics")


def test_numbers():
    for value in (float("nan"), float("inf")):
        for name in ("0.weight", "1.weight", "1.bias", "1.weight_scale", "head.bias"):
            net = small(fg.BinaryLinear(8, 8, **BINARY))
            with torch.no_grad():
                net.get_parameter(name).view(-1)[0] = value
            refused(net, f"'{name}' holds numbers that are not finite: train the network again")
    net = small(fg.BinaryLinear(8, 8, norm=nn.BatchNorm1d(8), **BINARY))
    with torch.no_grad():
        net[1].norm.weight.fill_(3e38)
        net[1].norm.running_var.fill_(1e-20)
    refused(net, "BinaryLinear '1' has a scale or a shift that is not finite: train the network again")
    for dtype in (torch.float64, torch.bfloat16):
        refused(small().to(dtype), f"pack takes a network in float32, and '0.weight' is {dtype}: convert it, net.float")


def test_layers_that_share_weights_have_their_own_scales():
    first, second = fg.BinaryLinear(8, 8, **BINARY), fg.BinaryLinear(8, 8, **BINARY)
    second.weight = first.weight
    net = small(first, second, first).eval()
    randomise(net, 2)
    x = torch.randn(40, 6)
    packed = pack(net, x)
    for one, other in zip(packed_states(packed, x)[0], torch_states(net.double(), x.double())[0], strict=True):
        np.testing.assert_array_equal(one, other)
    sums = [part for part in packed.program if isinstance(part, parts.Sums)]
    assert sums[0].bits is sums[1].bits is sums[2].bits
    assert packed.to_bytes()[1] == fg.summary(net.float(), x).packed_bytes == 4 * 56 + (8 + 2 * 64) + 4 * 18


def test_a_layer_behind_averages_and_alone_is_one():
    layer = fg.BinaryConv2d(2, 2, 1, **BINARY)
    net = images(layer, nn.AvgPool2d(2), layer, nn.Flatten(), head=nn.Linear(8, 2)).eval()
    randomise(net, 3)
    x = torch.randn(10, 1, 4, 4)
    packed = pack(net, x)
    for one, other in zip(packed_states(packed, x)[0], torch_states(net.double(), x.double())[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert packed.to_bytes()[1] == fg.summary(net.float(), x).packed_bytes


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 5)), r"inputs must be \[batch, 6\], got \[2, 5\]"),
        (np.zeros(6), r"inputs must be \[batch, 6\], got \[6\]"),
        (3.0, r"inputs must be \[batch, 6\], got \[\]"),
        (np.zeros((2, 6), complex), r"inputs must be an array of real numbers \[batch, 6\]: of dtype complex128"),
        ([["a"] * 6], "inputs must be an array of real numbers .*: of dtype <U1"),
        ([[1.0], [1.0, 2.0]], "inputs must be an array of real numbers"),
        (torch.zeros(2, 6, requires_grad=True), "inputs must be an array of real numbers"),
        ([[float("nan")] * 6], "inputs hold numbers that are not finite"),
        (np.full((1, 6), np.inf, np.float32), "inputs hold numbers that are not finite"),
    ],
)
def test_wrong_inputs(x, message):
    packed = pack(small(), torch.zeros(1, 6))
    for call in (packed, lambda x: packed.members(x, 2)):
        with pytest.raises(fg.InputError, match=message):
            call(x)


def test_other_inputs_are_numbers():
    packed = pack(small(), torch.zeros(1, 6))
    x = np.arange(12).reshape(2, 6) % 2
    wanted = packed(x.astype(np.float32))
    for given in (
        x,
        x.tolist(),
        x.astype(bool),
        x.astype(np.uint8),
        x.astype(np.float16),
        np.asfortranarray(x),
        torch.tensor(x),
    ):
        np.testing.assert_array_equal(packed(given), wanted)
    assert packed(np.zeros((0, 6))).shape == (0, 2)
    assert packed(np.zeros((0, 6)), samples=3).shape == (0, 2)
    assert packed.members(np.zeros((0, 6)), 3).shape == (3, 0, 2)
    assert packed(x).dtype == packed(x, samples=2).dtype == np.float32


@pytest.mark.parametrize("samples", [0, -1, 1.5, "3", 2**20 + 1])
def test_wrong_samples(samples):
    packed = pack(small(), torch.zeros(1, 6))
    with pytest.raises(fg.InputError, match=r"^samples=.*: give a whole number from 1 to 1048576$"):
        packed(np.zeros((1, 6)), samples=samples)


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, None])
def test_wrong_seeds(seed):
    packed = pack(small(), torch.zeros(1, 6))
    with pytest.raises(fg.InputError, match=r"^seed=.*: give a whole number from 0 to 9223372036854775807$"):
        packed(np.zeros((1, 6)), samples=1, seed=seed)


def test_wrong_engines(tmp_path):
    packed = pack(small(), torch.zeros(1, 6))
    packed.save(tmp_path / "net")
    for change in (lambda: setattr(packed, "engine", "fast"), lambda: load(tmp_path / "net", engine="fast")):
        with pytest.raises(fg.InputError, match=r"^engine='fast': choose 'auto', 'compiled' or 'numpy'$"):
            change()
    packed.engine = "numpy"
    assert packed.engine == load(tmp_path / "net", engine="numpy").engine == "numpy"


def test_a_reason_is_told_where_compiled_code_cannot(monkeypatch, tmp_path):
    packed = pack(small(), torch.zeros(1, 6))
    packed.save(tmp_path / "net")
    monkeypatch.setattr("flipgrad.packed.compiled.lower", lambda program, inputs: (None, "no compiler"))
    with pytest.raises(fg.InputError, match=r"^the compiled engine cannot run this network: no compiler; use engine='numpy'$"):
        load(tmp_path / "net", engine="compiled")
    assert (load(tmp_path / "net").engine, load(tmp_path / "net").reason) == ("numpy", "no compiler")


def test_facts_that_no_file_could_hold():
    with pytest.raises(fg.InputError, match="must be words that can be printed"):
        Facts(classes=("a\nb", "c"))
    with pytest.raises(fg.InputError, match="must be finite numbers"):
        Facts(pixel_scale=float("inf"), pixel_shift=0.0)


@pytest.mark.parametrize("name", fg.zoo.names())
def test_networks_of_the_zoo(name):
    net, card = fg.zoo.load(name), fg.zoo.card(name)
    x = torch.rand(2, *card.inputs) * 2 - 1
    if not name.endswith("binary"):
        refused(net, "has real weights behind states", x)
        return
    packed = pack(net, x)
    assert packed.to_bytes()[1] == fg.summary(net, x).packed_bytes
    found, results = packed_states(packed, x)
    wanted, outputs = torch_states(net.double(), x.double())
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(results, outputs, rtol=1e-5, atol=1e-5)


def check_mnist(count: int) -> None:
    """Every unit, and every class, of the first test images."""
    if not (DATA / "mnist").is_dir():
        pytest.skip(f"the files of MNIST are not in {DATA}; set $FLIPGRAD_DATA to their parent folder")
    test = mnist(DATA / "mnist").test
    net = fg.zoo.load("mnist-binary")
    packed = pack(net, test.x[:1])
    packed.engine = "numpy"
    exact = net.double()
    right = 0
    for start in range(0, count, 250):
        x = test.x[start : start + 250][: count - start]
        found, results = packed_states(packed, x)
        wanted, outputs = torch_states(exact, x.double())
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(results, outputs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(packed(x), results.astype(np.float32))
        right += int((results.argmax(1) == test.y[start : start + len(x)].numpy()).sum())
    assert right / count > 0.99


def test_images_of_mnist():
    check_mnist(250)


@pytest.mark.slow
def test_10000_images_of_mnist():
    check_mnist(10_000)
