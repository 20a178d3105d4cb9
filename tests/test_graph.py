"""Models written by hand as networks: they are the twins of Sequential to the bit, and what cannot be right is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flipgrad as fg
import reference
from flipgrad.contract import LocalEstimator
from flipgrad.estimators import ESTIMATORS
from flipgrad.network import parameters_by_layer
from hand_written import Branches, ByHand, Images, Shared, Skip
from reference import assert_same, batch, build, concatenated, gradients, noise_like, paper_psa, randomized


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def twins(net: fg.Sequential, x) -> tuple[fg.Sequential, fg.Graph]:
    """The network, and a copy of it that is written by hand."""
    return net, fg.Graph(ByHand(copy.deepcopy(net)), x)


def binary_weights():
    """Binary weights, drawn and not, with norms that take the statistics of the batch or of none."""
    options = {"weights": "binary", "bias": False}
    layers = [
        fg.BinaryLinear(4, 6, norm=nn.BatchNorm1d(6)),
        fg.BinaryLinear(6, 5, weight_noise=fg.Logistic(0.3), norm=fg.ScaleShift(5), **options),
        fg.BinaryLinear(5, 4, weights="binary"),
    ]
    x, objective = batch((8, 4))
    return randomized(fg.Sequential(nn.BatchNorm1d(4), *layers, head=nn.Linear(4, 3))), x, objective


NETS = {
    "fully connected": lambda: build("fc3", "mixed"),
    "convolutional": lambda: build("groups"),
    "real-valued front": lambda: build("front"),
    "concatenated": lambda: concatenated()[:1] + concatenated()[2:],
    "binary weights": binary_weights,
}
each_net = pytest.mark.parametrize("name", NETS)


def parameters(net: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*net.parameters(), *net.buffers())]


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_net
def test_a_twin_predicts_the_same_to_the_bit(name):
    net, x, _ = NETS[name]()
    x = x.detach()
    net, by_hand = twins(net, x)
    assert len(by_hand.binary_layers) == len(net.binary_layers)
    before = parameters(by_hand)
    for mode in (True, False):
        net.train(mode), by_hand.train(mode)
        assert torch.equal(net.predict(x, 3, generator=seeded()), by_hand.predict(x, 3, generator=seeded()))
        assert torch.equal(net.deterministic(x), by_hand.deterministic(x))
        assert_equal(parameters(by_hand), before)
    member, other = net.member(x, generator=seeded(1)), by_hand.member(x, generator=seeded(1))
    assert_equal(list(member.noise + member.weight_noise), list(other.noise + other.weight_noise))
    assert torch.equal(member(x), other(x))
    noise = noise_like(reference.chain(net), x) if name == "fully connected" else list(member.noise)
    assert torch.equal(net(x, noise=noise, generator=seeded(2)), by_hand(x, noise=noise, generator=seeded(2)))


@each_net
@pytest.mark.parametrize("moments", [False, True], ids=["sampled", "moments"])
def test_a_twin_is_initialised_the_same_to_the_bit(name, moments):
    net, x, _ = NETS[name]()
    net, by_hand = twins(net, x.detach())
    before = parameters(net)
    assert by_hand.initialize(x.detach(), moments=moments, generator=seeded()) is by_hand
    net.initialize(x.detach(), moments=moments, generator=seeded())
    assert_equal(parameters(by_hand), parameters(net))
    assert not all(torch.equal(a, b) for a, b in zip(parameters(net), before, strict=True))
    assert not any(p.grad_fn for p in by_hand.parameters())


LOCAL = {"psa": paper_psa(flip_head=False), "st": fg.ST(), "concrete": fg.Concrete(0.5), "hard-st": fg.HardST()}


def result(net, x, objective, estimator, **options) -> list[torch.Tensor]:
    """Losses and all gradients with one draw."""
    losses = net(x, objective, estimator=copy.deepcopy(estimator), generator=seeded(3), **options)
    return [losses.detach(), *torch.autograd.grad(losses.sum(), list(net.parameters()), materialize_grads=True)]


@each_net
@pytest.mark.parametrize("estimator", LOCAL.values(), ids=LOCAL)
def test_a_twin_has_the_losses_and_gradients_of_local_estimators(name, estimator):
    net, x, objective = NETS[name]()
    net, by_hand = twins(net, x.detach())
    if name == "binary weights":
        # The rest of the gradient in batch statistics is of the whole batch.
        net.eval(), by_hand.eval()
        if isinstance(estimator, fg.Concrete):
            net[3].weight_noise = by_hand.model.body[3].weight_noise = fg.Logistic()
    assert_equal(result(net, x.detach(), objective, estimator), result(by_hand, x.detach(), objective, estimator))


@pytest.mark.parametrize("name", [name for name, kind in ESTIMATORS.items() if not issubclass(kind, LocalEstimator)])
def test_a_twin_has_the_losses_and_gradients_of_estimators_of_paths(name):
    net, x, objective = build("fc3", "mixed")
    x = x.detach()
    estimator = ESTIMATORS[name]()
    net, by_hand = twins(net, x)
    torch.manual_seed(0)
    if name == "exact":
        with pytest.raises(fg.InputError, match=r"exact: the states of a model written by hand are not summed over"):
            by_hand(x, objective, estimator=estimator)
        return
    expected = result(net, x, objective, estimator)
    torch.manual_seed(0)
    assert_equal(result(by_hand, x, objective, estimator), expected)


USED = {
    "posterior": fg.PSA(inputs="posterior"),
    "mean": fg.PSA(inputs="mean"),
    "st": fg.ST(),
    "tanh": fg.Tanh(),
    "adf": fg.ADF(),
}


@pytest.mark.parametrize("estimator", USED.values(), ids=USED)
@pytest.mark.parametrize("kind", [Skip, Branches, Shared, Images])
def test_local_estimators_are_those_of_use(kind, estimator):
    model = randomized(kind())
    x, objective = batch(kind.shape)
    net = fg.Graph(copy.deepcopy(model), x)
    if getattr(estimator, "inputs", None) == "posterior" and kind in (Skip, Branches, Images):
        with pytest.raises(fg.InputError, match="the posterior of a unit is known only where its states go to one layer"):
            net(x, objective, estimator=estimator).sum().backward()
        return
    fg.use(model, estimator, generator=seeded(3))
    losses = objective(model(x))
    expected = [losses.detach(), *torch.autograd.grad(losses.sum(), list(model.parameters()))]
    assert_equal(result(net, x, objective, estimator), expected)
    # It is the default where it is in use.
    fg.use(net, estimator)
    losses = net(x, objective, generator=seeded(3))
    assert torch.equal(losses.detach(), expected[0])


@pytest.mark.parametrize("kind", [Skip, Branches, Shared])
def test_reinforce_is_unbiased_in_every_graph(kind):
    """By enumeration of all states of all units, with no statistics: skips, branches, a layer that is applied twice."""
    model = randomized(kind())
    x, objective = batch((1, *kind.shape[1:]))
    net = fg.Graph(model, x)
    reference.assert_unbiased_by_enumeration(net, model.graph(), x, objective, fg.REINFORCE())


class Stream(nn.Module):
    """A real-valued stream with parameters between binary layers, which no local estimator knows."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.second = fg.BinaryLinear(2, 3), nn.Linear(3, 3), fg.BinaryLinear(3, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        stream = torch.tanh(self.mix(h)) + h
        return self.head(torch.cat([stream, self.second(stream, binary=False)], 1))

    def graph(self):
        def stream(h):
            return torch.tanh(self.mix(h[1])) + h[1]

        nodes = [reference.Node(self.first, lambda h: h[0], ()), reference.Node(self.second, stream, (1,))]
        return reference.Graph(nodes, lambda h: self.head(torch.cat([stream(h), h[2]], 1)), (1, 2))


