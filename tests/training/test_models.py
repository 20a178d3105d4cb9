"""Networks for the built-in data sets: shapes, options, names, and what does not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import DataSet, Split, digits
from flipgrad.training.models import MODELS, cifar_net, digits_net, fully_connected, mnist_net, model

# (the network with options, the shape of its inputs, its binary layers)
NETS = {
    "digits": (digits_net, (1, 8, 8), 2),
    "mnist": (mnist_net, (1, 28, 28), 3),
    "cifar": (lambda **options: cifar_net(0.1, **options), (3, 32, 32), 8),
    "fully connected": (lambda **options: fully_connected(7, [5, 4], 10, **options), (7,), 2),
}
NORMS = {"none": type(None), "batch": (nn.BatchNorm1d, nn.BatchNorm2d), "affine": fg.ScaleShift}
every_net = pytest.mark.parametrize("name", NETS)


def images(*shape: int, classes: int = 4) -> DataSet:
    split = Split(torch.randn(6, *shape), torch.arange(6) % classes)
    return DataSet("made up", split, split, classes=classes, background=0.0)


@every_net
@pytest.mark.parametrize("norm", NORMS)
def test_a_step_of_every_network_with_every_norm(name, norm):
    make, shape, depth = NETS[name]
    net = make(norm=norm, noise=fg.Normal(1.5))
    x, y = torch.randn(6, *shape), torch.arange(6)
    net.initialize(x)
    net(x, fg.CrossEntropy(y), estimator=fg.PSA()).mean().backward()
    assert all(bool(p.grad.isfinite().all()) and bool((p.grad != 0).any()) for p in net.parameters())
    assert net(x).shape == (6, 10)
    layers = net.binary_layers
    assert len(layers) == depth
    assert all(layer.noise == fg.Normal(1.5) for layer in layers)
    assert all(isinstance(layer.norm, NORMS[norm]) for layer in layers)
    # The norm's shift stands for the bias.
    assert all((layer.bias is None) == (norm != "none") for layer in layers)


@every_net
@pytest.mark.parametrize("norm", NORMS)
def test_all_layers_but_the_one_with_real_inputs_have_binary_weights(name, norm):
    make, shape, depth = NETS[name]
    net = make(norm=norm, weights="binary", weight_noise=fg.Logistic(0.1))
    x, y = torch.randn(6, *shape), torch.arange(6)
    net.initialize(x)
    net(x, fg.CrossEntropy(y), estimator=fg.PSA()).mean().backward()
    assert all(bool(p.grad.isfinite().all()) and bool((p.grad != 0).any()) for p in net.parameters())
    assert [layer.weights for layer in net.binary_layers] == ["real", *["binary"] * (depth - 1)]
    assert [layer.weight_noise for layer in net.binary_layers] == [None, *[fg.Logistic(0.1)] * (depth - 1)]
    assert all(layer.weights == "real" for layer in make(norm=norm).binary_layers)


def test_a_single_layer_has_no_weights_that_could_be_binary():
    with pytest.raises(
        fg.InputError, match=r"the only binary layer has real-valued inputs.* e\.g\. 7-7, or leave the weights real"
    ):
        fully_connected(2, [7], 2, weights="binary")


@pytest.mark.parametrize("widths", [[7], [7, 7]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "ternary"}, "unknown weights 'ternary'; choose from real, binary"),
        ({"weight_noise": fg.Logistic(0.1)}, "is for binary weights; give weights='binary', too"),
    ],
)
def test_options_of_weights_are_checked_even_where_no_layer_takes_them(widths, options, message):
    with pytest.raises(fg.InputError, match=message):
        fully_connected(2, widths, 2, **options)


def test_by_default_networks_are_the_papers():
    assert all(layer.noise == fg.Logistic() and layer.norm is None for layer in cifar_net(0.1).binary_layers)
    assert [layer.out_channels for layer in cifar_net(0.25).binary_layers] == [24, 24, 24, 48, 48, 48, 48, 48]
    assert list(fully_connected(2, [3], 2).state_dict()) == ["0.weight", "0.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("name", MODELS)
def test_networks_by_name(name):
    _, shape = MODELS[name]
    net = model(name, images(*shape), 0.25, norm="affine", noise=fg.Laplace())
    assert net(torch.randn(2, *shape)).shape == (2, 4)
    assert all(isinstance(layer.norm, fg.ScaleShift) and layer.noise == fg.Laplace() for layer in net.binary_layers)
    whole, quarter = (sum(p.numel() for p in model(name, images(*shape), width).parameters()) for width in (1.0, 0.25))
    assert quarter < whole / 4


def test_networks_by_widths_flatten_the_image():
    net = model("6-5", digits(), norm="batch")
    assert [layer.out_features for layer in net.binary_layers] == [6, 5]
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert [layer.out_features for layer in model("20", images(3), 0.5).binary_layers] == [10]
    assert model("20", images(3))(torch.randn(2, 3)).shape == (2, 4)


ERRORS = [
    (
        lambda: model("resnet", digits()),
        "unknown model 'resnet'; choose from digits, mnist, cifar, residual, or give widths such as 200",
    ),
    (lambda: model("200-", digits()), "unknown model '200-'"),
    (lambda: model("5-0", digits()), r"widths=\[5, 0\]: give the units of every binary layer"),
    (
        lambda: model("mnist", digits()),
        r"model 'mnist' is for inputs \[1, 28, 28\], the data set 'digits' has \[1, 8, 8\]; choose",
    ),
    (lambda: model("mnist", digits()), "choose digits or widths such as 200-200-200-200"),
    (lambda: model("cifar", images(2)), r"'made up' has \[2\]; choose widths such as"),
    (lambda: model("digits", digits(), norm="layer"), "unknown norm 'layer'; choose from none, batch, affine"),
    (lambda: fully_connected(2, [], 2), r"widths=\[\]"),
    (lambda: mnist_net(width=0), r"mnist_net\(width=0\): the factor on the channels must be positive, e.g. 0.25"),
    (lambda: cifar_net(math.nan), r"cifar_net\(width=nan\)"),
    (lambda: digits_net(width=math.inf), r"digits_net\(width=inf\)"),
    (lambda: model("5-5", digits(), -1.0), r"model\(width=-1.0\)"),
    (lambda: model("1000000-1000000", digits()), "the network's weights need 3,725.* GiB, more than .*; give smaller widths"),
    (lambda: fully_connected(2, [10**6, 10**6], 2), "the network's weights need 3,725.* GiB"),
    (lambda: model("5-1000000000", digits()), r"widths=\[5, 1000000000\]: a layer has at most 16,777,216 units; give fewer"),
    (lambda: model("5-5", digits(), 1e300), r"model\(width=1e\+300\): a layer has at most 16,777,216 units; give a smaller"),
    (lambda: cifar_net(1e9), r"cifar_net\(width=1000000000.0\): a layer has at most 16,777,216 units"),
    (lambda: model("9" * 5000, digits()), "unknown model '9"),
    (lambda: model("\u0665-\u0665", digits()), "unknown model"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()
