"""Exact ELBOs, likelihoods and gradients by transfer matrices, against the sum over all states of all layers."""

import pytest
import torch
from latent_models import bits, by_enumeration, gradients, random_model
from torch import nn

import flipgrad as fg

MODELS = pytest.mark.parametrize("widths", [(3,), (3, 2), (2, 3, 2)], ids=str)


@MODELS
@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5)], ids=["logistic", "normal"])
@pytest.mark.parametrize("entropy", ["analytic", "sampled"])
def test_elbo_likelihood_and_gradients_are_those_of_enumeration(widths, noise, entropy):
    model, x = random_model(*widths, noise=noise, entropy=entropy), bits(4)
    elbo, likelihood = by_enumeration(model, x)
    found = fg.exact.negative_elbo(model, x)
    torch.testing.assert_close(found, elbo, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fg.exact.log_likelihood(model, x), likelihood, rtol=1e-12, atol=1e-12)
    expected = gradients(elbo, model)
    for rule in (found, model(x, estimator=fg.Exact())):
        for name, gradient in gradients(rule, model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


def test_the_likelihoods_gradient_too():
    model, x = random_model(3, 2), bits(4)
    named = [*model.decoder.parameters(), model.prior]
    found = torch.autograd.grad(fg.exact.log_likelihood(model, x).mean(), named)
    expected = torch.autograd.grad(by_enumeration(model, x)[1].mean(), named)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_convolutions_and_nonlinear_decoders_add_up_too():
    """The likelihood of all possible data is 1, and the ELBO lies below it."""
    torch.manual_seed(0)
    encoder = [nn.Unflatten(1, (1, 3, 1)), fg.BinaryConv2d(1, 1, (2, 1)), fg.BinaryConv2d(1, 1, (2, 1)), nn.Flatten()]
    decoder = [nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(1, 2)]
    model = fg.Variational(encoder[:3], decoder).double()
    every = fg.exact.enumerate_states((3,), torch.zeros(1).double()).add(1) / 2
    likelihoods = fg.exact.log_likelihood(model, every)
    torch.testing.assert_close(likelihoods.exp().sum(), torch.ones(()).double())
    assert bool((-fg.exact.negative_elbo(model, every) <= likelihoods).all())
    losses = model(every.repeat(4000, 1), estimator=fg.ST()).detach().view(4000, 8)
    error = losses.std(0) / len(losses) ** 0.5
    assert bool(((losses.mean(0) - fg.exact.negative_elbo(model, every)).abs() < 5 * error + 1e-9).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, x: fg.exact.negative_elbo(nn.Linear(2, 2), x), "negative_elbo takes a flipgrad.Variational, got Linear"),
        (lambda model, x: fg.exact.log_likelihood(nn.Linear(2, 2), x), "log_likelihood takes a flipgrad.Variational"),
        (lambda model, x: fg.exact.negative_elbo(model, x[:0]), "the batch is empty"),
        (lambda model, x: fg.exact.log_likelihood(model, x[:0]), "the batch is empty"),
        (lambda model, x: fg.exact.negative_elbo(random_model(13, 13), x), "over the budget"),
        (lambda model, x: fg.exact.log_likelihood(random_model(13, 13), x), "over the budget"),
    ],
)
def test_what_cannot_be_summed_is_refused(call, message):
    with pytest.raises(fg.InputError, match=message):
        call(random_model(2), bits(3))
