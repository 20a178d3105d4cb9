"""Estimators of sampled paths on binary weights that are drawn, which the examples of a batch share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from unbiasedness import Broken, assert_caught, assert_unbiased, binary_weight_net, perfect_baseline

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators._paths import Path
from flipgrad.noise import sign
from flipgrad.sampling import Apart, Mirrored, fresh
from random_tensors import normal
from reference import assert_same, gradients

# Noise beyond any latent weight: its sign decides.
FAR = 1e6

# With the draws in each group that a 5 % error needs to be seen.
SAMPLED = {fg.REINFORCE: 3000, fg.ARM: 4000, fg.DisARM: 3000, fg.ARMS: 1100, fg.BitFlip: 2900, fg.LEG: 1200}
UNITS_ONLY = [fg.MuProp, fg.REBAR, fg.RELAX, fg.DoubleCV, fg.FlipCV]

each = pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: kind.__name__)


def estimator(kind, *problem) -> fg.PathEstimator:
    """One whose noise is as small as it can be, for a ``problem``."""
    return kind(perfect_baseline(*problem)) if kind is fg.REINFORCE and problem else kind()


def branches() -> list[nn.Module]:
    """A convolution with groups and padding, a norm, a scale, branches, and a layer with real weights."""
    options = {"weights": "binary", "weight_noise": fg.Normal(0.9)}
    return [
        nn.Conv2d(1, 2, 3, padding=1),
        fg.BinaryConv2d(2, 4, 2, groups=2, padding=1, **options),
        nn.AvgPool2d(2),
        fg.BinaryConv2d(4, 2, 2, norm=fg.ScaleShift(2), weights="binary", weight_noise=fg.Laplace(0.5)),
        nn.Flatten(),
        fg.Concat(nn.Identity(), fg.BinaryLinear(2, 3, **options), fg.BinaryLinear(2, 2)),
        fg.BinaryLinear(7, 3, noise=fg.Normal(), **options),
    ]


def stream() -> list[nn.Module]:
    """Residual blocks, whose weights act on the stream behind their states."""
    options = {"weights": "binary", "weight_noise": fg.Normal(0.9)}
    return [
        fg.ResidualConv2d(1, 2, 3, padding=1, norm=fg.ScaleShift(1), **options),
        fg.ResidualConv2d(2, 2, 3, padding=1, branch_norm=fg.ScaleShift(2), **options),
        nn.AvgPool2d(3),
        nn.Flatten(),
        fg.ResidualLinear(2, 2, noise=fg.Normal(), prelu=True),
        fg.Sign(),
        fg.BinaryLinear(2, 3, **options),
    ]


BODIES = pytest.mark.parametrize("body", [branches, stream], ids=lambda body: body.__name__)


def problem(body=branches) -> tuple[fg.Sequential, Tensor, fg.CrossEntropy]:
    """Layers with drawn weights, and a head that is not linear, in float64; 5 examples."""
    torch.manual_seed(0)
    net = fg.Sequential(*body(), head=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()
    for name, parameter in net.named_parameters():
        nn.init.normal_(parameter, 1.0 if "scale" in name else 0.0, 0.2 if parameter.dim() == 1 else 0.8)
    return net, normal(5, 1, 3, 3), fg.CrossEntropy(torch.tensor([0, 1, 2, 1, 0]))


def drawing(net: fg.Sequential) -> list[fg.BinaryLayer]:
    return [layer for layer in net.binary_layers if layer.weight_noise is not None]


def a_draw(net: fg.Sequential, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Noise of units and of weights."""
    units = [z.expand(len(x), *z.shape[1:]) for z in net.member(x, generator=torch.Generator().manual_seed(1)).noise]
    generator = torch.Generator().manual_seed(2)
    return [z + normal(*z.shape, seed=k) for k, z in enumerate(units)], [
        layer.weight_noise.sample_like(layer.weight, generator=generator) for layer in drawing(net)
    ]


def losses_at(net: fg.Sequential, x: Tensor, objective, units: list[Tensor], signs: list[Tensor]) -> Tensor:
    """The losses [B] with these weights, by an ordinary pass."""
    with torch.no_grad():
        return objective(net(x, noise=units, weight_noise=[-FAR * w for w in signs]))


def test_no_estimator_of_paths_is_forgotten():
    paths = {kind for kind in ESTIMATORS.values() if issubclass(kind, fg.PathEstimator)}
    assert paths == SAMPLED.keys() | set(UNITS_ONLY)


