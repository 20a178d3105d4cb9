"""Binary weights: what layers and networks do with them, and estimators' gradients in them against enumeration."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.contract import LayerCall
from flipgrad.errors import InputError
from flipgrad.exact import enumerate_states
from flipgrad.gradeval.draws import Problem, one_by_one, stream, vectorised
from flipgrad.noise import sign
from random_tensors import normal, states
from reference import assert_same, gradients, paper_psa

Gradients = dict[str, Tensor]
# Noise beyond any latent weight or pre-activation: its sign decides.
FAR = 1e6


def name_of(estimator: fg.Estimator) -> str:
    """The same in all processes, unlike what ``repr`` gives."""
    return type(estimator).__name__


def tiny(widths=(2, 2), *, noise=None, weight_noise=None, norm=None, inputs=2, seed=0) -> fg.Sequential:
    """A fully connected net of few binary weights that are drawn, with parameters far from 0, in float64."""
    sizes = zip((inputs, *widths), widths, strict=False)
    weight_noise = weight_noise or fg.Logistic(0.8)
    layers = [
        fg.BinaryLinear(n, m, noise=noise, weights="binary", weight_noise=weight_noise, norm=norm and norm(m)) for n, m in sizes
    ]
    net = fg.Sequential(*layers, head=nn.Linear(widths[-1], 3)).double()
    return randomized(net, seed)


def randomized(net: fg.Sequential, seed: int = 0) -> fg.Sequential:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.double().parameters():
        nn.init.normal_(parameter, std=0.8, generator=generator)
    return net


def configurations(layers) -> list[list[Tensor]]:
    """All weights of the layers, one list of tensors for each configuration."""
    every = [enumerate_states(layer.weight.shape, layer.weight.detach()) for layer in layers]
    return [list(config) for config in product(*every)]


def mean_gradient(net: fg.Sequential, x: Tensor, y: Tensor, estimator: fg.Estimator) -> Gradients:
    """The expectation of the estimate for one example, as a sum over all weights and all joint states."""
    layers = net.binary_layers
    total = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    shapes = [states.shape[1:] for states in _states(net, x)]
    every = enumerate_states((sum(shape.numel() for shape in shapes),), x)
    joint = [part.reshape(-1, *shape) for part, shape in zip(every.split([s.numel() for s in shapes], 1), shapes, strict=True)]
    for weights in configurations(layers):
        log_p = sum(layer.weight_noise.log_prob(w, layer.weight).sum() for layer, w in zip(layers, weights, strict=True))
        log_p = log_p + _log_probability(layers, x, weights, joint)
        losses = net(
            x.expand(len(every), *x.shape[1:]),
            fg.CrossEntropy(y.expand(len(every))),
            estimator=estimator,
            noise=[-FAR * part for part in joint],
            weight_noise=[-FAR * w for w in weights],
        )
        for name, gradient in gradients(losses @ log_p.exp().detach(), net).items():
            total[name] += gradient
    return total


def _states(net: fg.Sequential, x: Tensor) -> list[Tensor]:
    """The states of every layer in one sampled pass."""
    found = []

    def visit(call: LayerCall) -> Tensor:
        found.append(call.sample(call.affine(call.x)))
        return found[-1]

    with torch.no_grad():
        net.run(net.front(x), visit, fg.sampling.fresh(None))
    return found


def _log_probability(layers, x: Tensor, weights: list[Tensor], joint: list[Tensor]) -> Tensor:
    """That of joint states [N, ...] of all layers, given their weights."""
    before, total = x.expand(len(joint[0]), *x.shape[1:]), torch.zeros(len(joint[0]), dtype=x.dtype)
    for layer, weight, after in zip(layers, weights, joint, strict=True):
        a = layer.affine((), weight)(before.flatten(1) if isinstance(layer, fg.BinaryLinear) else before)
        total = total + layer.noise.log_prob(after, a.view_as(after)).flatten(1).sum(1)
        before = after
    return total


def exact_gradient(net: fg.Sequential, x: Tensor, y: Tensor) -> Gradients:
    return gradients(fg.exact.expected_loss(net, x, fg.CrossEntropy(y)).sum(), net)


def example(inputs: int = 2, seed: int = 5) -> tuple[Tensor, Tensor]:
    return normal(1, inputs, seed=seed), torch.tensor([1])


@pytest.mark.parametrize("norm", [None, fg.ScaleShift])
@pytest.mark.parametrize(("weight_noise", "noise"), [(fg.Logistic(0.8), fg.Normal()), (fg.Normal(1.2), fg.Laplace())], ids=str)
def test_exact_sums_over_weights(weight_noise, noise, norm):
    """Losses, predictions and gradients against a loop over weights, and over states with them."""
    net = tiny(weight_noise=weight_noise, noise=noise, norm=norm, inputs=1)
    x, y = normal(4, 1, seed=3), torch.tensor([0, 1, 2, 1])
    objective = fg.CrossEntropy(y)
    expected, probabilities = torch.zeros(4, dtype=x.dtype), torch.zeros(4, 3, dtype=x.dtype)
    every = enumerate_states((4,), x)
    for weights in configurations(net.binary_layers):
        p = sum(layer.weight_noise.log_prob(w, layer.weight).sum() for layer, w in zip(net.binary_layers, weights, strict=True))
        for b in range(4):
            log_p = p + _log_probability(net.binary_layers, x[b : b + 1], weights, [every[:, :2], every[:, 2:]])
            outputs = net.head(every[:, 2:])
            one_hot = nn.functional.one_hot(torch.tensor(b), 4).to(x.dtype)
            losses = fg.CrossEntropy(y[b].expand(len(every)))(outputs)
            expected = expected + one_hot * (log_p.exp() * losses).sum()
            probabilities = probabilities + one_hot[:, None] * (log_p.exp()[:, None] * outputs.softmax(-1)).sum(0)
    found = fg.exact.expected_loss(net, x, objective)
    assert_same(found, expected)
    assert_same(gradients(found.sum(), net), gradients(expected.sum(), net))
    assert_same(fg.exact.predictive(net, x), probabilities)
    marginal = -probabilities.log().gather(1, y[:, None])[:, 0]
    assert_same(fg.exact.marginal_loss(net, x, objective), marginal)
    loss = net(x, objective, estimator=fg.Exact())
    assert_same(loss, expected)


def test_exact_sums_over_the_weights_of_residual_blocks():
    block = fg.ResidualLinear(2, 2, norm=fg.ScaleShift(2), weights="binary", weight_noise=fg.Normal(0.9))
    net = randomized(fg.Sequential(block, fg.Sign(), head=nn.Linear(2, 3)))
    x, objective = normal(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 2]))
    found, twin, expected = fg.exact.expected_loss(net, x, objective), copy.deepcopy(net), 0.0
    twin[0].branch.weight_noise = None
    for signs in enumerate_states((2, 2), x):
        twin[0].branch.weight.data.copy_(signs)
        p = block.weight_noise.log_prob(signs, block.weight).sum().exp()
        expected = expected + p * fg.exact.expected_loss(twin, x, objective).detach()
    assert_same(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), [block.branch.weight])
    assert_same(gradient, torch.autograd.grad(expected.sum(), [block.branch.weight])[0])


def test_exact_says_how_many_drawn_weights_fit():
    net = tiny((3, 4))
    with pytest.raises(InputError, match=r"18 binary weights are drawn.*up to 14 drawn weights fit"):
        fg.exact.expected_loss(net, *_problem())


def _problem() -> tuple[Tensor, fg.CrossEntropy]:
    x, y = example()
    return x, fg.CrossEntropy(y)


def test_exact_of_weights_that_are_not_drawn_is_that_of_their_signs():
    """A step function of the latent weights: its derivative in them is 0, in everything else the real-weight network's."""
    net = fg.Sequential(fg.BinaryLinear(2, 3, weights="binary"), fg.BinaryLinear(3, 3, weights="binary"), head=nn.Linear(3, 3))
    randomized(net)
    twin = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), head=copy.deepcopy(net.head)).double()
    for layer, real in zip(net.binary_layers, twin.binary_layers, strict=True):
        real.weight.data.copy_(layer.effective_weight())
        real.bias.data.copy_(layer.bias)
    x, objective = _problem()
    losses = fg.exact.expected_loss(net, x, objective)
    assert_same(losses, fg.exact.expected_loss(twin, x, objective))
    found, other = gradients(losses.sum(), net), gradients(fg.exact.expected_loss(twin, x, objective).sum(), twin)
    assert not found["0.weight"].any()
    assert_same(found["1.bias"], other["1.bias"])
    assert_same(found["0.weight_scale"], (other["0.weight"] * sign(net[0].weight.detach())).sum(1))


