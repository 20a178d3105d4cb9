"""The chooser: the cheapest kernel that is accurate enough, and its reasons."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flipgrad as fg
from flipgrad import flips
from flipgrad.flips import Geometry, choice, naive, separable, vectorized
from flipgrad.flips._arguments import flat
from flipgrad.flips.form import Form, find_form
from flipgrad.native import library
from random_tensors import channels_last

compiled = pytest.mark.skipif(not library.available(), reason=f"no compiled library: {library.reason()}")
WIDE = 192, 192, 3, 3


def weights(size: float = 1 / math.sqrt(9 * 192)) -> Tensor:
    return torch.randn(WIDE, generator=torch.Generator().manual_seed(0)) * size


@compiled
def test_small_layers_are_exact_and_large_ones_separable():
    small = choice.choose(torch.randn(5, 5), fg.Logistic(), 1000, 1e-3)
    assert (small.kernel, small.form) == ("native", None)
    large = choice.choose(weights(), fg.Logistic(), 64 * 121, 1e-3)
    assert large.kernel == "separable"
    assert (len(large.form.difference), len(large.form.curvature)) == (1, 1)
    assert "costs 2 ordinary products" in large.reason


@compiled
def test_exact_is_never_approximate():
    assert choice.choose(weights(), fg.Logistic(), 64 * 121, 0).kernel == "native"
    assert choice.choose(weights(), fg.Normal(), 64 * 121, 0).kernel == "vectorized"


@compiled
def test_large_weights_need_the_exact_kernel():
    found = choice.choose(weights(1.0), fg.Logistic(), 64 * 121, 1e-3)
    assert found.kernel == "native"
    assert "no separable form within 0.001" in found.reason or "costs more" in found.reason


def test_other_noise_is_separable_where_it_is_large():
    assert choice.choose(weights(), fg.Normal(), 64 * 121, 1e-3).kernel == "separable"
    assert choice.choose(torch.randn(5, 5), fg.Normal(), 10, 1e-3).kernel == "vectorized"


@compiled
def test_a_tighter_tolerance_never_lowers_the_rank():
    ranks = []
    for tolerance in (1e-2, 1e-3, 1e-4):
        form = find_form(weights(0.05), fg.Logistic(), tolerance)
        ranks.append(form.rank)
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_narrow_pre_activations_need_no_higher_rank():
    wide, narrow = (find_form(weights(1 / math.sqrt(864)), fg.Logistic(), 1e-3, activation_rms=s) for s in (3.0, 1.0))
    assert narrow.estimated_error <= 1e-3
    assert narrow.rank <= wide.rank


@pytest.mark.parametrize("size", [1 / math.sqrt(864), 1 / math.sqrt(1728), 0.1, 0.3])
def test_the_chosen_kernel_keeps_the_tolerance(size):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 96, 3, 3, generator=generator) * size
    x = torch.randint(0, 2, (4, 96, 12, 12), generator=generator) * 2.0 - 1
    a = torch.nn.functional.conv2d(x, weight)
    grad = torch.randn(a.shape, generator=generator)
    expected = vectorized.flip_product(*(t.double() for t in (x, a, grad, weight)), fg.Logistic(), Geometry())
    for tolerance in (1e-2, 1e-3, 0.0):
        u = flips.flip_product(x, a, grad, weight, fg.Logistic(), Geometry(), tolerance=tolerance)
        error = ((u - expected).norm() / expected.norm()).item()
        assert error <= max(tolerance, 1e-5)


def test_explain_tells_the_kernel_the_reason_and_the_times():
    layer = fg.BinaryConv2d(96, 96, 3)
    text = flips.explain(layer, places=64 * 28 * 28)
    assert text.startswith("separable: the separable form of rank 1 + 1 has an error of")
    assert "ms" in text
    assert "exact was asked for" in flips.explain(layer, tolerance=0)
    assert "this is Normal(scale=1.0)" in flips.explain(fg.BinaryLinear(3, 3, noise=fg.Normal()), places=5)


def test_a_missing_library_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_reason", "there was no compiler")
    choice._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "flipgrad"):
        for _ in range(3):
            found = choice.choose(torch.randn(5, 5), fg.Logistic(), 10, 1e-3)
    choice._warn_once.cache_clear()
    assert found.kernel == "vectorized"
    assert "there was no compiler" in found.reason
    assert [record.message for record in caplog.records] == [
        "flips are computed without compiled kernels, and slower: there was no compiler"
    ]


@pytest.mark.parametrize("tolerance", [-1e-3, 1.0, math.nan])
def test_impossible_tolerances_are_refused(tolerance):
    with pytest.raises(fg.InputError, match="tolerance"):
        choice.choose(torch.randn(5, 5), fg.Logistic(), 10, tolerance)
    with pytest.raises(fg.InputError, match="tolerance"):
        choice.choose_without_kernel(torch.randn(5, 5), fg.Logistic(), 10, tolerance, enough=bool, a=torch.randn(10, 5))
    with pytest.raises(fg.InputError, match=r"PSA\(tolerance=.*exact=True"):
        fg.PSA(tolerance=tolerance)


PADDED = Geometry(padding=(1, 1))


def arguments(dtype=torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 2, (3, 4, 7, 6), generator=generator).to(dtype) * 2 - 1
    weight = torch.randn(5, 4, 3, 2, generator=generator, dtype=dtype)
    a = torch.nn.functional.conv2d(x, weight, padding=1)
    return x, a, torch.randn(a.shape, generator=generator, dtype=dtype), weight


def connected() -> tuple[Tensor, ...]:
    return torch.ones(3, 4), torch.randn(3, 5), torch.randn(3, 5), torch.randn(5, 4)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_operators_pass_opcheck(tolerance):
    operator = torch.ops.flipgrad.flip_product.default
    torch.library.opcheck(operator, (*arguments(), "Logistic", 1.0, tolerance, flat(PADDED)))
    torch.library.opcheck(operator, (*arguments(), "Normal", 1.5, tolerance, flat(PADDED)))
    torch.library.opcheck(operator, (*connected(), "Laplace", 1.0, tolerance, flat(None)))


@pytest.mark.parametrize(
    ("tensors", "noise", "tolerance", "geometry"),
    [(arguments(), "Normal", 1e-2, PADDED), (connected(), "Logistic", 1e-3, None)],
    ids=["convolution", "linear"],
)
def test_the_operator_passes_opcheck_where_it_is_separable(tensors, noise, tolerance, geometry, monkeypatch):
    for exact in ("native", "vectorized"):
        monkeypatch.setitem(choice.CALL, exact, 1.0)
    x, a, grad, weight = tensors
    small = weight * 0.02
    assert choice.choose(small, getattr(fg, noise)(), len(a), tolerance).kernel == "separable"
    torch.library.opcheck(torch.ops.flipgrad.flip_product.default, (x, a, grad, small, noise, 1.0, tolerance, flat(geometry)))


def test_operators_refuse_unknown_noise():
    with pytest.raises(fg.InputError, match="the operator knows Laplace, Logistic"):
        torch.ops.flipgrad.flip_product(*connected(), "Cauchy", 1.0, 0.0, [])


class Steeper(fg.Logistic.__mro__[1]):
    """A noise of the user's own: logistic with half the scale."""

    def _cdf(self, t):
        return torch.sigmoid(2 * t)

    def _log_cdf(self, t):
        return torch.nn.functional.logsigmoid(2 * t)

    def _pdf(self, t, order):
        f = torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)
        return 2 * f

    def _icdf(self, u):
        return torch.logit(u) / 2

    def _mean_sign(self, t):
        return torch.tanh(t)

    def _variance(self):
        return math.pi**2 / 12