def test_reinforce_is_unbiased_with_real_values_between_layers():
    model = randomized(Stream())
    x, objective = batch((2, 2))
    reference.assert_unbiased_by_enumeration(fg.Graph(model, x), model.graph(), x, objective, fg.REINFORCE())


def test_the_bound_and_the_mean_of_draws_are_the_twins():
    net, x, objective = build("fc3")
    x = x.detach()
    net, by_hand = twins(net, x)
    for function, options in [(fg.bounds.mean_losses, {"antithetic": True}), (fg.bounds.bound_losses, {})]:
        got = [function(n, x, objective, 4, estimator=fg.ST(), generator=seeded(), **options) for n in (net, by_hand)]
        assert torch.equal(*got)
        both = [
            list(torch.autograd.grad(losses.sum(), list(n.parameters()))) for n, losses in zip((net, by_hand), got, strict=True)
        ]
        assert_equal(*both)
    assert torch.equal(*(fg.bounds.marginal_loss(n, x, objective, 3, generator=seeded()) for n in (net, by_hand)))


def test_layers_are_named_in_the_order_of_evaluation():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.late, self.early = nn.Linear(2, 2), fg.BinaryLinear(3, 2), fg.BinaryLinear(2, 3)

        def forward(self, x):
            return self.out(self.late(self.early(x)))

    model = Backwards()
    net = fg.Graph(model, torch.zeros(1, 2))
    assert net.binary_layers == [model.early, model.late]
    groups = parameters_by_layer(net)
    assert {name: list(group) for name, group in groups.items()} == {
        "layer 1": ["model.early.weight", "model.early.bias"],
        "layer 2": ["model.late.weight", "model.late.bias"],
        "others": ["model.out.weight", "model.out.bias"],
    }
    # By name: a layer may be replaced by another one, and copies have their own.
    model.early = fg.BinaryLinear(2, 3, noise=fg.Normal())
    assert net.binary_layers[0] is model.early
    assert copy.deepcopy(net).binary_layers[0] is not model.early
    assert [row.name for row in fg.summary(net, torch.zeros(1, 2)).rows] == ["model.early", "model.late", "model.out"]


