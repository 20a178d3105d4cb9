import pytest
import torch
from torch import nn
from unbiasedness import Broken, assert_caught, assert_unbiased, exact_gradients, random_net, train_parameters, variance_loss

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators._paths import Path
from flipgrad.sampling import fresh


@pytest.mark.parametrize(("samples", "alpha"), [(2, 0.0), (4, 0.3)])
def test_unbiased_whatever_its_parameters(samples, alpha):
    assert_unbiased(*random_net((3, 4), fg.Logistic()), fg.DoubleCV(samples, alpha), draws=2000)


@pytest.mark.parametrize("noise", [fg.Laplace(), fg.Uniform(1.5)], ids=["laplace", "uniform"])
def test_unbiased_with_other_noise(noise):
    assert_unbiased(*random_net((3, 4), noise), fg.DoubleCV(), draws=2000)


def test_a_wrong_correction_is_caught():
    """The last term with another alpha than the Taylor terms."""

    def error(k, g):
        return g + 0.05 * slope

    net, x, y = random_net((4,), fg.Logistic())
    slope = exact_gradients(net, x, y)["0.bias"]
    assert_caught(net, x, y, Broken(fg.DoubleCV(), error), draws=2000)


def path_of(net, x, objective, draws):
    return Path.sample(net.network(), Batch(x.expand(draws, 2), objective, fresh(torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("samples", [2, 4])
def test_a_linear_loss_has_no_variance(samples):
    net, x, _ = random_net((4,), fg.Normal(1.5))
    path = path_of(net, x, lambda outputs: outputs.sum(-1), 100)
    (g,) = fg.DoubleCV(samples).gradients(path)
    expected = 2 * fg.Normal(1.5).pdf(path.a[0]) * net.head.weight.sum(0)
    assert torch.allclose(g, expected.detach())


def test_is_the_formula_for_two_samples():
    net, x, y = random_net((4,), fg.Logistic())
    head, objective = net.head, fg.CrossEntropy(y.expand(50))
    drawn = []

    def draw(noise, a):
        drawn.append(noise.sample_like(a))
        return drawn[-1]

    path = Path.sample(net.network(), Batch(x.expand(50, 2), objective, draw))
    (g,) = fg.DoubleCV(alpha=-0.7).gradients(path)
    a = path.a[0].detach()
    states = [torch.where(a >= z, 1.0, -1.0).double().requires_grad_() for z in drawn]
    assert len(states) == 2
    f = [objective(head(s)) for s in states]
    df = [torch.autograd.grad(value.sum(), s)[0] for value, s in zip(f, states, strict=True)]
    m, s = torch.tanh(a / 2), [s.detach() for s in states]
    b = [-0.7 * (df[1 - i] * (s[i] - m)).sum(1) for i in range(2)]
    difference = (f[0] + b[0] - f[1] - b[1])[:, None]
    scores = [fg.Logistic().score(x, a) for x in s]
    expected = difference * (scores[0] - scores[1]) / 2 + 0.7 * (1 - m**2) / 2 * (df[0] + df[1]) / 2
    assert torch.allclose(g, expected.detach())


def test_variance_is_lower_than_without_taylor_terms_and_training_lowers_it_further():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(300, 2), fg.CrossEntropy(y.expand(300))
    plain, estimator = variance_loss(fg.DoubleCV(alpha=0.0), net, many, objective), fg.DoubleCV()
    start = variance_loss(estimator, net, many, objective)
    assert start < 0.9 * plain
    train_parameters(estimator, net, many, objective, rate=0.03)
    assert variance_loss(estimator, net, many, objective) < 0.95 * start
    assert all(parameter.grad is None for parameter in net.parameters())


def test_state_dict_round_trip():
    estimator = fg.DoubleCV()
    estimator.load_state_dict(fg.DoubleCV(alpha=0.25).state_dict())
    assert estimator.alpha.item() == 0.25


def test_refuses_bad_arguments():
    with pytest.raises(fg.InputError, match=r"DoubleCV\(samples=1\): leaving one out needs at least two"):
        fg.DoubleCV(1)
    with pytest.raises(fg.InputError, match=r"DoubleCV\(alpha=inf\): alpha must be finite"):
        fg.DoubleCV(alpha=float("inf"))


def test_says_that_frozen_parameters_cannot_be_trained():
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 2))
    estimator = fg.DoubleCV().requires_grad_(False)
    with pytest.raises(fg.InputError, match="every parameter of the estimator is frozen"):
        estimator.variance_loss(net, torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])))


def test_facts():
    assert fg.DoubleCV.unbiased
    assert fg.DoubleCV(3).passes(2) == 7
