"""What a weight's gradient takes for its input: the same expectation, never a larger variance, in every kind of layer."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.errors import InputError
from flipgrad.estimators.names import by_name

FORCED = 1e6


def fully_connected(noise):
    return fg.Sequential(
        fg.BinaryLinear(2, 3, noise=noise),
        fg.BinaryLinear(3, 2, noise=noise),
        fg.BinaryLinear(2, 2, noise=noise),
        head=nn.Linear(2, 3),
    ), (2,)


def convolutional(noise):
    return fg.Sequential(
        fg.BinaryConv2d(1, 1, (1, 2), noise=noise),
        nn.ZeroPad2d((0, 1, 0, 0)),
        fg.BinaryConv2d(1, 2, (1, 3), stride=(1, 2), padding=(0, 1), noise=noise),
        nn.Flatten(),
        head=nn.Linear(4, 2),
    ), (1, 1, 4)


def padded(noise):
    return fg.Sequential(
        fg.BinaryConv2d(1, 2, (1, 2), noise=noise),
        nn.ConstantPad2d((1, 0, 0, 0), -1.0),
        fg.BinaryConv2d(2, 2, (1, 2), groups=2, padding=(0, 1), padding_value=1, noise=noise),
        nn.Flatten(),
        head=nn.Linear(6, 2),
    ), (1, 1, 2)


def pooled(noise):
    return fg.Sequential(
        fg.BinaryConv2d(1, 1, (1, 1), noise=noise),
        nn.AvgPool2d((1, 2)),
        fg.BinaryConv2d(1, 1, (1, 1), noise=noise, norm=fg.ScaleShift(1)),
        nn.AvgPool2d((1, 2)),
        nn.Flatten(),
        fg.BinaryLinear(1, 2, noise=noise),
        head=nn.Linear(2, 2),
    ), (1, 1, 4)


def concatenated(noise):
    return fg.Sequential(
        fg.Concat(fg.BinaryLinear(2, 2, noise=noise), fg.BinaryLinear(2, 1, noise=fg.Laplace())),
        fg.BinaryLinear(3, 2, noise=noise),
        head=nn.Linear(2, 2),
    ), (2,)


# One net with all noises, every net with one of them.
NOISES = {"logistic": fg.Logistic(0.8), "normal": fg.Normal()}
PAIRS = [
    *((fully_connected, name) for name in NOISES),
    *((convolutional, "normal"), (padded, "logistic"), (pooled, "normal"), (concatenated, "logistic")),
]
each_net_and_noise = pytest.mark.parametrize(
    ("make", "noise"), [pytest.param(make, NOISES[name], id=f"{make.__name__}-{name}") for make, name in PAIRS]
)


def network(make, noise, seed=0):
    torch.manual_seed(seed)
    net, shape = make(noise)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.9)
    return net.double(), torch.randn(1, *shape, dtype=torch.float64)


def zero(noise, a):
    return torch.zeros_like(a)


def every_outcome(net, x):
    """Noise [outcomes, ...] of every layer that leads to each combination of states, and the probability of each."""
    sizes = []

    def visit(call):
        a = call.affine(call.x)
        sizes.append(a.shape)
        return call.sample(a)

    net.run(net.front(x), visit, zero)
    counts = [size.numel() for size in sizes]
    combinations = torch.tensor(list(product((-1.0, 1.0), repeat=sum(counts))), dtype=x.dtype)
    states = [s.unflatten(1, size) for s, size in zip(combinations.split(counts, 1), sizes, strict=True)]
    remaining, log_probability = iter(states), []

    def given(call):
        chosen = next(remaining)[:, 0]
        log_probability.append(call.noise.log_prob(chosen, call.affine(call.x)).flatten(1).sum(1))
        return chosen

    with torch.no_grad():
        net.run(net.front(x.expand(len(combinations), *x.shape[1:])), given, zero)
    return [-FORCED * s for s in states], sum(log_probability).exp()


def gradients(net, x, estimator, noise):
    """The estimate [outcomes, parameters] for each of the noises [outcomes, ...]."""
    copies = {name: p.detach().expand(len(noise[0]), *p.shape).clone().requires_grad_() for name, p in net.named_parameters()}

    def one(copy, noise):
        arguments = {"estimator": estimator, "noise": noise}
        return torch.func.functional_call(net, copy, (x, fg.CrossEntropy(torch.tensor([1]))), arguments).sum()

    losses = torch.vmap(one, randomness="different")(copies, noise)
    return torch.cat([g.flatten(1) for g in torch.autograd.grad(losses.sum(), list(copies.values()))], 1)


def moments(net, x, estimator):
    """The exact mean and mean square of an estimate."""
    noise, probability = every_outcome(net, x)
    assert probability.sum() == pytest.approx(1)
    estimates = gradients(net, x, estimator, noise)
    return probability @ estimates, probability @ estimates.square()


# A weight of a convolution, or behind pooling, adds up terms of many units; only of each of them is the variance never larger.
ONE_UNIT_PER_WEIGHT = (fully_connected, concatenated)


@each_net_and_noise
@pytest.mark.parametrize("kind", [fg.PSA, fg.ST], ids=["psa", "st"])
def test_rao_blackwell_keeps_the_mean_and_reduces_the_variance(kind, make, noise):
    net, x = network(make, noise)
    mean, square = moments(net, x, kind(inputs="sampled", head="sampled", exact=True))
    for head in ("sampled", "rao-blackwell"):
        ours, smaller = moments(net, x, kind(inputs="rao-blackwell", head=head, exact=True))
        torch.testing.assert_close(ours, mean, rtol=1e-9, atol=1e-12)
        if make in ONE_UNIT_PER_WEIGHT:
            assert bool((smaller <= square + 1e-12).all())
        assert smaller.sum() < square.sum() - 1e-3


class Branched(nn.Module):
    """Two layers' states, reshaped, sliced and put together with constants, become the input of a third."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2 = fg.BinaryLinear(2, 4), fg.BinaryLinear(2, 2, noise=fg.Normal())
        self.l3, self.head = fg.BinaryLinear(6, 2), nn.Linear(2, 2)

    def forward(self, x):
        first = self.l1(x).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)[:, [2, 0, 3]]
        return self.head(self.l3(torch.cat([first, torch.ones(len(x), 1, dtype=x.dtype), self.l2(x)], 1)))

    def inputs(self, x):
        """The log-odds of the third layer's inputs."""
        first = self.l1.noise.log_odds(nn.functional.linear(x, self.l1.weight, self.l1.bias))
        second = self.l2.noise.log_odds(nn.functional.linear(x, self.l2.weight, self.l2.bias))
        first = first.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)[:, [2, 0, 3]]
        return torch.cat([first, torch.full((len(x), 1), 1e6, dtype=x.dtype), second], 1)


