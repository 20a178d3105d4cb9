"""Flip products: the reference by hand, the vectorised ones against it, and what the mathematics says of both."""

from __future__ import annotations

import pytest
import torch
from flip_layers import Layer, rounding_of_terms, small_convolutions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import Geometry, naive, vectorized
from flipgrad.noise import Laplace, Logistic, Normal, Uniform
from random_tensors import channels_last, layouts, normal, states, strided

NOISES = [Logistic(), Normal(), Laplace(0.8), Uniform(2.0)]
WEIGHTS = [1e-4, 1e-2, 0.3, 2.0, 20.0]

every_noise = pytest.mark.parametrize("noise", NOISES, ids=repr)


class Case(Layer):
    """Computed by the kernel that is chosen."""

    def actual(self, layout=lambda t: t) -> Tensor:
        return self.product(*(layout(t) for t in (self.x, self.a, self.grad)))

    def product(self, x: Tensor, a: Tensor, grad: Tensor) -> Tensor:
        return flips.flip_product(x, a, grad, self.weight, self.noise, self.geometry)

    def assert_right(self, actual: Tensor) -> None:
        assert actual.shape == self.x.shape
        assert actual.dtype == self.x.dtype
        expected = self.expected()
        relative = 1e-10 if self.x.dtype == torch.float64 else 1e-5
        # Differences of probabilities near 1 are rounded: the reference's, and but for logistic noise the product's own. They
        # may be large beside their sum.
        rounding = 1e-15 if isinstance(self.noise, Logistic) else max(1e-15, torch.finfo(self.x.dtype).eps)
        # So may the terms themselves.
        rounded = rounding_of_terms(self.grad, self.weight, self.x, self.noise, self.geometry, self.x.dtype)
        allowed = relative * expected.norm() + rounding * self.grad.double().abs().sum() + rounded
        assert float((actual.double() - expected).norm()) <= float(allowed)


def case(shape, weight, noise, *, scale=1.0, dtype=torch.float64, seed=0, **rest) -> Case:
    """A fully connected layer, or a convolution by the number of dimensions; the rest is its geometry."""
    w = scale * normal(*weight, seed=seed + 2)
    bias = normal(weight[0], seed=seed + 3)
    geometry = Geometry(**rest) if len(shape) == 4 else None
    return Case(states(*shape, seed=seed).to(dtype), w.to(dtype), bias.to(dtype), noise, geometry, seed)


common = {
    "noise": st.sampled_from(NOISES),
    "scale": st.sampled_from(WEIGHTS),
    "dtype": st.sampled_from([torch.float64, torch.float32]),
    "seed": st.integers(0, 1000),
}


@st.composite
def linear_cases(draw) -> Case:
    batch, inputs, outputs = draw(st.integers(0, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return case((batch, inputs), (outputs, inputs), **{name: draw(value) for name, value in common.items()})


@st.composite
def conv_cases(draw) -> Case:
    shape, weight, geometry = draw(small_convolutions)
    return case(shape, weight, **geometry._asdict(), **{name: draw(value) for name, value in common.items()})


def test_naive_linear_by_hand():
    # F(a) = (a + 2) / 4 within ±2. a = -1/4, 1; F = 7/16, 3/4. First unit flipped: a = -5/4, -3; F = 3/16, 0.
    # Second unit flipped: a = 7/4, 3; F = 15/16, 1.
    x = torch.tensor([[1.0, -1.0]])
    weight, bias = torch.tensor([[0.5, 1.0], [2.0, 1.0]]), torch.tensor([0.25, 0.0])
    u = naive.flip_product(x, weight, bias, torch.tensor([[2.0, 4.0]]), Uniform(2.0))
    assert u.tolist() == [[2 * 4 / 16 + 4 * 3 / 4, 2 * 8 / 16 + 4 * 1 / 4]]


def test_naive_conv2d_by_hand():
    # F(a) = (a + 4) / 8. With a zero on both sides, a = 2, -1, -1; the first unit flipped, -2, -3, -1; the second, 2, 3, 1.
    x, weight = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[1.0, 2.0]]]])
    grad = torch.tensor([[[[8.0, 16.0, 32.0]]]])
    u = naive.flip_product(x, weight, None, grad, Uniform(4.0), Geometry(padding=(0, 1)))
    assert u.tolist() == [[[[8 * 4 / 8 + 16 * 2 / 8, 16 * 4 / 8 + 32 * 2 / 8]]]]


