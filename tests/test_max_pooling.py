"""Max-pooling of states: values, discrete derivatives and probabilities against flips and sums over all states."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import flipgrad as fg
import reference
from flipgrad.contract import CERTAIN
from flipgrad.estimators._moments import MomentEstimator
from flipgrad.max_pooling import Windows
from reference import assert_same, batch, chain, gradients, mean_gradient, noise_like, paper_psa, randomized


@st.composite
def poolings(draw) -> tuple[nn.MaxPool2d, tuple[int, int]]:
    """A pooling without overlaps, and the size of an image that it takes."""
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    stride = [k + draw(st.integers(0, 2)) for k in kernel]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    size = [draw(st.integers(max(1, k - 2 * p), 7)) for k, p in zip(kernel, padding, strict=True)]
    return nn.MaxPool2d(tuple(kernel), tuple(stride), tuple(padding), ceil_mode=draw(st.booleans())), tuple(size)


def random_states(*shape: int, plus: float = 0.3, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.rand(shape) < plus).to(dtype) * 2 - 1


@given(poolings(), st.sampled_from([0.05, 0.3, 0.8]))
def test_it_is_the_maximum_and_its_derivative_that_of_naive_flips(pooling, plus):
    module, size = pooling
    x = random_states(2, 2, *size, plus=plus).requires_grad_()
    windows = Windows.of(module)
    y = windows.states(x)
    assert torch.equal(y, module(x))
    assert windows.output_size(*size) == tuple(y.shape[2:])
    back = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, back)
    naive = torch.zeros_like(x)
    for i in range(x[0].numel()):
        low, high = (x.detach().flatten(1).clone() for _ in range(2))
        low[:, i], high[:, i] = -1, 1
        change = (module(high.view_as(x)) - module(low.view_as(x))) / 2
        naive.flatten(1)[:, i] = (change * back).flatten(1).sum(1)
    assert torch.equal(found, naive)


@given(poolings())
def test_probabilities_and_means_are_those_of_a_sum_over_all_states(pooling):
    module, size = pooling
    log_odds = 3 * torch.randn(1, 1, *size, dtype=torch.float64)
    plus = log_odds.sigmoid()
    # Of a window of independent units: all are -1.
    minus = -functional.max_pool2d(
        -torch.ones_like(plus), module.kernel_size, module.stride, module.padding, 1, module.ceil_mode
    )
    rows, columns = minus.shape[2:]
    for p, q in product(range(rows), range(columns)):
        top, left = (k * s - d for k, s, d in zip((p, q), module.stride, module.padding, strict=True))
        window = plus[0, 0, max(0, top) : top + module.kernel_size[0], max(0, left) : left + module.kernel_size[1]]
        minus[0, 0, p, q] = (1 - window).prod()
    windows = Windows.of(module)
    assert_same(windows.log_odds(log_odds), (1 - minus).log() - minus.log())
    assert_same(windows.states(2 * plus - 1), 1 - 2 * minus)


def test_log_odds_keep_their_digits_at_any_size():
    windows = Windows.of(nn.MaxPool2d((1, 3)))
    infinite = float("inf")
    cases = [
        ((-200.0, -201.0, -300.0), -200 + torch.tensor(-1.0).double().exp().log1p().item()),
        ((150.0, 120.0, 90.0), 360.0),
        ((-1e-3, 40.0, -700.0), 40 + torch.tensor(1e-3).double().neg().exp().log1p().item()),
        ((-CERTAIN, -CERTAIN, -3.0), -3.0),
        ((CERTAIN, -CERTAIN, -3.0), CERTAIN),
        ((-infinite, -infinite, 2.0), 2.0),
        ((infinite, -infinite, 2.0), CERTAIN),
    ]
    for odds, expected in cases:
        for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            found = windows.log_odds(torch.tensor(odds, dtype=dtype).view(1, 1, 1, 3)).item()
            assert found == pytest.approx(expected, rel=rounding, abs=3 if abs(expected) == CERTAIN else 0)


def test_relaxed_states_may_be_differentiated_twice():
    x = (torch.rand(2, 2, 5, 4, dtype=torch.float64) * 2 - 1).requires_grad_()
    windows = Windows.of(nn.MaxPool2d((2, 3), padding=(1, 1), ceil_mode=True))
    assert torch.autograd.gradcheck(windows.states, x)
    assert torch.autograd.gradgradcheck(windows.states, x)


# Small enough for a sum over all joint states; the number is that of the units that the head sees.
SMALL = {
    "head": ((2, 1, 3, 4), lambda: [fg.BinaryConv2d(1, 2, 2), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten()], 4),
    "padded head": (
        (2, 1, 3, 4),
        lambda: [fg.BinaryConv2d(1, 1, 1), nn.MaxPool2d((2, 3), padding=1, ceil_mode=True), nn.Flatten()],
        4,
    ),
    "reshaped head": (
        (2, 3),
        lambda: [
            fg.BinaryLinear(3, 8),
            nn.Unflatten(1, (4, 1, 2)),
            nn.PixelShuffle(2),
            nn.ConstantPad2d((0, 0, 0, 1), -1),
            nn.MaxPool2d((1, 2)),
            nn.MaxPool2d((3, 1)),
            nn.AvgPool2d((1, 2)),
            nn.Flatten(),
        ],
        1,
    ),
    "between": (
        (2, 1, 3, 5),
        lambda: [fg.BinaryConv2d(1, 1, 2), nn.MaxPool2d(2), fg.BinaryConv2d(1, 2, (1, 2)), nn.Flatten()],
        2,
    ),
    "both": (
        (2, 1, 3, 5),
        lambda: [
            fg.BinaryConv2d(1, 1, 2, noise=fg.Normal(1.2)),
            nn.MaxPool2d((2, 1)),
            fg.BinaryConv2d(1, 1, 1),
            nn.MaxPool2d((1, 2)),
            nn.Flatten(),
        ],
        2,
    ),
}
ONE_LAYER, TWO_LAYERS = ["head", "padded head", "reshaped head"], ["between", "both"]


def small(name: str, head: nn.Module | None = None) -> tuple[fg.Sequential, reference.Graph, Tensor, fg.CrossEntropy]:
    shape, modules, units = SMALL[name]
    net = randomized(fg.Sequential(*modules(), head=head or nn.Linear(units, 3)))
    return net, chain(net), *batch(shape)


@pytest.mark.parametrize("name", SMALL)
def test_the_exact_expectation_is_a_sum_over_all_states(name):
    net, graph, x, objective = small(name)
    expected = reference.expected_loss(graph, x, objective)
    found = fg.exact.expected_loss(net, x, objective)
    assert_same(found, expected)
    assert_same(gradients(found.sum(), net), gradients(expected.sum(), net))
    assert_same(fg.exact.predictive(net, x), reference.expectation(graph, x, lambda outputs, _: outputs.softmax(-1)))


@pytest.mark.parametrize("name", ONE_LAYER)
@pytest.mark.parametrize("head", ["sampled", "enhanced", "rao-blackwell"])
def test_psa_is_unbiased_with_one_hidden_layer(name, head):
    net, graph, x, objective = small(name)
    reference.assert_unbiased_by_enumeration(net, graph, x, objective, fg.PSA(head=head))


def test_psa_is_unbiased_with_any_head_behind_one_hidden_layer():
    net, graph, x, objective = small("head", nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    reference.assert_unbiased_by_enumeration(net, graph, x, objective, fg.PSA())


@pytest.mark.parametrize("name", TWO_LAYERS)
def test_averaged_inputs_have_the_mean_of_sampled_ones(name):
    """The conditional expectation given all others: with a wrong prior of pooled states it would not be."""
    net, graph, x, objective = small(name)
    sampled = mean_gradient(net, graph, x, objective, paper_psa(exact=True))
    averaged = mean_gradient(net, graph, x, objective, fg.PSA(inputs="rao-blackwell", head="sampled", exact=True))
    assert_same(averaged, sampled)


@pytest.mark.parametrize("name", TWO_LAYERS)
def test_auto_is_the_posterior_of_pooled_states(name):
    net, graph, x, objective = small(name)
    z = noise_like(graph, x)
    results = [
        gradients(net(x, objective, estimator=fg.PSA(inputs=rule), noise=z).sum(), net)
        for rule in ("auto", "posterior", "sampled")
    ]
    assert_same(results[0], results[1], 0)
    assert not torch.allclose(results[0]["2.weight"], results[2]["2.weight"])


LARGER = {
    "between and behind": (
        (3, 2, 9, 8),
        lambda: [
            fg.BinaryConv2d(2, 3, 3, padding=1),
            nn.MaxPool2d(2, ceil_mode=True),
            fg.BinaryConv2d(3, 4, 3, padding=1, norm=fg.ScaleShift(4)),
            nn.MaxPool2d((2, 1), (3, 2)),
            nn.Flatten(),
        ],
        16,
    ),
    "moved": (
        (3, 2, 8, 8),
        lambda: [
            fg.BinaryConv2d(2, 4, 3, padding=1),
            nn.PixelUnshuffle(2),
            nn.ConstantPad2d(1, 1),
            nn.MaxPool2d(3, padding=1),
            nn.Flatten(),
            fg.BinaryLinear(16 * 4, 4),
        ],
        4,
    ),
    "averaged behind": (
        (3, 2, 8, 8),
        lambda: [
            fg.BinaryConv2d(2, 3, 3),
            nn.MaxPool2d(2),
            nn.AvgPool2d(2, stride=1),
            fg.BinaryConv2d(3, 3, 1),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ],
        3,
    ),
}


@pytest.mark.parametrize("name", LARGER)
def test_psa_is_the_papers_algorithm_with_every_unit_flipped(name):
    shape, modules, units = LARGER[name]
    net = randomized(fg.Sequential(*modules(), head=nn.Linear(units, 3)), scale=0.4)
    graph, (x, objective) = chain(net), batch(shape)
    z = noise_like(graph, x)
    expected = gradients(reference.psa(graph, x, z, objective).sum(), net)
    assert_same(gradients(net(x, objective, estimator=paper_psa(exact=True), noise=z).sum(), net), expected)
    # Where head and loss are linear, to linearise them changes nothing: what is pooled is flipped all the same.
    results = [
        gradients(net(x, reference.LinearLoss(), estimator=paper_psa(exact=True, flip_head=flip), noise=z).sum(), net)
        for flip in (True, False)
    ]
    assert_same(*results)


def test_a_pooled_branch_is_psa_over_the_graph():
    first, second, third = fg.BinaryConv2d(1, 2, 2), fg.BinaryConv2d(2, 3, 2, stride=2), fg.BinaryConv2d(5, 2, 2)
    net = randomized(
        fg.Sequential(first, fg.Concat(nn.MaxPool2d(2), second), third, nn.Flatten(), head=nn.Linear(2, 3)),
    )
    x, objective = batch((3, 1, 5, 5))
    nodes = [
        reference.Node(first, lambda h: h[0], ()),
        reference.Node(second, lambda h: h[1], (1,)),
        reference.Node(third, lambda h: torch.cat([functional.max_pool2d(h[1], 2), h[2]], 1), (1, 2)),
    ]
    graph = reference.Graph(nodes, lambda h: net.head(h[3].flatten(1)), (3,))
    z = noise_like(graph, x)
    expected = gradients(reference.psa(graph, x, z, objective).sum(), net)
    # The units go to two places: their posterior is not known, and they are sampled.
    for rule in (paper_psa(exact=True), fg.PSA(inputs="auto", head="sampled", exact=True)):
        assert_same(gradients(net(x, objective, estimator=rule, noise=z).sum(), net), expected)


@pytest.mark.parametrize("rule", [fg.PSA(exact=True), fg.ST(), fg.Tanh()], ids=["psa", "st", "tanh"])
def test_states_of_real_numbers_are_pooled_as_those_of_a_layer(rule):
    """A Sign is a convolution with the identity."""
    x, objective = batch((3, 1, 6, 6))
    front, last, head = randomized(nn.Conv2d(1, 2, 3)), randomized(fg.BinaryConv2d(2, 3, 2)), randomized(nn.Linear(3, 3))
    same = fg.BinaryConv2d(2, 2, 1, bias=False).double()
    nn.init.dirac_(same.weight)
    results = []
    for layer in (fg.Sign(), same):
        net = fg.Sequential(front, layer, nn.MaxPool2d(2), last, nn.Flatten(), head=head)
        loss = net(x, objective, estimator=rule, generator=torch.Generator().manual_seed(2)).sum()
        parameters = [*front.parameters(), *last.parameters(), *head.parameters()]
        results.append(torch.autograd.grad(loss, parameters))
    assert_same(*results)
    # By hand, too, and behind the last layer: the same loss with a linear head.
    pool = fg.MaxPool2d(2)
    by_hand = [
        head(last(pool(layer(front(x), estimator=rule, noise=torch.zeros(1))), estimator=rule, noise=torch.zeros(1)).flatten(1))
        for layer in (fg.Sign(), same)
    ]
    assert_same(*[torch.autograd.grad(objective(outputs).sum(), parameters) for outputs in by_hand])


class Or(nn.Module):
    """Max-pooling with kernel 2, window by window, and its discrete derivative."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for top in range(0, x.shape[2] - 1, 2):
            windows = [x[:, :, top : top + 2, left : left + 2].flatten(2) for left in range(0, x.shape[3] - 1, 2)]
            rows.append(torch.stack([self.one(window) for window in windows], -1))
        return torch.stack(rows, -2)

    def one(self, window: Tensor) -> Tensor:
        value, result = window.detach().amax(2), window.detach().amax(2)
        for i in range(4):
            others = torch.cat([window[:, :, :i], window[:, :, i + 1 :]], 2).detach()
            decides = (others == -1).all(2).to(window.dtype)
            result = result + decides * (window[:, :, i] - window[:, :, i].detach())
        assert torch.equal(result.detach(), value)
        return result