@pytest.fixture
def branched():
    torch.manual_seed(3)
    return Branched().double(), torch.randn(7, 2, dtype=torch.float64)


@pytest.mark.parametrize("inputs", ["mean", "posterior", "rao-blackwell"])
def test_priors_are_found_in_graphs_written_by_hand(branched, inputs):
    net, x = branched
    fg.use(net, fg.PSA(inputs=inputs, exact=True))
    seen = {}
    net.l3.register_forward_pre_hook(lambda layer, arguments: seen.update(x=arguments[0].detach()))

    def hook(layer, arguments, states):
        seen.update(y=states.detach())
        states.register_hook(lambda grad: seen.update(u=grad))

    net.l3.register_forward_hook(hook)
    net(x).square().sum().backward()
    weight, noise = net.l3.weight.detach(), net.l3.noise
    a = nn.functional.linear(seen["x"], weight, net.l3.bias.detach())
    # [examples, out, in], as the definition has it.
    moved = a[:, :, None] - 2 * weight * seen["x"][:, None]
    y, u = seen["y"][:, :, None], seen["u"][:, :, None]
    log_ratio = (noise.log_prob(y, moved) - noise.log_prob(y, a[:, :, None])).sum(1)
    q = torch.sigmoid(seen["x"] * net.inputs(x) - log_ratio)[:, None]
    h, h_moved = 2 * noise.pdf(a)[:, :, None] * u, 2 * noise.pdf(moved) * u
    other = h_moved if inputs == "rao-blackwell" else h
    average = seen["x"][:, None] * (q * h - (1 - q) * other)
    expected = (h * torch.tanh(net.inputs(x) / 2)[:, None] if inputs == "mean" else average).sum(0)
    torch.testing.assert_close(net.l3.weight.grad, expected)
    torch.testing.assert_close(net.l3.bias.grad, h[:, :, 0].sum(0))


def test_a_layer_whose_input_was_drawn_nowhere_is_told(branched):
    layer = fg.BinaryLinear(3, 2)
    states = torch.ones(2, 3)
    with pytest.raises(InputError, match="not known which layer drew it"):
        layer(states, estimator=fg.PSA(inputs="posterior"), binary=True)