def test_to_make_it_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), fg.BinaryLinear(2, 3, norm=nn.BatchNorm1d(3)), nn.Dropout(), nn.Linear(3, 2))
    x = torch.randn(5, 2)
    before, state = parameters(model), torch.get_rng_state()
    fg.Graph(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(parameters(model), before)
    assert all(module.training for module in model.modules())


def test_vmap_hides_the_record_and_that_is_refused_unless_it_is_known():
    model = randomized(Skip())
    x, objective = batch((3, 2))
    net = fg.Graph(model, x)
    copies = {name: p.detach().expand(2, *p.shape).clone().requires_grad_() for name, p in net.named_parameters()}

    def losses(named):
        return torch.func.functional_call(net, named, (x, objective), {"estimator": fg.PSA()}).sum()

    def by_layers(named):
        fg.use(model, fg.PSA())
        named = {name.removeprefix("model."): p for name, p in named.items()}
        return torch.func.functional_call(model, named, (x,)).sum()

    for function in (losses, by_layers):
        with pytest.raises(fg.InputError, match=r"torch.vmap hides autograd's record of it. Say layer\(x, binary=True\)"):
            torch.vmap(function, randomness="different")(copies)
    net(x, objective, estimator=fg.PSA())
    fg.use(model, None)
    # Now it knows which layers see states; the draws themselves are compared in tests/gradeval.
    torch.vmap(losses, randomness="different")(copies).sum().backward()
    assert all(bool(p.grad.any()) for p in copies.values())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_checkpoint_around_a_part_is_refused_and_around_the_whole_is_right():
    class Part(Skip):
        def __init__(self, **options):
            super().__init__()
            self.options = options

        def forward(self, x):
            if not self.options:
                return super().forward(x)
            h1 = checkpoint(self.l1, x, **self.options)
            return self.head(self.l3(torch.cat([h1, self.l2(h1)], 1)))

    x, objective = batch((3, 2))
    for reentrant in (True, False):
        net = fg.Graph(randomized(Part(use_reentrant=reentrant)), x)
        with pytest.raises(fg.InputError, match="a checkpoint around a part of a model in fg"):
            net(x.clone().requires_grad_(), objective)
        # Without a way back nothing is computed again.
        with torch.no_grad():
            net(x)
    net = fg.Graph(randomized(Part()), x)
    torch.manual_seed(0)
    expected = gradients(net(x, objective).sum(), net)
    torch.manual_seed(0)
    assert_same(gradients(checkpoint(net, x, objective, use_reentrant=False).sum(), net), expected, 0)


def test_second_derivatives_are_refused_or_right():
    x, objective = batch((3, 2))
    net = fg.Graph(randomized(Skip()), x)
    for estimator, twice in [(fg.PSA(), False), (fg.Concrete(), True)]:
        loss = net(x, objective, estimator=estimator, generator=seeded()).sum()
        (slope,) = torch.autograd.grad(loss, [net.model.l1.weight], create_graph=True)
        if twice:
            slope.square().sum().backward()
            assert bool(net.model.l1.weight.grad.any())
        else:
            with pytest.raises(RuntimeError, match="cannot differentiate twice"):
                slope.square().sum().backward()


class Counting(nn.Module):
    """Evaluates other layers in every second call; each call counts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head, self.calls = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), nn.Linear(3, 2), 0

    def forward(self, x):
        self.calls += 1
        h = self.b(self.a(x))
        return self.head(h if self.calls < 3 else self.b(h))


class TimeFirst(nn.Module):
    """Its second layer sees [time, batch, units]."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.b(self.a(x).transpose(0, 1)).transpose(0, 1)).mean(1)


class Mixing(nn.Module):
    """Examples see the mean of the batch, before a layer or behind all of them."""

    def __init__(self, early):
        super().__init__()
        self.a, self.b, self.head, self.early = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), nn.Linear(3, 2), early

    def forward(self, x):
        h = self.a(x)
        h = self.b(h - h.mean(0) if self.early else h, binary=False)
        return self.head(h if self.early else h - h.mean(0))