def pooled_net(pool: nn.Module | None = None) -> tuple[fg.Sequential, Tensor, fg.CrossEntropy]:
    layers = [fg.BinaryConv2d(2, 3, 3, padding=1), pool or nn.MaxPool2d(2), fg.BinaryConv2d(3, 4, 2), nn.Flatten()]
    return randomized(fg.Sequential(*layers, head=nn.Linear(16, 3))), *batch((4, 2, 6, 6))


@pytest.mark.parametrize("rule", [fg.ST(), fg.HardST(), fg.ZGR()], ids=["st", "hard-st", "zgr"])
def test_estimators_that_sample_take_the_discrete_derivative_of_the_maximum(rule):
    net, x, objective = pooled_net()
    graph = chain(net)
    z = noise_like(graph, x)
    found = gradients(net(x, objective, estimator=rule, noise=z).sum(), net)
    first, pool, second, head = net[0], Or(), net[2], net.head
    hidden = pool(first(x, estimator=rule, noise=z[0]))
    outputs = head(second(hidden, estimator=rule, noise=z[1], binary=False).flatten(1))
    assert_same(found, gradients(objective(outputs).sum(), net))


def test_the_mean_of_means_is_exact_behind_one_layer():
    """With a loss linear in the units, the network of means has the expected loss."""
    net, _, x, _ = small("head")
    loss = reference.LinearLoss()
    exact = fg.exact.expected_loss(net, x, loss)
    found = net(x, loss, estimator=fg.Tanh())
    assert_same(found, exact)
    assert_same(gradients(found.sum(), net), gradients(exact.sum(), net))