@each
def test_is_unbiased(kind):
    net, x, y = binary_weight_net()
    assert_unbiased(net, x, y, estimator(kind, net, x, y), SAMPLED[kind])


ERRORS = {"a factor": (lambda term: 1.05 * term, 1.0), "nothing": (lambda term: 0 * term, 0.05)}


@pytest.mark.parametrize("kind", [fg.REINFORCE, fg.LEG], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("error", ERRORS)
def test_a_broken_variant_is_caught(kind, error):
    (weight_error, share), (net, x, y) = ERRORS[error], binary_weight_net()
    broken = Broken(estimator(kind, net, x, y), weight_error=weight_error)
    # Twice the draws: an error of 5 % is to be seen whichever way the mean has strayed.
    assert_caught(net, x, y, broken, 2 * share * SAMPLED[kind])


@each
def test_each_loss_has_the_gradient_of_its_own_example(kind):
    """Where the objective of one example alone is not 0, nothing else has a gradient in the weights that all share."""
    net, x, objective = problem()
    latent = [layer.weight for layer in drawing(net)]
    own = torch.eye(5, dtype=x.dtype)[2]
    losses = net(x, lambda outputs: objective(outputs) * own, estimator=kind(), generator=torch.Generator().manual_seed(0))
    total = torch.autograd.grad(losses.sum(), latent, retain_graph=True)
    assert any(bool(g.any()) for g in total)
    for b, loss in enumerate(losses):
        for g, expected in zip(torch.autograd.grad(loss, latent, retain_graph=True), total, strict=True):
            assert torch.equal(g, expected if b == 2 else torch.zeros_like(g))


@BODIES
@pytest.mark.parametrize("kind", [fg.ARM, fg.DisARM], ids=lambda kind: kind.__name__)
def test_antithetic_estimators_are_their_formula(kind, body):
    """With the units' noise at its median, so that continuations depend on the weights alone."""
    net, x, objective = problem(body)
    z, still = a_draw(net, x)[1], Apart(lambda noise, a: torch.zeros_like(a), fresh(None))
    signs = [sign(layer.weight.detach() - noise) for layer, noise in zip(drawing(net), z, strict=True)]
    units = [torch.zeros((), dtype=x.dtype)] * len(net.binary_layers)
    f, counts = losses_at(net, x, objective, units, signs), torch.arange(1.0, 6, dtype=x.dtype)
    remaining = iter(z)
    draw = replace(still, weights=lambda noise, a: next(remaining))
    losses = kind().losses(net.network(), Batch(x, objective, draw))
    found = torch.autograd.grad(losses @ counts, [layer.weight for layer in drawing(net)])
    for k, (layer, gradient) in enumerate(zip(drawing(net), found, strict=True)):
        p, u = layer.weight_noise.cdf(layer.weight), layer.weight_noise.cdf(z[k])
        first, second = 2.0 * (u > 1 - p) - 1, 2.0 * (u < p) - 1
        assert_same(second, signs[k].float())
        difference = losses_at(net, x, objective, units, [*signs[:k], first.double(), *signs[k + 1 :]]) - f
        weight = u - 0.5 if kind is fg.ARM else (first - second) / 4 * torch.maximum(p, 1 - p)
        (slope,) = torch.autograd.grad(torch.logit(p).sum(), layer.weight, retain_graph=True)
        assert_same(gradient, (difference @ counts) * weight.detach() * slope)
    assert any(bool(g.any()) for g in found)


@BODIES
def test_reinforce_is_its_formula(body):
    net, x, objective = problem(body)
    units, z = a_draw(net, x)
    signs = [sign(layer.weight.detach() - noise) for layer, noise in zip(drawing(net), z, strict=True)]
    f, counts = losses_at(net, x, objective, units, signs), torch.arange(1.0, 6, dtype=x.dtype)
    losses = net(x, objective, estimator=fg.REINFORCE(fg.ConstantBaseline(0.25)), noise=units, weight_noise=z)
    assert_same(losses.detach(), f)
    found = torch.autograd.grad(losses @ counts, [layer.weight for layer in drawing(net)])
    for layer, w, gradient in zip(drawing(net), signs, found, strict=True):
        assert_same(gradient, ((f - 0.25) @ counts) * layer.weight_noise.score(w, layer.weight.detach()))


@BODIES
def test_leg_is_its_formula(body):
    """Every weight flipped in turn in an ordinary pass, for the whole batch, with all noise as it was."""
    net, x, objective = problem(body)
    units, z = a_draw(net, x)
    signs = [sign(layer.weight.detach() - noise) for layer, noise in zip(drawing(net), z, strict=True)]
    f, counts = losses_at(net, x, objective, units, signs), torch.arange(1.0, 6, dtype=x.dtype)
    losses = net(x, objective, estimator=fg.LEG(), noise=units, weight_noise=z)
    found = torch.autograd.grad(losses @ counts, [layer.weight for layer in drawing(net)])
    for k, (layer, gradient) in enumerate(zip(drawing(net), found, strict=True)):
        expected = torch.zeros_like(gradient).flatten()
        for i in range(len(expected)):
            other = [w.clone() for w in signs]
            other[k].view(-1)[i] *= -1
            expected[i] = signs[k].view(-1)[i] * (f - losses_at(net, x, objective, units, other)) @ counts
        assert_same(gradient, layer.weight_noise.pdf(layer.weight.detach()) * expected.view_as(gradient))


@BODIES
def test_continuations_keep_the_weights_of_the_path(body):
    """With all the units' noise at its median a continuation with nothing changed is the path itself."""
    net, x, objective = problem(body)

    still = Apart(lambda noise, a: torch.zeros_like(a), fresh(None))
    path = Path.sample(net.network(), Batch(x, objective, still))
    for k in range(len(path.states)):
        assert_same(path.tail(k, path.states[k]), path.losses.detach())
        assert_same(path.replayed(k, path.states[k][None])[0], path.losses.detach())
        assert_same(path.continued(k, path.states[k], lambda call: sign(call.affine(call.x))), path.losses.detach())
    assert [weights.k for weights in path.weights] == ([0, 1, 2, 4] if body is branches else [0, 1, 4])
    for weights in path.weights:
        assert_same(weights.tail(weights.states), path.losses.detach())
        assert_same(weights.replayed(weights.states[None])[0], path.losses.detach())
    assert any(bool((w.replayed(-w.states[None])[0] != path.losses).any()) for w in path.weights)


def test_a_layer_that_stands_twice_draws_its_weights_twice():
    """Its gradient is the sum of those of two layers with the same parameters."""
    torch.manual_seed(0)
    tied = fg.BinaryLinear(2, 2, weights="binary", weight_noise=fg.Logistic(0.8))
    net = fg.Sequential(tied, tied, head=nn.Linear(2, 3)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    untied = fg.Sequential(
        *(fg.BinaryLinear(2, 2, weights="binary", weight_noise=fg.Logistic(0.8)) for _ in range(2)), head=net.head
    ).double()
    for layer in untied.binary_layers:
        layer.load_state_dict(tied.state_dict())
    x, objective = normal(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 2]))
    z = [normal(3, 2, seed=1), normal(3, 2, seed=2)]
    w = [normal(2, 2, seed=3), normal(2, 2, seed=4)]
    for kind in (fg.REINFORCE, fg.LEG):
        found, apart = (gradients(n(x, objective, estimator=kind(), noise=z, weight_noise=w).sum(), n) for n in (net, untied))
        for name in ("weight", "bias", "weight_scale"):
            assert_same(found[f"0.{name}"], apart[f"0.{name}"] + apart[f"1.{name}"])