PSAS = {
    "paper": paper_psa(exact=True),
    "default": fg.PSA(exact=True),
    "rao-blackwell": fg.PSA(inputs="rao-blackwell", exact=True),
}


@pytest.mark.parametrize("name", PSAS)
def test_psa_is_unbiased_with_one_fully_connected_layer(name):
    """A weight moves one unit of an example, in whose mean the expected loss is linear; the same in latent weights' means."""
    net = tiny((3,), weight_noise=fg.Normal(0.9))
    x, y = example()
    assert_same(mean_gradient(net, x, y, PSAS[name]), exact_gradient(net, x, y))


@pytest.mark.parametrize("name", ["paper", "rao-blackwell"])
def test_psa_is_unbiased_in_the_last_fully_connected_layer_of_every_net(name):
    net = tiny((2, 2), noise=fg.Normal(), norm=fg.ScaleShift, inputs=1)
    x, y = example(1)
    mean, exact = mean_gradient(net, x, y, PSAS[name]), exact_gradient(net, x, y)
    for key in exact:
        if key.startswith(("1.", "head.")):
            assert_same(mean[key], exact[key])
    assert not torch.allclose(mean["0.weight"], exact["0.weight"], rtol=1e-3)


def test_psa_is_unbiased_with_one_unit_in_every_layer():
    """The weights of a layer are one more set of units before it, and the first such set may be as large as it likes."""
    net = tiny((1, 1, 1), inputs=3)
    x, y = example(3)
    assert_same(mean_gradient(net, x, y, PSAS["paper"]), exact_gradient(net, x, y))