def test_noise_of_the_users_own_works():
    x, a, grad, weight = arguments(torch.float64)
    expected = flips.flip_product(x, a, grad, weight, fg.Logistic(0.5), PADDED)
    assert torch.allclose(flips.flip_product(x, a, grad, weight, Steeper(), PADDED), expected)
    units, pre = x[:, :, 0, 0], x[:, :, 0, 0] @ weight[:, :, 0, 0].t()
    expected = naive.flip_product(units, weight[:, :, 0, 0], None, grad[:, :, 0, 0], fg.Logistic(0.5))
    assert torch.allclose(flips.flip_product(units, pre, grad[:, :, 0, 0], weight[:, :, 0, 0], Steeper()), expected)
    states = torch.tensor([1.0, -1.0])
    a = torch.tensor([0.3, -2.0])
    assert torch.allclose(Steeper().score(states, a), fg.Logistic(0.5).score(states, a))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, a, grad, weight = arguments()
    halves = [t.to(dtype) for t in (x, a, grad, weight)]
    exact = flips.flip_product(*(t.float() for t in halves), fg.Logistic(), PADDED)
    u = flips.flip_product(*halves, fg.Logistic(), PADDED)
    assert u.dtype == dtype
    assert torch.equal(u, exact.to(dtype))
    mixed = flips.flip_product(halves[0], halves[1], halves[2], weight, fg.Logistic(), PADDED)
    assert mixed.dtype == dtype


