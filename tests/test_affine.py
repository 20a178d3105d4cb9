"""Affine maps against torch's layers, and their flip products, pooling folded in, against flipping every unit in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.nn import functional

from flipgrad.affine import Affine
from flipgrad.errors import InputError
from flipgrad.flips import Geometry, naive
from flipgrad.layers import BinaryConv2d, BinaryLayer, BinaryLinear
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform
from random_tensors import normal, states

NOISES = [Logistic(), Normal(), Laplace(0.8), Uniform(2.0)]


def randomized(layer: BinaryLayer, seed: int = 5) -> BinaryLayer:
    generator = Generator().manual_seed(seed)
    for parameter in layer.double().parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator)
    return layer


def flipped_in_turn(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, noise: Noise) -> Tensor:
    """The flip product of any ``function`` to pre-activations, as it is defined."""
    units = x.shape[1:].numel()
    flipped = x * (1 - 2 * torch.eye(units, dtype=x.dtype).view(units, 1, *x.shape[1:]))
    # [units, B, ...]
    changes = noise.cdf(function(x)) - noise.cdf(function(flipped.flatten(0, 1))).unflatten(0, (units, len(x)))
    return x * (changes * grad).flatten(2).sum(2).t().reshape(x.shape)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def assert_folds(layer: BinaryLayer, modules: list[nn.Module], x: Tensor, noise: Noise) -> None:
    """Assert that ``layer`` behind ``modules`` computes what they do, and flips what they do."""

    def real(x: Tensor) -> Tensor:
        return layer.affine()(nn.Sequential(*modules)(x))

    folded = layer.affine(tuple(modules))
    a = folded(x)
    assert torch.equal(a, real(x))
    grad = normal(*a.shape, seed=9)
    assert_same(folded.flip_product(x, a.detach(), grad, noise), flipped_in_turn(real, x, grad, noise))


def test_flipping_in_turn_is_the_naive_flip_product():
    layer = randomized(BinaryConv2d(2, 3, (2, 3), padding=1))
    x, noise = states(2, 2, 3, 4), Logistic()
    a = layer.affine()(x).detach()
    grad = normal(*a.shape)
    geometry = Geometry(padding=(1, 1))
    expected = naive.flip_product(x, layer.weight.detach(), layer.bias.detach(), grad, noise, geometry)
    assert_same(flipped_in_turn(layer.affine(), x, grad, noise), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (0, 4), (2, 3, 4), (4,)])
def test_linear_map_is_torchs(shape, bias):
    torch_layer, layer = nn.Linear(4, 5, bias), BinaryLinear(4, 5, bias)
    layer.load_state_dict(torch_layer.state_dict())
    x = torch.randn(shape)
    assert torch.equal(layer.affine()(x), torch_layer(x))
    assert layer.affine().weight is layer.weight


CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2), "bias": False},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 2},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": (2, 4), "padding": "same"},
    {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3), "groups": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": (3, 4), "padding": "same", "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": (2, 1), "padding_mode": "replicate", "stride": 2},
    {"kernel_size": (2, 3), "padding": "same", "padding_mode": "circular"},
]
# Torch says that an even kernel makes padding="same" copy its input.
even_kernels = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@even_kernels
@pytest.mark.parametrize("arguments", CONVOLUTIONS, ids=str)
def test_conv_map_is_torchs(arguments):
    torch_layer, layer = nn.Conv2d(4, 6, **arguments).double(), BinaryConv2d(4, 6, **arguments).double()
    layer.load_state_dict(torch_layer.state_dict())
    x = normal(2, 4, 7, 5)
    assert_same(layer.affine()(x), torch_layer(x))
    assert layer.affine().weight is layer.weight


PADDINGS = [
    {"kernel_size": (3, 2), "padding": (1, 2), "stride": (1, 2)},
    {"kernel_size": (2, 4), "padding": "same", "groups": 2},
    {"kernel_size": 2, "padding": 1, "dilation": (2, 1)},
    {"kernel_size": 2, "padding": 0},
]


@pytest.mark.parametrize("value", [-1, 0, 1])
@pytest.mark.parametrize("arguments", PADDINGS, ids=str)
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_padding_value_is_padding_by_hand(arguments, value, noise):
    layer = randomized(BinaryConv2d(2, 4, **arguments, padding_value=value))
    affine = layer.affine()
    x = states(2, 2, 4, 5)
    left, right, top, bottom = sides = layer._pads()
    padded = functional.pad(x, sides, value=value)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    geometry = Geometry(layer.stride, (0, 0), layer.dilation, layer.groups)
    a = functional.conv2d(padded, weight, bias, *geometry)
    assert_same(affine(x).detach(), a)
    grad = normal(*a.shape, seed=1)
    expected = naive.flip_product(padded, weight, bias, grad, noise, geometry)
    expected = expected[:, :, top : padded.shape[2] - bottom, left : padded.shape[3] - right]
    assert_same(affine.flip_product(x, a, grad, noise), expected)


def test_constant_states_and_zeros_are_different_paddings():
    x = states(1, 1, 3, 3)
    layers = [randomized(BinaryConv2d(1, 1, 3, padding=1, padding_value=value)) for value in (-1, 0, 1)]
    a = [layer.affine()(x) for layer in layers]
    assert_same((a[0] + a[2]) / 2, a[1])
    assert not torch.allclose(a[0], a[1])


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (0, 4), (2, 3, 4), (4,)])
def test_linear_flip_product_takes_any_leading_dimensions(shape):
    layer = randomized(BinaryLinear(4, 5))
    x = states(*shape)
    a = layer.affine()(x).detach()
    grad = normal(*a.shape, seed=1)
    expected = naive.flip_product(x.view(-1, 4), layer.weight, layer.bias, grad.view(-1, 5), Logistic())
    actual = layer.affine().flip_product(x, a, grad, Logistic())
    assert not actual.requires_grad
    assert_same(actual, expected.detach().view(shape))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 5, 12, 13])
def test_narrow_products_are_torchs(outputs, bias):
    layer = randomized(BinaryLinear(4, outputs, bias))
    x = normal(70, 4).requires_grad_()
    a = layer.affine()(x)
    expected = functional.linear(x, layer.weight, layer.bias)
    assert_same(a, expected)
    grad = normal(70, outputs, seed=1)
    inputs = [x, *layer.parameters()]
    for actual, wanted in zip(torch.autograd.grad(a, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        assert_same(actual, wanted)
    assert_same(layer.affine().variance(x), functional.linear(x, layer.weight.square()))


@st.composite
def pooled_convolutions(draw) -> tuple[BinaryConv2d, list[nn.AvgPool2d], tuple[int, int], bool]:
    """A convolution behind one or two poolings, a size for them, and whether it must be refused."""
    count = draw(st.integers(1, 2))
    kernels = st.integers(1, 3 if count == 1 else 2)
    pools: list[dict[str, list[int]]] = [{"kernel": [], "stride": [], "padding": []} for _ in range(count)]
    conv: dict[str, list[int]] = {"kernel": [], "stride": [], "padding": [], "dilation": []}
    size, refused = [], False
    for _ in range(2):
        kernel, stride = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
        padding, dilation = draw(st.integers(0, 3)), draw(st.integers(1, 2))
        for name, value in zip(conv, (kernel, stride, padding, dilation), strict=True):
            conv[name].append(value)
        n = max(1, dilation * (kernel - 1) + 1 - 2 * padding) + draw(st.integers(0, 2))
        padded = padding > 0
        for pool in reversed(pools):
            kernel, stride = draw(kernels), draw(kernels)
            padding = draw(st.integers(0, kernel // 2))
            for name, value in zip(pool, (kernel, stride, padding), strict=True):
                pool[name].append(value)
            refused |= padded and kernel > stride
            padded |= padding > 0
            # Up to stride - 1 pixels at the end that no window covers.
            n = max(1, (n - 1) * stride + kernel - 2 * padding) + draw(st.integers(0, stride - 1))
        size.append(n)
    groups = draw(st.integers(1, 2))
    layer = BinaryConv2d(
        groups,
        2 * groups,
        tuple(conv["kernel"]),
        tuple(conv["stride"]),
        tuple(conv["padding"]),
        tuple(conv["dilation"]),
        groups,
        padding_value=draw(st.sampled_from([-1, 0, 1])),
    )
    modules = [
        nn.AvgPool2d(*(tuple(pool[name]) for name in pool), divisor_override=draw(st.sampled_from([None, 1, 5])))
        for pool in pools
    ]
    return randomized(layer), modules, (size[0], size[1]), refused


@settings(max_examples=4 * settings().max_examples)
@given(pooled_convolutions(), st.sampled_from(NOISES), st.integers(0, 2))
def test_folded_pooling_before_convolution(case, noise, batch):
    layer, pools, size, refused = case
    x = states(batch, layer.in_channels, *size)
    if not refused:
        assert_folds(layer, pools, x, noise)
        return
    folded = layer.affine(tuple(pools))
    a = folded(x).detach()
    with pytest.raises(InputError, match="overlapping windows and padding do not fold into one kernel"):
        folded.flip_product(x, a, torch.ones_like(a), noise)


# (the poolings, the convolution, the size of the images), each a corner that is easily got wrong.
FOLDS = {
    "leftover rows behind a padded convolution": ([nn.AvgPool2d(2)], BinaryConv2d(2, 3, 3, padding=1), (7, 5)),
    "leftover rows, pool padding": ([nn.AvgPool2d(3, padding=1)], BinaryConv2d(2, 3, 3, padding=1), (9, 6)),
    "even kernel with padding='same'": ([nn.AvgPool2d(2)], BinaryConv2d(2, 3, (2, 4), padding="same"), (7, 6)),
    "gaps between windows": ([nn.AvgPool2d(2, 3)], BinaryConv2d(2, 3, 2, padding=1), (8, 9)),
    "overlapping windows": ([nn.AvgPool2d(3, 1)], BinaryConv2d(2, 3, 2, stride=2), (6, 7)),
    "two poolings": ([nn.AvgPool2d(2), nn.AvgPool2d((1, 2), padding=(0, 1))], BinaryConv2d(2, 3, 2, padding=1), (6, 9)),
    "identity between": ([nn.AvgPool2d(2), nn.Identity()], BinaryConv2d(2, 3, 2), (6, 4)),
    "adaptive": ([nn.AdaptiveAvgPool2d((2, 3))], BinaryConv2d(2, 3, 3, padding=1), (4, 9)),
    "adaptive, one axis": ([nn.AdaptiveAvgPool2d((None, 2))], BinaryConv2d(2, 3, 2), (3, 6)),
    "adaptive to one pixel": ([nn.AdaptiveAvgPool2d(1)], BinaryConv2d(2, 3, 1), (3, 4)),
    "pooling, then adaptive": ([nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)], BinaryConv2d(2, 3, 1, padding=1), (9, 8)),
    "divisor": ([nn.AvgPool2d(2, divisor_override=3)], BinaryConv2d(2, 3, 2), (6, 4)),
    "convolution that sees only its padding": ([nn.AvgPool2d(2)], BinaryConv2d(2, 3, 1, stride=9, padding=3), (4, 5)),
    "one pixel": ([nn.AvgPool2d(1)], BinaryConv2d(2, 3, 3, padding=2), (1, 1)),
}


@even_kernels
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_folded_pooling_corner(name, noise):
    modules, layer, size = FOLDS[name]
    assert_folds(randomized(layer), modules, states(2, 2, *size), noise)


# Every linear module folds into a fully connected layer, those with uneven windows too.
LINEAR_FOLDS = {
    "pooling": [nn.AvgPool2d(2)],
    "overlapping, uneven windows": [nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)],
    "adaptive that does not divide": [nn.AdaptiveAvgPool2d((2, 3))],
    "global": [nn.AdaptiveAvgPool2d(1)],
    "two poolings": [nn.AvgPool2d(2, 1), nn.AvgPool2d((1, 2))],
    "padding with states": [nn.AvgPool2d(2), nn.ConstantPad2d(1, -1.0)],
    "shuffling": [nn.AvgPool2d(2), nn.ChannelShuffle(2)],
}


@pytest.mark.parametrize("name", LINEAR_FOLDS)
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_folded_pooling_before_linear(name, noise):
    modules = [*LINEAR_FOLDS[name], nn.Flatten()]
    x = states(3, 4, 5, 4)
    features = nn.Sequential(*modules)(x).shape[1]
    assert_folds(randomized(BinaryLinear(features, 5)), modules, x, noise)


@given(
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    channels=st.integers(1, 3),
    batch=st.integers(0, 2),
    noise=st.sampled_from(NOISES),
)
def test_folded_pooling_before_linear_of_any_shape(kernel, stride, more, channels, batch, noise):
    modules = [nn.AvgPool2d(kernel, stride, padding=kernel // 2), nn.Flatten()]
    x = states(batch, channels, kernel + more[0], kernel + more[1])
    features = nn.Sequential(*modules)(x[:0]).shape[1]
    assert_folds(randomized(BinaryLinear(features, 2)), modules, x, noise)


def test_pre_activations_are_differentiable_in_the_ordinary_way():
    layer = randomized(BinaryConv2d(1, 2, 2, padding=1, padding_value=-1))
    x = normal(2, 1, 4, 4).requires_grad_()
    folded = layer.affine((nn.AvgPool2d(2),))

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return folded.with_tensors((weight, bias))(x)

    assert torch.autograd.gradcheck(run, (x, layer.weight, layer.bias))


POOL_ERRORS = [
    (nn.AvgPool2d(2, ceil_mode=True), 0, "border windows weigh pixels differently; use ceil_mode=False"),
    (nn.AvgPool2d(2, padding=1, count_include_pad=False), 0, "border windows weigh .* count_include_pad=True"),
    (nn.AdaptiveAvgPool2d(2), 0, "5x5 is no multiple of 2x2, so its windows differ in size; choose an output_size"),
    (nn.AdaptiveAvgPool2d((None, 3)), 0, "5x5 is no multiple of 5x3"),
    (nn.AvgPool2d(3, 2), 1, "average pooling with kernel 3 and stride 2 before a padded convolution: overlapping windows"),
]


@pytest.mark.parametrize(("pool", "padding", "message"), POOL_ERRORS, ids=lambda value: str(value)[:40])
def test_pooling_that_does_not_fold_is_refused(pool, padding, message):
    folded = BinaryConv2d(1, 2, 1, padding=padding).affine((pool,))
    x = torch.ones(1, 1, 5, 5)
    a = folded(x).detach()
    with pytest.raises(InputError, match=message):
        folded.flip_product(x, a, torch.ones_like(a), Logistic())


def test_unpadded_border_windows_are_even_windows():
    # count_include_pad means nothing without padding, so it is no reason to refuse.
    assert_folds(randomized(BinaryConv2d(1, 2, 2)), [nn.AvgPool2d(2, count_include_pad=False)], states(2, 1, 4, 6), Logistic())


INPUT_ERRORS = [
    (BinaryLinear(4, 2), (3, 5), r"weight \[2, 4\] takes inputs \[..., 4\], got \[3, 5\]: change in_features, or put"),
    (BinaryLinear(4, 2), (), r"takes inputs \[..., 4\], got \[\]"),
    (BinaryConv2d(4, 2, 3, groups=2), (1, 2, 5, 5), r"groups=2 takes inputs \[batch, 4, height, width\], got \[1, 2, 5, 5\]"),
    (BinaryConv2d(1, 2, 3), (1, 5, 5), r"takes inputs \[batch, 1, height, width\], got \[1, 5, 5\]"),
    (BinaryConv2d(1, 2, 3, padding=1, dilation=2), (1, 1, 2, 9), r"spans 5x5 .* got 2x9 \(with padding 4x11\): give larger"),
]


@pytest.mark.parametrize(("layer", "shape", "message"), INPUT_ERRORS)
def test_wrong_input_shape_is_refused(layer, shape, message):
    with pytest.raises(InputError, match=message):
        layer.affine()(torch.ones(shape))


def test_pooling_before_linear_without_flattening_is_refused():
    folded = Affine(torch.ones(3, 2), None, views=(nn.AvgPool2d(2),))
    with pytest.raises(InputError, match=r"got \[1, 1, 2, 2\] from the pooling before it: put torch.nn.Flatten\(\) between"):
        folded(torch.ones(1, 1, 4, 4))


def enumerated_variance(affine: Affine, m: Tensor) -> Tensor:
    """The variance of the pre-activations of independent ±1 units with means ``m`` [1, ...]: a sum over all their states."""
    units = m.numel()
    joint = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=m.dtype)] * units).view(-1, units)
    p = ((1 + joint * m.flatten()) / 2).prod(1)
    a = affine(joint.view(-1, *m.shape[1:]))
    mean = torch.tensordot(p, a, 1)
    return torch.tensordot(p, (a - mean).square(), 1)[None]


VARIANCES = {
    "linear": (BinaryLinear(6, 4), (), (6,)),
    "linear without bias": (BinaryLinear(6, 4, bias=False), (), (6,)),
    "conv": (BinaryConv2d(1, 3, 2), (), (1, 3, 4)),
    "stride and padding": (BinaryConv2d(2, 2, (3, 2), stride=(2, 1), padding=(1, 0)), (), (2, 2, 3)),
    "groups": (BinaryConv2d(4, 4, 2, padding=1, groups=2), (), (4, 1, 3)),
    "dilation": (BinaryConv2d(1, 2, 2, padding=1, dilation=2), (), (1, 3, 4)),
    "padded with -1": (BinaryConv2d(1, 2, 3, padding=1, padding_value=-1), (), (1, 3, 3)),
    "padded with 1, uneven": (BinaryConv2d(1, 2, 2, padding="same", padding_value=1), (), (1, 3, 3)),
    "pooled": (BinaryConv2d(1, 2, 2, padding=1), (nn.AvgPool2d(2),), (1, 3, 4)),
    "pooled, padded with -1": (BinaryConv2d(1, 2, 2, padding=1, padding_value=-1), (nn.AvgPool2d(2),), (1, 3, 4)),
    "overlapping pooling": (BinaryConv2d(1, 2, 2), (nn.AvgPool2d(2, stride=1),), (1, 3, 4)),
    "pooled groups": (BinaryConv2d(2, 2, 1, groups=2), (nn.AvgPool2d(2),), (2, 2, 3)),
    "pooled, flattened": (BinaryLinear(6, 3), (nn.AvgPool2d(2, stride=1), nn.Flatten()), (1, 3, 4)),
    "pooled, padded, flattened": (BinaryLinear(12, 3), (nn.AvgPool2d(2), nn.ZeroPad2d(1), nn.Flatten()), (1, 2, 4)),
}


@pytest.mark.parametrize(("layer", "modules", "shape"), VARIANCES.values(), ids=VARIANCES.keys())
def test_variance_is_that_of_independent_units(layer, modules, shape):
    layer = randomized(layer)
    affine = layer.affine(modules)
    m = torch.tanh(normal(1, *shape)).requires_grad_()
    variance, expected = affine.variance(1 - m.square()), enumerated_variance(affine, m)
    assert_same(variance, expected)
    weights = normal(*variance.shape, seed=3)
    actual, truth = (torch.autograd.grad((v * weights).sum(), [m, layer.weight]) for v in (variance, expected))
    assert_same(actual[0], truth[0])
    assert_same(actual[1], truth[1])
    # Of several examples each has its own; without a graph the numbers are the same.
    both = torch.cat([m, m / 2]).detach()
    with torch.no_grad():
        assert_same(affine.variance(1 - both.square())[:1], expected)
        assert_same(affine.variance(1 - both.square())[1:], affine.variance(1 - (m / 2).square()))


def test_variance_of_a_linear_map_takes_further_dimensions():
    layer = randomized(BinaryLinear(3, 2))
    v = normal(4, 5, 3).square()
    assert_same(layer.affine().variance(v), torch.einsum("abi,oi->abo", v, layer.weight**2))