@each
def test_nothing_is_as_large_as_the_examples_times_the_weights(kind):
    """For the way back; but in LEG, which has a loss of every example for every flip."""
    net = fg.Sequential(
        fg.BinaryLinear(16, 16, weights="binary", weight_noise=fg.Logistic()),
        fg.BinaryLinear(16, 16, weights="binary", weight_noise=fg.Logistic()),
        head=nn.Linear(16, 3),
    )
    x, objective = torch.randn(40, 16), fg.CrossEntropy(torch.zeros(40, dtype=torch.long))
    sizes = []
    with saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        net(x, objective, estimator=kind()).mean().backward()
    assert max(sizes) <= (40 * 256 if kind is fg.LEG else 40 * 16)


@each
def test_baselines_halves_empty_batches_and_autocast(kind):
    net, x, objective = problem()
    net.float()
    x = x.float()
    latent = [layer.weight for layer in drawing(net)]
    losses = fg.bounds.mean_losses(net, x, objective, 2, estimator=kind(), antithetic=True)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(losses.sum(), latent))
    none = fg.CrossEntropy(torch.zeros(0, dtype=torch.long))
    for g in torch.autograd.grad(net(x[:0], none, estimator=kind()).sum(), latent):
        assert not g.any()
    with torch.autocast("cpu", torch.bfloat16):
        losses = net(x, objective, estimator=kind())
    assert losses.dtype == torch.float32
    assert all(g.dtype == torch.float32 and bool(torch.isfinite(g).all()) for g in torch.autograd.grad(losses.sum(), latent))


