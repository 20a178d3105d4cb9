"""Log ratios and slope products: tensor operations and interpolation against their definitions in float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.nn import functional

import flipgrad as fg
from flipgrad import flips
from flipgrad.flips import Geometry, naive, separable, vectorized
from flipgrad.flips._arguments import flat
from flipgrad.flips.form import find_form
from flipgrad.native import library
from flipgrad.noise import sign

SMOOTH = [fg.Logistic(), fg.Logistic(0.5), fg.Normal(), fg.Normal(2.0)]
NOISES = [*SMOOTH, fg.Laplace(0.8), fg.Uniform(3.0)]
# Channels in and out, the size and kernel of a convolution, and its geometry: fully connected layers have none.
CONVOLUTIONS = [
    (3, 4, (4, 3), (2, 2), Geometry()),
    (2, 2, (5, 4), (3, 2), Geometry((2, 1), (1, 2), (1, 2))),
    (4, 6, (3, 3), (2, 1), Geometry((1, 2), (1, 0), groups=2)),
]
SHAPES = [(5, 4, (), (), None), *CONVOLUTIONS]
each_noise = pytest.mark.parametrize("noise", NOISES, ids=str)
each_smooth = pytest.mark.parametrize("noise", SMOOTH, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def layer(shape, noise, scale=0.7, batch=3, seed=0):
    """States, pre-activations, gradient, output states, weight, bias and geometry."""
    channels, out, size, kernel, geometry = shape
    groups = geometry.groups if geometry else 1
    torch.manual_seed(seed)
    weight = scale * noise.scale * torch.randn(out, channels // groups, *kernel, dtype=torch.float64)
    x = sign(torch.randn(batch, channels, *size, dtype=torch.float64))
    x.view(-1)[0] = 0
    bias = torch.randn(out, dtype=torch.float64) * noise.scale
    a = functional.conv2d(x, weight, bias, *geometry) if geometry else functional.linear(x, weight, bias)
    return x, a, torch.randn_like(a), sign(noise.cdf(a) - torch.rand_like(a)), weight, bias, geometry


@each_noise
@each_shape
def test_the_log_ratio_is_its_definition(shape, noise):
    x, a, _, states, weight, bias, geometry = layer(shape, noise)
    expected = naive.log_ratio(x, weight, bias, states, noise, geometry)
    torch.testing.assert_close(flips.log_ratio(x, a, states, weight, noise, geometry), expected, rtol=1e-9, atol=1e-10)


def slopes(x, share, a, grad, weight, noise, geometry):
    """The definition, weight by weight and place by place."""
    stride, padding, dilation, groups = geometry
    padded, shares = (functional.pad(t, (padding[1], padding[1], padding[0], padding[0])) for t in (x, share))
    result = torch.zeros_like(weight)
    per_group = weight.shape[0] // groups
    for o, c, row, column in product(*(range(n) for n in weight.shape)):
        channel = o // per_group * weight.shape[1] + c
        for i, j in product(range(a.shape[2]), range(a.shape[3])):
            at = (slice(None), channel, i * stride[0] + row * dilation[0], j * stride[1] + column * dilation[1])
            units, parts = padded[at], shares[at]
            here = a[:, o, i, j]
            moved = here - 2 * weight[o, c, row, column] * units
            result[o, c, row, column] += (units * parts * (noise.pdf(here) - noise.pdf(moved)) * grad[:, o, i, j]).sum()
    return result


@each_noise
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_the_slope_product_is_its_definition(shape, noise):
    x, a, grad, _, weight, _, geometry = layer(shape, noise)
    share = torch.rand_like(x)
    expected = slopes(x, share, a, grad, weight, noise, geometry)
    torch.testing.assert_close(flips.slope_product(x, share, a, grad, weight, noise, geometry), expected)


def test_the_slope_product_of_a_fully_connected_layer_is_that_of_a_convolution_of_one_place():
    torch.manual_seed(2)
    weight, x, share = torch.randn(4, 5), sign(torch.randn(6, 5)), torch.rand(6, 5)
    a, grad = x @ weight.t(), torch.randn(6, 4)
    expected = flips.slope_product(*(t[..., None, None] for t in (x, share, a, grad, weight)), fg.Normal(), Geometry())
    torch.testing.assert_close(flips.slope_product(x, share, a, grad, weight, fg.Normal()), expected[..., 0, 0])


@each_smooth
@each_shape
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.4])
def test_interpolated_sums_are_within_ten_times_the_tolerance(shape, noise, scale):
    x, a, grad, states, weight, _, geometry = layer(shape, noise, scale, batch=20)
    share = torch.rand_like(x)
    form = find_form(weight, noise, 1e-3)
    exact = vectorized.log_ratio(x, a, states, weight, noise, geometry)
    for dtype in (torch.float64, torch.float32):
        some = [t.to(dtype) for t in (x, share, a, grad, states, weight)]
        ratio = separable.log_ratio(some[0], some[2], some[4], some[5], noise, form, geometry)
        assert (ratio - exact).norm() <= 1e-2 * exact.norm()
        assert ratio.view(-1)[0] == 0
        slope = separable.slope_product(*some[:4], some[5], noise, form, geometry)
        expected = vectorized.slope_product(x, share, a, grad, weight, noise, geometry)
        assert (slope - expected).norm() <= 1e-2 * expected.norm()


def test_the_error_of_interpolation_is_estimated():
    """Of the terms, over the distributions that it is stated for."""
    torch.manual_seed(0)
    noise, n = fg.Normal(0.7), 400
    weight = torch.randn(n, 1, dtype=torch.float64).clamp(-3, 3) * 0.1
    form = find_form(weight, noise, 1e-3)
    weight = weight / 0.3 * form.limit
    a = torch.randn(n, n, dtype=torch.float64).clamp(-4, 4) * noise.scale
    states, x = sign(noise.cdf(a) - torch.rand_like(a)), sign(torch.randn(n, 1, dtype=torch.float64))
    # One output at a time: a sum of one term.
    found = torch.cat([separable.log_ratio(x, a[:, [j]], states[:, [j]], weight[[j]], noise, form) for j in range(n)])
    exact = torch.cat([vectorized.log_ratio(x, a[:, [j]], states[:, [j]], weight[[j]], noise) for j in range(n)])
    measured = float((found - exact).norm() / exact.norm())
    assert measured == pytest.approx(separable.error("log_ratio", form, noise), rel=0.3)


@pytest.mark.skipif(not library.available(), reason=f"no compiled kernels: {library.reason()}")
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_compiled_features_are_those_of_torch(scale, portable, monkeypatch):
    monkeypatch.setattr(library, "PORTABLE", portable)
    noise = fg.Logistic(1.5)
    _, a, _, states, weight, _, _ = layer(CONVOLUTIONS[0], noise, scale)
    form = separable.with_curvature(find_form(weight, noise, 1e-4))
    a = (a * 20).float()
    a.view(-1)[0] = 1000.0
    rest = noise, form, 1
    found = separable.log_functions(a, states.float(), *rest)
    expected = separable.log_functions(a.double(), states, *rest)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("noise", [fg.Laplace(), fg.Uniform()], ids=str)
def test_where_interpolation_is_too_coarse_the_exact_form_is_used(noise):
    torch.manual_seed(0)
    weight = torch.randn(300, 300) * 0.02
    x = sign(torch.randn(64, 300))
    a, share = x @ weight.t(), torch.rand(64, 300)
    grad = torch.randn_like(a)
    exact = vectorized.slope_product(*(t.double() for t in (x, share, a, grad, weight)), noise)
    found = flips.slope_product(x, share, a, grad, weight, noise, tolerance=1e-3)
    assert (found - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_hundreds_in_the_exponent_are_safe(tolerance):
    """A unit with thousands of children that all speak against its state."""
    torch.manual_seed(0)
    weight = torch.full((4096, 64), 0.5)
    x = torch.ones(8, 64)
    a = x @ weight.t() - 32
    states = -torch.ones_like(a)
    ratio = flips.log_ratio(x, a, states, weight, fg.Logistic(), tolerance=tolerance)
    term = float(functional.logsigmoid(torch.tensor(1.0)) - math.log(0.5))
    assert torch.allclose(ratio, torch.full_like(ratio, 4096 * term), rtol=2e-3)


@pytest.mark.parametrize("name", ["log_ratio", "slope_product"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=["linear", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_operators(dtype, shape, name):
    x, a, grad, states, weight, _, geometry = layer(shape, fg.Logistic())
    tensors = (x, a, states, weight) if name == "log_ratio" else (x, torch.rand_like(x), a, grad, weight)
    arguments = (*(t.to(dtype) for t in tensors), "Logistic", 1.0, 1e-3, flat(geometry))
    torch.library.opcheck(getattr(torch.ops.flipgrad, name), arguments)


class Own(fg.Noise):
    """A noise that no operator knows."""

    _cdf = fg.Logistic._cdf
    _log_cdf = fg.Logistic._log_cdf
    _pdf = fg.Logistic._pdf
    _icdf = fg.Logistic._icdf
    _mean_sign = fg.Logistic._mean_sign
    _variance = fg.Logistic._variance


@each_shape
def test_a_noise_of_ones_own(shape):
    x, a, grad, states, weight, _, geometry = layer(shape, fg.Logistic())
    share = torch.rand_like(x)
    own, ours = (
        (
            flips.log_ratio(x, a, states, weight, noise, geometry),
            flips.slope_product(x, share, a, grad, weight, noise, geometry),
        )
        for noise in (Own(), fg.Logistic())
    )
    torch.testing.assert_close(own, ours)
