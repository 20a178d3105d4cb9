"""Sums over flips of entropies: tensor operations and interpolation against their definition in float64."""

import pytest
import torch

import flipgrad as fg
from flipgrad import flips
from flipgrad.flips import Geometry, naive, separable, vectorized
from flipgrad.flips.form import find_form
from flipgrad.noise import sign

NOISES = [fg.Logistic(), fg.Logistic(0.5), fg.Normal(2.0), fg.Laplace(0.8), fg.Uniform(3.0)]


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_it_is_its_definition(noise):
    weight = noise.scale * torch.randn(4, 5).double()
    x, bias = sign(torch.randn(3, 5).double()), noise.scale * torch.randn(4).double()
    x[0, 0] = 0
    a = x @ weight.t() + bias
    grad = torch.randn_like(a)
    expected = naive.entropy_product(x, weight, bias, grad, noise)
    torch.testing.assert_close(flips.entropy_product(x, a, grad, weight, noise), expected, rtol=1e-9, atol=1e-10)


def test_a_convolution_is_too():
    noise, geometry = fg.Logistic(), Geometry((2, 1), (1, 2), (1, 2))
    weight, x = torch.randn(2, 2, 3, 2).double(), sign(torch.randn(3, 2, 5, 4).double())
    a = torch.nn.functional.conv2d(x, weight, None, *geometry)
    grad = torch.randn_like(a)
    expected = naive.entropy_product(x, weight, None, grad, noise, geometry)
    torch.testing.assert_close(flips.entropy_product(x, a, grad, weight, noise, geometry), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(2.0)], ids=str)
@pytest.mark.parametrize("size", [0.05, 0.3])
def test_the_tolerance_holds(noise, size):
    weight = size * noise.scale * torch.randn(64, 48)
    x = sign(torch.randn(20, 48))
    a = x @ weight.t()
    grad = torch.randn_like(a)
    form = find_form(weight, noise, flips.ENTROPY_SHARE * 1e-3)
    assert form.reachable
    assert separable.errors(form, noise)["entropy_product"] <= flips.ENTROPY_SHARE * 1e-3
    expected = naive.entropy_product(x, weight, None, grad, noise)
    for found in (
        separable.entropy_product(x, a, grad, weight, noise, form),
        flips.entropy_product(x, a, grad, weight, noise, tolerance=1e-3),
    ):
        assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_layers_as_large_as_those_of_models_take_ordinary_products(size, monkeypatch):
    """No compiled kernel knows entropies: to form every term takes at least five times as long."""
    weight = size * torch.randn(200, 200)
    x = sign(torch.randn(50, 200))
    a = x @ weight.t()
    monkeypatch.setattr(vectorized, "entropy_product", None)
    found = flips.entropy_product(x, a, torch.randn_like(a), weight, fg.Logistic(), tolerance=1e-3)
    assert found.shape == x.shape
    with pytest.raises(TypeError, match="NoneType"):
        flips.entropy_product(x, a, torch.randn_like(a), weight, fg.Logistic())


def test_many_draws_at_once_are_each_of_them():
    noise, weight = fg.Logistic(), torch.randn(4, 5).double()
    x = sign(torch.randn(6, 3, 5).double())
    a = x @ weight.t()
    grad = torch.randn_like(a)
    together = torch.vmap(lambda x, a, g: flips.entropy_product(x, a, g, weight, noise))(x, a, grad)
    alone = torch.stack([flips.entropy_product(x[k], a[k], grad[k], weight, noise) for k in range(6)])
    torch.testing.assert_close(together, alone)


def test_the_negative_entropy_is_that_of_the_probabilities():
    for noise in NOISES:
        a = noise.scale * torch.linspace(-4, 4, 9).double()
        p = noise.cdf(a)
        expected = torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)
        torch.testing.assert_close(noise.negative_entropy(a), expected, rtol=1e-9, atol=1e-9)