def test_psa_is_biased_where_a_weight_moves_many_units():
    """A convolution's weight moves a unit at every place: the loss is not linear in their means together."""
    layer = fg.BinaryConv2d(1, 1, 2, weights="binary", weight_noise=fg.Logistic(0.8))
    net = randomized(fg.Sequential(layer, nn.Flatten(), head=nn.Linear(4, 3)))
    x, y = normal(1, 1, 3, 3), torch.tensor([2])
    exact = exact_gradient(net, x, y)
    errors = {
        key: (mean_gradient(net, x, y, estimator)["0.weight"] - exact["0.weight"]).norm() / exact["0.weight"].norm()
        for key, estimator in (("psa", PSAS["paper"]), ("st", fg.ST()), ("hard", fg.HardST()))
    }
    assert 1e-3 < errors["psa"] < 0.5 * errors["st"] < errors["hard"]


def test_psa_is_less_biased_than_straight_through_in_deep_nets():
    """In the latent weights of both layers, over several nets: the geometric mean of the relative biases."""
    logs = {"psa": [], "st": [], "hard": []}
    for seed in range(4):
        net, (x, y) = tiny((2, 2), inputs=1, seed=seed), example(1, seed=seed)
        exact = exact_gradient(net, x, y)
        for key, estimator in (("psa", PSAS["paper"]), ("st", fg.ST()), ("hard", fg.HardST())):
            mean = mean_gradient(net, x, y, estimator)
            logs[key].append(((mean["0.weight"] - exact["0.weight"]).norm() / exact["0.weight"].norm()).log())
    psa, st, hard = (torch.stack(values).mean().exp() for values in logs.values())
    assert psa < 0.5 * st
    assert st < hard


@pytest.mark.parametrize("norm", [None, fg.ScaleShift])
@pytest.mark.parametrize("baseline", [None, fg.ConstantBaseline(0.7)], ids=["plain", "baseline"])
def test_reinforce_is_unbiased_in_fully_connected_nets(norm, baseline):
    net = tiny((2, 2), noise=fg.Normal(), weight_noise=fg.Laplace(0.9), norm=norm, inputs=1)
    x, y = example(1)
    assert_same(mean_gradient(net, x, y, fg.REINFORCE(baseline)), exact_gradient(net, x, y))


def test_reinforce_is_unbiased_in_convolutional_nets():
    layer = fg.BinaryConv2d(1, 1, 2, weights="binary", weight_noise=fg.Logistic(0.8))
    net = randomized(fg.Sequential(layer, nn.Flatten(), head=nn.Linear(4, 3)))
    x, y = normal(1, 1, 3, 3), torch.tensor([2])
    assert_same(mean_gradient(net, x, y, fg.REINFORCE()), exact_gradient(net, x, y))


def test_the_mean_of_averaged_inputs_is_that_of_sampled_ones():
    """In latent weights "posterior" inputs are the conditional expectation itself, not an approximation."""
    net = tiny((2, 2), noise=fg.Laplace(), inputs=1)
    x, y = example(1)
    sampled = mean_gradient(net, x, y, PSAS["paper"])
    for inputs in ("posterior", "rao-blackwell"):
        averaged = mean_gradient(net, x, y, fg.PSA(inputs=inputs, head="sampled", exact=True))
        assert_same(averaged["1.weight"], sampled["1.weight"])
        assert_same(averaged["1.weight_scale"], sampled["1.weight_scale"])


def literal(net: fg.Sequential, x: Tensor, y: Tensor, z, weights, estimator: str) -> Gradients:
    """Straight-through as five lines of torch: signs forward, the clamp, the identity or the mean's slope backward."""

    def through(value: Tensor, mean: Tensor) -> Tensor:
        return value.detach() + mean - mean.detach()

    def smooth(t: Tensor, noise: fg.Noise | None) -> Tensor:
        if estimator == "hard":
            return t.clamp(-1, 1)
        return t if noise is None else noise.mean_sign(t)

    h = x
    for layer, noise, weight in zip(net.binary_layers, z, weights, strict=True):
        binary = through(weight, smooth(layer.weight, layer.weight_noise))
        a = nn.functional.linear(h, binary * layer.weight_scale[:, None], layer.bias)
        h = through(sign(a.detach() - noise), smooth(a, layer.noise))
    return gradients(fg.CrossEntropy(y)(net.head(h)).sum(), net)


@pytest.mark.parametrize(("name", "estimator"), [("st", fg.ST()), ("hard", fg.HardST())])
@pytest.mark.parametrize("drawn", [True, False])
def test_straight_through_is_what_people_write(name, estimator, drawn):
    net = tiny((3, 4))
    x, y = normal(5, 2, seed=2), torch.tensor([0, 1, 2, 1, 0])
    z = [normal(5, layer.out_features, seed=k) for k, layer in enumerate(net.binary_layers)]
    weights = [sign(layer.weight.detach()) for layer in net.binary_layers]
    for layer in net.binary_layers:
        layer.weight_noise = layer.weight_noise if drawn else None
    if drawn:
        weights = [states(*layer.weight.shape, seed=7) for layer in net.binary_layers]
    handed = [-FAR * w for w in weights] if drawn else None
    losses = net(x, fg.CrossEntropy(y), estimator=estimator, noise=z, weight_noise=handed)
    assert_same(gradients(losses.sum(), net), literal(net, x, y, z, weights, name))