def test_concrete_states_have_the_mean_of_the_maximum_of_symmetric_units():
    """Their own maximum would not: of four units it is near 0.4 at this temperature, that of states 7/8."""
    x = fg.Concrete(1.0)
    layer = fg.BinaryLinear(1, 4, bias=False)
    nn.init.zeros_(layer.weight)
    states = layer(torch.ones(40_000, 1), estimator=x, generator=torch.Generator().manual_seed(0)).detach()
    pooled = Windows.of(nn.MaxPool2d(2)).states(states.view(-1, 1, 2, 2)).flatten()
    assert abs(pooled.mean() - 7 / 8) < 5 * pooled.std() / len(pooled) ** 0.5
    assert states.amax(1).mean() < 0.6


@pytest.mark.parametrize("rule", [fg.ADF(), fg.LocalReparam()], ids=["adf", "local-reparam"])
def test_moments_of_pooled_units_are_those_of_a_sum_over_their_states(rule, monkeypatch):
    """The head's outputs are drawn by the means and the variances of pooled states."""
    net, graph, x, _ = small("head")
    z = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    monkeypatch.setattr(MomentEstimator, "sample_normal", lambda self, mu, v, draw: mu + v.sqrt() * z)
    found = net(x, lambda outputs: outputs.sum(-1), estimator=rule)
    mean = reference.expectation(graph, x, lambda outputs, _: outputs)
    square = reference.expectation(graph, x, lambda outputs, _: outputs.square())
    assert_same(found, (mean + (square - mean.square()).sqrt() * z).sum(1))


