"""The separable flip product: against the definition within its tolerance, and its form's promises."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from flip_layers import Layer, small_convolutions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.flips import Geometry, choose, ordinary, separable, vectorized
from flipgrad.flips.form import MAX_RANK, PER_OCTAVE, Form, find_form, fit_basis, terms
from flipgrad.native import library
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform
from random_tensors import layouts, normal, states, strided, uniform


@dataclass(frozen=True)
class Cauchy(Noise):
    """A noise that a user might add, with nothing but its cdf and density."""

    def _cdf(self, t: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(t), -t) / torch.pi

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        assert order == 0
        return 1 / (torch.pi * (1 + t * t))

    def _log_cdf(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    _icdf = _mean_sign = _log_cdf

    def _variance(self) -> float:
        raise NotImplementedError


# One of each kind: the scale is the unit of all, see below.
SMOOTH = [Logistic(2.5), Normal(0.7), Cauchy(0.5)]
NOISES = [*SMOOTH, Laplace(0.8), Uniform(2.0)]
TOLERANCES = [1e-1, 1e-2, 1e-3, 1e-4]

# In one process: they share the fits.
pytestmark = pytest.mark.xdist_group("separable")

every_noise = pytest.mark.parametrize("noise", NOISES, ids=repr)
smooth_noise = pytest.mark.parametrize("noise", SMOOTH, ids=repr)


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """A few weights ten times as large as the rest."""
    return normal(*shape, seed=seed) * torch.where(uniform(*shape, seed=seed + 1) > 0.98, 10.0, 1.0)


def to_tolerance(x, a, grad, weight, noise, tolerance, geometry=None) -> Tensor:
    """The separable flip product, of a form that is within the tolerance."""
    form = find_form(weight, noise, tolerance)
    assert form.reachable
    return separable.flip_product(x, a, grad, weight, noise, form, geometry)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.norm())


class SeparableLayer(Layer):
    """Computed to a tolerance."""

    def size(self, form: Form) -> float:
        """The norm of the product with terms of their usual size and random signs.

        Small layers' own norm can be anything, by cancellation and with units in the tails.
        """
        step = 2 * self.weight.double().flatten(1) / self.noise.scale
        t = torch.linspace(0, 4 + 2 * form.limit / self.noise.scale, 200, dtype=torch.float64)
        E, O = terms(self.noise, t, step.flatten())  # noqa: E741
        per_output = (E.square() + O.square()).mean(0).view_as(step).sum(1)
        grad = self.grad.double().square().transpose(0, 1).flatten(1).sum(1)
        return float((per_output * grad).sum().sqrt())

    def assert_right(self, tolerance: float, layout) -> None:
        x, a, grad, weight = (layout(t) for t in (self.x, self.a, self.grad, self.weight))
        form = find_form(weight, self.noise, tolerance)
        if not form.reachable:
            return
        actual = to_tolerance(x, a, grad, weight, self.noise, tolerance, self.geometry)
        assert actual.shape == x.shape
        assert actual.dtype == x.dtype
        expected = self.expected()
        # A small layer is not an average over pre-activations: a single unit can be where the error is largest. Measured, that
        # is up to 17 times the average, and up to 69 times next to a kink or jump of the density.
        factor = 80 if isinstance(self.noise, Laplace | Uniform) else 20
        allowed = factor * tolerance * self.size(form) + 1e-15 * self.grad.double().abs().sum()
        assert float((actual.double() - expected).norm()) <= float(allowed)


def layer(shape, weight, noise, *, scale=1.0, bias=1.0, dtype=torch.float64, seed=0, **rest) -> SeparableLayer:
    """A fully connected layer, or a convolution by the number of dimensions; the rest is its geometry."""
    w = scale * normal(*weight, seed=seed + 2)
    b = bias * normal(weight[0], seed=seed + 3).clamp(-2, 2)
    geometry = Geometry(**rest) if len(shape) == 4 else None
    return SeparableLayer(states(*shape, seed=seed).to(dtype), w.to(dtype), b.to(dtype), noise, geometry, seed)


common = {
    "noise": st.sampled_from(NOISES),
    "scale": st.sampled_from([1e-4, 1e-2, 0.1, 0.3, 1.0, 2.0]),
    "bias": st.sampled_from([1.0, 50.0]),
    "dtype": st.sampled_from([torch.float64, torch.float32]),
    "seed": st.integers(0, 1000),
}


@st.composite
def linear_layers(draw) -> SeparableLayer:
    batch, inputs, outputs = draw(st.integers(0, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return layer((batch, inputs), (outputs, inputs), **{name: draw(value) for name, value in common.items()})


@st.composite
def conv_layers(draw) -> SeparableLayer:
    shape, weight, geometry = draw(small_convolutions)
    return layer(shape, weight, **geometry._asdict(), **{name: draw(value) for name, value in common.items()})


tolerances = st.sampled_from(TOLERANCES)


@pytest.mark.parametrize("layers", [linear_layers(), conv_layers()], ids=["linear", "convolution"])
@settings(max_examples=3 * settings().max_examples)
@given(st.data(), tolerances, layouts)
def test_flip_product_is_naive_within_the_tolerance(layers, data, tolerance, layout):
    data.draw(layers).assert_right(tolerance, layout)


@pytest.mark.parametrize("batch", [0, 3])
def test_weights_in_the_largest_bin_are_within_reach(batch):
    # 7.5 scales: the largest bin goes from 6.7 to 8.
    alone = layer((batch, 1), (1, 1), Cauchy(0.5), dtype=torch.float32)
    alone.weight = torch.tensor([[-3.7488]])
    form = find_form(alone.weight, alone.noise, 0.1)
    assert form.reachable
    assert 0.01 < form.estimated_error < 0.05
    alone.assert_right(0.1, torch.Tensor.contiguous)


def test_a_single_unit_may_be_where_the_error_is_largest():
    alone = layer((1, 1), (1, 1), Cauchy(0.5), seed=228)
    alone.x, alone.weight, alone.bias = (torch.tensor(t).double() for t in ([[1.0]], [[-0.5978]], [-1.1106]))
    alone.assert_right(1e-2, torch.Tensor.contiguous)


def test_reach_ends_at_the_largest_bin():
    noise = Normal(0.5)
    x, a, grad, weight = random_layer(noise, uniform, 0.1, 1.0, torch.float32)
    below, above = weight.clone(), weight.clone()
    below[3, 4], above[3, 4] = -3.999, 4.001
    form = find_form(below, noise, 0.3)
    assert form.reachable
    expected = vectorized.flip_product(x.double(), a.double(), grad.double(), below.double(), noise)
    assert error(separable.flip_product(x, a, grad, below, noise, form), expected) <= form.estimated_error
    form = find_form(above, noise, 0.3)
    assert (form.reachable, form.estimated_error, form.limit) == (False, float("inf"), 4.0)
    reason = choose(above, noise, 10**6, 0.3).reason
    assert "for weights above 4 and Normal" in reason


def random_layer(noise: Noise, weights, size: float, spread: float, dtype) -> tuple[Tensor, ...]:
    """Wide enough that the error is an average: states, pre-activations, gradients, weights."""
    weight = (size * weights(300, 100, seed=1)).to(dtype)
    x = states(20, 100, seed=2).to(dtype)
    a = (x.double() @ weight.double().t() + spread * noise.scale * normal(20, 300, seed=3)).to(dtype)
    return x, a, normal(20, 300, seed=4).to(dtype), weight


SPREADS = [0.7, 3.0, 50.0]
WEIGHTS = [normal, uniform, heavy_tailed]


# One noise with all weights and spreads, and each noise with all weights and with all spreads.
@pytest.mark.parametrize(
    ("noise", "weights", "spread"),
    [(SMOOTH[0], weights, spread) for weights in WEIGHTS for spread in SPREADS]
    + [(noise, *pair) for noise in NOISES[1:] for pair in zip(WEIGHTS, SPREADS, strict=True)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_estimate_is_honest(noise, weights, spread):
    for size in (1e-4, 1e-2, 0.05, 0.2, 0.6):
        x, a, grad, weight = random_layer(noise, weights, size, spread, torch.float32)
        expected = vectorized.flip_product(x.double(), a.double(), grad.double(), weight.double(), noise)
        for tolerance in TOLERANCES:
            form = find_form(weight, noise, tolerance)
            measured = error(separable.flip_product(x, a, grad, weight, noise, form), expected)
            if not form.reachable:
                continue
            assert measured <= tolerance
            # With a kink or jump the error is that of the few units next to it: no average.
            if noise in SMOOTH:
                assert measured <= form.estimated_error + 1e-6
            # Not a wild overestimate either, where it is no matter of rounding, or of narrow pre-activations.
            if noise in SMOOTH and spread > 1 and form.estimated_error > 1e-5:
                assert form.estimated_error <= 4 * measured


@every_noise
def test_ranks_fall_with_the_tolerance(noise):
    for size in (1e-3, 0.03, 0.3):
        weight = size * normal(2000)
        forms = [find_form(weight, noise, tolerance) for tolerance in (0.3, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)]
        assert [p.rank for p in forms] == sorted(p.rank for p in forms)
        assert [p.reachable for p in forms] == sorted((p.reachable for p in forms), reverse=True)
        assert all(p.reachable == (p.estimated_error <= p.tolerance) for p in forms)
        assert forms[0].reachable
        assert max(len(p.difference) for p in forms) <= MAX_RANK


@smooth_noise
def test_ranks_grow_with_the_weights(noise):
    ranks = [find_form(size * normal(2000), noise, 1e-3) for size in (1e-4, 5e-3, 0.1, 0.3, 2.0)]
    assert [p.rank for p in ranks] == sorted(p.rank for p in ranks)
    assert (len(ranks[0].difference), len(ranks[1].difference), ranks[-1].reachable) == (1, 1, False)


def test_few_large_weights_count_for_little():
    weight = 0.01 * normal(100_000)
    outlier = weight.clone()
    outlier[0] = 0.5
    all_large = find_form(0.5 * uniform(100_000), Logistic())
    form = find_form(outlier, Logistic())
    assert form.limit >= 0.5
    assert form.rank < all_large.rank


@pytest.mark.parametrize(("largest", "ranks"), [(0.1, (2e-4, 4e-8)), (0.5, (4.8e-3, 2.2e-5)), (1.0, (1.8e-2, 3.2e-4))])
def test_the_difference_is_as_accurate_as_the_best_of_its_rank(largest, ranks):
    # The largest error of the best fit of rank 1 and 2 on the whole range, relative to the largest value.
    t, steps = torch.linspace(0, 8, 400, dtype=torch.float64), torch.linspace(0, largest, 100, dtype=torch.float64)[1:]
    E = terms(Logistic(), t, steps)[0]
    for rank, best in enumerate(ranks, 1):
        top = int(torch.log2(torch.tensor(largest / 2 * 0.9999)).mul(PER_OCTAVE).floor())
        basis = fit_basis(Logistic(), top, 1, 0.0, rank)
        features = torch.stack(Logistic().flip_parts(t, torch.ones_like(t), basis.steps, ())[0], 1)
        centred = 2 * (steps / basis.reach) ** 2 - 1
        functions = torch.stack(
            [sum(c * centred**k for k, c in enumerate(row)) * steps for row in basis.difference.coefficients]
        )
        assert float((features @ functions - E).abs().max() / E.max()) < 2.5 * best


@every_noise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tiny_weights_give_straight_through(noise, dtype):
    x, a, grad = states(4, 50).to(dtype), (normal(4, 70, seed=1) * noise.scale).to(dtype), normal(4, 70, seed=2).to(dtype)
    for size in (1e-4, 1e-6, 1e-9):
        weight = (size * noise.scale * uniform(70, 50, seed=3)).to(dtype)
        form = find_form(weight, noise, 1e-2)
        actual = separable.flip_product(x, a, grad, weight, noise, form)
        expected = (2 * noise.pdf(a.double()) * grad) @ weight.double()
        assert (len(form.difference), len(form.curvature)) == (1, 0)
        assert error(actual, expected) < 1e-3
        # A single tiny weight among larger ones has its relative precision too.
        weight[:, 0] *= 1e-5
        alone = separable.flip_product(x, a, grad, weight, noise, form)[:, 0]
        assert error(alone, expected[:, 0] * 1e-5) < 1e-3


@smooth_noise
def test_single_precision_has_its_digits_for_small_weights(noise):
    for size in (1e-4, 1e-3, 1e-2):
        x, a, grad, weight = random_layer(noise, uniform, size, 2.0, torch.float64)
        single = [t.float() for t in (x, a, grad, weight)]
        exact = vectorized.flip_product(*(t.double() for t in single), noise)
        assert error(to_tolerance(*single, noise, 1e-4), exact) < 1e-4


@every_noise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_single(noise, dtype):
    half = [t.to(dtype) for t in random_layer(noise, uniform, 0.02, 2.0, torch.float64)]
    actual = to_tolerance(*half, noise, 2e-2)
    assert actual.dtype == dtype
    assert torch.equal(actual, to_tolerance(*(t.float() for t in half), noise, 2e-2).to(dtype))


@every_noise
def test_far_pre_activations_have_their_signs_and_no_more(noise):
    for dtype in (torch.float32, torch.float64):
        a = torch.tensor([[100.0, -100.0, 1e4, -1e4]], dtype=dtype)
        u = to_tolerance(torch.ones(1, 3, dtype=dtype), a, torch.ones_like(a), torch.full((4, 3), 0.1, dtype=dtype), noise, 0.2)
        assert bool(u.isfinite().all())
        assert float(u.abs().max()) < (1e-4 if isinstance(noise, Cauchy) else 1e-15)


@pytest.mark.parametrize("noise", [Logistic(), Laplace()], ids=repr)
@pytest.mark.parametrize("side", [-1, 1])
def test_tails_keep_their_digits(noise, side):
    # Far out the term is proportional to the density, on both sides.
    a = side * torch.linspace(20, 40, 30, dtype=torch.float64)[None]
    x, grad, weight = states(1, 40), torch.ones_like(a), 0.02 * uniform(30, 40)
    expected = vectorized.flip_product(x, a, grad, weight, noise)
    for dtype in (torch.float32, torch.float64):
        actual = to_tolerance(*(t.to(dtype) for t in (x, a, grad, weight)), noise, 1e-3)
        assert error(actual, expected) < 1e-3


@every_noise
@pytest.mark.parametrize("size", [1e-3, 0.05], ids=["without O", "with O"])
def test_zeros_are_not_flipped(noise, size):
    inner = layer((2, 3, 4, 5), (4, 3, 3, 2), noise, scale=size)
    padded = functional.pad(inner.x, (1, 1, 2, 2))
    form = find_form(inner.weight, noise, 1e-1)
    geometry = Geometry(stride=(2, 1), padding=(2, 1))
    a = functional.conv2d(inner.x, inner.weight, None, *geometry)
    inside = separable.flip_product(inner.x, a, a, inner.weight, noise, form, geometry)
    u = separable.flip_product(padded, a, a, inner.weight, noise, form, Geometry(stride=(2, 1)))
    assert not u[padded == 0].any()
    torch.testing.assert_close(u[:, :, 2:-2, 1:-1], inside)
    row = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    flat = separable.flip_product(row, a.flatten(1)[:1, :4], a.flatten(1)[1:, :4], inner.weight[:, :, 0, 0], noise, form)
    assert flat[0, 1] == 0
    assert bool((flat[0, ::2] != 0).all())


def test_convolution_is_its_fully_connected_layer():
    shape = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
    for tolerance in (1e-2, 1e-4):
        conv = layer((3, 4, 5, 4), (6, 2, 3, 2), Logistic(), scale=0.2, **shape)
        form = find_form(conv.weight, conv.noise, tolerance)
        assert len(form.difference) > 1
        units = torch.eye(conv.x[0].numel(), dtype=torch.float64).view(-1, *conv.x.shape[1:])
        dense = functional.conv2d(units, conv.weight, **shape).flatten(1).t()
        expected = separable.flip_product(*(t.flatten(1) for t in (conv.x, conv.a, conv.grad)), dense, conv.noise, form)
        actual = separable.flip_product(conv.x, conv.a, conv.grad, conv.weight, conv.noise, form, conv.geometry)
        torch.testing.assert_close(actual.flatten(1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 200, 500])
def test_chunks_give_the_same(chunk, monkeypatch):
    shape = {"stride": (2, 1), "padding": (1, 2), "groups": 2}
    conv = layer((5, 4, 5, 4), (6, 2, 3, 2), Logistic(), scale=0.1, **shape)
    for memory in (torch.contiguous_format, torch.channels_last):
        x, a, grad = (t.contiguous(memory_format=memory) for t in (conv.x, conv.a, conv.grad))
        whole = to_tolerance(x, a, grad, conv.weight, conv.noise, 1e-3, conv.geometry)
        with monkeypatch.context() as patch:
            patch.setattr(ordinary, "ACTIVATIONS_AT_ONCE", chunk)
            parts = to_tolerance(x, a, grad, conv.weight, conv.noise, 1e-3, conv.geometry)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
        assert parts.stride() == whole.stride()


@pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")
@pytest.mark.parametrize("noise", [Logistic(2.0), Normal()], ids=repr)
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
@pytest.mark.parametrize("chunk", [10**6, 2000])
def test_fused_product_is_that_of_ordinary_ones(noise, layout, chunk, monkeypatch):
    tensors = [layout(t) for t in random_layer(noise, uniform, 0.3, 1.0, torch.float32)]
    tensors[0][:, 3] = 0
    for tolerance in (0.3, 1e-3):
        form = find_form(tensors[3], noise, tolerance)
        assert form.reachable
        found = []
        for pays in (True, False):
            monkeypatch.setattr(separable, "fused_product_pays", lambda *_, pays=pays: pays)
            monkeypatch.setattr(ordinary, "ACTIVATIONS_AT_ONCE", chunk)
            found.append(separable.flip_product(*tensors, noise, form))
        assert error(*found) < 1e-5
        assert not found[0][:, 3].any()


def test_fused_product_pays_by_size_and_processor(monkeypatch):
    class Library:
        def __init__(self, fast: int) -> None:
            self.flipgrad_has_fast_products = lambda: fast

    for fast, inputs, pays in ((1, 1000, True), (1, 10, False), (0, 1000, False)):
        monkeypatch.setattr(library, "_library", Library(fast))
        assert separable.fused_product_pays(torch.ones(100, inputs)) is pays
        assert not separable.fused_product_pays(torch.ones(1000, inputs))
    monkeypatch.setattr(library, "_library", None)
    assert not separable.fused_product_pays(torch.ones(100, 1000))


def test_nothing_is_fitted_twice():
    fit_basis.cache_clear()
    noise = Logistic(1.2345)
    weight = 0.05 * uniform(1000)
    first = find_form(weight, noise)
    fits = fit_basis.cache_info()
    assert fits.misses == fits.currsize > 0
    # A training step changes the weights, not their range's bin.
    second = find_form(weight * 0.999, Logistic(1.2345))
    assert fit_basis.cache_info().misses == fits.misses
    assert (first.steps, first.difference, first.curvature) == (second.steps, second.difference, second.curvature)
    find_form(weight * 4, noise)
    assert fit_basis.cache_info().misses > fits.misses


def test_form_of_unusual_weights():
    for weight in (torch.zeros(3, 4), torch.zeros(0, 4), torch.full((2, 2), 1e-30)):
        form = find_form(weight, Normal())
        assert form.reachable
        assert form.estimated_error < 1e-3
        u = separable.flip_product(torch.ones(2, 4), torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 4), Normal(), form)
        assert not u.any()
    for bad in (torch.inf, torch.nan, 1e6):
        assert not find_form(torch.tensor([[0.01, bad]]), Logistic(), 0.5).reachable


def test_scale_of_the_noise_is_the_unit_of_all():
    x, a, grad, weight = random_layer(Normal(), uniform, 0.05, 1.0, torch.float64)
    one = to_tolerance(x, a, grad, weight, Normal(), 1e-3)
    torch.testing.assert_close(to_tolerance(x, 3 * a, grad, 3 * weight, Normal(3.0), 1e-3), one, rtol=1e-6, atol=1e-9)


def test_tolerance_is_checked():
    for tolerance in (0.0, -1e-3, 1.0, float("nan")):
        with pytest.raises(InputError, match="a relative error between 0 and 1"):
            find_form(torch.ones(2, 2), Logistic(), tolerance)


@pytest.mark.parametrize("noise", [Logistic(), Normal(2.0), Laplace(3.0)], ids=repr)
def test_product_is_one_graph(noise):
    conv = layer((2, 4, 5, 4), (6, 2, 3, 2), noise, scale=0.1, dtype=torch.float32, groups=2, padding=(1, 1))
    form = find_form(conv.weight, noise, 1e-1)
    form = replace(form, tolerance=0.1)
    compiled = torch.compile(separable.flip_product, fullgraph=True, backend="eager")
    arguments = conv.x, conv.a, conv.grad, conv.weight, noise, form, conv.geometry
    assert torch.equal(compiled(*arguments), separable.flip_product(*arguments))
