"""Layers whose inputs are flipped: shapes for property tests, random layers, and layers that float32 holds exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from flipgrad.flips import Geometry, naive, ordinary
from flipgrad.noise import Logistic, Noise
from random_tensors import normal


@st.composite
def convolutions(draw, batches, inputs, outputs, *, largest_kernel=4, most_units=None):
    """Shapes of the input and the weight of a convolution, channels per group, and its geometry."""

    def two(low, high):
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    batch, groups, inputs, outputs = draw(batches), draw(st.integers(1, 3)), draw(inputs), draw(outputs)
    kernel, stride, padding, dilation, more = two(1, largest_kernel), two(1, 3), two(0, 2), two(1, 2), two(0, 3)
    size = [max(1, d * (k - 1) + 1 - 2 * p) + m for d, k, p, m in zip(dilation, kernel, padding, more, strict=True)]
    if most_units and groups * inputs * size[0] * size[1] > most_units:
        inputs, groups = max(1, min(inputs, most_units // (size[0] * size[1]))), 1
    shapes = (batch, groups * inputs, *size), (groups * outputs, inputs, *kernel)
    return *shapes, Geometry(stride, padding, dilation, groups)


small_convolutions = convolutions(st.integers(0, 3), st.sampled_from([1, 2, 3, 7]), st.sampled_from([1, 2, 5]))


def pre_activations(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry | None) -> Tensor:
    """Without a geometry, those of a fully connected layer."""
    return functional.conv2d(x, weight, bias, *geometry) if geometry else functional.linear(x, weight, bias)


@dataclass
class Layer:
    """A layer's arguments, in float32 or float64; without a geometry, of a fully connected one."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    noise: Noise
    geometry: Geometry | None = None
    seed: int = 0

    @property
    def a(self) -> Tensor:
        """The pre-activations, rounded once."""
        a = pre_activations(self.x.double(), self.weight.double(), self.bias.double(), self.geometry)
        return a.to(self.x.dtype)

    @property
    def grad(self) -> Tensor:
        return normal(*self.a.shape, seed=self.seed + 1).to(self.x.dtype)

    def expected(self) -> Tensor:
        return naive.flip_product(self.x, self.weight, self.bias, self.grad, self.noise, self.geometry)


PRECISION = {torch.float32: 1e-5, torch.float64: 1e-12}
# Of log ratios: absolute, or relative to the size of what is summed where that is above 1.
RATIO_PRECISION = {torch.float32: 5e-6, torch.float64: 1e-12}
SIZES = [1e-4, 1e-2, 0.3, 2.0, 20.0]

grid_options = {
    "size": st.sampled_from(SIZES),
    "seed": st.integers(0, 1000),
    "scale": st.sampled_from([1.0, 0.7, 5.0]),
    "zeros": st.booleans(),
    "ratio": st.booleans(),
}
channels = st.sampled_from([1, 3, 7, 20, 33])


