"""The Triton kernel against the definition. Run by test_triton.py, in a process of its own: Triton's interpreter is chosen by
an environment variable before Triton is imported, for all of the process."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from flip_layers import (
    PRECISION,
    SIZES,
    GridLayer,
    assert_log_ratios_of_large_numbers,
    channels,
    convolutions,
    far_layer,
    grid_options,
    precise_product,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import Geometry, triton
from flipgrad.flips._arguments import flat
from flipgrad.noise import Laplace, Logistic, Normal, Uniform
from random_tensors import channels_last, layouts, strided

DEVICE = "cpu" if triton._interpreted() else "cuda"

# Terms whose denominator is beyond the largest number are 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """Fills every torch.empty with NaN, so that an element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Case(GridLayer):
    """Computed by the Triton kernel."""

    def actual(self, dtype: torch.dtype, layout=lambda t: t) -> Tensor:
        tensors = (layout(t.to(DEVICE, dtype)) for t in (self.x, self.a, self.grad, self.weight))
        return self.function(triton)(*tensors, Logistic(self.scale), self.geometry)


dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64])


@st.composite
def linear_cases(draw) -> Case:
    batch, inputs, outputs = draw(st.sampled_from([0, 1, 2, 9, 40])), draw(channels), draw(channels)
    return Case((batch, inputs), (outputs, inputs), **{name: draw(value) for name, value in grid_options.items()})


@st.composite
def conv_cases(draw) -> Case:
    few = st.sampled_from([1, 3, 7]), st.sampled_from([1, 3, 5])
    shape, weight, geometry = draw(convolutions(st.integers(0, 3), *few, largest_kernel=5))
    return Case(shape, weight, geometry=geometry, **{name: draw(value) for name, value in grid_options.items()})


