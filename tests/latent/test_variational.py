"""Latent-variable models: every estimator against the exact gradient, PSA and ST draw by draw against their formulas."""

from functools import partial

import pytest
import torch
from latent_models import DATA, bits, gradients, random_model
from torch import Tensor, nn
from torch.nn import functional

import flipgrad as fg
from flipgrad.bounds import MeanOfDraws
from flipgrad.estimators._paths import PathEstimator

# Deviations are tested at 5 standard errors: a false alarm in about 10,000 runs of the suite.
SIGMAS, GROUPS = 5.0, 50


def deviation(model: fg.Variational, x: Tensor, estimator: fg.Estimator, draws: int, seed: int = 0) -> tuple[float, float]:
    """By how many standard errors the mean gradient is off, in any entry; and the length of its standard error, relative."""
    generator, index = torch.Generator().manual_seed(seed), torch.zeros(draws, dtype=torch.long)
    exact = torch.cat([g.flatten() for g in gradients(fg.exact.negative_elbo(model, x), model).values()])
    drawn = []
    for _ in range(GROUPS):
        losses = model(x.expand(draws, -1), estimator=estimator, generator=generator, index=index)
        drawn.append(torch.cat([g.flatten() for g in gradients(losses, model).values()]))
    samples = torch.stack(drawn)
    error = samples.std(0) / GROUPS**0.5
    worst = float(((samples.mean(0) - exact).abs() / (error + 1e-9)).max())
    return worst, float(error.norm() / exact.norm())


UNBIASED = {
    "reinforce": lambda: fg.REINFORCE(fg.RunningBaseline(1)),
    "constant baseline": lambda: fg.REINFORCE(fg.ConstantBaseline(4.0)),
    "learned baseline": lambda: fg.REINFORCE(fg.LearnedBaseline(nn.Linear(DATA, 1).double())),
    "arm": fg.ARM,
    "disarm": fg.DisARM,
    "arms": lambda: fg.ARMS(3),
    "double-cv": fg.DoubleCV,
    "flip-cv": fg.FlipCV,
    "bitflip": fg.BitFlip,
    "leg": fg.LEG,
    "relax": fg.RELAX,
    "rebar": fg.REBAR,
    "muprop": fg.MuProp,
}


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("entropy", ["analytic", "sampled"])
def test_unbiased_estimators_are_unbiased(name, entropy):
    model = random_model(3, 2, entropy=entropy)
    worst, error = deviation(model, bits(1), UNBIASED[name](), 500)
    assert worst < SIGMAS
    assert error < 0.1


@pytest.mark.parametrize("name", ["reinforce", "disarm", "double-cv", "flip-cv", "rebar"])
@pytest.mark.parametrize("widths", [(4,), (2, 2, 2)], ids=str)
def test_with_one_and_three_layers_too(name, widths):
    worst, error = deviation(random_model(*widths), bits(1), UNBIASED[name](), 500)
    assert worst < SIGMAS
    assert error < 0.1


class Twice(PathEstimator):
    """An estimator that is wrong by a factor of two in one layer."""

    unbiased, citation, tails = True, "none", 1

    def gradients(self, path):
        first, *others = fg.DisARM().gradients(path)
        return [2 * first, *others]


def test_a_wrong_estimator_would_be_noticed():
    assert deviation(random_model(3, 2), bits(1), Twice(), 500)[0] > SIGMAS


@pytest.mark.parametrize("entropy", ["analytic", "sampled"])
@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5)], ids=["logistic", "normal"])
def test_psa_is_unbiased_for_one_layer(entropy, noise):
    worst, error = deviation(random_model(4, entropy=entropy, noise=noise), bits(1), fg.PSA(exact=True), 500)
    assert worst < SIGMAS
    assert error < 0.01


def test_psa_of_several_layers_is_biased_less_than_st():
    model, x = random_model(3, 3), bits(1)
    exact = gradients(fg.exact.negative_elbo(model, x), model)["encoder.0.weight"]
    far = []
    for estimator in (fg.PSA(), fg.ST()):
        found = gradients(model(x.expand(40_000, -1), estimator=estimator), model)["encoder.0.weight"]
        far.append(float((found - exact).norm() / exact.norm()))
    assert 1.3 * far[0] < far[1]