@pytest.mark.parametrize("cases", [linear_cases(), conv_cases()], ids=["linear", "convolution"])
@settings(max_examples=3 * settings().max_examples)
@given(st.data(), layouts)
def test_flip_product_is_naive(cases, data, layout):
    layer = data.draw(cases)
    layer.assert_right(layer.actual(layout))


def test_terms_of_either_sign_may_be_large_beside_their_sum():
    x, bias = torch.tensor([[1.0]]), torch.tensor([0.3249, 0.5193, 0.1116])
    layer = Case(x, torch.tensor([[0.0096], [0.0223], [-0.0177]]), bias, Normal(), seed=595)
    layer.assert_right(layer.actual())
    layer = case((1, 1, 1, 1), (5, 1, 1, 1), Logistic(), scale=1e-4, dtype=torch.float32, seed=91, padding=(1, 2))
    layer.assert_right(layer.actual())


@pytest.mark.parametrize("noise", [Logistic(), Normal()], ids=repr)
def test_states_of_another_kind_of_layer_are_refused(noise):
    row, image = torch.ones(2, 3), torch.ones(2, 3, 1, 1)
    for function, tensors in ((flips.flip_product, 4), (flips.log_ratio, 4), (flips.slope_product, 5)):
        with pytest.raises(InputError, match=r"\(2, 3, 1, 1\), not \[B, in\]: give the geometry"):
            function(*[image] * tensors, noise)
        with pytest.raises(InputError, match=r"\(2, 3\), not \[B, C, H, W\]: a fully connected layer has no geometry"):
            function(*[row] * tensors, noise, Geometry())


def test_layouts_are_what_they_say():
    t = normal(2, 3, 4, 5)
    assert torch.equal(strided(t), t)
    assert not strided(t).is_contiguous()
    assert channels_last(t).is_contiguous(memory_format=torch.channels_last)
    assert not channels_last(t[0, 0]).is_contiguous()


