"""What is computed of units one by one: compiled passes against the same sums in float64, and these against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from flipgrad.flips import Geometry, averaging, units
from flipgrad.native import library
from flipgrad.noise import Logistic
from random_tensors import channels_last, normal, states

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")

# Of elements: none, fewer than a register holds, and more than one thread takes.
COUNTS = [0, 1, 7, 16, 33, 40000]


@pytest.fixture(params=[False, True], ids=["fastest", "portable"], autouse=True)
def path(request, monkeypatch):
    """Both sets of instructions, one after the other."""
    monkeypatch.setattr(library, "PORTABLE", request.param)


@pytest.fixture(autouse=True)
def _two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """The names of the compiled functions that were called."""
    names: list[str] = []
    call = library.call

    def watched(name: str, *arguments: object, **fields: object) -> int:
        names.append(name)
        return call(name, *arguments, **fields)

    monkeypatch.setattr(library, "call", watched)
    return names


def holes(*shape: int, seed: int) -> Tensor:
    """States, and zeros in the place of some."""
    x = states(*shape, seed=seed)
    x[normal(*shape, seed=seed + 1) > 1] = 0
    return x


@pytest.mark.parametrize("count", COUNTS)
def test_sums_are_joined(count, calls):
    once, twice, x = normal(count, seed=1), normal(count, seed=2), holes(count, seed=3)
    single = units.joined(once.float(), twice.float(), x.float())
    assert calls == ["join"]
    torch.testing.assert_close(single.double(), x * (once + x * twice), rtol=1e-6, atol=1e-6)
    assert units.joined(once, twice, x).equal((once + x * twice) * x)


@pytest.mark.parametrize("count", COUNTS)
def test_posterior_means_are_those_of_bayes(count, calls):
    x, log_odds, ratio = states(count, seed=1), normal(count, seed=2) * 8, normal(count, seed=3) * 8
    # The odds of +1, times the likelihood with +1 over that with -1.
    expected = torch.tanh((log_odds - x * ratio) / 2)
    single = units.posterior_means(x.float(), log_odds.float(), ratio.float())
    assert calls == ["posterior"]
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(units.posterior_means(x, log_odds, ratio), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("count", COUNTS)
def test_mean_gradients_are_those_of_the_density(scale, count, calls):
    noise, a, grad = Logistic(scale), normal(count, seed=1) * 8, normal(count, seed=2)
    expected = grad / (2 * scale * torch.cosh(a / (2 * scale)) ** 2)
    single = noise.mean_gradient(a.float(), grad.float())
    assert calls == ["slopes"]
    # Far out, a rounded pre-activation moves the density by as much as it is rounded, in scales.
    torch.testing.assert_close(single.double(), expected, rtol=2e-6 * (1 + 32 / scale), atol=1e-30)
    torch.testing.assert_close(noise.mean_gradient(a, grad), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (1, 40, 1, 2), (0, 2, 3, 3)])
def test_images_with_channels_last_are_compiled_as_they_lie(shape, calls):
    a, x = normal(*shape, seed=1).float(), states(*shape, seed=2).float()
    grad, ratio = normal(*shape, seed=3).float(), normal(*shape, seed=4).float()
    for function, name, tensors in (
        (Logistic().mean_gradient, "slopes", (a, grad)),
        (units.posterior_means, "posterior", (x, a, ratio)),
        (lambda *parts: units.joined(parts[0], parts[1].clone(), parts[2]), "join", (a, grad, x)),
    ):
        expected = function(*tensors)
        found = function(*map(channels_last, tensors))
        assert calls[-2:] == [name] * 2
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert found.equal(expected)
    # Of many units some are looked at, and which ones depends on how they lie.
    assert averaging.certainty(channels_last(a)) == pytest.approx(averaging.certainty(a), rel=1e-6)


def test_tensors_in_different_orders_are_not_taken_for_alike():
    images = normal(2, 3, 4, 5).float()
    last = channels_last(images)
    assert library.takes_alike(images, images)
    assert library.takes_alike(last, last.clone())
    assert not library.takes_alike(images, last)
    assert not library.takes_alike(last, images)
    assert not library.takes_alike(last.double())
    assert not library.takes_alike(images[:, :, ::2])
    assert not library.takes_alike(last[:, 1:])
    torch.testing.assert_close(Logistic().mean_gradient(images, last), Logistic().mean_gradient(images, images))


@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 40000])
def test_certainty_is_the_mean_square_of_means(count, calls):
    log_odds = normal(count, seed=1) * 3
    every = -(-count // averaging.UNITS_READ)
    expected = float(torch.tanh(log_odds[::every] / 2).square().mean())
    assert averaging.certainty(log_odds.float()) == pytest.approx(expected, rel=1e-5)
    assert calls == ["certainty"]
    assert averaging.certainty(log_odds) == pytest.approx(expected, rel=1e-5)


def test_extreme_units():
    assert math.isnan(averaging.certainty(torch.tensor([1.0, float("nan")])))
    assert averaging.certainty(torch.tensor([float("inf"), -500.0, 0.0])) == pytest.approx(2 / 3)
    inf, nan = float("inf"), float("nan")
    one = torch.ones(4)
    means = units.posterior_means(one, torch.tensor([inf, -inf, 500.0, nan]), torch.zeros(4))
    assert means[:3].tolist() == [1, -1, 1]
    assert means[3].isnan()
    slopes = Logistic().mean_gradient(torch.tensor([inf, -500.0, 0.0, nan]), one)
    torch.testing.assert_close(slopes[:3], torch.tensor([0, 0, 0.5]), rtol=0, atol=1e-30)
    assert slopes[3].isnan()


def test_mean_gradients_have_derivatives_of_their_own():
    # Where someone differentiates again, torch has to see the operations.
    a = normal(5, seed=1).float().requires_grad_()
    grad = normal(5, seed=2).float()
    slopes = Logistic().mean_gradient(a, grad)
    (second,) = torch.autograd.grad(slopes.sum(), a)
    torch.testing.assert_close(second, 2 * Logistic().pdf_derivative(a.detach()) * grad)


def test_mean_gradients_of_one_gradient_for_many():
    a = normal(3, 4, seed=1).float()
    torch.testing.assert_close(Logistic().mean_gradient(a, torch.ones(1, 4)), 2 * Logistic().pdf(a))


@st.composite
def geometries(draw) -> tuple[Geometry, int, tuple[int, int], tuple[int, int]]:
    """Of a convolution; the channels of a group, height and width, and those of the kernel."""
    pair = st.tuples
    stride, dilation = draw(pair(st.integers(1, 3), st.integers(1, 3))), draw(pair(st.integers(1, 2), st.integers(1, 3)))
    padding, kernel = draw(pair(st.integers(0, 2), st.integers(0, 4))), draw(pair(st.integers(1, 3), st.integers(1, 4)))
    least = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    size = draw(pair(*[st.integers(n, n + 20) for n in least]))
    return Geometry(stride, padding, dilation, draw(st.integers(1, 3))), draw(st.integers(1, 3)), size, kernel


@given(geometries(), st.integers(0, 3), st.booleans(), st.integers(0, 1000))
@settings(max_examples=60)
def test_sums_are_spread_over_a_convolution(case, batch, of_ratio, seed):
    geometry, channels, size, kernel_size = case
    groups = geometry.groups
    x = holes(batch, groups * channels, *size, seed=seed)
    kernel, share = normal(groups, *kernel_size, seed=seed + 2), normal(groups, channels, seed=seed + 3)
    weight = (share[:, :, None, None] * kernel[:, None]).double()
    inputs = torch.zeros_like(x, requires_grad=True)
    out = F.conv2d(inputs, weight, None, geometry.stride, geometry.padding, geometry.dilation, groups)
    total, sums = normal(*out.shape, seed=seed + 4), normal(*x.shape, seed=seed + 5)
    (shared,) = torch.autograd.grad(out, inputs, total)
    expected = x * (sums + x * shared) if of_ratio else x * (shared + x * sums)
    double = units.spread(total, kernel, share, sums.clone(), x, geometry, of_ratio=of_ratio)
    torch.testing.assert_close(double, expected, rtol=1e-12, atol=1e-12)
    floats = (t.float() for t in (total, kernel, share, sums, x))
    single = units.spread(*floats, geometry, of_ratio=of_ratio)
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=2e-5)
    parts = (total.float(), kernel.float(), share.float(), channels_last(sums.float()), channels_last(x.float()))
    last = units.spread(*parts, geometry, of_ratio=of_ratio)
    torch.testing.assert_close(last.double(), expected, rtol=1e-5, atol=2e-5)


def test_spread_sums_are_compiled(calls):
    parts = (torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 1), torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
    result = units.spread(*parts, Geometry(), of_ratio=True)
    assert calls == ["spread"]
    assert result.squeeze().tolist() == [[2, 3, 2], [3, 5, 3], [2, 3, 2]]
    one, two = torch.ones(1, 1, 2, 2), channels_last(torch.ones(1, 2, 3, 3))
    result = units.spread(one, torch.ones(1, 2, 2), torch.tensor([[1.0, 2.0]]), two.clone(), two, Geometry(), of_ratio=True)
    assert calls == ["spread"] * 2
    assert result[0, 0].tolist() == [[2, 3, 2], [3, 5, 3], [2, 3, 2]]
    assert result[0, 1].tolist() == [[3, 5, 3], [5, 9, 5], [3, 5, 3]]