def test_initialisation_by_moments_is_that_of_independent_units():
    net, graph, x, _ = small("between")
    x = torch.randn(7, *x.shape[1:], dtype=x.dtype)
    net[0].norm, net[2].norm = fg.ScaleShift(1).double(), fg.ScaleShift(2).double()
    net.initialize(x, moments=True)
    second = graph.nodes[1]

    def moment(power: int) -> Tensor:
        h = [reference.joint_states(reference.Graph(graph.nodes[:1], lambda h: h[1], (1,)), x[i : i + 1]) for i in range(7)]
        inner = reference.Graph(graph.nodes[:1], lambda h: h[1], (1,))
        return torch.stack([torch.tensordot(reference.probability(inner, s), second.a(s) ** power, 1) for s in h])

    mean, square = moment(1).mean((0, 2, 3)), moment(2).mean((0, 2, 3))
    assert_same(mean, torch.zeros_like(mean))
    assert_same(square, torch.ones_like(square))


UNBIASED = {"leg": (fg.LEG(), 200), "muprop": (fg.MuProp(), 3000), "rebar": (fg.REBAR(), 3000), "disarm": (fg.DisARM(), 1500)}


@pytest.mark.parametrize("name", UNBIASED)
def test_estimators_that_look_at_paths_are_unbiased(name):
    """At 7 standard errors of every parameter's mean over 20 groups of draws: one false alarm in 10^4 runs."""
    rule, draws = UNBIASED[name]
    assert _errors(rule, draws) < 7