@dataclass
class GridLayer:
    """A layer whose numbers lie on so coarse a grid that float32 pre-activations are exact; its flip product or log ratio.

    A subclass says how a kernel computes these.
    """

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    size: float = 0.3
    seed: int = 0
    scale: float = 1.0
    zeros: bool = False
    ratio: bool = False
    geometry: Geometry | None = None

    def __post_init__(self) -> None:
        step = 2.0 ** math.ceil(math.log2(self.size) - 9)
        self.x = normal(*self.shape, seed=self.seed).sign()
        if self.zeros:
            self.x[normal(*self.shape, seed=self.seed + 1) > 1] = 0
        self.weight = on_grid(self.size * normal(*self.weight_shape, seed=self.seed + 2).clamp(-1, 1), step)
        self.bias = on_grid((1e3 * step * normal(self.weight_shape[0], seed=self.seed + 3)).clamp(-100, 100), step)
        if len(self.shape) == 4:
            self.geometry = self.geometry or Geometry()
        self.a = pre_activations(self.x, self.weight, self.bias, self.geometry)
        assert torch.equal(self.a.float().double(), self.a)
        # Exact in float32 too.
        self.grad = normal(*self.a.shape, seed=self.seed + 4).float().double()
        if self.ratio:
            # Likely output states, unlikely ones, and some that are none.
            self.grad = (4 * self.grad + self.a / self.scale).sign() * (self.grad > -2)

    def function(self, module: ModuleType):
        return module.log_ratio if self.ratio else module.flip_product

    @cached_property
    def expected(self) -> Tensor:
        return self.function(naive)(self.x, self.weight, self.bias, self.grad, Logistic(self.scale), self.geometry)

    def actual(self, dtype: torch.dtype, layout=lambda t: t) -> Tensor:
        raise NotImplementedError

    def assert_right(self, *dtypes: torch.dtype, layout=lambda t: t) -> None:
        expected = self.expected
        for dtype in dtypes:
            actual = self.actual(dtype, layout).cpu()
            assert actual.dtype == dtype
            assert actual.shape == expected.shape
            assert not actual[self.x == 0].any()
            if self.ratio:
                allowed = RATIO_PRECISION[dtype] * max(1.0, *expected.abs().flatten().tolist(), 0.0)
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=allowed)
                continue
            # The reference takes differences of probabilities near 1, and rounds these.
            allowed = PRECISION[dtype] * expected.norm() + 1e-15 * self.grad.abs().sum()
            allowed = allowed + rounding_of_terms(self.grad, self.weight, self.x, Logistic(self.scale), self.geometry, dtype)
            assert float((actual.double() - expected).norm()) <= float(allowed)


def rounding_of_terms(
    grad: Tensor, weight: Tensor, x: Tensor, noise: Noise, geometry: Geometry | None, dtype: torch.dtype
) -> Tensor:
    """The norm of the rounding of a flip product's terms, each of which may be large beside their sum.

    A term's change of a probability is at most 1, and at most 2 |w| times the peak of the density.
    """
    changes = (2 * noise.pdf(torch.zeros((), dtype=torch.float64)) * weight.double().abs()).clamp(max=1)
    terms = ordinary.input_gradient(grad.double().abs(), changes, x.double(), geometry)
    return 4 * torch.finfo(dtype).eps * terms.norm()


def on_grid(t: Tensor, step: float) -> Tensor:
    return (t / step).round() * step


def precise_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """The fully connected product in float64, with F(a) - F(b) = -F(a) F(-b) expm1(b - a), which does not cancel."""
    step = 2 * weight[None] * x[:, None]
    a = a[:, :, None]
    change = -torch.sigmoid(a) * torch.sigmoid(step - a) * torch.expm1(-step)
    return x * (change * grad[:, :, None]).sum(1)


def far_layer(reach: float, size: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """States, pre-activations up to ``reach``, gradients, and weights of ``size``, of a fully connected layer."""
    x, weight = normal(9, 20).sign(), (size * normal(33, 20, seed=1)).clamp(-20, 20)
    a = reach * (2 * torch.rand(9, 33, dtype=torch.float64) - 1)
    return tuple(t.to(dtype) for t in (x, a, normal(9, 33, seed=3), weight))


def assert_log_ratios_of_large_numbers(log_ratio, units: tuple[int, int], reach: float, size: float, dtype: torch.dtype):
    """Of a fully connected layer with ``units`` inputs and outputs, pre-activations up to ``reach`` and weights of ``size``."""
    x, weight = normal(9, units[0]).sign().to(dtype), (size * normal(units[1], units[0], seed=1).clamp(-1, 1)).to(dtype)
    a = (reach * normal(9, units[1], seed=2)).to(dtype)
    # The last examples' states are mostly unlikely.
    states = (a + 3 * normal(9, units[1], seed=3)).sign().to(dtype)
    states[5:] *= -1
    x64, a64, states64, weight64 = (t.double() for t in (x, a, states, weight))
    before, after = states64 * a64, states64[:, :, None] * (a64[:, :, None] - 2 * weight64[None] * x64[:, None])
    terms = functional.logsigmoid(after) - functional.logsigmoid(before)[:, :, None]
    # The last part is the rounding of the reference, which takes differences of logarithms as large as a.
    allowed = RATIO_PRECISION[dtype] * terms.abs().sum(1).clamp(min=1) + 1e-15 * reach * units[1]
    assert bool(((log_ratio(x, a, states, weight) - terms.sum(1)).abs() <= allowed).all()), size