@pytest.mark.parametrize("cases", [linear_cases(), conv_cases()], ids=["linear", "convolution"])
@settings(max_examples=settings().max_examples // 8)
@given(st.data(), dtypes, layouts)
def test_kernel_is_naive(cases, data, dtype, layout):
    data.draw(cases).assert_right(dtype, layout=layout)


@pytest.mark.parametrize(("ratio", "inputs"), [(False, 20), (True, 33), (False, 70), (True, 70)])
def test_many_channels_of_a_convolution(ratio, inputs):
    geometry = Geometry(stride=(1, 2), padding=(1, 0), groups=2)
    Case((1, 2 * inputs, 3, 4), (14, inputs, 3, 2), geometry=geometry, ratio=ratio).assert_right(torch.float32)


@pytest.mark.parametrize(("ratio", "tile"), [(False, (8, 1, 2)), (True, (2, 16, 8)), (False, (64, 2, 1)), (True, (64, 2, 1))])
def test_tiles_give_the_same(ratio, tile, monkeypatch):
    # Six places in each of two examples: some tiles have places of both.
    layer = Case((2, 3, 3, 2), (5, 3, 2, 2), geometry=Geometry(padding=(1, 1)), ratio=ratio)
    monkeypatch.setattr(triton, "_tile", lambda *_: tile)
    layer.assert_right(torch.float64)


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return triton.flip_product(*(t.to(DEVICE) for t in (x, a, grad, weight)), Logistic()).cpu()


@pytest.mark.parametrize(("reach", "dtype"), [(1.0, torch.float32), (100.0, torch.float32), (100.0, torch.float64)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_far_pre_activations_keep_their_digits(reach, size, dtype):
    tensors = far_layer(reach, size, dtype)
    expected = precise_product(*(t.double() for t in tensors))
    u = flip_product(*tensors).double()
    assert float((u - expected).norm() / expected.norm()) < PRECISION[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_tiny_term_is_right(dtype):
    # One output, far out: the term is tiny, and the whole result.
    x, grad = torch.tensor([[1.0, -1.0] * 3] * 4, dtype=dtype), torch.ones(4, 1, dtype=dtype)
    a = torch.tensor([[-100.0], [-40.0], [40.0], [100.0]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.5, 3.0, 3.0, 20.0, 20.0]], dtype=dtype)
    expected = precise_product(*(t.double() for t in (x, a, grad, weights)))
    # Near the smallest normal number, 1e-38 in float32, there are no digits.
    atol = 10 * torch.finfo(dtype).tiny
    torch.testing.assert_close(flip_product(x, a, grad, weights).double(), expected, rtol=PRECISION[dtype], atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_numbers_are_right(dtype):
    # Flipped, a stays far, or crosses to the other side, or goes further.
    a = torch.tensor([[1000.0], [-1000.0], [math.inf], [1e35]], dtype=dtype)
    x, grad = torch.ones(4, 4, dtype=dtype), torch.full((4, 1), 3.0, dtype=dtype)
    weight = torch.tensor([[0.5, 1000.0, -1000.0, 450.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 3, 0, 0], [0, 0, -3, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    torch.testing.assert_close(flip_product(x, a, grad, weight), expected, rtol=1e-6, atol=1e-30)


SOME_PAIRS = [(1.0, 1e-4), (1.0, 2.0), (1.0, 20.0), (100.0, 1000.0), (1e4, 1.0)]
ALL_PAIRS = list(product((1.0, 100.0, 1e4), (1e-4, 2.0, 20.0, 1000.0)))


@pytest.mark.parametrize(
    ("units", "dtype", "reaches_and_sizes"),
    [((1, 1), torch.float64, ALL_PAIRS), ((1, 1), torch.float32, ALL_PAIRS), ((40, 30), torch.float32, SOME_PAIRS)],
    ids=["one unit-float64", "one unit-float32", "many units"],
)
def test_log_ratios_of_large_numbers(units, dtype, reaches_and_sizes):
    def log_ratio(*tensors: Tensor) -> Tensor:
        return triton.log_ratio(*(t.to(DEVICE) for t in tensors), Logistic()).cpu()

    for reach, size in reaches_and_sizes:
        assert_log_ratios_of_large_numbers(log_ratio, units, reach, size, dtype)


@pytest.mark.parametrize("ratio", [False, True])
def test_results_have_the_memory_format_of_the_states(ratio):
    layer = Case((2, 3, 5, 4), (4, 3, 2, 2), ratio=ratio)
    whole, last = layer.actual(torch.float32), layer.actual(torch.float32, channels_last)
    assert whole.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, whole)
    assert layer.actual(torch.float32, strided).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ratio", [False, True])
def test_half_precision_is_computed_in_float32(ratio, dtype):
    layer = Case((2, 3, 5, 4), (7, 3, 2, 2), ratio=ratio)
    x, a, grad, weight = (t.to(DEVICE, dtype) for t in (layer.x, layer.a, layer.grad, layer.weight))
    # Without memory of its own: it has other strides in another dtype.
    grad = grad[:1, :1].expand_as(a)
    u = layer.function(triton)(x, a, grad, weight, Logistic(), layer.geometry)
    assert u.dtype == dtype
    wide = layer.function(triton)(*(t.float() for t in (x, a, grad, weight)), Logistic(), layer.geometry)
    assert torch.equal(u, wide.to(dtype))


@pytest.mark.parametrize("operator", ["flip_product", "log_ratio"])
@pytest.mark.parametrize(
    ("layer", "layout"),
    [(Case((3, 5), (4, 5)), torch.Tensor.contiguous), (Case((2, 3, 5, 4), (3, 3, 3, 2)), channels_last)],
    ids=["linear", "convolution"],
)
def test_operators_pass_opcheck(layer, layout, operator, monkeypatch):
    monkeypatch.setattr(flips, "choose", lambda *_, **__: flips.Choice("triton", None, {}, "as a test wants it"))
    tensors = [layout(t.to(DEVICE)) for t in (layer.x, layer.a, layer.grad.sign(), layer.weight)]
    arguments = (*tensors, "Logistic", 1.0, 0.0, flat(layer.geometry))
    torch.library.opcheck(getattr(torch.ops.flipgrad, operator).default, arguments)


def test_bad_input_is_refused():
    x, a, grad, weight = (torch.ones(2, 2, device=DEVICE) for _ in range(4))
    for noise in (Normal(), Laplace(), Uniform()):
        with pytest.raises(InputError, match=rf"{type(noise).__name__}.*Logistic"):
            triton.flip_product(x, a, grad, weight, noise)
    with pytest.raises(InputError, match=r"a is on meta.*GPU"):
        triton.flip_product(x, a.to("meta"), grad, weight, Logistic())
    with pytest.raises(InputError, match=r"x has dtype torch.int64"):
        triton.flip_product(x.long(), a, grad, weight, Logistic())
    with pytest.raises(InputError, match=r"weight has dtype torch.float64, but x has torch.float32"):
        triton.flip_product(x, a, grad, weight.double(), Logistic())
    with pytest.raises(InputError, match=r"grad has shape \(2, 3\).*\(2, 2\)"):
        triton.flip_product(x, a, torch.ones(2, 3, device=DEVICE), weight, Logistic())
    with pytest.raises(InputError, match=r"states has shape \(2, 3\).*\(2, 2\)"):
        triton.log_ratio(x, a, torch.ones(2, 3, device=DEVICE), weight, Logistic())
    with pytest.raises(InputError, match=r"Normal.*Logistic"):
        triton.log_ratio(x, a, grad, weight, Normal())
    shapes = (1, 2, 4, 4), (1, 4, 3, 4), (1, 4, 4, 4), (4, 2, 1, 1)
    with pytest.raises(InputError, match=r"a has shape \(1, 4, 3, 4\).*\(1, 4, 4, 4\)"):
        triton.flip_product(*(torch.ones(shape, device=DEVICE) for shape in shapes), Logistic(), Geometry())


def test_tensors_on_the_processor_have_another_kernel():
    assert triton.available()
    for places in (1, 10**6):
        for tolerance in (0.0, 1e-3):
            choice = flips.choose(torch.ones(8, 8), Logistic(), places, tolerance)
            assert "triton" not in choice.seconds


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_flips_on_a_gpu_use_the_kernel():
    layer = Case((3, 5), (4, 5))
    x, a, grad, weight = (t.to(DEVICE) for t in (layer.x, layer.a, layer.grad, layer.weight))
    assert flips.choose(weight, Logistic(), 3, 0.0).kernel == "triton"
    u = flips.flip_product(x, a, grad, weight, Logistic())
    assert torch.equal(u, triton.flip_product(x, a, grad, weight, Logistic()))