def test_weights_that_are_not_drawn_get_their_discrete_derivative_clipped_or_not():
    """PSA's derivative in the sign goes straight to the latent weight, unless that is beyond the clip."""
    net = tiny((3,), weight_noise=fg.Logistic())
    net[0].weight_noise = None
    net[0].weight.data = torch.tensor([[0.5, -1.5], [0.0, 2.0], [-0.2, 0.9]], dtype=torch.float64)
    x, y = normal(4, 2), torch.tensor([0, 1, 2, 1])
    z = [normal(4, 3, seed=1)]
    found = gradients(net(x, fg.CrossEntropy(y), estimator=paper_psa(exact=True), noise=z).sum(), net)["0.weight"]
    signs = sign(net[0].weight.detach())
    assert signs[1, 0] == 1
    # Flip each weight; the units' own discrete derivatives come from the head.
    h = sign(net[0].affine((), signs)(x) - z[0]).detach()
    loss = fg.CrossEntropy(y)
    expected = torch.zeros_like(signs)
    for j in range(3):
        flipped = h.clone()
        flipped[:, j] *= -1
        slope = h[:, j] * (loss(net.head(h)) - loss(net.head(flipped))) / 2
        for i in range(2):
            other = signs.clone()
            other[j, i] *= -1
            kept, moved = (net[0].noise.mean_sign(net[0].affine((), w)(x))[:, j] for w in (signs, other))
            expected[j, i] = (signs[j, i] * (kept - moved) / 2 * slope).sum()
    assert_same(found, expected)
    net[0].weight_clip = 1.0
    clipped = gradients(net(x, fg.CrossEntropy(y), estimator=paper_psa(exact=True), noise=z).sum(), net)["0.weight"]
    assert_same(clipped, torch.where(net[0].weight.abs() <= 1, found, 0.0))


@pytest.mark.parametrize("flips", [True, False])
def test_batch_statistics_are_differentiated_in_the_ordinary_way(flips):
    """PSA with BatchNorm in training mode: what a flip does with the statistics held, and the derivative through these."""
    layer = fg.BinaryLinear(4, 3, bias=False, norm=nn.BatchNorm1d(3), weights="binary").double()
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(layer.norm.weight, generator=torch.Generator().manual_seed(1))
    x, grad, noise = states(6, 4), normal(6, 3), layer.noise
    estimator = paper_psa(exact=True) if flips else fg.ST()
    (found,) = torch.autograd.grad(layer(x, estimator=estimator, binary=True), layer.weight, grad)
    signs = sign(layer.weight.detach()).requires_grad_()
    h = x @ signs.t()
    mean, deviation = h.mean(0), (h.var(0, correction=0) + layer.norm.eps).sqrt()
    a = (h - mean) / deviation * layer.norm.weight + layer.norm.bias
    (expected,) = torch.autograd.grad((noise.mean_sign(a) * grad).sum(), signs, retain_graph=True)
    if flips:
        held = (h - mean.detach()) / deviation.detach() * layer.norm.weight + layer.norm.bias
        (ordinary,) = torch.autograd.grad((noise.mean_sign(held) * grad).sum(), signs)
        scale = (layer.norm.weight / deviation).detach()
        moved = held.detach()[:, :, None] - 2 * scale[:, None] * signs.detach() * x[:, None]
        change = (noise.cdf(held.detach())[:, :, None] - noise.cdf(moved)) * grad[:, :, None]
        expected = expected - ordinary + signs.detach() * change.sum(0)
    assert_same(found, expected)