def changes(function, z: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """D_i of the sum over outputs of a function of their pre-activations ``a``, unit by unit."""
    moved = a[:, :, None] - 2 * weight[None] * z[:, None]
    return z / 2 * (function(a[:, :, None]) - function(moved)).sum(1)


def psa_by_formula(model: fg.Variational, x: Tensor, noise: list[Tensor]) -> Tensor:
    """The losses with the gradient of math: the signals of every layer by flips one by one, and then ordinary derivatives."""
    layers, decoder, prior = list(model.encoder), list(model.decoder), model.prior
    a, z, before = [], [], x
    for layer, draw in zip(layers, noise, strict=True):
        a.append(functional.linear(before, layer.weight, layer.bias))
        z.append(torch.where(a[-1] - draw >= 0, 1.0, -1.0).double())
        before = z[-1]
    b = [module(states) for module, states in zip(decoder, z, strict=True)]
    targets = [x, *((states + 1) / 2 for states in z[:-1])]
    signals: list[Tensor] = []
    for k in reversed(range(len(z))):
        with torch.no_grad():
            t = targets[k][:, :, None]
            u = changes(lambda b, t=t: functional.softplus(b) - t * b, z[k], decoder[k].weight, b[k])
            u = u - (b[k + 1] if k + 1 < len(z) else prior) / 2
            if k + 1 < len(z):
                cdf, weight = layers[k + 1].noise.cdf, layers[k + 1].weight
                signal = signals[0][:, :, None]

                def of_next(a: Tensor, cdf=cdf, signal=signal) -> Tensor:
                    p, q = cdf(a), cdf(-a)
                    return 2 * p * signal + p * p.log() + q * q.log()

                u = u + changes(of_next, z[k], weight, a[k + 1])
            signals.insert(0, u)
    total = sum((functional.softplus(logits) - t * logits).sum(1) for logits, t in zip(b, targets, strict=True))
    for layer, pre, u in zip(layers, a, signals, strict=True):
        p, q = layer.noise.cdf(pre), layer.noise.cdf(-pre)
        mean = 2 * p * u
        total = total + (p * p.log() + q * q.log()).sum(1) + (mean - mean.detach()).sum(1)
    p = layers[-1].noise.cdf(a[-1].detach())
    return total + (functional.softplus(prior) - p * prior).sum(1)


@pytest.mark.parametrize("widths", [(4,), (3, 4), (3, 2, 3)], ids=str)
@pytest.mark.parametrize("noise", [fg.Logistic(0.7), fg.Normal()], ids=["logistic", "normal"])
def test_psa_is_its_formula(widths, noise):
    model, x = random_model(*widths, noise=noise), bits(6)
    drawn = [noise.sample_like(torch.zeros(6, n).double()) for n in widths]
    found, expected = model(x, estimator=fg.PSA(exact=True), noise=drawn), psa_by_formula(model, x, drawn)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    wanted = gradients(expected, model)
    for name, gradient in gradients(found, model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-11)


def straight_through(model: fg.Variational, x: Tensor, noise: list[Tensor]) -> Tensor:
    """The negative ELBO of states whose derivative is that of their means, in ordinary operations."""
    log_sigmoid, z, before, total = functional.logsigmoid, [], x, torch.zeros(len(x)).double()
    for layer, draw in zip(model.encoder, noise, strict=True):
        a = functional.linear(before, layer.weight, layer.bias)
        mean = 2 * torch.sigmoid(a) - 1
        before = torch.where(a - draw >= 0, 1.0, -1.0).double() + mean - mean.detach()
        p = torch.sigmoid(a)
        total = total + (p * log_sigmoid(a) + (1 - p) * log_sigmoid(-a)).sum(1)
        z.append(before)
    total = total + (functional.softplus(model.prior) - p * model.prior).sum(1)
    for module, states, t in zip(model.decoder, z, (x, *((states + 1) / 2 for states in z[:-1])), strict=True):
        logits = module(states)
        total = total + (functional.softplus(logits) - t * logits).sum(1)
    return total


@pytest.mark.parametrize("widths", [(4,), (3, 4), (3, 2, 3)], ids=str)
def test_st_is_its_formula(widths):
    model, x = random_model(*widths), bits(6)
    noise = [fg.Logistic().sample_like(torch.zeros(6, n).double()) for n in widths]
    found, expected = model(x, estimator=fg.ST(), noise=noise), straight_through(model, x, noise)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    wanted = gradients(expected, model)
    for name, gradient in gradients(found, model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "estimator",
    [fg.ZGR(0.0), fg.GumbelRao(2), fg.ZGR(), fg.Concrete(0.5), fg.Tanh(), fg.HardST()],
    ids=lambda e: type(e).__name__,
)
def test_local_estimators_have_the_entropys_own_gradient(estimator):
    """With a decoder and a prior that ignore the latents, it is the negative entropy, whose gradient is known."""
    model, x = random_model(4), bits(5)
    with torch.no_grad():
        model.prior.zero_()
        model.decoder[0].weight.zero_()
    a = functional.linear(x, model.encoder[0].weight, model.encoder[0].bias)
    expected = gradients(fg.Logistic().negative_entropy(a).sum(1) + 0 * sum(p.sum() for p in model.parameters()), model)
    found = gradients(model(x, estimator=estimator), model)
    for name in ("encoder.0.weight", "encoder.0.bias"):
        torch.testing.assert_close(found[name], expected[name])


def test_zgr_at_zero_is_st():
    model, x = random_model(3, 4), bits(6)
    noise = [fg.Logistic().sample_like(torch.zeros(6, n).double()) for n in (3, 4)]
    wanted = gradients(model(x, estimator=fg.ST(), noise=noise), model)
    for name, gradient in gradients(model(x, estimator=fg.ZGR(0.0), noise=noise), model).items():
        torch.testing.assert_close(gradient, wanted[name])


def test_concrete_differentiates_the_relaxed_elbo():
    """Its gradient is that of its own loss, by finite differences."""
    model, x = random_model(3, 2), bits(4)
    noise = [fg.Logistic().sample_like(torch.zeros(4, n).double()) for n in (3, 2)]

    def loss() -> Tensor:
        return model(x, estimator=fg.Concrete(0.7), noise=noise).mean()

    weight = model.encoder[0].weight
    (found,) = torch.autograd.grad(loss(), weight)
    with torch.no_grad():
        weight[1, 2] += 1e-6
        above = loss()
        weight[1, 2] -= 2e-6
        below = loss()
    assert float((above - below) / 2e-6) == pytest.approx(float(found[1, 2]), rel=1e-6)


def test_a_normal_likelihood_and_a_nonlinear_front_and_decoder():
    torch.manual_seed(0)
    encoder = [nn.Linear(DATA, 4), nn.LeakyReLU(0.3), fg.BinaryLinear(4, 3)]
    decoder = [nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.3), nn.Linear(4, DATA))]
    model = fg.Variational(encoder, decoder, likelihood=partial(fg.GaussianLikelihood, scale=0.7)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(1, DATA).double()
    for estimator in (fg.PSA(exact=True), fg.DisARM(), fg.LEG()):
        worst, error = deviation(model, x, estimator, 300)
        assert worst < SIGMAS
        assert error < 0.1


def test_the_bound_rises_to_the_likelihood():
    model, x = random_model(3, 2), bits(5)
    generator = torch.Generator().manual_seed(0)
    exact = fg.exact.log_likelihood(model, x).detach()
    one = torch.stack([model.log_likelihood(x, 1, generator=generator) for _ in range(2000)])
    error = one.std(0) / 2000**0.5
    assert bool(((one.mean(0) + fg.exact.negative_elbo(model, x)).abs() < SIGMAS * error).all())
    many = model.log_likelihood(x, 20_000, generator=generator)
    torch.testing.assert_close(many, exact, rtol=0, atol=0.05)
    assert bool((one.mean(0) < exact).all())


def test_samples_have_the_models_probabilities():
    model = random_model(3, 2)
    every = fg.exact.enumerate_states((DATA,), torch.zeros(1).double()).add(1) / 2
    wanted = fg.exact.log_likelihood(model, every).exp() @ every
    drawn = model.sample(20_000, generator=torch.Generator().manual_seed(0))
    error = drawn.std(0) / 20_000**0.5
    assert bool(((drawn.mean(0) - wanted).abs() < SIGMAS * error).all())


def test_reconstructions_come_from_the_recognised_latents():
    model, x = random_model(4), bits(1).expand(20_000, -1)
    a = functional.linear(x[:1], model.encoder[0].weight, model.encoder[0].bias)
    every = fg.exact.enumerate_states((4,), torch.zeros(1).double())
    wanted = torch.sigmoid(every * a).prod(1) @ torch.sigmoid(model.decoder[0](every))
    found = model.reconstruct(x.view(-1, 1, DATA), generator=torch.Generator().manual_seed(0))
    assert found.shape == (20_000, 1, DATA)
    error = found.std(0) / 20_000**0.5
    assert bool(((found.mean(0) - wanted).abs() < SIGMAS * error).all())


def test_a_prior_is_learned_fixed_or_given():
    layers = lambda: ([fg.BinaryLinear(4, 3)], [nn.Linear(3, 4)])  # noqa: E731
    learned = fg.Variational(*layers())
    assert isinstance(learned.prior, nn.Parameter)
    assert float(learned.prior.detach().abs().max()) == 0
    fixed = fg.Variational(*layers(), prior=torch.ones(3))
    assert not isinstance(fixed.prior, nn.Parameter)
    assert "prior" in fixed.state_dict()
    own = nn.Parameter(torch.ones(3))
    assert fg.Variational(*layers(), prior=own).prior is own


def test_an_empty_batch_gives_nothing():
    model = random_model(3, 2)
    assert model(bits(4)[:0]).shape == (0,)
    assert model.sample(0).shape == (0, DATA)


def hooked(model: fg.Variational) -> fg.Variational:
    model.decoder[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def autocast(model: fg.Variational) -> Tensor:
    with torch.autocast("cpu"):
        return model(bits(2))


class Drawn(nn.Module):
    """Noise, new at every evaluation."""

    evaluations = 0

    def forward(self, x: Tensor) -> Tensor:
        Drawn.evaluations += 1
        return x + torch.randn_like(x)


def test_a_front_that_draws_is_evaluated_once():
    model = fg.Variational([Drawn(), fg.BinaryLinear(DATA, 2)], [nn.Linear(2, DATA)]).double()
    for estimator in (fg.PSA(), fg.DisARM(), fg.Concrete(), fg.Exact()):
        Drawn.evaluations = 0
        model(bits(4), estimator=estimator)
        assert Drawn.evaluations == 1


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1]


LINEAR = [fg.BinaryLinear(4, 3)], [nn.Linear(3, 4)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.Variational(*LINEAR, entropy="none"), "entropy='none'.: choose 'analytic' or 'sampled'"),
        (lambda: fg.Variational(fg.BinaryLinear(4, 3), [nn.Linear(3, 4)]), r"encoder=.*give a list of modules"),
        (lambda: fg.Variational([fg.BinaryLinear(4, 3)], []), "0 modules in the decoder for 1 latent layers; give one each"),
        (lambda: fg.Variational([nn.Linear(4, 3)], [nn.Linear(3, 4)]), "the network has no binary layer"),
        (lambda: fg.Variational(*LINEAR, prior=torch.zeros(1, 3)), r"give logits \[units\], one for each; got shape \[1, 3\]"),
        (
            lambda: fg.Variational([fg.BinaryLinear(4, 3), fg.BinaryLinear(3, 2)], [nn.Linear(3, 4), nn.Linear(3, 3)]),
            "module 2 of the decoder is for 3 units of layer 2, which has 2",
        ),
        (
            lambda: fg.Variational([fg.BinaryLinear(4, 3), fg.BinaryLinear(3, 2)], [nn.Linear(3, 4), nn.Linear(2, 2)]),
            "module 2 of the decoder is for 2 units of layer 1, which has 3",
        ),
        (
            lambda: fg.Variational([fg.BinaryLinear(4, 3), fg.BinaryLinear(3, 2)], [nn.Linear(3, 4), nn.Tanh()]),
            "module 2 of the decoder is Tanh; those that generate latents are nn.Linear",
        ),
        (
            lambda: fg.Variational([fg.BinaryLinear(4, 3, weights="binary")], [nn.Linear(3, 4)]),
            "weights='binary'. is not known to be right where entropies are costs; use weights='real'",
        ),
        (
            lambda: fg.Variational([fg.BinaryConv2d(1, 1, 2)], [nn.Sequential(nn.Linear(4, 9))]),
            "how many units a convolution draws depends on its input; give prior=",
        ),
        (
            lambda: fg.Variational([fg.BinaryLinear(4, 3), nn.Unflatten(1, (3, 1, 1)), nn.AvgPool2d(1)], [nn.Linear(3, 4)]),
            "behind the last latent layer; put it in front of the decoder",
        ),
        (
            lambda: fg.Variational(
                [fg.Concat(fg.BinaryLinear(4, 3), fg.BinaryLinear(4, 3))], [nn.Linear(6, 4)], torch.zeros(6)
            ),
            "Branch in the encoder|modules in the decoder for 2 latent layers",
        ),
    ],
)
def test_models_that_would_be_wrong_are_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(bits(2), estimator=fg.ADF()), "ADF propagates means"),
        (lambda model: model(bits(2), estimator=fg.LocalReparam()), "LocalReparam propagates means"),
        (lambda model: model(bits(2), estimator=fg.PSA(inputs="mean")), r"inputs='mean'.*use inputs='sampled' or 'auto'"),
        (lambda model: model(bits(2), estimator="psa"), "pass an object"),
        (lambda model: model(3 * bits(2)), "targets must be from 0 to 1"),
        (lambda model: model(bits(2), noise=[torch.zeros(2, 3)]), "1 tensors were handed in for 2 binary layers"),
        (lambda model: model.log_likelihood(bits(2), 0), "at least one sample is needed"),
        (lambda model: model.sample(-1), "give the number of examples"),
        (
            lambda model: random_model(3, 2, entropy="sampled")(bits(2), estimator=fg.PSA()),
            "make the model with entropy='analytic'",
        ),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2)], [nn.Linear(2, DATA)], likelihood=fg.CrossEntropy)(
                torch.zeros(2, DATA).long()
            ),
            "CrossEntropy takes class indices",
        ),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2)], [nn.Linear(2, DATA)], likelihood=lambda x: x)(
                bits(2).float()
            ),
            "it gave Tensor; give fg.BernoulliLikelihood",
        ),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2)], [nn.Sequential(Halved())])(
                bits(2).float(), estimator=fg.ARM()
            ),
            r"must map states \[2, 2\] to outputs \[batch, ...\], it gave \[1, 2\]",
        ),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2)], [nn.Linear(2, DATA + 1)])(
                bits(2).float(), estimator=fg.ARM()
            ),
            "the data have 3 values per example, the decoder gives 4 outputs",
        ),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2)], [nn.Linear(2, DATA + 1)])(bits(2).float()),
            "the target has 3 values per example, the head 4",
        ),
        (lambda model: model(bits(2), estimator=MeanOfDraws(fg.PSA(), 2)), "takes single draws"),
        (lambda model: hooked(model)(bits(2)), "module 2 of the decoder is Linear with hooks"),
        (lambda model: autocast(model), "more digits than autocast leaves"),
        (
            lambda model: fg.Variational([fg.BinaryLinear(DATA, 2, norm=nn.BatchNorm1d(2))], [nn.Linear(2, DATA)])(
                bits(2).float()
            ),
            "takes its statistics from the batch",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(call, message):
    with pytest.raises(fg.InputError, match=message):
        call(random_model(3, 2))