@every_noise
def test_gradient_without_memory_of_its_own(noise):
    # What sum().backward() hands to a layer.
    layer = case((3, 2, 5, 4), (3, 2, 2, 3), noise)
    grad = torch.ones((), dtype=torch.float64).expand_as(layer.a)
    expected = naive.flip_product(layer.x, layer.weight, layer.bias, grad, noise, layer.geometry)
    torch.testing.assert_close(layer.product(layer.x, layer.a, grad), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("noise", [*NOISES, Logistic(100.0)], ids=repr)
@pytest.mark.parametrize("scale", WEIGHTS)
def test_float32_is_precise_for_many_outputs(noise, scale):
    # Differences of sums lose digits with their length, and differences of probabilities where the weights are small.
    layer = case((2, 6), (3000, 6), noise, scale=scale, dtype=torch.float32)
    layer.assert_right(layer.actual())
    layer = case((2, 3, 3, 3), (500, 3, 3, 3), noise, scale=scale, dtype=torch.float32, padding=(1, 1))
    layer.assert_right(layer.actual())


@every_noise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_its_digits(noise, dtype):
    for layer in (case((4, 8), (50, 8), noise, scale=0.02), case((2, 3, 4, 4), (20, 3, 2, 2), noise, scale=0.02)):
        half = Case(*(t.to(dtype) for t in (layer.x, layer.weight, layer.bias)), noise, layer.geometry)
        expected, actual = half.expected(), half.actual()
        assert actual.dtype == dtype
        # The pre-activations and the result are rounded, by 2**-9 at most.
        assert float((actual.double() - expected).norm() / expected.norm()) < 2**-7


@pytest.mark.parametrize("chunk", [1, 7, 60, 1000])
@pytest.mark.parametrize(
    "layer",
    [
        case((5, 6), (4, 6), Logistic()),
        case((3, 4, 5, 6), (6, 2, 2, 3), Laplace(), stride=(2, 1), padding=(1, 2), groups=2),
    ],
    ids=["linear", "conv2d"],
)
def test_chunks_give_the_same(layer, chunk, monkeypatch):
    whole = layer.actual()
    monkeypatch.setattr(vectorized, "TERMS_AT_ONCE", chunk)
    torch.testing.assert_close(layer.actual(), whole, rtol=1e-12, atol=1e-14)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return result


@pytest.mark.parametrize("chunk", [100, 1000])
@pytest.mark.parametrize(
    ("layer", "terms"),
    [
        (case((20, 30), (40, 30), Logistic()), 20 * 30 * 40),
        (case((8, 6, 9, 9), (10, 6, 3, 3), Logistic(), padding=(1, 1)), 8 * 6 * 10 * 9 * 9),
    ],
    ids=["linear", "conv2d"],
)
def test_memory_is_bounded(layer, terms, chunk, monkeypatch):
    monkeypatch.setattr(vectorized, "TERMS_AT_ONCE", chunk)
    # Nothing is larger than a chunk, or what was given: all of it, and one example of it.
    for batch in (len(layer.x), 1):
        tensors = [t[:batch] for t in (layer.x, layer.a, layer.grad)]
        padded = functional.pad(tensors[0], (1, 1, 1, 1)) if layer.x.dim() == 4 else tensors[0]
        largest_given = max(padded.numel(), tensors[1].numel(), layer.weight.numel())
        assert batch == 1 or terms > 5 * max(chunk, largest_given)
        with Largest() as largest:
            layer.product(*tensors)
        assert 0 < largest.numel <= max(chunk, largest_given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(
    ("noise", "low", "high"),
    [(Logistic(), 15, 30), (Laplace(), 15, 30), (Normal(), 7, 11)],
    ids=["logistic", "laplace", "normal"],
)
def test_tails_keep_their_digits(noise, low, high, side, dtype):
    # Numbers that float32 holds exactly; every term is positive, so that each unit has its own relative error.
    weight = side * torch.tensor([[0.5, 0.0625, 1.5], [0.25, 2.0, 0.75]], dtype=torch.float64)
    base = torch.tensor([[low, high]], dtype=torch.float64).mul(side)
    x = torch.ones(1, 3, dtype=torch.float64)
    grad = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    bias = base[0] - weight.sum(1)
    a = base
    # On the lower tail the reference has all digits: F(a) - F(b) = F(-b) - F(-a).
    expected = naive.flip_product(x, -weight * side, -bias * side, grad, noise) * -side
    actual = flips.flip_product(*(t.to(dtype) for t in (x, a, grad, weight)), noise)
    assert 0 < float(expected.abs().max()) < 1e-4
    torch.testing.assert_close(actual.double(), expected, rtol=1e-10 if dtype == torch.float64 else 3e-5, atol=0)
    image = [t.to(dtype)[:, :, None, None] for t in (x, a, grad, weight)]
    assert torch.equal(flips.flip_product(*image, noise, Geometry())[..., 0, 0], actual)


@every_noise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_far_pre_activations_are_right(noise, dtype):
    a = torch.tensor([[100.0], [-100.0]], dtype=dtype)
    x, grad = torch.ones(2, 4, dtype=dtype), torch.full((2, 1), 3.0, dtype=dtype)
    # Flipped, a stays far, or crosses to the other side, or goes further.
    weight = torch.tensor([[0.5, 100.0, -100.0, 1e4]], dtype=dtype)
    # Per unit F(100) - F(100 - 2w) and F(-100) - F(-100 - 2w), times 3.
    expected = torch.tensor([[0.0, 3, 0, 3], [0, 0, -3, 0]], dtype=dtype)
    torch.testing.assert_close(flips.flip_product(x, a, grad, weight, noise), expected, rtol=1e-6, atol=1e-30)
    image = [t[:, :, None, None] for t in (x, a, grad, weight)]
    u = flips.flip_product(*image, noise, Geometry())[..., 0, 0]
    torch.testing.assert_close(u, expected, rtol=1e-6, atol=1e-30)


@every_noise
def test_zeros_are_not_flipped(noise):
    layer = case((2, 3, 4, 5), (4, 3, 3, 2), noise, padding=(2, 1), stride=(2, 1))
    inside, padded = layer.actual(), functional.pad(layer.x, (1, 1, 2, 2))
    u = flips.flip_product(padded, layer.a, layer.grad, layer.weight, noise, Geometry(stride=(2, 1)))
    assert not u[padded == 0].any()
    assert torch.equal(u[:, :, 2:-2, 1:-1], inside)
    assert bool((inside != 0).any())


@every_noise
def test_convolution_is_its_fully_connected_layer(noise):
    shape = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
    layer = case((3, 4, 5, 4), (6, 2, 3, 2), noise, **shape)
    units = torch.eye(layer.x[0].numel(), dtype=torch.float64).view(-1, *layer.x.shape[1:])
    dense = functional.conv2d(units, layer.weight, **shape).flatten(1).t()
    x, a, grad = (t.flatten(1) for t in (layer.x, layer.a, layer.grad))
    u = flips.flip_product(x, a, grad, dense, noise)
    torch.testing.assert_close(layer.actual().flatten(1), u, rtol=1e-10, atol=1e-12)
    bias = layer.a[0].flatten() - dense @ x[0]
    expected = naive.flip_product(x, dense, bias, grad, noise)
    torch.testing.assert_close(layer.expected().flatten(1), expected, rtol=1e-10, atol=1e-12)


@every_noise
def test_term_is_a_difference_plus_state_times_curvature(noise):
    x, a, grad, weight = states(5, 4), 2 * normal(5, 3), normal(5, 3, seed=1), normal(3, 4, seed=2)
    F, step = noise.cdf, 2 * weight[None]
    at = a[:, :, None]
    E = (F(at + step) - F(at - step)) / 2
    O = F(at) - (F(at + step) + F(at - step)) / 2  # noqa: E741
    expected = ((E + x[:, None] * O) * grad[:, :, None]).sum(1)
    torch.testing.assert_close(flips.flip_product(x, a, grad, weight, noise), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("noise", [Logistic(), Normal(1.3)], ids=repr)
@pytest.mark.parametrize(("at_zero", "order"), [(False, 2), (True, 3)])
def test_straight_through_is_the_first_taylor_term(noise, at_zero, order):
    # Of order w; the next term is -2 w² F''(a), which vanishes at a = 0, and then (4/3) w³ F'''(a).
    x, grad, weight = states(5, 4), normal(5, 3, seed=1), normal(3, 4, seed=2)
    a = torch.zeros(5, 3, dtype=torch.float64) if at_zero else normal(5, 3, seed=3)
    st = (2 * noise.pdf(a) * grad) @ weight
    products = [(h, flips.flip_product(x, a, grad, h * weight, noise)) for h in (2**-6, 2**-7, 2**-8)]
    differences = [(u - h * st).norm().item() for h, u in products]
    assert differences[0] / differences[1] == pytest.approx(2**order, rel=0.03)
    assert differences[1] / differences[2] == pytest.approx(2**order, rel=0.03)


def test_straight_through_is_exact_where_the_cdf_is_linear():
    noise = Uniform(50.0)
    layer = case((3, 2, 4, 5), (3, 2, 2, 2), noise)
    slope = 2 * noise.pdf(layer.a) * layer.grad
    expected = functional.conv_transpose2d(slope, layer.weight)
    torch.testing.assert_close(layer.actual(), expected, rtol=1e-10, atol=1e-12)


def layer_tensors():
    """States, pre-activations, gradient, weight and geometry of a convolution."""
    shapes = (2, 4, 5, 5), (2, 6, 3, 3), (2, 6, 3, 3), (6, 2, 3, 3)
    return [torch.ones(shape) for shape in shapes], Geometry(groups=2)


@pytest.mark.parametrize("noise", [Logistic(), Normal()], ids=repr)
@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda x: x.long(), r"x has dtype torch.int64, expected floating point: give it as x.float\(\)"),
        (0, lambda x: x.to_sparse(), r"x is torch.sparse_coo: give it as x.to_dense\(\)"),
        (1, lambda a: a[:1], r"a has shape \(1, 6, 3, 3\), but the layer's weight and states make it \(2, 6, 3, 3\)"),
        (1, lambda a: a.to("meta"), r"the tensors are on cpu and meta: move them to one device"),
        (3, lambda weight: weight[0], r"weight has shape \(2, 3, 3\), not \[out, C / groups, kh, kw\]"),
        (3, lambda weight: weight[:5], r"the groups must divide the outputs"),
        (3, lambda weight: weight[:, :, :0], r"kernel, stride, dilation and groups must be at least 1"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(noise, place, change, message):
    tensors, geometry = layer_tensors()
    tensors[place] = change(tensors[place])
    for function in (flips.flip_product, flips.log_ratio):
        with pytest.raises(InputError, match=message):
            function(*tensors, noise, geometry)
    x, a, grad, weight = tensors
    with pytest.raises(InputError, match=message):
        flips.slope_product(x, x, a, grad, weight, noise, geometry)


def test_the_geometry_of_no_convolution_is_refused():
    tensors, geometry = layer_tensors()
    for wrong in ({"stride": (0, 1)}, {"padding": (-1, 0)}, {"dilation": (1, 0)}, {"groups": 0}):
        with pytest.raises(InputError, match="stride, dilation and groups must be at least 1, the padding at least 0"):
            flips.flip_product(*tensors, Logistic(), geometry._replace(**wrong))
    x, a, grad, weight = tensors
    with pytest.raises(InputError, match=r"share has shape \(1, 4, 5, 5\), but the states have \(2, 4, 5, 5\)"):
        flips.slope_product(x, x[:1], a, grad, weight, Logistic(), geometry)