def test_weights_are_drawn_once_for_all_examples():
    layer = fg.BinaryLinear(3, 200, bias=False, noise=fg.Uniform(1e-9), weights="binary", weight_noise=fg.Logistic())
    nn.init.zeros_(layer.weight)
    x = torch.ones(2, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        first, second = layer(x, generator=generator), layer(x, generator=generator)
        again = layer(x, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first[0], first[1])
    assert torch.equal(first, again)
    assert 60 < (first[0] != second[0]).sum() < 140


def test_frequencies_of_weights_are_their_probabilities():
    latent = torch.linspace(-2, 2, 9)[:, None]
    layer = fg.BinaryLinear(1, 9, bias=False, noise=fg.Uniform(1e-9), weights="binary", weight_noise=fg.Normal(0.9))
    layer.weight.data.copy_(latent)
    generator, count = torch.Generator().manual_seed(0), 4000
    with torch.no_grad():
        drawn = torch.stack([layer(torch.ones(1, 1), generator=generator)[0] for _ in range(count)])
    p = fg.Normal(0.9).cdf(latent[:, 0])
    # 9 tests at 5 standard errors: a false alarm in 200,000 runs.
    assert ((drawn.mean(0) / 2 + 0.5 - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()


def convolutional(weight_noise=None, norm=None) -> fg.Sequential:
    torch.manual_seed(0)
    return fg.Sequential(
        fg.BinaryConv2d(1, 4, 3),
        fg.BinaryConv2d(4, 6, 3, padding=1, weights="binary", weight_noise=weight_noise, norm=norm and norm(6)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        fg.BinaryLinear(54, 5, weights="binary", weight_noise=weight_noise),
        head=nn.Linear(5, 3),
    ).double()


@pytest.mark.parametrize("weight_noise", [None, fg.Logistic(0.1)], ids=str)
def test_members_fix_weights_and_predictions_average_over_them(weight_noise):
    net, x = convolutional(weight_noise), normal(3, 1, 8, 8)
    generator = torch.Generator().manual_seed(3)
    member = net.member(x, generator=generator)
    assert len(member.noise) == 3
    assert [z.shape for z in member.weight_noise] == [net[k].weight.shape for k in (1, 4) if weight_noise]
    with torch.no_grad():
        assert torch.equal(member(x), member(x))
        handed = net(x, noise=member.noise, weight_noise=member.weight_noise)
        assert torch.equal(member(x), handed)
        mode = net.deterministic(x)
        zeros = [torch.zeros((), dtype=x.dtype)] * 3
        medians = zeros[:2] if weight_noise else None
        assert torch.equal(mode, net(x, noise=zeros, weight_noise=medians))
        predicted = net.predict(x, 4, generator=torch.Generator().manual_seed(5))
        generator = torch.Generator().manual_seed(5)
        passes = torch.stack([net(x, generator=generator).softmax(-1) for _ in range(4)])
    assert_same(predicted, passes.mean(0))
    if weight_noise:
        # With the units' noise handed in, what is left is that of the weights.
        with torch.no_grad():
            outputs = torch.stack([net(x, noise=member.noise, generator=generator) for _ in range(5)])
        assert outputs.std(0).max() > 1e-3


def test_opposite_noise_is_for_units_alone():
    """Both halves of an antithetic batch have the same weights."""
    net = tiny((4, 3))
    x = normal(3, 2).repeat(2, 1)
    generator = torch.Generator().manual_seed(0)
    seen = []

    def keep(layer, inputs, outputs):
        seen.append(outputs)

    net[0].register_forward_hook(keep)
    with torch.no_grad():
        net[0].noise = fg.Uniform(1e-9)
        net(x, fg.CrossEntropy(torch.zeros(6, dtype=torch.long)), generator=generator, antithetic=True)
    assert torch.equal(seen[0][:3], seen[0][3:])


@pytest.mark.parametrize("norm", [None, fg.ScaleShift, nn.BatchNorm2d])
def test_initialisation_whitens_by_the_scale_and_leaves_the_latent_weights(norm):
    net, x = convolutional(norm=norm), normal(40, 1, 8, 8)
    before = copy.deepcopy(net.state_dict())
    net.initialize(x, generator=torch.Generator().manual_seed(0)).eval()
    for k in (1, 4):
        assert torch.equal(net[k].weight, before[f"{k}.weight"])
    found = []

    def visit(call: LayerCall) -> Tensor:
        found.append(call.affine(call.x))
        return call.sample(found[-1])

    with torch.no_grad():
        net.run(x, visit, fg.sampling.fresh(torch.Generator().manual_seed(0)))
    a = found[1].transpose(0, 1).flatten(1)
    assert_same(a.mean(1), torch.zeros(6, dtype=x.dtype), 1e-6)
    assert_same(a.var(1, correction=0), torch.ones(6, dtype=x.dtype), 1e-4)


def test_a_float_checkpoint_goes_on_as_binary():
    """The weight is the latent one, and a scale that is missing is the mean size of an output's weights."""
    torch.manual_seed(0)
    real, binary = nn.Linear(4, 3), fg.BinaryLinear(4, 3, weights="binary")
    binary.load_state_dict(real.state_dict())
    assert torch.equal(binary.weight, real.weight)
    assert torch.equal(binary.weight_scale, real.weight.abs().mean(1))
    assert torch.equal(binary.effective_weight(), sign(real.weight) * real.weight.abs().mean(1, keepdim=True))
    other = fg.BinaryLinear(4, 3, weights="binary")
    binary.weight_scale.data.fill_(3.0)
    other.load_state_dict(binary.state_dict())
    assert torch.equal(other.weight_scale, binary.weight_scale)
    normed = fg.BinaryConv2d(2, 3, 3, weights="binary", norm=nn.BatchNorm2d(3))
    assert normed.weight_scale is None
    normed.load_state_dict(fg.BinaryConv2d(2, 3, 3, norm=nn.BatchNorm2d(3)).state_dict())


def test_a_graph_written_by_hand_is_sequential():
    net = tiny((3, 4))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net.binary_layers

        def forward(self, x, z, w):
            h = self.first(x, noise=z[0], weight_noise=w[0])
            return net.head(self.second(h, noise=z[1], weight_noise=w[1]))

    x, y = normal(5, 2), torch.tensor([0, 1, 2, 1, 0])
    z = [normal(5, 3, seed=1), normal(5, 4, seed=2)]
    w = [normal(3, 2, seed=3), normal(4, 3, seed=4)]
    estimator = paper_psa(exact=True, flip_head=False)
    expected = gradients(net(x, fg.CrossEntropy(y), estimator=estimator, noise=z, weight_noise=w).sum(), net)
    own = fg.use(Own(), estimator)
    assert_same(gradients(fg.CrossEntropy(y)(own(x, z, w)).sum(), net), expected)


@pytest.mark.parametrize(
    "estimator", [fg.PSA(exact=True), fg.ST(), fg.HardST(), fg.ZGR(), fg.Concrete(), fg.Tanh()], ids=name_of
)
def test_vectorised_draws_are_those_one_by_one(estimator):
    net = tiny((3, 2))
    problem = Problem(net, normal(4, 2), fg.CrossEntropy(torch.tensor([0, 1, 2, 1])))
    noise = []
    for layer, (n, m) in zip(net.binary_layers, [(2, 3), (3, 2)], strict=True):
        noise += [normal(6, m, n, seed=len(noise)), normal(6, 4, m, seed=len(noise) + 10)]
        assert layer.weight.shape == (m, n)
    if isinstance(estimator, fg.Tanh):
        noise = []
    draw = fg.sampling.fresh(torch.Generator())
    assert_same(vectorised(problem, estimator, 6, draw, noise), one_by_one(problem, estimator, 6, draw, noise))


def test_gradeval_measures_latent_weights():
    net = tiny((2, 2))
    x, y = normal(3, 2), torch.tensor([0, 1, 2])
    estimators = [fg.PSA(), fg.ST(), fg.REINFORCE(), fg.ARMS(), fg.LEG()]
    result = fg.gradeval.evaluate(net, x, fg.CrossEntropy(y), estimators, samples=200, seed=0)
    assert "layer 1" in str(result)
    assert all(measured.vectorised for measured in result.estimators.values())
    rmse = [result.accuracy(name, "layer 1").rmse[0] for name in ("PSA", "LEG", "ARMS", "REINFORCE")]
    assert rmse == sorted(rmse)


def test_relaxations_of_drawn_weights_are_ordinary_functions():
    net = tiny((3, 2))
    x, y = normal(4, 2), torch.tensor([0, 1, 2, 1])
    h, objective = x, fg.CrossEntropy(y)
    for layer in net.binary_layers:
        weight = layer.weight_noise.mean_sign(layer.weight) * layer.weight_scale[:, None]
        h = layer.noise.mean_sign(nn.functional.linear(h, weight, layer.bias))
    expected = objective(net.head(h)).sum()
    found = net(x, objective, estimator=fg.Tanh()).sum()
    assert_same(gradients(found, net), gradients(expected, net))
    z = [normal(4, layer.out_features, seed=k) for k, layer in enumerate(net.binary_layers)]
    w = [normal(*layer.weight.shape, seed=k + 5) for k, layer in enumerate(net.binary_layers)]
    h = x
    for layer, unit_noise, weight_noise in zip(net.binary_layers, z, w, strict=True):
        weight = torch.tanh((layer.weight - weight_noise) / 1.4) * layer.weight_scale[:, None]
        h = torch.tanh((nn.functional.linear(h, weight, layer.bias) - unit_noise) / 1.4)
    found = net(x, objective, estimator=fg.Concrete(0.7), noise=z, weight_noise=w).sum()
    assert_same(gradients(found, net), gradients(objective(net.head(h)).sum(), net))


# Those of sampled paths are in estimators/test_drawn_weights.py.
@pytest.mark.parametrize("estimator", [fg.ADF(), fg.LocalReparam(), fg.GumbelRao()], ids=name_of)
def test_estimators_without_a_rule_refuse_by_name(estimator):
    net = tiny((3, 2))
    with pytest.raises(InputError, match=rf"{type(estimator).__name__} has no rule for binary weights: use fg.PSA"):
        net(normal(4, 2), fg.CrossEntropy(torch.zeros(4, dtype=torch.long)), estimator=estimator)


@pytest.mark.parametrize("estimator", [fg.Tanh(), fg.Concrete(), fg.ZGR()], ids=name_of)
def test_relaxations_refuse_weights_that_are_not_drawn(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 3, weights="binary"), head=nn.Linear(3, 3))
    with pytest.raises(InputError, match=rf"{type(estimator).__name__} relaxes .* give the layer a weight_noise"):
        net(torch.randn(4, 2), fg.CrossEntropy(torch.zeros(4, dtype=torch.long)), estimator=estimator)


def test_going_backward_without_an_estimator_is_an_error():
    layer = fg.BinaryLinear(2, 3, weights="binary")
    with pytest.raises(RuntimeError, match="without an estimator"):
        layer(torch.randn(4, 2)).sum().backward()


BAD = {
    r"BinaryLinear\(weights='ternary'\): choose 'real' or 'binary'": {"weights": "ternary"},
    r"options of weights='binary', these are real": {"weight_noise": fg.Logistic()},
    r"weight_clip are options of weights='binary'": {"weight_clip": 1.0},
    r"weight_noise=0.1\): give a noise, e.g. fg.Logistic\(0.1\)": {"weights": "binary", "weight_noise": 0.1},
    r"weight_clip=-1.0\): the limit must be a positive number": {"weights": "binary", "weight_clip": -1.0},
    r"weight_clip='a'\): the limit must be a positive number": {"weights": "binary", "weight_clip": "a"},
    r"weight_clip is for weights that are not drawn": {"weights": "binary", "weight_clip": 1.0, "weight_noise": fg.Normal()},
}


@pytest.mark.parametrize("message", BAD)
def test_options_that_do_not_go_together_are_refused(message):
    with pytest.raises(InputError, match=message):
        fg.BinaryLinear(2, 3, **BAD[message])


def test_a_norm_that_was_taken_away_is_missed():
    layer = fg.BinaryLinear(2, 3, weights="binary", norm=fg.ScaleShift(3))
    layer.norm = None
    with pytest.raises(InputError, match=r"binary weights need a scale .* layer.norm = fg.ScaleShift"):
        layer(torch.randn(4, 2))


def test_weight_noise_that_does_not_fit_is_refused():
    net = tiny((3, 2))
    x = normal(4, 2)
    with pytest.raises(InputError, match=r"noise of shape \[2, 3\] does not broadcast to weights \[3, 2\]"):
        net(x, weight_noise=[torch.zeros(2, 3), torch.zeros(2, 3)])
    with pytest.raises(InputError, match=r"weight_noise: 1 tensors were handed in for 2 layers that draw their weights"):
        net(x, weight_noise=[torch.zeros(3, 2)])
    with pytest.raises(InputError, match="BinaryLinear draws no weights; give it weight_noise="):
        fg.BinaryLinear(2, 3)(torch.randn(4, 2), weight_noise=torch.zeros(3, 2))


def test_flips_of_binary_weights_are_explained():
    assert "rank one" in fg.flips.explain(fg.BinaryLinear(4, 4, weights="binary"))


def test_layers_show_their_weights():
    assert "weights='binary', weight_noise=Normal(scale=0.5)" in repr(
        fg.BinaryConv2d(2, 3, 3, weights="binary", weight_noise=fg.Normal(0.5))
    )


@pytest.mark.parametrize("padding_value", [0, 1, -1])
@pytest.mark.parametrize("norm", [None, fg.ScaleShift])
def test_a_network_with_binary_weights_is_the_one_with_real_weights_of_the_same_size(padding_value, norm):
    """Estimators' gradients in everything but the weights themselves, given the same draws: PSA exact, and straight-through."""

    def net(**weights) -> fg.Sequential:
        torch.manual_seed(0)
        layers = (
            fg.BinaryConv2d(1, 3, 3),
            fg.BinaryConv2d(3, 4, 3, stride=2, padding=1, padding_value=padding_value, norm=norm and norm(4), **weights),
        )
        return randomized(fg.Sequential(*layers, nn.Flatten(), head=nn.Linear(36, 3)))

    binary, real = net(weights="binary"), net()
    real.load_state_dict(
        {name: value for name, value in binary.state_dict().items() if not name.endswith("weight_scale")}, strict=True
    )
    scale = 1 if norm else binary[1].weight_scale.detach()[:, None, None, None]
    real[1].weight.data.copy_(sign(binary[1].weight.detach()) * scale)
    x, objective = normal(3, 1, 8, 8), fg.CrossEntropy(torch.tensor([0, 1, 2]))
    for estimator in (paper_psa(exact=True), fg.PSA(exact=True), fg.ST(), fg.ST(inputs="posterior", exact=True)):
        draws = [normal(3, 3, 6, 6, seed=1), normal(3, 4, 3, 3, seed=2)]
        found, expected = (gradients(n(x, objective, estimator=estimator, noise=draws).sum(), n) for n in (binary, real))
        for key in ("0.weight", "0.bias", "1.bias", "head.weight"):
            assert_same(found[key], expected[key])
        if norm and "sampled" in (estimator.inputs,):
            assert_same(found["1.norm.scale"], expected["1.norm.scale"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST()], ids=name_of)
def test_a_step_compiles_as_one_graph(estimator):
    net, x = convolutional(fg.Logistic(0.2), fg.ScaleShift).float(), normal(3, 1, 8, 8).float()
    objective = fg.CrossEntropy(torch.tensor([0, 1, 2]))
    z = [normal(3, 4, 6, 6), normal(3, 6, 6, 6), normal(3, 5)]
    w = [normal(*net[k].weight.shape) for k in (1, 4)]

    def loss() -> Tensor:
        return net(x, objective, estimator=estimator, noise=z, weight_noise=w).mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled(), net), gradients(loss(), net), 1e-5)


def drawn(n: int, m: int) -> fg.BinaryLinear:
    return fg.BinaryLinear(n, m, weights="binary", weight_noise=fg.Logistic(0.8))


def test_exact_refuses_a_layer_that_draws_its_weights_twice():
    """Sampling draws the weights of a tied layer at each place, so that one configuration for both is another network."""
    tied = drawn(2, 2)
    net = fg.Sequential(fg.BinaryLinear(2, 2), tied, fg.Concat(nn.Identity(), tied), head=nn.Linear(4, 3)).double()
    with pytest.raises(InputError, match=r"BinaryLinear stands in the network more than once.*weight_noise=None"):
        fg.exact.expected_loss(net, *_problem())
    tied.weight_noise = None
    fg.exact.expected_loss(net, *_problem())


def test_exact_evaluates_modules_in_front_once():
    """Not for every configuration of weights, nor again on the way back: they may draw, or keep statistics."""
    net = fg.Sequential(nn.BatchNorm1d(2), nn.Dropout(), drawn(2, 2), head=nn.Linear(2, 3)).double()
    losses = fg.exact.expected_loss(net, normal(4, 2), fg.CrossEntropy(torch.tensor([0, 1, 2, 1])))
    losses.sum().backward()
    assert net[0].num_batches_tracked == 1


def test_exact_takes_heads_that_draw_batches_of_any_size_and_refuses_none():
    net = fg.Sequential(drawn(1, 2), fg.BinaryLinear(2, 12), head=nn.Sequential(nn.Dropout(), nn.Linear(12, 2)))
    x, y = torch.linspace(-1, 1, 520)[:, None], torch.arange(520) % 2
    fg.exact.expected_loss(net, x[:2], fg.CrossEntropy(y[:2])).sum().backward()
    net.eval()
    losses = fg.exact.expected_loss(net, x, fg.CrossEntropy(y))
    losses.sum().backward()
    assert_same(losses[-2:], fg.exact.expected_loss(net, x[-2:], fg.CrossEntropy(y[-2:])), 1e-5)
    with pytest.raises(InputError, match="the batch is empty"):
        fg.exact.expected_loss(net, x[:0], fg.CrossEntropy(y[:0]))


CHANGES = {
    r"weights='ternary'\): choose": ({"weights": "ternary"}, {"weights": "binary"}),
    r"weight_noise and weight_clip are options": ({"weights": "real"}, {"weights": "binary", "weight_noise": fg.Logistic()}),
    r"weight_noise and weight_clip are": ({"weight_noise": fg.Logistic()}, {}),
    r"has a weight_scale, .* weights became real": ({"weights": "real"}, {"weights": "binary"}),
    r"has a weight_scale, .* given a norm": ({"norm": fg.ScaleShift(3)}, {"weights": "binary"}),
    r"weight_noise=0.1\): give a noise": ({"weight_noise": 0.1}, {"weights": "binary"}),
    r"need a scale for every output": ({"weights": "binary"}, {}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_options_that_are_changed_later_are_checked_too(message):
    changes, options = CHANGES[message]
    layer = fg.BinaryLinear(2, 3, **options)
    net = fg.Sequential(layer, head=nn.Linear(3, 3))
    for name, value in changes.items():
        setattr(layer, name, value)
    with pytest.raises(InputError, match=message):
        net(torch.randn(1, 2), fg.CrossEntropy(torch.tensor([1])))
    with pytest.raises(InputError, match=message):
        layer(torch.randn(1, 2))


def test_zeros_around_the_states_are_no_units_however_they_came_there():
    """A module that pads and the convolution's own padding: the mean certainty is that of the units alone."""
    torch.manual_seed(0)
    first, second = fg.BinaryConv2d(1, 16, 3, noise=fg.Logistic(0.05)), fg.BinaryConv2d(16, 4, 3, weights="binary")
    own = fg.BinaryConv2d(16, 4, 3, padding=3, weights="binary")
    own.load_state_dict(second.state_dict())
    head = nn.Linear(4 * 8 * 8, 3)
    padded = fg.Sequential(first, nn.ZeroPad2d(3), second, nn.Flatten(), head=head).double()
    net = fg.Sequential(first, own, nn.Flatten(), head=head).double()
    x, objective = normal(4, 1, 6, 6), fg.CrossEntropy(torch.tensor([0, 1, 2, 1]))
    z = [0.05 * normal(4, 16, 4, 4, seed=1), normal(4, 4, 8, 8, seed=2)]
    found, expected = (gradients(n(x, objective, noise=z).sum(), n) for n in (padded, net))
    assert_same(found["2.weight"], expected["1.weight"])


@pytest.mark.parametrize("weights", ["real", "binary"])
def test_vectorised_draws_differ_where_parameters_are_frozen(weights):
    """Weights and states that no copied parameter goes into are drawn for each draw all the same."""
    torch.manual_seed(0)
    options = {"weights": weights, "weight_noise": fg.Logistic() if weights == "binary" else None}
    net = fg.Sequential(fg.BinaryLinear(2, 90, **options), fg.BinaryLinear(90, 90, **options), head=nn.Linear(90, 3))
    for layer in net.binary_layers:
        layer.requires_grad_(False)
    problem = Problem(net, torch.randn(2, 2), fg.CrossEntropy(torch.tensor([0, 1])))
    draws = vectorised(problem, fg.ST(), 6, stream([1], torch.device("cpu")))
    assert len(draws.unique(dim=0)) == 6
    if weights == "binary":
        for layer in net.binary_layers:
            layer.bias.requires_grad_()
        assert len(vectorised(problem, fg.ST(), 6, stream([1], torch.device("cpu"))).unique(dim=0)) == 6


@pytest.mark.parametrize("binary", [True, False])
def test_one_example_without_a_batch_is_a_batch_of_one(binary):
    layer = fg.BinaryLinear(4, 3, weights="binary").double()
    x, z = states(1, 4), normal(1, 3)
    for estimator in (paper_psa(), fg.ST()):
        alone, batch = (
            gradients(layer(t, estimator=estimator, noise=noise, binary=binary).sum(), layer)
            for t, noise in ((x[0], z[0]), (x, z))
        )
        assert_same(alone, batch)


def test_the_bound_of_copies_that_share_their_weights_is_not_that_of_exact_ones():
    net = tiny((2,))
    x, y = normal(3, 2), torch.tensor([0, 1, 2])
    for estimator in (fg.Exact(), fg.REINFORCE()):
        with pytest.raises(InputError, match=rf"copies share .* binary weights.*{type(estimator).__name__}"):
            fg.bounds.bound_losses(net, x, fg.CrossEntropy(y), 4, estimator=estimator)
    fg.bounds.bound_losses(net, x, fg.CrossEntropy(y), 4).sum().backward()
    fg.bounds.bound_losses(net, x, fg.CrossEntropy(y), 1, estimator=fg.Exact()).sum().backward()


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST(), fg.HardST()], ids=name_of)
def test_every_estimator_clips(estimator):
    layer = fg.BinaryLinear(2, 3, weights="binary", weight_clip=0.5)
    layer.weight_scale.data.fill_(0.1)
    layer.weight.data.copy_(torch.tensor([[0.7, 0.3], [-0.7, -0.3], [0.4, -0.6]]))
    net = fg.Sequential(layer, head=nn.Linear(3, 3))
    net(torch.ones(1, 2), fg.CrossEntropy(torch.tensor([1])), estimator=estimator).sum().backward()
    assert torch.equal(layer.weight.grad != 0, layer.weight.abs() <= 0.5)