@compiled
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("steps", "nodes"), [((0.1, 0.7, 2.0), (0, 2)), ((0.7,), (0,)), ((0.7,), ())])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 3, 5), (0, 4), (1, 1, 1, 1)])
def test_compiled_features_are_those_of_torch(shape, steps, nodes, portable, monkeypatch):
    monkeypatch.setattr(library, "PORTABLE", portable)
    generator = torch.Generator().manual_seed(0)
    a, grad = torch.randn(shape, generator=generator) * 30, torch.randn(shape, generator=generator)
    form = Form(0.1, 0.0, 1.0, steps, difference=(), curvature=(), curvature_nodes=nodes)
    differences, curvatures = separable.flip_functions(a, grad, fg.Logistic(1.5), form, groups=1)
    expected = fg.Logistic(1.5).flip_parts(a.double(), grad.double(), steps, nodes)
    for actual, wanted in zip((differences, curvatures), expected, strict=True):
        assert torch.allclose(actual.double(), torch.cat([actual[:, :0].double(), *wanted], 1), rtol=1e-5, atol=1e-30)
    for order in (torch.Tensor.contiguous, channels_last):
        # Places are examples where channels are last; the numbers are the same.
        if a.dim() == 4:
            again = separable.flip_functions(order(a), order(grad), fg.Logistic(1.5), form, groups=1)
            assert all(found.equal(before) for found, before in zip(again, (differences, curvatures), strict=True))
        parts = [order(t) for t in (a, grad)] if a.dim() == 4 else [a, grad]
        led = replace(form, leads=tuple(0.3 * r for r in range(1, len(steps))))
        first, rest, curved = separable.led_functions(*parts, fg.Logistic(1.5), led)
        others = [other - lead * expected[0][0] for other, lead in zip(expected[0][1:], led.leads, strict=True)]
        size = expected[0][0].abs().amax() if a.numel() else 0
        assert torch.allclose(first.double(), expected[0][0], rtol=1e-5, atol=1e-30)
        assert torch.allclose(
            rest.double(), torch.cat([first[:, :0].double(), *others], 1), rtol=1e-5, atol=1e-6 * size + 1e-30
        )
        assert curved.equal(curvatures)


@compiled
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 3, 3), (1, 1)])
def test_compiled_weight_functions_are_those_of_torch(shape, portable, monkeypatch):
    monkeypatch.setattr(library, "PORTABLE", portable)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    difference, curvature = ((0.5, 0.1), (1.0,)), ((0.3, -0.2, 0.1),)
    form = Form(0.1, 0.0, 2.0, (1.0, 2.0), difference, curvature, curvature_nodes=(0,))
    square = weight * weight
    expected = [
        torch.cat([separable.polynomial(c, leading, square, 2.0) for c in some])
        for leading, some in ((weight, difference), (square, curvature))
    ]
    for actual, wanted in zip(separable.weight_functions(weight, form, groups=1), expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-5, atol=1e-7)


@compiled
def test_exact_terms_of_convolutions_cost_less_with_avx512(monkeypatch):
    large = torch.randn(200, 200)
    seconds = []
    for wide in (False, True):
        monkeypatch.setattr(choice.library, "has_avx512", lambda wide=wide: wide)
        found = [choice.choose(weight, fg.Logistic(), 64 * 121, 0) for weight in (weights(), weights(1.0), large)]
        seconds.append([each.seconds["native"] for each in found])
    narrow, wide = seconds
    assert narrow[0] > 1.5 * wide[0]
    assert narrow[1] > 1.2 * wide[1]
    # Fully connected layers have hardly a gain; their large weights cost most themselves.
    assert narrow[2] == wide[2]


@compiled
def test_large_weights_of_fully_connected_layers_are_looked_at():
    # 64 examples: by their terms alone that would not be worth a look.
    small, large = (choice.choose(torch.randn(200, 200) * size, fg.Logistic(), 64, 1e-3) for size in (0.05, 1.0))
    assert large.seconds["native"] > 2 * small.seconds["native"]