class Calling(nn.Module):
    """Calls a function of itself in its forward."""

    def __init__(self, function, **parts):
        super().__init__()
        self.layer, self.function = fg.BinaryLinear(2, 3), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


X = torch.zeros(4, 2)
OUTSIDE = fg.BinaryLinear(2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.Graph(nn.Linear(2, 3), X), "Graph: Linear has no binary layer; build it with fg.BinaryLinear"),
        (
            lambda: fg.Graph(fg.BinaryLinear, X),
            r"Graph\(model, x\) takes a module and a batch of at least one example, got .*ABC",
        ),
        (
            lambda: fg.Graph(fg.BinaryLinear(2, 3), X[:0]),
            r"a batch of at least one example, got BinaryLinear and Tensor \[0, 2\]",
        ),
        (
            lambda: fg.Graph(nn.Sequential(fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Identity())), X),
            r"Graph: '0' of the model is a flipgrad.Sequential, a network of its own .* or put its layers into the model",
        ),
        (lambda: fg.Graph(fg.Graph(fg.BinaryLinear(2, 3), X), X), "Graph: the model is a flipgrad.Graph, a network of its own"),
        (
            lambda: fg.Graph(Calling(lambda self, x: self.layer(x), unused=fg.BinaryLinear(2, 3)), X),
            "the model does not evaluate its binary layer 'unused': call it in its forward, or take it out",
        ),
        (
            lambda: fg.Graph(Calling(lambda self, x: self.layer(x) + OUTSIDE(x)), X),
            "evaluates a BinaryLinear that is no submodule of it, so that its parameters would be left out; make it",
        ),
        (lambda: fg.Graph(Calling(lambda self, x: (self.layer(x), x)), X), r"to outputs \[2, K\], it gave \(tensor"),
        (lambda: fg.Graph(Calling(lambda self, x: self.layer(x)[:, 0]), X), r"it gave \[2\]; one output still needs the last"),
        (
            lambda: fg.Graph(Calling(lambda self, x: self.layer(x, generator=torch.Generator())), X),
            r"BinaryLinear was handed an estimator, a generator or noise inside of a model in fg.Graph, .* hand them to net\(x",
        ),
        (
            lambda: fg.Graph(Counting(), X)(X),
            r"in the order a, b, b, and a, b when fg.Graph\(model, x\) was made; .* fg.use\(model",
        ),
        (
            lambda: fg.Graph(TimeFirst(), X.view(2, 2, 2))(X.view(2, 2, 2), fg.CrossEntropy(X[0].long()), estimator=fg.ARM()),
            "an estimator that looks at sampled paths: a binary layer .* whose first dimension is not the batch",
        ),
        (
            lambda: fg.Graph(TimeFirst(), X.view(2, 2, 2))(X.view(2, 2, 2), antithetic=True),
            "antithetic=True: a binary layer of the model has pre-activations whose first dimension is not the batch",
        ),
        (lambda: fg.exact.expected_loss(fg.Graph(fg.BinaryLinear(2, 3), X), X, None), "exact takes a flipgrad.Sequential"),
        (
            lambda: fg.gradeval.evaluate(nn.Sequential(fg.BinaryLinear(2, 3)), X, None, [fg.PSA()]),
            r"gradeval takes a flipgrad.Sequential or a flipgrad.Graph, got Sequential: give .* fg.Graph\(model, x\)",
        ),
        (lambda: fg.Graph(fg.BinaryLinear(2, 3), X)(X * torch.nan), "the network's input holds NaN or inf"),
        (lambda: fg.Graph(fg.BinaryLinear(2, 3), X)(X, noise=[X, X]), "2 tensors were handed in for 1 binary layers"),
    ],
)
def test_what_cannot_be_right_is_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()