def test_a_slip_of_a_path_estimator_would_show():
    class Slip(fg.PathEstimator):
        unbiased, citation = True, "none"

        def gradient(self, path: fg.Path, k: int) -> Tensor:
            return fg.LEG().gradient(path, k) * (1.5 if k == 0 else 1)

    assert _errors(Slip(), 200) > 10


def _errors(rule: fg.Estimator, draws: int) -> float:
    """The largest deviation of an estimator's mean from the exact gradient, in standard errors."""
    net, _, x, objective = small("both")
    exact = gradients(fg.exact.expected_loss(net, x[:1], objective.select(slice(1))).sum(), net)
    generator, many = torch.Generator().manual_seed(0), x[:1].expand(draws, *x.shape[1:])
    labels = objective.select(torch.zeros(draws, dtype=torch.long))
    groups = []
    for _ in range(20):
        losses = net(many, labels, estimator=rule, generator=generator, index=torch.zeros(draws, dtype=torch.long))
        groups.append(torch.cat([g.flatten() for g in gradients(losses.mean(), net).values()]))
    drawn = torch.stack(groups)
    truth = torch.cat([g.flatten() for g in exact.values()])
    return float(((drawn.mean(0) - truth).abs() / (drawn.std(0) / 20**0.5 + 1e-9)).max())


class ByHand(nn.Module):
    """The network of :func:`pooled_net`."""

    def __init__(self, net: fg.Sequential) -> None:
        super().__init__()
        self.first, self.second, self.head = net[0], net[2], net.head
        self.pool = fg.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.pool(self.first(x))).flatten(1))


RULES = {
    "psa": paper_psa(flip_head=False),
    "mean": fg.PSA(flip_head=False, inputs="mean", head="sampled"),
    "posterior": fg.PSA(flip_head=False, inputs="posterior", head="sampled"),
    "rao-blackwell": fg.PSA(flip_head=False, inputs="rao-blackwell", head="sampled"),
    "st": fg.ST(),
    "concrete": fg.Concrete(),
    "tanh": fg.Tanh(),
    "gumbel-rao": fg.GumbelRao(),
}


@pytest.mark.parametrize("name", RULES)
def test_by_hand_it_is_sequentials_to_the_bit(name):
    net, x, objective = pooled_net(fg.MaxPool2d(2))
    inside = net(x, objective, estimator=RULES[name], generator=torch.Generator().manual_seed(1))
    expected = list(gradients(inside.sum(), net).values())
    model = fg.use(ByHand(net), RULES[name], generator=torch.Generator().manual_seed(1))
    alone = objective(model(x))
    assert torch.equal(alone, inside)
    assert all(torch.equal(g, h) for g, h in zip(gradients(alone.sum(), model).values(), expected, strict=True))
    # nn.MaxPool2d is the same there.
    net[1].__class__ = nn.MaxPool2d
    again = net(x, objective, estimator=RULES[name], generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(g, h) for g, h in zip(gradients(again.sum(), net).values(), expected, strict=True))


