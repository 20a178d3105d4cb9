"""The noises against scipy.stats, their derivatives against autograd, their draws against their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator, Tensor

from flipgrad.affine import Signal
from flipgrad.errors import InputError
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform, noise_by_name, sign

SCIPY = {
    Logistic: lambda s: stats.logistic(scale=s),
    Normal: lambda s: stats.norm(scale=s),
    Laplace: lambda s: stats.laplace(scale=s),
    Uniform: lambda s: stats.uniform(loc=-s, scale=2 * s),
}
KINDS = list(SCIPY)
NOISES = [kind(scale) for kind in KINDS for scale in (0.5, 1.0, 2.0)]
DTYPES = [torch.float32, torch.float64]

every_noise = pytest.mark.parametrize("noise", NOISES, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def truth(noise: Noise):
    return SCIPY[type(noise)](noise.scale)


def points(noise: Noise, low: float = -30, high: float = 30, dtype: torch.dtype = torch.float64) -> Tensor:
    """Pre-activations, but for the kinks at 0 and at ±scale."""
    a = torch.linspace(low, high, 1201, dtype=torch.float64)
    kinks = torch.tensor([0, -noise.scale, noise.scale], dtype=torch.float64)
    return a[((a[:, None] - kinks).abs() > 1e-4).all(1)].to(dtype)


def assert_is(actual: Tensor, expected: np.ndarray | Tensor, rtol: float = 1e-10, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=rtol, atol=atol)


@every_noise
def test_cdf_and_pdf_are_scipys(noise):
    a = points(noise)
    # As good as no absolute tolerance: the lower tail is right in every digit.
    assert_is(noise.cdf(a), truth(noise).cdf(a), atol=1e-300)
    assert_is(noise.pdf(a), truth(noise).pdf(a), atol=1e-300)


@every_noise
def test_log_probabilities_of_both_states_are_scipys(noise):
    inside = noise.scale if isinstance(noise, Uniform) else 30
    a = points(noise, -0.99 * inside, 0.99 * inside)
    one = torch.ones_like(a)
    assert_is(noise.log_cdf(a), truth(noise).logcdf(a))
    assert_is(noise.log_prob(one, a), truth(noise).logcdf(a))
    assert_is(noise.log_prob(-one, a), truth(noise).logsf(a))
    assert_is(noise.log_prob(one, a).exp() + noise.log_prob(-one, a).exp(), one)


@every_noise
def test_icdf_is_scipys_and_inverts_the_cdf(noise):
    tail = torch.logspace(-12, -1, 100, dtype=torch.float64)
    u = torch.cat([tail, torch.linspace(0.1, 0.9, 101, dtype=torch.float64), 1 - tail])
    assert_is(noise.icdf(u), truth(noise).ppf(u), atol=1e-12)
    assert_is(noise.cdf(noise.icdf(u)), u)


@every_noise
def test_variance_and_median_are_scipys(noise):
    assert noise.variance == pytest.approx(truth(noise).var(), rel=1e-12)
    assert noise.median == truth(noise).median() == 0


@every_noise
def test_mean_sign_is_the_mean_and_is_precise_near_zero(noise):
    a = points(noise)
    assert_is(noise.mean_sign(a), 2 * noise.cdf(a) - 1)
    small = torch.tensor([1e-12, -1e-12], dtype=torch.float64)
    assert_is(noise.mean_sign(small), 2 * noise.pdf(torch.zeros_like(small)) * small, atol=0)


@every_noise
def test_cdf_is_symmetric(noise):
    a = points(noise)
    assert_is(noise.cdf(-a), 1 - noise.cdf(a))


@every_noise
def test_derivative_of_cdf_is_pdf(noise):
    a = torch.cat([points(noise), torch.zeros(1, dtype=torch.float64)]).requires_grad_()
    for function, slope in ((noise.cdf, noise.pdf(a)), (noise.mean_sign, 2 * noise.pdf(a))):
        (gradient,) = torch.autograd.grad(function(a).sum(), a)
        assert_is(gradient, slope.detach())


@every_noise
@pytest.mark.parametrize("order", [1, 2, 3])
def test_pdf_derivative_is_the_derivative(noise, order):
    a = points(noise, -8, 8)

    def before(a: Tensor) -> Tensor:
        return noise.pdf_derivative(a, order - 1) if order > 1 else torch.as_tensor(truth(noise).pdf(a))

    h = 1e-5
    # Central differences: an error of h² times the third derivative, and rounding of 1e-16 / h.
    differences = (before(a + h) - before(a - h)) / (2 * h)
    assert_is(noise.pdf_derivative(a, order), differences, rtol=1e-6, atol=2e-8 / noise.scale ** (order + 1))


@pytest.mark.parametrize("noise", [n for n in NOISES if not isinstance(n, Uniform)], ids=repr)
def test_pdf_derivatives_are_autograds(noise):
    a = points(noise).requires_grad_()
    value = noise.pdf(a)
    for order in (1, 2, 3):
        (value,) = torch.autograd.grad(value.sum(), a, create_graph=True)
        assert_is(noise.pdf_derivative(a, order).detach(), value.detach())


def test_pdf_derivative_where_it_does_not_exist():
    kink = torch.zeros(1)
    assert [Laplace().pdf_derivative(kink, order).item() for order in (1, 2, 3)] == [0, 0.5, 0]
    edges = torch.tensor([-1.0, 1.0])
    assert all(not Uniform().pdf_derivative(edges, order).any() for order in (1, 2, 3))


@every_noise
@every_dtype
def test_everything_is_finite_from_minus_to_plus_100(noise, dtype):
    edges = torch.tensor([0, -noise.scale, noise.scale], dtype=dtype)
    a = torch.cat([torch.linspace(-100, 100, 2001, dtype=dtype), edges]).requires_grad_()
    one = torch.ones_like(a)
    values = {
        "cdf": noise.cdf(a),
        "pdf": noise.pdf(a),
        "mean_sign": noise.mean_sign(a),
        "log_cdf": noise.log_cdf(a),
        "log_prob": noise.log_prob(-one, a),
        **{f"derivative {order}": noise.pdf_derivative(a, order) for order in (1, 2, 3)},
    }
    for name, value in values.items():
        assert value.dtype == dtype
        assert bool(value.isfinite().all()), name
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), a)
            assert bool(gradient.isfinite().all()), f"gradient of {name}"


@every_noise
def test_float32_keeps_its_digits_in_the_tails(noise):
    a = points(noise, -10, 10, torch.float32)
    for function in (noise.cdf, noise.pdf, noise.mean_sign):
        assert_is(function(a).double(), function(a.double()), rtol=3e-5, atol=1e-36)


@every_noise
@every_dtype
def test_samples_have_the_distribution(noise, dtype):
    z = noise.sample((20_000,), generator=Generator().manual_seed(1), dtype=dtype)
    # False alarm: 1e-4 for each of 24 cases, once for the chosen seed.
    assert stats.kstest(z.double().numpy(), truth(noise).cdf).pvalue > 1e-4


@every_noise
@every_dtype
def test_sampled_states_have_their_frequency(noise, dtype):
    n = 40_000
    a = torch.tensor([-3, -1.2, -0.4, 0, 0.1, 0.7, 2.5], dtype=dtype) * noise.scale
    x = noise.sample_sign(a.repeat(n, 1), Generator().manual_seed(2))
    assert bool((x.abs() == 1).all())
    assert not x.requires_grad
    p = truth(noise).cdf(a.double().numpy())
    error = ((x.double().numpy() + 1) / 2).mean(0) - p
    # Five standard errors: a false alarm in one of 168 cases has probability 1e-4. States that cannot occur never do.
    assert (np.abs(error) <= 5 * np.sqrt(p * (1 - p) / n)).all()


@every_noise
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16], ids=str)
def test_draws_are_reproducible_and_keep_their_dtype(noise, dtype):
    first, second, other = (noise.sample((3, 5), generator=Generator().manual_seed(s), dtype=dtype) for s in (3, 3, 4))
    assert first.dtype == dtype
    assert first.shape == (3, 5)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    like = noise.sample_like(torch.empty(3, 5, dtype=dtype), generator=Generator().manual_seed(3))
    assert like.dtype == dtype
    assert torch.equal(like, first)


# Normal noise is torch's own.
@pytest.mark.parametrize("noise", [noise for noise in NOISES if not isinstance(noise, Normal)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
def test_draws_are_finite_at_the_extremes_of_the_uniform_variable(noise, dtype, monkeypatch):
    def extremes(shape, *, dtype, **_):
        # torch.rand gives multiples of 2**-24 (2**-53 in float64) in [0, 1).
        step = 2**-24 if dtype == torch.float32 else 2**-53
        return torch.tensor([0, step, 0.5, 1 - step], dtype=dtype)

    monkeypatch.setattr(torch, "rand", extremes)
    z = noise.sample((4,), dtype=dtype)
    assert bool(z.isfinite().all())
    assert bool((z.diff() >= 0).all())


def test_default_dtype_of_draws_is_torchs():
    assert Logistic().sample((2,)).dtype == torch.get_default_dtype()


def test_sign_is_never_zero():
    t = torch.tensor([-math.inf, -1e-30, -0.0, 0.0, 1e-30, 3.0])
    assert sign(t).tolist() == [-1, -1, 1, 1, 1, 1]
    assert sign(t.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, -math.inf])
def test_bad_scale_is_refused(kind, scale):
    with pytest.raises(InputError, match=rf"{kind.__name__}\(scale={scale}\): the scale must be positive and finite"):
        kind(scale)


@pytest.mark.parametrize("order", [-1, 0, 4, 1.5])
def test_bad_order_is_refused(order):
    with pytest.raises(InputError, match=rf"pdf_derivative\(order={order}\): the order must be 1, 2 or 3"):
        Logistic().pdf_derivative(torch.zeros(1), order)


def test_noises_are_values():
    assert Logistic(2.0) == Logistic(2.0)
    assert Logistic(2.0) != Logistic(1.0)
    assert Logistic() != Normal()
    assert repr(Laplace(0.5)) == "Laplace(scale=0.5)"


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_score_is_the_derivative_of_the_log_probability(noise):
    a = torch.linspace(-30, 30, 1201, dtype=torch.float64).requires_grad_()
    for x in (1.0, -1.0):
        states = torch.full_like(a, x)
        (expected,) = torch.autograd.grad(noise.log_prob(states, a).sum(), a)
        assert torch.allclose(noise.score(states, a.detach()), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("noise", [Logistic(), Normal(), Laplace()], ids=str)
def test_score_is_right_far_in_the_tail(noise):
    """In single precision, where F and F' have both vanished: log F is linear there, or parabolic for normal noise."""
    expected = 200.0 + 1 / 200 if isinstance(noise, Normal) else 1.0
    assert noise.score(torch.tensor(1.0), torch.tensor(-200.0)).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("specification", ["cauchy", "normal:wide", "normal:", "normal:-1", "normal:inf"])
