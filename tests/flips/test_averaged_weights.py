"""Gradients in binary weights from one pass over memory: compiled as in tensors, and of averaged inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flipgrad as fg
from flipgrad.affine import Signal
from flipgrad.binary_weights import LEAST_INPUTS, BinaryWeightMap
from random_tensors import normal, states, uniform

# Channels in and out, kernel and further options of convolutions: zero and constant padding, strides, groups, dilation.
CONVOLUTIONS = [
    (4, 6, 3, {}),
    (4, 6, 3, {"padding": 1, "stride": 2}),
    (4, 6, 2, {"padding": "same"}),
    (4, 6, 3, {"padding": 1, "padding_value": -1}),
    (4, 6, (3, 2), {"padding": (1, 0), "dilation": 2, "groups": 2}),
    (8, 4, 3, {"padding": 1}),
    (8, 4, 3, {"padding": 2, "padding_value": 1}),
]


def convolution(inputs: int, outputs: int, kernel, options: dict, dtype: torch.dtype) -> BinaryWeightMap:
    norm = fg.ScaleShift(outputs)
    layer = fg.BinaryConv2d(inputs, outputs, kernel, bias=False, weights="binary", norm=norm, **options).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(normal(*layer.weight.shape, seed=1))
        layer.norm.scale.copy_(0.2 * states(outputs, seed=2) * (1.5 + uniform(outputs, seed=3)))
        layer.norm.shift.copy_(normal(outputs, seed=4))
    affine = layer.affine()
    assert isinstance(affine, BinaryWeightMap)
    return affine


def gradients(affine: BinaryWeightMap, dtype: torch.dtype, averaged: bool, **options) -> tuple[Tensor, ...]:
    channels = affine.inner.weight.shape[1] * affine._groups
    x = states(3, channels, 7, 6, seed=5).to(dtype)
    mean = (x * (0.5 + 0.4 * uniform(*x.shape, seed=6))).to(dtype) if averaged else x
    a = affine(x).detach()
    grad = normal(*a.shape, seed=7).to(dtype)
    found = affine.gradients(Signal(x, mean, a, grad, fg.Logistic(0.8), **options), of_x=True, of_parameters=True)
    return tuple(part for part in found if part is not None)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_gradients_in_float32_are_those_in_float64(case, averaged, exact):
    """Compiled in the one, by tensors in the other."""
    found, expected = (
        gradients(convolution(*case, dtype), dtype, averaged, exact=exact) for dtype in (torch.float32, torch.float64)
    )
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).abs() <= 1e-5 * other.abs().max()).all()


def by_certainty(affine: BinaryWeightMap, x: Tensor, mean: Tensor, a: Tensor, grad: Tensor, certainty: Tensor) -> Tensor:
    """The sums of mean E and of W c O, for certainties c [B, in]."""
    odd, even = fg.Logistic().change(a, 2 * affine.scale)
    signs = affine.inner.weight
    return (odd * grad).t() @ mean + signs * ((even * grad).t() @ certainty)


@pytest.mark.parametrize("inputs", [LEAST_INPUTS - 1, LEAST_INPUTS])
def test_certainties_are_those_of_examples_in_wide_layers_with_a_tolerance_only(inputs):
    layer = fg.BinaryLinear(inputs, 5, weights="binary").double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    affine = layer.affine()
    x = states(6, inputs, seed=5)
    mean, share = x * (0.5 + 0.4 * uniform(6, inputs, seed=6)), uniform(6, inputs, seed=9)
    a = affine(x).detach()
    grad = normal(6, 5, seed=7)
    each = x * mean
    exact = by_certainty(affine, x, mean, a, grad, each)
    of_examples = by_certainty(affine, x, mean, a, grad, each.mean(1, keepdim=True).expand_as(each))
    wide = inputs == LEAST_INPUTS
    for options, expected in (
        ({}, exact),
        ({"exact": False}, of_examples if wide else exact),
        ({"exact": False, "share": share}, exact),
    ):
        found = affine.gradients(Signal(x, mean, a, grad, fg.Logistic(), **options), of_x=False, of_parameters=True)
        torch.testing.assert_close(found[1], expected, rtol=1e-12, atol=1e-14)
    # What is left out is a part of the smaller sum.
    assert 0 < (of_examples - exact).norm() < 0.05 * exact.norm()


def test_zeros_among_the_states_are_no_units():
    """One example has another pattern of zeros: the masks of examples differ, and so does what weights meet."""
    affine = convolution(4, 6, 3, {"padding": 1}, torch.float64)
    x = states(3, 4, 7, 6, seed=5)
    x[1, :2, 3] = 0
    a = affine(x).detach()
    grad = normal(*a.shape, seed=7)
    found = affine.gradients(Signal(x, x, a, grad, fg.Normal()), of_x=True, of_parameters=True)
    kept = fg.Normal().cdf(a)
    signs = affine.inner.weight.detach()
    for index in (0, 17, 100, 215):
        flipped = signs.clone()
        flipped.view(-1)[index] *= -1
        moved = fg.Normal().cdf(affine.with_tensors((flipped, affine.scale, affine.bias, None))(x)).detach()
        expected = signs.view(-1)[index] * ((kept - moved) * grad).sum()
        torch.testing.assert_close(found[1].view(-1)[index], expected, rtol=1e-10, atol=1e-12)
    assert not found[0][1, :2, 3].any()


def test_sums_are_the_same_where_states_cannot_be_looked_at():
    """Under torch.vmap nobody knows whether there are zeros among them."""
    affine = convolution(8, 4, 3, {"padding": 1}, torch.float64)
    x = states(3, 8, 7, 6, seed=5)
    mean = x * (0.5 + 0.4 * uniform(*x.shape, seed=6))
    a = affine(x).detach()
    grad = normal(*a.shape, seed=7)

    def weight(x: Tensor, mean: Tensor, a: Tensor, grad: Tensor) -> Tensor:
        return affine.gradients(Signal(x, mean, a, grad, fg.Logistic(), exact=False), of_x=False, of_parameters=True)[1]

    blind = torch.vmap(weight)(*(torch.stack([t, t.flip(0)]) for t in (x, mean, a, grad)))
    for found in blind:
        torch.testing.assert_close(found, weight(x, mean, a, grad), rtol=1e-12, atol=1e-12)