def test_a_learned_baseline_guesses_the_losses_of_drawn_weights():
    net, x, objective = problem()
    baseline = nn.Sequential(nn.Flatten(), nn.Linear(9, 1)).double()
    units, z = a_draw(net, x)
    losses = net(x, objective, estimator=fg.REINFORCE(fg.LearnedBaseline(baseline)), noise=units, weight_noise=z)
    (learned,) = torch.autograd.grad(losses.sum(), [baseline[1].bias], retain_graph=True)
    assert_same(learned, 2 * (baseline(x)[:, 0] - losses).sum().detach()[None])
    guessed = net(x, objective, estimator=fg.REINFORCE(fg.ConstantBaseline(baseline(x)[:, 0])), noise=units, weight_noise=z)
    latent = [layer.weight for layer in drawing(net)]
    assert_same(torch.autograd.grad(losses.sum(), latent), torch.autograd.grad(guessed.sum(), latent))


def test_halves_of_weights_are_no_halves_of_a_batch():
    """Where the second half of a batch has the opposite noise, weights and what is drawn for them are independent."""
    net = fg.Sequential(fg.BinaryLinear(3, 6, weights="binary", weight_noise=fg.Logistic()), head=nn.Linear(6, 3))
    batch = Batch(torch.randn(4, 3), fg.CrossEntropy(torch.zeros(4, dtype=torch.long)), Mirrored(fresh(None)))
    path = Path.sample(net.network(), batch)
    assert torch.equal(path.z[0][:2], -path.z[0][2:])
    (weights,) = path.weights
    for drawn in (weights.z[0], weights.uniform(torch.zeros(6, 3)) - 0.5):
        assert (drawn[:3] + drawn[3:]).abs().min() > 0
    mirrored = path.units(0).uniform(torch.zeros(4, 6))
    assert torch.allclose(mirrored[:2], 1 - mirrored[2:])


@pytest.mark.parametrize("kind", [fg.ARMS, fg.BitFlip], ids=lambda kind: kind.__name__)
def test_weight_noise_may_be_handed_in_where_more_is_drawn_for_weights(kind):
    net, x, objective = problem()
    units, z = a_draw(net, x)
    net(x, objective, estimator=kind(), weight_noise=z).sum().backward()
    with pytest.raises(fg.InputError, match="noise: this estimator draws more than once per layer"):
        net(x, objective, estimator=kind(), noise=units, weight_noise=z)


@each
def test_weights_that_are_not_drawn_are_refused(kind):
    net, x, objective = problem()
    net.binary_layers[1].weight_noise = None
    message = rf"^{kind.__name__} takes binary weights for random variables.*give the layer a weight_noise.*or use fg.PSA"
    with pytest.raises(fg.InputError, match=message):
        net(x, objective, estimator=kind())


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("kind", UNITS_ONLY, ids=lambda kind: kind.__name__)
def test_estimators_with_a_slope_for_each_example_refuse_by_name(kind, drawn):
    net, x, objective = problem()
    if not drawn:
        net.binary_layers[0].weight_noise = None
    message = rf"^{kind.__name__} has no rule for binary weights: its .* for each example\. Use fg\.PSA.*fg\.DisARM"
    with pytest.raises(fg.InputError, match=message):
        net(x, objective, estimator=kind())
    if kind not in (fg.MuProp, fg.FlipCV):
        with pytest.raises(fg.InputError, match=message):
            kind().variance_loss(net, x, objective)


def test_an_estimator_of_units_alone_refuses_by_name():
    class Mine(fg.PathEstimator):
        unbiased, citation = True, "none"

        def gradient(self, path, k):
            return torch.zeros_like(path.a[k])

    net, x, objective = problem()
    with pytest.raises(fg.InputError, match=r"^Mine has no rule for binary weights: .*write products\(variables\)"):
        net(x, objective, estimator=Mine())


@pytest.mark.parametrize("kind", [*SAMPLED, fg.Exact], ids=lambda kind: kind.__name__)
def test_the_bound_of_copies_that_share_their_weights_is_refused(kind):
    net, x, objective = problem()
    with pytest.raises(fg.InputError, match=rf"copies share .* binary weights, which {kind.__name__} takes .*use fg.PSA"):
        fg.bounds.bound_losses(net, x, objective, 3, estimator=kind())
