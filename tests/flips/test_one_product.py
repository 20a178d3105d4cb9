"""The log ratio by one product, and products in bfloat16: errors as estimated, against definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import flipgrad as fg
from flipgrad import flips
from flipgrad.flips import Geometry, one_product, ordinary, vectorized
from flipgrad.flips.choice import choose, choose_ratio
from flipgrad.flips.form import find_form
from flipgrad.native import library
from flipgrad.noise import sign

SMOOTH = [fg.Logistic(), fg.Logistic(0.4), fg.Normal(1.5), fg.Laplace()]
# Channels in and out, the size and kernel of a convolution, and its geometry.
SHAPES = [
    (120, 100, (), (), None),
    (16, 24, (6, 5), (3, 3), Geometry()),
    (16, 24, (7, 6), (3, 2), Geometry((2, 1), (1, 1), (1, 2), groups=2)),
]
each_smooth = pytest.mark.parametrize("noise", SMOOTH, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def layer(shape, noise, scale, batch=4, seed=0):
    """States, pre-activations, output states, weight and geometry, in float64; channels have weights of different sizes."""
    channels, out, size, kernel, geometry = shape
    groups = geometry.groups if geometry else 1
    torch.manual_seed(seed)
    weight = scale * noise.scale * torch.randn(out, channels // groups, *kernel, dtype=torch.float64)
    weight *= torch.linspace(0.5, 1.5, out, dtype=torch.float64).view(-1, *[1] * (weight.dim() - 1))
    x = sign(torch.randn(batch, channels, *size, dtype=torch.float64))
    x.view(-1)[0] = 0
    a = functional.conv2d(x, weight, None, *geometry) if geometry else functional.linear(x, weight)
    return x, a, sign(noise.cdf(a) - torch.rand_like(a)), weight, geometry


def relative(found, exact):
    return float((found - exact).norm() / exact.norm())


@each_smooth
@each_shape
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.3])
def test_the_error_is_within_the_estimate(shape, noise, scale):
    x, a, states, weight, geometry = layer(shape, noise, scale)
    exact = vectorized.log_ratio(x, a, states, weight, noise, geometry)
    allowed = one_product.error(weight, noise)
    assert allowed < 0.6
    for dtype in (torch.float64, torch.float32):
        found = one_product.log_ratio(*(t.to(dtype) for t in (x, a, states, weight)), noise, geometry)
        assert found.dtype == dtype
        assert relative(found, exact) <= allowed
        assert found.view(-1)[0] == 0


def test_without_the_curvature_it_would_not_be():
    noise = fg.Logistic()
    x, a, states, weight, _ = layer(SHAPES[0], noise, 0.1)
    exact = vectorized.log_ratio(x, a, states, weight, noise)
    found = one_product.log_ratio(x, a, states, weight, noise)
    odd_alone = (found - one_product.log_ratio(-x, a, states, weight, noise)) / 2
    assert relative(odd_alone, exact) > 3 * one_product.error(weight, noise)


def test_weights_of_one_size_are_exact():
    """Every term is then at a node, and no square deviates from the mean."""
    noise = fg.Normal()
    x, a, states, weight, _ = layer(SHAPES[0], noise, 0.1)
    weight = 0.2 * weight.sign()
    a = functional.linear(x, weight)
    exact = vectorized.log_ratio(x, a, states, weight, noise)
    torch.testing.assert_close(one_product.log_ratio(x, a, states, weight, noise), exact)


def test_channels_without_weights_add_nothing():
    noise = fg.Logistic()
    x, a, states, weight, geometry = layer(SHAPES[1], noise, 0.1)
    weight[3] = 0
    weight[:, 5] = 0
    a = functional.conv2d(x, weight)
    found = one_product.log_ratio(x, a, states, weight, noise, geometry)
    assert found[:, 5].eq(0).all()
    assert relative(found, vectorized.log_ratio(x, a, states, weight, noise, geometry)) < 0.1
    assert one_product.log_ratio(x, a, states, 0 * weight, noise, geometry).eq(0).all()


def test_the_estimate_is_infinite_where_nothing_is_known():
    weight = torch.randn(50, 50)
    assert one_product.error(100 * weight, fg.Logistic()) == math.inf
    assert one_product.error(weight * math.nan, fg.Logistic()) == math.inf
    assert one_product.error(weight[:0], fg.Logistic()) == 0
    assert one_product.error(0 * weight, fg.Logistic()) < 1e-2
    # Its logarithms have no smooth differences: a flip may make a state impossible.
    assert not one_product.error(0.05 * weight, fg.Uniform()) < 0.5


def test_chunks_give_the_same(monkeypatch):
    noise = fg.Logistic()
    x, a, states, weight, geometry = layer(SHAPES[2], noise, 0.1)
    whole = one_product.log_ratio(x, a, states, weight, noise, geometry)
    monkeypatch.setattr(ordinary, "ACTIVATIONS_AT_ONCE", 1000)
    torch.testing.assert_close(one_product.log_ratio(x, a, states, weight, noise, geometry), whole)


def test_it_is_chosen_for_large_layers_with_small_weights_and_tolerances_that_allow_it():
    noise, weight = fg.Logistic(), torch.randn(256, 256) / 16
    a = torch.randn(512, 256)

    def kernel(tolerance, factor=1.0, places=512):
        return choose_ratio(factor * weight, noise, places, tolerance, error=10 * tolerance, a=a).kernel

    assert kernel(1e-2) == "one product"
    assert kernel(1e-3) == "separable"
    assert kernel(1e-2, factor=30.0) != "one product"
    assert kernel(1e-2, places=1) != "one product"
    assert kernel(0.0) not in ("one product", "separable")


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_the_operator_keeps_to_the_tolerance(tolerance):
    noise = fg.Logistic()
    x, a, states, weight, geometry = layer((64, 96, (9, 9), (3, 3), Geometry()), noise, 0.04, batch=16)
    exact = vectorized.log_ratio(x, a, states, weight, noise, geometry)
    some = [t.float() for t in (x, a, states, weight)]
    assert relative(flips.log_ratio(*some, noise, geometry, tolerance=tolerance), exact) <= 10 * tolerance


def narrow_everywhere(monkeypatch):
    monkeypatch.setattr(ordinary, "_narrow_is_fast", lambda: True)
    monkeypatch.setattr(ordinary, "LEAST_NARROW_TERMS", {2: 0, 4: 0})
    monkeypatch.setattr(ordinary, "LEAST_NARROW_SIZE", {2: 1, 4: 1})


@each_shape
def test_products_in_bfloat16_have_their_error(shape, monkeypatch):
    x, a, _, weight, geometry = layer(shape, fg.Logistic(), 0.1)
    x, grad, weight = x.float(), torch.randn_like(a).float(), weight.float()
    exact = ordinary.input_gradient(grad.double(), weight.double(), x.double(), geometry)
    narrow_everywhere(monkeypatch)
    found = ordinary.narrow_input_gradient(grad, weight, x, geometry)
    assert found.dtype == torch.float32
    assert 1e-4 < relative(found, exact) < 1.2 * ordinary.NARROW_ERROR
    # Others are as precise as they come.
    assert relative(ordinary.narrow_input_gradient(grad.double(), weight.double(), x.double(), geometry), exact) == 0


@pytest.mark.parametrize("factor", [0.03, 0.1, 0.3])
def test_curvatures_in_bfloat16_keep_to_the_tolerance(factor, monkeypatch):
    noise = fg.Logistic()
    x, a, _, weight, geometry = layer((48, 40, (8, 8), (3, 3), Geometry()), noise, factor)
    grad = torch.randn_like(a)
    exact = vectorized.flip_product(x, a, grad, weight, noise, geometry)
    narrow_everywhere(monkeypatch)
    found = []
    for tolerance in (1e-3, 1e-5):
        form = find_form(weight.float(), noise, tolerance)
        result = flips.separable.flip_product(*(t.float() for t in (x, a, grad, weight)), noise, form, geometry)
        if form.reachable:
            assert relative(result, exact) <= tolerance
        found.append(form.narrow)
    assert found == [factor < 0.3, False]


def test_what_is_left_after_the_first_difference_is_small_enough_for_bfloat16(monkeypatch):
    # At rank 2 and more the first difference's product is in float32, and what others add to it need not be.
    noise, narrow = fg.Logistic(), []
    x, a, _, weight, geometry = layer((48, 40, (8, 8), (3, 3), Geometry()), noise, 0.1)
    grad = torch.randn_like(a)
    exact = vectorized.flip_product(x, a, grad, weight, noise, geometry)
    form = find_form(weight.float(), noise, 1e-3)
    assert len(form.difference) == 2
    assert form.narrow_rest
    products = ordinary.narrow_input_gradient
    monkeypatch.setattr(
        flips.separable, "narrow_input_gradient", lambda g, *rest: (narrow.append(g.shape[1]), products(g, *rest))[1]
    )
    narrow_everywhere(monkeypatch)
    for some in ((x, a, grad), [t.contiguous(memory_format=torch.channels_last) for t in (x, a, grad)]):
        narrow.clear()
        found = flips.separable.flip_product(*(t.float() for t in (*some, weight)), noise, form, geometry)
        assert narrow == [40, 40 * len(form.curvature)]
        assert 1e-6 < relative(found, exact) <= 1e-3
    # Where nothing is rounded, it is the same sum.
    monkeypatch.setattr(ordinary, "_narrow_is_fast", lambda: False)
    plain = flips.separable.flip_product(*(t.float() for t in (x, a, grad, weight)), noise, form, geometry)
    monkeypatch.setattr(flips.separable, "narrow_pays", lambda *_: True)
    led = flips.separable.flip_product(*(t.float() for t in (x, a, grad, weight)), noise, form, geometry)
    assert relative(led, plain.double()) < 1e-6
    for other in (fg.Normal(), fg.Laplace()):
        parts = separable_twice(x, a, grad, weight, other, geometry, monkeypatch)
        assert relative(*parts) < 1e-10


def separable_twice(x, a, grad, weight, noise, geometry, monkeypatch):
    """A flip product in float64 with what is left after the first difference apart, and as it is."""
    form = find_form(weight, noise, 1e-4)
    found = []
    for pays in (True, False):
        monkeypatch.setattr(flips.separable, "narrow_pays", lambda *_, pays=pays: pays)
        found.append(flips.separable.flip_product(x, a, grad, weight, noise, replace(form, narrow_rest=True), geometry))
    assert len(form.leads) == len(form.difference) - 1 > 0
    return found


def test_what_is_chosen_says_that_products_are_in_bfloat16(monkeypatch):
    # With it, exact terms would cost less than three products in float32.
    monkeypatch.setattr(flips.choice.library, "has_avx512", lambda: False)
    weight = torch.randn(96, 96, 3, 3) / 30
    monkeypatch.setattr(ordinary, "_narrow_is_fast", lambda: True)
    fast = choose(weight, fg.Logistic(), 2**15, 1e-3)
    assert fast.reason.endswith("costs 3 ordinary products, 2 of them in bfloat16")
    monkeypatch.setattr(ordinary, "_narrow_is_fast", lambda: False)
    slow = choose(weight, fg.Logistic(), 2**15, 1e-3)
    assert slow.reason.endswith("costs 3 ordinary products")
    assert fast.seconds["separable"] < slow.seconds["separable"]


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("batch", "outputs", "inputs"), [(1, 1, 2), (3, 7, 33), (64, 200, 130), (50, 300, 64)])
def test_fully_connected_layers_in_one_call_are_as_in_tensor_operations(batch, outputs, inputs, portable, monkeypatch):
    if not library.available():
        pytest.skip("no compiled library")
    monkeypatch.setattr(library, "PORTABLE", portable)
    monkeypatch.setattr(one_product, "fused_product_pays", lambda x: x.dtype == torch.float32)
    noise = fg.Logistic(0.7)
    x, a, states, weight, _ = layer((inputs, outputs, (), (), None), noise, 0.2, batch)
    weight[0] *= 0.01
    expected = one_product.log_ratio(x, a, states, weight, noise)
    narrow = [t.float() for t in (x, a, states, weight)]
    found = one_product.log_ratio(*narrow, noise)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().mean()))
    assert found.view(-1)[0] == 0
    # Of steps so large that compiled code refuses them, the tensor operations'.
    weight[:, 0] = 40 * noise.scale
    wide = one_product.log_ratio(x, a, states, weight, noise)
    assert relative(one_product.log_ratio(*(t.float() for t in (x, a, states, weight)), noise), wide) < 1e-2


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 1100), (6, 4, 3, 3), (8, 2, 1, 5)])
@pytest.mark.parametrize("groups", [1, 2])
def test_compiled_nodes_are_those_of_tensor_operations(shape, groups):
    if shape[0] % groups:
        pytest.skip("groups divide the outputs")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.rand(shape[0], *[1] * (len(shape) - 1))
    weight[0] = 0
    for found, expected in zip(one_product._nodes(weight, groups), one_product._nodes(weight.double(), groups), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