def test_a_noise_by_name_is_refused_by_name(specification):
    with pytest.raises(InputError, match=specification.split(":")[0] if ":" not in specification else "scale"):
        noise_by_name(specification)


def test_a_noise_by_name_has_the_scale_that_is_given():
    assert noise_by_name("laplace") == Laplace()
    assert noise_by_name("laplace:0.25") == Laplace(0.25)


@every_noise
def test_log_odds(noise):
    a = torch.linspace(-6, 6, 101, dtype=torch.float64) * noise.scale * (0.16 if isinstance(noise, Uniform) else 1)
    expected = noise.log_cdf(a) - noise.log_cdf(-a)
    torch.testing.assert_close(noise.log_odds(a), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.tanh(noise.log_odds(a) / 2), noise.mean_sign(a), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("noise", [Logistic(), Logistic(0.3), Normal(1.2)], ids=str)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_are_those_of_the_cdf(noise: Noise, order: int) -> None:
    a = torch.linspace(-20, 20, 81, dtype=torch.float64)
    expected = [noise.pdf(a), *(noise.pdf_derivative(a, k) for k in range(1, order))]
    found = noise.derivatives(a, order)
    assert len(found) == order
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_the_gradient_leaves_what_a_noise_of_the_user_keeps():
    """A density may be a tensor that is kept: nobody writes into it."""
    a = torch.randn(3, 2)
    kept = Logistic().pdf(a)

    class Keeping:
        mean_gradient = Noise.mean_gradient

        def pdf(self, a):
            return kept

    before = kept.clone()
    slopes = Signal(a, a, a, torch.ones(3, 2), Keeping()).slopes()
    assert torch.equal(kept, before)
    assert torch.equal(slopes, 2 * before)