def test_products_of_states_are_no_moved_states():
    first, second = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 2)
    rule = fg.PSA(inputs="mean")
    h = first(torch.randn(4, 2), estimator=rule)
    with pytest.raises(InputError, match="went through the operation Mul"):
        second(h * h.flip(1), estimator=rule)


def test_states_that_several_layers_see_have_no_known_posterior():
    net = fg.Sequential(
        fg.BinaryLinear(2, 3), fg.Concat(nn.Identity(), fg.BinaryLinear(3, 2)), fg.BinaryLinear(5, 2), head=nn.Linear(2, 2)
    )
    objective = fg.CrossEntropy(torch.tensor([0, 1]))
    x = torch.randn(2, 2)
    for inputs in ("sampled", "mean"):
        net(x, objective, estimator=fg.PSA(inputs=inputs)).sum().backward()
    for inputs in ("posterior", "rao-blackwell"):
        with pytest.raises(InputError, match="one layer"):
            net(x, objective, estimator=fg.PSA(inputs=inputs)).sum().backward()


def test_auto_is_the_posterior_where_it_is_known():
    torch.manual_seed(0)
    x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    chain = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 4), head=nn.Linear(4, 2))
    skip = fg.Sequential(
        fg.BinaryLinear(2, 3), fg.Concat(nn.Identity(), fg.BinaryLinear(3, 2)), fg.BinaryLinear(5, 2), head=nn.Linear(2, 2)
    )

    def estimate(net, inputs):
        loss = net(x, objective, estimator=fg.PSA(inputs=inputs), generator=torch.Generator().manual_seed(0)).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    assert torch.equal(estimate(chain, "auto"), estimate(chain, "posterior"))
    assert torch.equal(estimate(skip, "auto"), estimate(skip, "sampled"))
    layer, states = fg.BinaryLinear(3, 2), torch.ones(2, 3)
    layer(states, estimator=fg.PSA(inputs="auto"), binary=True).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [fg.PSA, fg.ST])
@pytest.mark.parametrize("options", [{"inputs": "average"}, {"head": "best"}, {"tolerance": 2.0}])
def test_options_are_checked(kind, options):
    with pytest.raises(InputError, match=kind.__name__):
        kind(**options)


@pytest.mark.parametrize("kind", [fg.PSA, fg.ST])
def test_batch_statistics(kind):
    """The mean and the posterior are taken with the statistics held; the other parameters' gradients stay as they were."""
    torch.manual_seed(0)
    net = fg.Sequential(
        fg.BinaryConv2d(1, 3, 2), fg.BinaryConv2d(3, 4, 2, norm=nn.BatchNorm2d(4)), nn.Flatten(), head=nn.Linear(16, 3)
    ).double()
    x, objective = torch.randn(5, 1, 4, 4, dtype=torch.float64), fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1]))

    def all_gradients(inputs):
        generator = torch.Generator().manual_seed(0)
        loss = net(x, objective, estimator=kind(inputs=inputs, exact=True), generator=generator).mean()
        names, parameters = zip(*net.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    sampled = all_gradients("sampled")
    before = net[1].norm.running_mean.clone()
    for inputs in ("mean", "posterior"):
        ours = all_gradients(inputs)
        for name, gradient in sampled.items():
            same = torch.allclose(ours[name], gradient, rtol=1e-9, atol=1e-12)
            assert same == (name != "1.weight"), name
    # One update of the running statistics for each evaluation.
    assert net[1].norm.num_batches_tracked == 3
    assert not torch.equal(net[1].norm.running_mean, before)
    with pytest.raises(InputError, match="statistics"):
        all_gradients("rao-blackwell")


def test_evaluation_needs_no_prior():
    net = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 2), head=nn.Linear(2, 2))
    fg.use(net, fg.PSA(inputs="posterior"))
    with torch.no_grad():
        assert net(torch.randn(4, 2)).shape == (4, 2)


def test_ways_of_averaging_have_names():
    named = by_name(["psa:sampled", "PSA:posterior", "st", "st:rao-blackwell", "psa:enhanced"], lambda: torch.zeros(1))
    assert list(named) == ["PSA", "PSA posterior", "ST", "ST rao-blackwell", "PSA enhanced"]
    assert (named["PSA"].inputs, named["PSA"].head_gradient) == ("sampled", "sampled")
    assert (named["PSA posterior"].inputs, named["PSA posterior"].head_gradient) == ("posterior", "rao-blackwell")
    assert isinstance(named["ST rao-blackwell"], fg.ST)
    for wrong in ("psa:best", "psa:", "tanh:mean"):
        with pytest.raises(InputError, match="unknown estimator"):
            by_name([wrong], lambda: torch.zeros(1))
