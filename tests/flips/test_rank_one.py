"""Flips of rank one, of units and of weights ±1 times a scale, against their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from flip_layers import pre_activations, small_convolutions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.affine import Affine, Signal, per_channel
from flipgrad.binary_weights import BinaryWeightMap
from flipgrad.flips import Geometry, naive, rank_one
from flipgrad.native import library
from flipgrad.noise import Noise
from random_tensors import channels_last, normal, states, uniform


@dataclass(frozen=True)
class Cauchy(Noise):
    """A noise of a user."""

    def _cdf(self, t: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(t), -t) / torch.pi

    def _log_cdf(self, t: Tensor) -> Tensor:
        return torch.log(self._cdf(t))

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        return 1 / (torch.pi * (1 + t * t))

    def _icdf(self, u: Tensor) -> Tensor:
        return torch.tan(torch.pi * (u - 0.5))

    def _mean_sign(self, t: Tensor) -> Tensor:
        return 2 * self._cdf(t) - 1

    def _variance(self) -> float:
        return float("inf")


NOISES = [fg.Logistic(), fg.Logistic(0.3), fg.Normal(), fg.Laplace(2.0), fg.Uniform(1.5), Cauchy(0.7)]
SCALES = [1e-3, 0.05, 0.7, 20.0]
LINEAR = ((5, 7), (4, 7), None)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The error relative to the largest entry."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item() if expected.numel() else 0.0


@dataclass
class Case:
    """A layer of weights ±1 with scales of both signs, states (some of them 0), and what comes back to it."""

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    geometry: Geometry | None
    scale: float
    noise: Noise
    zeros: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.x = states(*self.shape, seed=self.seed)
        if self.zeros:
            self.x[normal(*self.shape, seed=self.seed + 1) > 1] = 0
        self.signs = states(*self.weight_shape, seed=self.seed + 2)
        outputs = self.weight_shape[0]
        self.scales = self.scale * (1.5 + uniform(outputs, seed=self.seed + 3)) * states(outputs, seed=self.seed + 4)
        self.bias = normal(outputs, seed=self.seed + 5)
        self.map = BinaryWeightMap(Affine(self.signs, None, self.geometry, binary_weights=True), self.scales, self.bias)
        self.a = self.map(self.x)
        self.grad = normal(*self.a.shape, seed=self.seed + 6)
        self.y = states(*self.a.shape, seed=self.seed + 7)

    @property
    def weight(self) -> Tensor:
        return per_channel(self.signs, self.scales)

    def weights_in_turn(self, x: Tensor) -> Tensor:
        """The discrete gradient in every weight, by its definition: flip it, and evaluate the layer on ``x`` anew."""
        result = torch.zeros_like(self.signs)
        kept = self.noise.cdf(pre_activations(x, self.weight, self.bias, self.geometry))
        for index in range(self.signs.numel()):
            flipped = self.signs.clone()
            flipped.view(-1)[index] *= -1
            moved = self.noise.cdf(pre_activations(x, per_channel(flipped, self.scales), self.bias, self.geometry))
            result.view(-1)[index] = self.signs.view(-1)[index] * ((kept - moved) * self.grad).sum()
        return result

    def check(self) -> None:
        """Compare all three sums, to 1e-12 of the largest."""
        torch.testing.assert_close(
            self.a, pre_activations(self.x, self.weight, self.bias, self.geometry), rtol=1e-12, atol=1e-12
        )
        others = (self.weight, self.bias)
        product = naive.flip_product(self.x, *others, self.grad, self.noise, self.geometry)
        # Terms of size eps are differences of numbers of size 1.
        allowed = max(1e-12, 4e-16 / self.scale * self.noise.scale)
        assert relative(self.map.flip_product(self.x, self.a, self.grad, self.noise), product) < allowed
        ratio = naive.log_ratio(self.x, *others, self.y, self.noise, self.geometry)
        assert relative(self.map.log_ratio(self.x, self.a, self.y, self.noise), ratio) < allowed
        back = Signal(self.x, self.x, self.a, self.grad, self.noise)
        found = self.map.weight_gradient(back, back.slopes())
        expected = self.weights_in_turn(self.x)
        size = max(expected.abs().max().item(), 1e-3 * self.scale) if expected.numel() else 1.0
        assert ((found - expected).abs() <= allowed * 10 * size).all()


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_sums_of_rank_one_are_naive_for_every_noise_and_scale(noise):
    for scale in SCALES:
        for zeros in (False, True):
            Case(*LINEAR, scale, noise, zeros).check()
            Case((2, 4, 6, 5), (6, 2, 3, 2), Geometry((2, 1), (1, 2), (1, 2), 2), scale, noise, zeros).check()


@given(small_convolutions, st.sampled_from(SCALES), st.sampled_from(NOISES), st.booleans(), st.integers(0, 1000))
@settings(max_examples=settings().max_examples // 2)
@example(((0, 2, 3, 3), (2, 2, 2, 2), Geometry()), 0.7, fg.Logistic(), False, 0)
def test_sums_of_rank_one_are_naive_for_every_geometry(shapes, scale, noise, zeros, seed):
    Case(*shapes, scale, noise, zeros, seed).check()


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_weights_at_real_inputs_are_flipped_by_the_general_kernels(noise):
    for shape, weight_shape, geometry in (LINEAR, ((2, 4, 6, 5), (6, 2, 3, 2), Geometry((2, 1), (1, 2), (1, 2), 2))):
        for scale in (0.05, 3.0):
            case = Case(shape, weight_shape, geometry, scale, noise)
            x = normal(*shape, seed=9)
            back = Signal(x, x, case.map(x), case.grad, noise, binary=False)
            assert relative(case.map.weight_gradient(back, back.slopes()), case.weights_in_turn(x)) < 1e-10


def test_large_batches_of_real_inputs_go_in_parts(monkeypatch):
    case = Case((7, 2, 5, 5), (4, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 2), 0.5, fg.Logistic())
    x = normal(7, 2, 5, 5, seed=9)
    back = Signal(x, x, case.map(x), case.grad, fg.Logistic(), binary=False)
    whole = case.map.weight_gradient(back, back.slopes())
    monkeypatch.setattr("flipgrad.binary_weights.NUMBERS_AT_ONCE", 2 * 9 * 25 * 2)
    torch.testing.assert_close(case.map.weight_gradient(back, back.slopes()), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "views",
    [(nn.AvgPool2d(2),), (nn.AvgPool2d(2, stride=3),), (nn.AvgPool2d(3, stride=2),), (nn.AdaptiveAvgPool2d(3),)],
    ids=str,
)
@pytest.mark.parametrize("flat", [False, True])
def test_pooled_states_and_weights_are_flipped_exactly(views, flat):
    """Of rank one where windows do not overlap, by the general kernels else, and where weights see averages."""
    x = states(3, 2, 6, 6)
    size = views[0](x)[0].numel()
    layer = fg.BinaryLinear(size, 4, weights="binary") if flat else fg.BinaryConv2d(2, 4, 2, weights="binary")
    nn.init.normal_(layer.double().weight, generator=torch.Generator().manual_seed(1))
    views = (*views, nn.Flatten()) if flat else views
    signs = fg.noise.sign(layer.weight.detach())

    def a_of(x: Tensor, weight: Tensor) -> Tensor:
        return layer.affine(views, weight)(x)

    affine = layer.affine(views, signs)
    a, noise = affine(x), fg.Logistic(0.5)
    grad = normal(*a.shape)
    expected = torch.zeros_like(x)
    for index in range(x[0].numel()):
        flipped = x.clone()
        flipped.flatten(1)[:, index] *= -1
        change = ((noise.cdf(a) - noise.cdf(a_of(flipped, signs))) * grad).flatten(1).sum(1)
        expected.flatten(1)[:, index] = x.flatten(1)[:, index] * change
    assert relative(affine.flip_product(x, a, grad, noise).detach(), expected.detach()) < 1e-12
    back = Signal(x, x, a, grad, noise)
    in_turn = torch.zeros_like(signs)
    for index in range(signs.numel()):
        flipped = signs.clone()
        flipped.view(-1)[index] *= -1
        in_turn.view(-1)[index] = signs.view(-1)[index] * ((noise.cdf(a) - noise.cdf(a_of(x, flipped))) * grad).sum()
    assert relative(affine.weight_gradient(back, back.slopes()).detach(), in_turn.detach()) < 1e-12


def test_averaged_inputs_average_the_flips_of_weights():
    """The term of a weight is x D with D free of x, so its mean over the two states of x is that of x times D."""
    noise = fg.Laplace(0.8)
    case = Case((6, 5), (3, 5), None, 0.4, noise)
    mean = uniform(6, 5, seed=11)
    found = case.map.weight_gradient(Signal(case.x, mean, case.a, case.grad, noise), case.grad)
    expected = torch.zeros_like(case.signs)
    for unit in range(5):
        for state in (-1, 1):
            x = case.x.clone()
            x[:, unit] = state
            share = ((1 + state * mean[:, unit]) / 2)[:, None]
            flipped = case.signs.clone()
            flipped[:, unit] *= -1
            kept, moved = (
                noise.cdf(pre_activations(x, per_channel(signs, case.scales), case.bias, None))
                for signs in (case.signs, flipped)
            )
            expected[:, unit] += case.signs[:, unit] * ((kept - moved) * case.grad * share).sum(0)
    assert relative(found, expected) < 1e-12


def test_straight_through_is_the_first_term_of_a_flip():
    case = Case(*LINEAR, 1e-4, fg.Normal())
    back = Signal(case.x, case.x, case.a, case.grad, case.noise)
    ordinary = Signal(case.x, case.x, case.a, case.grad, case.noise, flips=False)
    discrete = case.map.gradients(back, of_x=True, of_parameters=True)
    smooth = case.map.gradients(ordinary, of_x=True, of_parameters=True)
    for one, other in zip(discrete[:2], smooth[:2], strict=True):
        assert 0 < relative(one, other) < 1e-3
    for one, other in zip(discrete[2:4], smooth[2:4], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("steps", [(1e-3, 0.2), (1e-3, 5.0), (0.5, 5.0), (1.0, 19.0), (1.0, 40.0)])
@pytest.mark.parametrize("outputs", [1, 7, 40])
def test_log_changes_of_rows_are_those_of_the_definition(outputs, steps, scale):
    torch.manual_seed(0)
    noise = fg.Logistic(scale)
    a, states = 4 * scale * torch.randn(37, outputs), torch.sign(torch.randn(37, outputs))
    low, high = (math.log(step) for step in steps)
    step = torch.exp(low + (high - low) * torch.rand(outputs)) * scale * torch.sign(torch.randn(outputs))
    found = rank_one.log_changes(a, states, step, noise)
    wide = rank_one.log_changes(a.double(), states.double(), step.double(), noise)
    assert found.odd.dtype == torch.float32
    # To rounding: of every number relative to the largest of its channel, as many as its step.
    assert bool(((found.odd - wide.odd).abs() <= 2e-6 * (step.abs() / scale).clamp(max=20)).all())
    torch.testing.assert_close(found.spread.double(), wide.spread, rtol=1e-5, atol=1e-7 * outputs**0.5)


@pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")
@pytest.mark.parametrize("portable", [0, 1, 2])
@pytest.mark.parametrize("keep_even", [True, False])
@pytest.mark.parametrize("shape", [(37, 7), (0, 3), (5, 40), (3, 4, 5, 2), (2, 19, 1, 3)])
def test_changes_of_rows_are_those_of_the_definition(shape, keep_even, portable, monkeypatch):
    calls = []
    call = library.call
    monkeypatch.setattr(library, "PORTABLE", portable)
    monkeypatch.setattr(library, "call", lambda name, *rest, **fields: (calls.append(name), call(name, *rest, **fields))[1])
    a, grad, sums = (normal(*shape, seed=seed) * size for seed, size in ((1, 3), (2, 1), (3, 1)))
    step = normal(shape[1], seed=4) * 2
    given = [t.float() if t.dim() == 2 else channels_last(t.float()) for t in (a, grad, sums)]
    found = rank_one.changes(*given, step.float(), fg.Logistic(0.7), keep_even=keep_even)
    assert calls == ["flip_rows"]
    expected = rank_one.changes(a, grad, sums, step, fg.Logistic(0.7))
    assert (found.even is not None) is keep_even
    for name, t in vars(found).items():
        if t is not None:
            torch.testing.assert_close(
                t.double(), vars(expected)[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_changes_do_not_depend_on_how_images_lie(size, groups):
    a, y, grad, sums = (normal(3, 4, 5, 2, seed=seed).float() for seed in range(4))
    step, y = size * torch.tensor([1.0, -0.5, 0.2, 2.0]), y.sign()
    for function, tensors in ((rank_one.log_changes, (a, y)), (rank_one.changes, (a, grad, sums))):
        expected = function(*tensors, step, fg.Logistic(), groups)
        found = function(*map(channels_last, tensors), step, fg.Logistic(), groups)
        for name, t in vars(expected).items():
            if t is not None:
                torch.testing.assert_close(vars(found)[name], t, rtol=2e-5, atol=2e-6 * size, msg=lambda m, n=name: f"{n}: {m}")