def test_means_of_adf_by_hand_are_pooled_as_in_sequential():
    net, x, _ = pooled_net()
    model = fg.use(ByHand(net), fg.ADF())
    found, expected = [], []
    model.second.register_forward_pre_hook(lambda layer, inputs: found.append(inputs[0]))
    model(x)
    with torch.no_grad():
        net.run(x, lambda call: expected.append(call.x) or fg.ADF().states(call), lambda noise, a: torch.zeros_like(a))
    assert_same(found[0], expected[1])


class Shared(nn.Module):
    """Units that are pooled for one layer and go elsewhere too."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.pool = where, fg.MaxPool2d(2)
        self.first, self.second = fg.BinaryConv2d(1, 2, 1), fg.BinaryConv2d(2, 2, 2)
        self.third = fg.BinaryConv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        pooled = self.pool(-h)
        result = self.second(pooled).sum((1, 2, 3))
        other = {"head": h, "pooled head": pooled, "nowhere": torch.zeros_like(h)}.get(self.where)
        return result + (self.third(h) if other is None else other).sum((1, 2, 3))


@pytest.mark.parametrize("inputs", ["posterior", "rao-blackwell"])
@pytest.mark.parametrize("where", ["head", "pooled head", "layer", "nowhere"])
def test_the_posterior_of_pooled_units_that_go_elsewhere_too_is_refused(inputs, where):
    model = fg.use(randomized(Shared(where)), fg.PSA(inputs=inputs))
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    if where == "nowhere":
        model(x).sum().backward()
        return
    with pytest.raises(fg.InputError, match="posterior of a unit is known only where its states go to one layer"):
        model(x).sum().backward()
    # What is recommended samples them.
    fg.use(model, fg.PSA())(x).sum().backward()


def test_states_pooled_and_as_they_are_may_not_meet_in_one_input():
    first, pool, second = fg.BinaryConv2d(1, 1, 1), fg.MaxPool2d(2), fg.BinaryLinear(5, 2)
    for rule in (fg.ST(), fg.ADF()):
        h = first(torch.randn(3, 1, 2, 2), estimator=rule)
        with pytest.raises(fg.InputError, match=r"BinaryLinear was handed states of one layer twice.*: hand over one of"):
            second(torch.cat([h.flatten(1), pool(h).flatten(1)], 1), estimator=rule)
        with pytest.raises(fg.InputError, match="MaxPool2d was handed states of one layer twice"):
            pool(torch.cat([h, pool(h).expand_as(h)], 1))
    # Of two layers, or two draws of one, they may.
    for other in (fg.BinaryConv2d(1, 1, 1), first):
        h, g = (layer(torch.randn(3, 1, 2, 2), estimator=fg.PSA()) for layer in (first, other))
        second(torch.cat([h.flatten(1), pool(g).flatten(1)], 1), estimator=fg.PSA()).sum().backward()


def test_nothing_of_a_graph_outlives_it():
    net, x, objective = pooled_net()
    model = fg.use(ByHand(net), fg.PSA(inputs="posterior"))
    kept = []
    for module in (model.first, model.pool):
        module.register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    objective(model(x)).sum().backward()
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def layers(pool: nn.Module, *more: nn.Module) -> fg.Sequential:
    return fg.Sequential(fg.BinaryConv2d(1, 2, 1), *more, pool, fg.BinaryConv2d(2, 2, 1), head=nn.Flatten())


REFUSED = [
    (lambda kind: kind(3, 2), "its windows overlap, .*; use a stride of at least kernel_size"),
    (lambda kind: kind((2, 3), (2, 1)), "its windows overlap"),
    (lambda kind: kind(2, 0), "kernel_size and stride must be positive"),
    (lambda kind: kind(2, padding=2), "padding at most half of kernel_size"),
    (lambda kind: kind(2, padding=-1), "padding at most half of kernel_size"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_windows_that_are_not_known_to_be_right_are_refused_by_name(make, message):
    with pytest.raises(fg.InputError, match=rf"MaxPool2d\(kernel_size=.*\) of binary states: .*{message}"):
        layers(make(nn.MaxPool2d))
    with pytest.raises(fg.InputError, match=message):
        make(fg.MaxPool2d)


def test_options_that_states_have_not_are_refused_by_name():
    for module in (nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, return_indices=True)):
        with pytest.raises(fg.InputError, match=r"MaxPool2d\(.*of binary states: use dilation=1 and return_indices=False"):
            layers(module)
    # Real values may be pooled in any way.
    net = fg.Sequential(nn.MaxPool2d(3, 1, dilation=2), fg.BinaryConv2d(1, 2, 1), nn.Flatten(), head=nn.Linear(8, 2))
    net(torch.randn(2, 1, 6, 6), fg.CrossEntropy(torch.tensor([0, 1]))).sum().backward()


def test_what_is_no_state_is_not_pooled_in_sequential():
    with pytest.raises(fg.InputError, match=r"MaxPool2d\(.*\) behind AvgPool2d\(.*\) takes the maximum of averages"):
        layers(nn.MaxPool2d(2), nn.AvgPool2d(2))
    for padding in ([nn.ZeroPad2d(1)], [nn.ConstantPad2d(1, 0), nn.Identity()], [fg.Concat(nn.ZeroPad2d(1))]):
        with pytest.raises(fg.InputError, match=r"MaxPool2d\(.*\) behind padding with 0, .*: use the padding of MaxPool2d"):
            layers(nn.MaxPool2d(2), *padding)
    with pytest.raises(fg.InputError, match="behind padding with 0"):
        layers(fg.Concat(nn.Sequential(nn.MaxPool2d(2)), fg.BinaryConv2d(2, 2, 2, 2)), nn.ZeroPad2d(1))
    # Behind a layer that saw the zeros there are none.
    layers(nn.MaxPool2d(2), nn.ZeroPad2d(1), fg.BinaryConv2d(2, 2, 1))
    with pytest.raises(
        fg.InputError, match=r"MaxPool2d\(.*before the first binary layer is handed real values: use nn\.MaxPool"
    ):
        fg.Sequential(fg.MaxPool2d(2), fg.BinaryConv2d(1, 2, 1), head=nn.Flatten())
    with pytest.raises(fg.InputError, match="more than one branch hands the same states on"):
        layers(fg.Concat(nn.Identity(), nn.MaxPool2d(2), dim=2))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), fg.MaxPool2d(2)], ids=["nn", "fg"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 4), (1, 4, 4)])
def test_images_that_are_too_small_or_no_images_are_refused(pool, shape):
    message = r"kernel 2x2 takes \[batch, channels, height, width\] of at least that size, got \[.*move it before nn\.Flatten"
    if len(shape) == 4:
        with pytest.raises(fg.InputError, match=message):
            layers(pool)(torch.randn(shape))
    with pytest.raises(fg.InputError, match=message):
        fg.MaxPool2d(2)(torch.ones(shape))


def test_hooks_of_torchs_module_would_never_run_and_ours_may_look():
    module = nn.MaxPool2d(2)
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(fg.InputError, match=r"MaxPool2d\(.*has hooks, which would never run: use fg\.MaxPool2d"):
        layers(module)
    seen, net = [], layers(fg.MaxPool2d(2))
    handle = net[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    net(torch.randn(3, 1, 4, 4))
    assert seen == [(3, 2, 2, 2)]
    handle.remove()
    net[1].register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(fg.InputError, match="a hook of MaxPool2d changes its result"):
        net(torch.randn(3, 1, 4, 4))


def test_real_values_are_not_pooled_by_hand():
    pool, x = fg.MaxPool2d(2), torch.rand(2, 1, 4, 4)
    for value in (x, x.requires_grad_() * 1):
        with pytest.raises(fg.InputError, match=r"fg\.MaxPool2d was handed 0\.\d+, which is no state .*take nn\.MaxPool2d"):
            pool(value)
    with torch.no_grad():
        pool(x)
        with pytest.raises(fg.InputError, match="handed 3, which is no state"):
            pool(torch.full((1, 1, 2, 2), 3.0))
    h = fg.BinaryConv2d(1, 1, 1)(x, estimator=fg.ST())
    with pytest.raises(fg.InputError, match="MaxPool2d was handed states that went through the operation Abs"):
        pool(h.abs())
    with pytest.raises(fg.InputError, match="MaxPool2d was handed relaxed states together with 0, which is no unit"):
        pool(functional.pad(h, (1, 1, 1, 1)))
    with pytest.raises(fg.InputError, match="MaxPool2d was handed states that are not each one unit") as error:
        pool(torch.cat([h, h], 1))
    assert "binary=False" not in str(error.value)


@pytest.mark.parametrize("module", [nn.AdaptiveMaxPool2d(2), nn.MaxPool1d(2), nn.FractionalMaxPool2d(2, 2)], ids=str)
def test_other_poolings_by_the_maximum_name_the_way_out(module):
    with pytest.raises(fg.InputError, match=r"may not stand between .*For the maximum of states use nn\.MaxPool2d"):
        layers(module)


def test_everything_else_that_a_network_does(tmp_path):
    torch.manual_seed(0)
    first, second = fg.ScaleShift(4), nn.BatchNorm2d(6)
    net = fg.Sequential(
        fg.BinaryConv2d(1, 4, 3, norm=first),
        nn.MaxPool2d(2),
        fg.BinaryConv2d(4, 6, 2, weights="binary", norm=second),
        fg.MaxPool2d(2),
        nn.Flatten(),
        head=nn.Linear(6, 3),
    )
    x, objective = torch.randn(8, 1, 8, 8), fg.CrossEntropy(torch.randint(3, (8,)))
    net.initialize(x)
    for rule in (fg.PSA(), fg.PSA(head="enhanced"), fg.ST(), fg.HardST()):
        loss = net(x, objective, estimator=rule).mean()
        assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(loss, list(net.parameters())))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x, objective).mean().backward()
    assert net(x[:0], objective.select(slice(0))).shape == (0,)
    net.eval()
    assert net.predict(x, 3).shape == (8, 3)
    member = net.member(x)
    assert torch.equal(member(x), member(x))
    assert net.deterministic(x).shape == (8, 3)
    shapes = [row.output_shape for row in fg.summary(net, x).rows]
    assert shapes == [(4, 6, 6), (6, 2, 2), (3,)]
    rows = fg.summary(net, x).rows
    assert [(row.bits, row.binary_operations) for row in rows] == [(32, 0), (1, 6 * 4 * 16), (32, 0)]
    torch.save(net.state_dict(), tmp_path / "net.pt")
    net.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_by_hand_it_is_summed_up_and_exported_and_not_scripted():
    net, x, _ = pooled_net()
    rows = fg.summary(ByHand(net), x).rows
    assert [row.output_shape for row in rows] == [(3, 6, 6), (4, 2, 2), (3,)]
    with pytest.raises(fg.InputError, match=r"torch\.jit\.script cannot express the sampled states of MaxPool2d"):
        torch.jit.script(fg.MaxPool2d(2))
    with torch.no_grad():
        for model in (net, ByHand(net)):
            assert torch.export.export(model, (x,)).module()(x).shape == (4, 3)


@pytest.mark.filterwarnings("default")
def test_a_step_compiles_into_one_graph():
    modules = [
        fg.BinaryConv2d(2, 3, 3),
        nn.MaxPool2d(2, ceil_mode=True),
        fg.BinaryConv2d(3, 4, 1),
        fg.MaxPool2d(2),
        nn.Flatten(),
    ]
    net, (x, objective) = randomized(fg.Sequential(*modules, head=nn.Linear(4, 3))), batch((4, 2, 6, 6))
    z = noise_like(chain(fg.Sequential(*modules[:3], nn.MaxPool2d(2), nn.Flatten(), head=net.head)), x)

    def step(x: Tensor, *z: Tensor) -> Tensor:
        return net(x, objective, estimator=fg.PSA(inputs="mean"), noise=list(z)).sum()

    expected = gradients(step(x, *z), net)
    torch._dynamo.reset()
    assert_same(gradients(torch.compile(step, fullgraph=True, backend="aot_eager")(x, *z), net), expected)
    # By hand the layers run as they are, and so does the pooling.
    net, x, objective = pooled_net()
    model = fg.use(ByHand(net), paper_psa(), generator=torch.Generator().manual_seed(0))
    by_hand = gradients(objective(model(x)).sum(), model)
    fg.use(model, paper_psa(), generator=torch.Generator().manual_seed(0))
    assert_same(gradients(objective(torch.compile(model, backend="eager")(x)).sum(), model), by_hand)


def test_quality_is_measured_with_vectorised_draws():
    net, _, x, objective = small("head")
    rules = {"psa": fg.PSA(), "st": fg.ST(), "concrete": fg.Concrete(), "leg": fg.LEG(), "adf": fg.ADF()}
    result = fg.gradeval.evaluate(net, x, objective, rules, samples=1000, seed=0)
    assert result.reference.kind == "exact"
    assert all(measured.vectorised for measured in result.estimators.values())
    low = {name: measured.layers[0].bias_low for name, measured in result.estimators.items()}
    assert low["psa"] == low["leg"] == 0
    assert min(low["st"], low["concrete"], low["adf"]) > 0
