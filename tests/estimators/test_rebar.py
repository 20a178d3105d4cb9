import pytest
import torch
from torch import nn
from unbiasedness import assert_caught, assert_unbiased, random_net, train_parameters, variance_loss

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators._draws import conditional
from flipgrad.estimators._paths import Path
from flipgrad.estimators._tuned import PACE
from flipgrad.sampling import fresh

DRAWS = 5000


def fixed(*args):
    """With frozen parameters: the same estimate, sooner."""
    return fg.REBAR(*args).requires_grad_(False)


@pytest.mark.parametrize(("temperature", "scale"), [(2.0, 0.3), (0.2, 1.2)])
def test_unbiased_whatever_its_parameters(temperature, scale):
    assert_unbiased(*random_net((3, 4), fg.Logistic()), fixed(temperature, scale), draws=3000)


def test_unbiased_with_laplace_noise():
    assert_unbiased(*random_net((3, 4), fg.Laplace()), fixed(), draws=1000)


def test_unbiased_with_uniform_noise_inside_and_outside_its_support():
    net, x, y = random_net((3, 4), fg.Uniform(0.9))
    a = net[0].affine()(x)
    assert 0 < (a.abs() > 0.9).sum() < a.numel()
    assert_unbiased(net, x, y, fixed(), draws=1000)


def test_conditional_noise_must_be_differentiated(monkeypatch):
    """Without the derivative of the conditional noise the estimator is biased, and the harness sees it."""

    def held(noise, a, x, z):
        return conditional(noise, a.detach(), x, z)

    monkeypatch.setattr("flipgrad.estimators.rebar.conditional", held)
    assert_caught(*random_net((3, 4), fg.Logistic()), fixed(), draws=500)


def test_is_the_formula_for_one_layer():
    """Differentiated as a whole by autograd, with the logistic noise written out, as in the paper."""
    net, x, y = random_net((4,), fg.Logistic())
    t, eta, objective, uniforms = 0.5, 0.8, fg.CrossEntropy(y.expand(50)), []

    def draw(noise, a):
        uniforms.append(torch.rand_like(a))
        return noise.icdf(uniforms[-1])

    path = Path.sample(net.network(), Batch(x.expand(50, 2), objective, draw))
    (g,) = fg.REBAR(t, eta).gradients(path)
    u, v = uniforms
    a = path.a[0].detach().requires_grad_()
    p, states = torch.sigmoid(a), path.states[0]
    # Given the state +1, the uniform variable lies below p; given -1, above.
    conditional = torch.where(states > 0, v * p, 1 - v * (1 - p))

    def relaxed(w):
        return 2 * torch.sigmoid((a - torch.logit(w)) / t) - 1

    f, soft, tied = (objective(net.head(s)) for s in (states, relaxed(u), relaxed(conditional)))
    log_p = torch.where(states > 0, p, 1 - p).log().sum(1)
    whole = (f - eta * tied).detach() * log_p + eta * (soft - tied)
    (expected,) = torch.autograd.grad(whole.sum(), a)
    assert torch.allclose(g, expected, rtol=1e-5)


def test_variance_loss_is_the_squared_length_and_has_its_derivative():
    net, x, y = random_net((3, 4), fg.Normal(1.5))
    many, objective = x.expand(20, 2), fg.CrossEntropy(y.expand(20))
    rebar = fg.REBAR(0.7, 0.9).double()

    def loss():
        return rebar.variance_loss(net, many, objective, generator=torch.Generator().manual_seed(3))

    value = loss()
    path = Path.sample(net.network(), Batch(many, objective, fresh(torch.Generator().manual_seed(3))))
    assert torch.allclose(value, sum(g.square().sum(1).mean() for g in rebar.gradients(path)))
    value.backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    for parameter in rebar.parameters():
        with torch.no_grad():
            parameter.add_(1e-5)
            up = loss().item()
            parameter.sub_(2e-5)
            down = loss().item()
            parameter.add_(1e-5)
        assert parameter.grad.item() == pytest.approx((up - down) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("kind", [fg.REBAR, fg.RELAX, fg.DoubleCV])
def test_the_ordinary_backward_gives_the_same_derivative_relative_to_the_square(kind):
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(20, 2), fg.CrossEntropy(y.expand(20))
    torch.manual_seed(0)
    estimator = kind().double()
    loss = estimator.variance_loss(net, many, objective, generator=torch.Generator().manual_seed(3))
    loss.backward()
    separate = [parameter.grad.clone() for parameter in estimator.parameters()]
    estimator.zero_grad()
    net(many, objective, estimator=estimator, generator=torch.Generator().manual_seed(3)).mean().backward()
    for parameter, grad in zip(estimator.parameters(), separate, strict=True):
        assert torch.allclose(parameter.grad * loss.detach() / PACE, grad)
    assert any(bool((grad != 0).any()) for grad in separate)
    # Frozen parameters change nothing else.
    learned = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    estimator.requires_grad_(False)
    net(many, objective, estimator=estimator, generator=torch.Generator().manual_seed(3)).mean().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(net.parameters(), learned, strict=True))


def test_training_along_with_momentum_lowers_the_variance_and_stays_finite():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(100, 2), fg.CrossEntropy(y.expand(100))
    rebar = fg.REBAR(temperature=2.0, scale=0.3)
    start = variance_loss(rebar, net, many, objective)
    optimizer = torch.optim.SGD(rebar.parameters(), 0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        optimizer.zero_grad()
        net(many, objective, estimator=rebar, generator=generator).mean().backward()
        optimizer.step()
    assert variance_loss(rebar, net, many, objective) < 0.6 * start


def test_training_lowers_the_variance():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(300, 2), fg.CrossEntropy(y.expand(300))
    rebar = fg.REBAR(temperature=2.0, scale=0.3)
    start = variance_loss(rebar, net, many, objective)
    train_parameters(rebar, net, many, objective, rate=0.1)
    trained = variance_loss(rebar, net, many, objective)
    assert trained < 0.5 * start
    # And below that of a vanishing control variate, which is REINFORCE.
    assert trained < 0.5 * variance_loss(fg.REBAR(scale=1e-6), net, many, objective)


@pytest.mark.parametrize("kind", [fg.REBAR, fg.RELAX])
@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(), fg.Laplace(), fg.Uniform()], ids=lambda n: type(n).__name__)
def test_stays_finite_in_saturated_nets(kind, noise):
    net = fg.Sequential(fg.BinaryLinear(2, 4, noise=noise), fg.BinaryLinear(4, 4, noise=noise), head=nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(300)
    net(torch.randn(50, 2), fg.CrossEntropy(torch.zeros(50, dtype=torch.long)), estimator=kind()).sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in net.parameters())


def test_state_dict_round_trip():
    rebar = fg.REBAR()
    rebar.load_state_dict(fg.REBAR(0.3, 2.0).state_dict())
    assert rebar.log_temperature.exp().item() == pytest.approx(0.3)
    assert rebar.log_scale.exp().item() == pytest.approx(2.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["temperature", "scale"])
@pytest.mark.parametrize("kind", [fg.REBAR, fg.RELAX])
def test_refuses_bad_arguments(kind, name, value):
    with pytest.raises(fg.InputError, match=rf"{kind.__name__}\({name}={value}\): the {name} must be positive and finite"):
        kind(**{name: value})


def test_facts():
    assert fg.REBAR.unbiased
    assert fg.REBAR().passes(3) == 7