@pytest.mark.parametrize("early", [True, False])
def test_paths_need_examples_that_do_not_depend_on_each_other(early):
    x, objective = batch((4, 2), classes=2)
    net = fg.Graph(randomized(Mixing(early)), x)
    net(x, objective, estimator=fg.ST()).sum().backward()
    with pytest.raises(fg.InputError, match="needs examples that do not depend on each other, and the model gives an example"):
        net(x, objective, estimator=fg.REINFORCE())


def test_modules_in_training_mode_are_refused_where_paths_are_replayed():
    x, objective = batch((4, 2), classes=2)
    for module, once in [(nn.BatchNorm1d(3), False), (nn.Dropout(), True)]:
        net = fg.Graph(randomized(nn.Sequential(fg.BinaryLinear(2, 3), module, nn.Linear(3, 2))), x)
        with pytest.raises(fg.InputError, match="in training mode mixes examples or draws at random"):
            net(x, objective, estimator=fg.ARM())
        if once:
            net(x, objective, estimator=fg.REINFORCE()).sum().backward()
        net.eval()(x, objective, estimator=fg.ARM()).sum().backward()


def test_batchnorm_beside_dropout_in_a_head_is_refused_too():
    x, objective = batch((4, 2), classes=2)
    head = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=head).double()
    with pytest.raises(fg.InputError, match=r"BatchNorm1d.* in training mode mixes examples"):
        net(x, objective, estimator=fg.REINFORCE())


def test_moments_refuse_what_they_would_count_wrongly():
    """Zeros, and real values beside states, have no variance; in the moments of a layer they would count as units."""
    x, _ = batch((4, 1, 4, 4))
    padded = nn.Sequential(fg.BinaryConv2d(1, 2, 2), nn.ZeroPad2d(1), fg.BinaryConv2d(2, 2, 2), nn.Flatten(), nn.LazyLinear(2))
    net = fg.Graph(padded.double(), x)
    net.initialize(x)
    with pytest.raises(fg.InputError, match="relaxed states together with 0, which is no unit"):
        net.initialize(x, moments=True)


def test_local_estimators_refuse_what_they_refuse_with_use():
    x, objective = batch((4, 1, 4, 4), classes=2)
    model = nn.Sequential(fg.BinaryConv2d(1, 2, 3), nn.MaxPool2d(2), fg.BinaryConv2d(2, 2, 1), nn.Flatten(), nn.Linear(2, 2))
    net = fg.Graph(model.double(), x)
    with pytest.raises(fg.InputError, match="went through the operation MaxPool2D"):
        net(x, objective, estimator=fg.PSA())
    # It is no obstacle to looking, nor to what needs no flips.
    assert net.predict(x, 2).shape == (4, 2)
    net(x, objective, estimator=fg.DisARM()).sum().backward()
    assert net.initialize(x) is net
