"""Sampled losses, the multi-sample bound, and training with many draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg
import reference
from flipgrad import bounds, exact
from flipgrad.data import toy
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators.names import for_training
from flipgrad.objectives import of_copies
from flipgrad.training.models import fully_connected as toy_net
from reference import assert_same, batch, chain, fully_connected, gradients


@pytest.fixture
def problem():
    return fully_connected(2, 3, 3, 3, scale=1.5), *batch((3, 2))


def test_losses_are_those_of_sampled_passes(problem):
    net, x, objective = problem
    losses = bounds.sampled_losses(net, x, objective, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    assert_same(losses, torch.stack([objective(net(x, generator=generator)).detach() for _ in range(4)]), 0)
    assert not losses.requires_grad


def test_estimates_are_made_of_the_losses(problem):
    net, x, objective = problem

    def seeded(function):
        return function(net, x, objective, 5, generator=torch.Generator().manual_seed(0))

    losses = seeded(bounds.sampled_losses)
    assert losses.shape == (5, 3)
    assert_same(seeded(bounds.expected_loss), losses.mean(0))
    assert_same(seeded(bounds.marginal_loss), -torch.exp(-losses).mean(0).log())


def test_estimates_approach_the_exact_losses(problem):
    """Fails by chance less than once in 10^5 seeds: 2 x 3 numbers, 5 standard errors each."""
    net, x, objective = problem
    samples = 1000
    f = bounds.sampled_losses(net, x, objective, samples, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = f.std(0) / samples**0.5
        assert bool(((f.mean(0) - exact.expected_loss(net, x, objective)).abs() < 5 * error).all())
        p = torch.exp(-f)
        # By the delta method, the error of a logarithm is the relative error.
        error = p.std(0) / p.mean(0) / samples**0.5
        assert bool(((bounds.multi_sample_bound(f) - exact.marginal_loss(net, x, objective)).abs() < 5 * error).all())


def test_bound_lies_between_the_expected_and_the_marginal_loss(problem):
    """In expectation, computed over all states, and closer to the marginal loss the more samples."""
    net, x, objective = problem
    graph = chain(net)
    h = reference.joint_states(graph, x[:1])
    with torch.no_grad():
        p = reference.probability(graph, h)
        f = objective.select(torch.zeros(len(p), dtype=torch.long))(graph.outputs(h))
        one = p @ bounds.multi_sample_bound(f[None])
        two = p @ bounds.multi_sample_bound(torch.stack(torch.broadcast_tensors(f[:, None], f))) @ p
        expected, marginal = (
            loss(net, x[:1], objective.select(slice(1)))[0] for loss in (exact.expected_loss, exact.marginal_loss)
        )
    assert_same(one, expected)
    assert marginal + 0.05 < two < expected - 0.05


def test_bound_neither_overflows_nor_underflows():
    assert_same(bounds.multi_sample_bound(torch.tensor([[1e4, -1e4], [1e4, -1e4]])), torch.tensor([1e4, -1e4]))


@pytest.mark.parametrize(
    "function",
    [bounds.sampled_losses, bounds.expected_loss, bounds.marginal_loss, bounds.mean_losses, bounds.bound_losses],
)
def test_refuses_no_samples(problem, function):
    with pytest.raises(fg.InputError, match="samples=0: at least one sample is needed"):
        function(*problem, 0)


# For training: one hidden layer, where PSA is unbiased too, and two.
ONE, TWO = (2, 3, 3), (2, 2, 2, 3)


def one_example(sizes):
    return fully_connected(*sizes, scale=1.2), *batch((1, 2))


def joint_copies(net, x, samples):
    """For all joint states of ``samples`` copies: each copy's states, and their probability."""
    graph = chain(net)
    h = reference.joint_states(graph, x)
    rows = torch.cartesian_prod(*[torch.arange(len(h[0]))] * samples).view(-1, samples)
    copies = [[t[row] for t in h] for row in rows.unbind(1)]
    return copies, torch.stack([reference.probability(graph, copy) for copy in copies]).prod(0)


def exact_bound(net, x, objective, samples):
    """The expected bound of the one example ``x``, a sum over all joint states of all copies; differentiable."""
    copies, p = joint_copies(net, x, samples)
    repeated = objective.select(torch.zeros(len(p), dtype=torch.long))
    likelihoods = torch.stack([torch.exp(-repeated(chain(net).outputs(copy))) for copy in copies])
    return p @ -likelihoods.mean(0).log()


def mean_bound(net, x, objective, samples, estimator):
    """The expectation of the estimate, value and gradient, of an estimator that draws every layer's Z and nothing else."""
    copies, p = joint_copies(net, x, samples)
    noise = [torch.cat(z) for z in zip(*map(reference.forcing, copies), strict=True)]
    repeated = objective.select(torch.zeros(len(p), dtype=torch.long))
    return p.detach() @ bounds.bound_losses(net, x.expand(len(p), -1), repeated, samples, estimator=estimator, noise=noise)


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "estimator"),
    [(ONE, fg.PSA()), (ONE, fg.PSA(head="enhanced")), (ONE, fg.REINFORCE()), (TWO, fg.REINFORCE())],
    ids=["PSA", "PSA enhanced", "REINFORCE", "REINFORCE, two layers"],
)
def test_the_mean_of_the_bounds_estimate_is_its_exact_gradient(sizes, estimator, samples):
    net, x, objective = one_example(sizes)
    expected, mean = exact_bound(net, x, objective, samples), mean_bound(net, x, objective, samples, estimator)
    assert_same(mean, expected)
    assert_same(gradients(mean, net), gradients(expected, net), 1e-8)


def test_the_bounds_gradient_is_not_that_of_the_expected_loss():
    net, x, objective = one_example(ONE)
    two, one = (gradients(exact_bound(net, x, objective, samples), net)["0.weight"] for samples in (2, 1))
    assert (two - one).norm() > 0.1 * two.norm()


@pytest.mark.parametrize(
    ("estimator", "draws"),
    [(fg.ARM(), 3000), (fg.REINFORCE(), 8000), (fg.LEG(), 1000), (fg.MuProp(), 4000), (fg.Exact(), 100)],
    ids=lambda value: type(value).__name__ if isinstance(value, fg.Estimator) else "",
)
def test_unbiased_estimators_give_unbiased_gradients_of_the_bound(estimator, draws):
    """Fails by chance less than once in 10^4 seeds: 5 estimators, 21 entries, 5 standard errors; sees errors of 10 %."""
    net, x, objective = one_example(TWO)
    generator, samples, groups = torch.Generator().manual_seed(0), 3, 40
    many, repeated = x.expand(draws, -1), objective.select(torch.zeros(draws, dtype=torch.long))
    truth = torch.cat([g.flatten() for g in gradients(exact_bound(net, x, objective, samples), net).values()])

    def group():
        losses = bounds.bound_losses(net, many, repeated, samples, estimator=estimator, generator=generator)
        return torch.cat([g.flatten() for g in gradients(losses.mean(), net).values()])

    drawn = torch.stack([group() for _ in range(groups)])
    error = drawn.std(0) / groups**0.5
    assert bool(((drawn.mean(0) - truth).abs() < 5 * error + 1e-12).all())
    assert 5 * (drawn @ truth / truth.square().sum()).std() / groups**0.5 < 0.1


def bound_given(losses, others):
    """The bounds of [..., B] ``losses`` beside those of other copies, [S - 1, B]."""
    return -torch.log((torch.exp(-losses) + torch.exp(-others).sum(0)) / (1 + len(others)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_value_is_the_bound_of_what_the_estimator_samples(problem, name):
    """So every estimator evaluates the objective at its own path first, which is what the others' losses are taken from."""
    net, x, objective = problem
    seen = []

    def spy(outputs):
        seen.append(objective(outputs).detach())
        return objective(outputs)

    value = bounds.bound_losses(net, x, spy, 4, estimator=ESTIMATORS[name](), generator=torch.Generator().manual_seed(0))
    assert value.shape == (3,)
    if name == "exact":
        # All states were seen first, then a sampled pass. A copy's own loss is expected, the others' are sampled.
        copies, others = seen[0].unbind(1), seen[1]
        means = [
            exact.expected_loss(net, x, lambda outputs, s=s: bound_given(objective(outputs), others[torch.arange(4) != s]))
            for s in range(4)
        ]
        assert len(copies) == 4
        assert_same(value, torch.stack(means).mean(0))
    else:
        assert_same(value.detach(), bounds.multi_sample_bound(seen[0]))
    (slope,) = torch.autograd.grad(value.sum(), net[0].weight)
    assert bool(torch.isfinite(slope).all())
    assert slope.norm() > 0


def test_relaxed_bounds_are_differentiated_as_they_are(problem):
    """Nothing is sampled by Tanh but one relaxed pass: S equal copies, so that the bound is the relaxed loss."""
    net, x, objective = problem
    bound = bounds.bound_losses(net, x, objective, 3, estimator=fg.Tanh()).sum()
    relaxed = net(x, objective, estimator=fg.Tanh()).sum()
    assert_same(bound, relaxed)
    assert_same(gradients(bound, net), gradients(relaxed, net))


def test_a_sampled_relaxation_is_differentiated_through_the_whole_bound(problem):
    net, x, objective = problem
    noise = [torch.randn(12, 3).double() for _ in range(2)]
    bound = bounds.bound_losses(net, x, objective, 4, estimator=fg.Concrete(0.5), noise=noise)
    copies = [[z[3 * s : 3 * s + 3] for z in noise] for s in range(4)]
    losses = torch.stack([net(x, objective, estimator=fg.Concrete(0.5), noise=z) for z in copies])
    expected = bounds.multi_sample_bound(losses)
    assert_same(bound, expected)
    assert_same(gradients(bound.sum(), net), gradients(expected.sum(), net))


@pytest.mark.parametrize("function", [bounds.mean_losses, bounds.bound_losses])
@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ARM()], ids=["PSA", "ARM"])
def test_one_sample_is_the_ordinary_estimate(problem, function, estimator):
    net, x, objective = problem
    one = function(net, x, objective, 1, estimator=estimator, generator=torch.Generator().manual_seed(0))
    ordinary = net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one, ordinary)
    assert_same(gradients(one.sum(), net), gradients(ordinary.sum(), net), 0)


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST(), fg.REINFORCE()], ids=["PSA", "ST", "REINFORCE"])
def test_the_mean_of_draws_is_that_of_a_loop(problem, estimator):
    net, x, objective = problem
    noise = [torch.randn(12, 3).double() for _ in range(2)]
    copies = [[z[3 * s : 3 * s + 3] for z in noise] for s in range(4)]
    losses = bounds.mean_losses(net, x, objective, 4, estimator=estimator, noise=noise)
    loop = torch.stack([net(x, objective, estimator=estimator, noise=z) for z in copies]).mean(0)
    assert_same(losses, loop)
    assert_same(gradients(losses.sum(), net), gradients(loop.sum(), net))


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST(), fg.REINFORCE()], ids=["PSA", "ST", "REINFORCE"])
def test_antithetic_draws_are_pairs_with_opposite_noise(problem, estimator):
    net, x, objective = problem
    generator = torch.Generator().manual_seed(0)
    half = [layer.noise.sample((6, 3), generator=generator, dtype=x.dtype) for layer in net.binary_layers]
    pairs = bounds.mean_losses(
        net, x, objective, 4, estimator=estimator, generator=torch.Generator().manual_seed(0), antithetic=True
    )
    handed_in = bounds.mean_losses(net, x, objective, 4, estimator=estimator, noise=[torch.cat([z, -z]) for z in half])
    assert_same(pairs, handed_in, 0)
    assert_same(gradients(pairs.sum(), net), gradients(handed_in.sum(), net), 0)


def test_antithetic_draws_have_the_same_mean_and_less_variance():
    """Of the head's gradient, which is unbiased: within 5 standard errors; the variances differ by far more than chance."""
    net, x, objective = fully_connected(2, 8, 8, 3, scale=1.0), *batch((3, 2))
    exact.expected_loss(net, x, objective).mean().backward()
    # Every draw is the mean of two.
    rows = torch.arange(3).repeat(2)
    x, objective = x[rows], objective.select(rows)
    truth, draws = net.head.weight.grad.clone(), {}
    for antithetic in (False, True):
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(750):
            loss = bounds.mean_losses(net, x, objective, 2, estimator=fg.ST(), generator=generator, antithetic=antithetic)
            found.append(gradients(loss.mean(), net)["head.weight"])
        draws[antithetic] = torch.stack(found)
    error = draws[True].std(0) / 750**0.5
    assert bool(((draws[True].mean(0) - truth).abs() < 5 * error).all())
    independent, pairs = (draws[key].var(0).sum() for key in (False, True))
    assert pairs < 0.8 * independent


@pytest.mark.parametrize("objective", ["cross-entropy", "soft", "bits", "normal", "squares", "logistic"])
def test_several_draws_know_their_flips_as_one_does(objective):
    """An objective of ours stays one for the copies: its flips are known, and the gradient is that of evaluating them."""
    torch.manual_seed(0)
    made = {
        "cross-entropy": fg.CrossEntropy(torch.tensor([0, 2, 1])),
        "soft": fg.SoftCrossEntropy(torch.rand(3, 3).double().softmax(1)),
        "bits": fg.BernoulliLikelihood(torch.rand(3, 3).double()),
        "normal": fg.GaussianLikelihood(torch.randn(3, 3).double(), torch.rand(3).double() + 0.5),
        "squares": fg.SquaredError(torch.randn(3, 3).double()),
        "logistic": fg.LogisticLoss(torch.tensor([1, -1, 1])),
    }[objective]
    assert type(of_copies(made, 2, 3)) is type(made)
    net, x = fully_connected(2, 5, 5, 1 if objective == "logistic" else 3, scale=1.0), torch.randn(3, 2).double()
    noise = [net.binary_layers[0].noise.sample_like(torch.zeros(6, 5).double()) for _ in range(2)]
    # Bits have no averaged gradient of the head without flips that are evaluated.
    rule = fg.PSA(exact=True, head="sampled" if objective == "bits" else "rao-blackwell")
    known, evaluated = (
        bounds.mean_losses(net, x, each, 2, estimator=rule, noise=noise) for each in (made, lambda outputs: made(outputs))
    )
    assert_same(known, evaluated)
    assert_same(gradients(known.sum(), net), gradients(evaluated.sum(), net))


def conv_chain() -> fg.Sequential:
    """Convolutions, max-pooling and a view between layers, in float64."""
    layers = (
        fg.BinaryConv2d(1, 3, 3, padding=1),
        nn.MaxPool2d(2),
        fg.BinaryConv2d(3, 4, 2),
        nn.Flatten(),
        fg.BinaryLinear(16, 5),
    )
    return reference.randomized(fg.Sequential(*layers, fg.BinaryLinear(5, 4), head=nn.Linear(4, 3)))


@pytest.mark.parametrize("estimator", ["psa", "psa:rao-blackwell", "psa:mean", "psa:sampled", "psa:enhanced", "st", "concrete"])
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_draws_that_share_the_first_layers_are_whole_draws(estimator, shared):
    """Term by term: with the same noise, the mean of one estimate each."""
    net, x = conv_chain(), torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    objective, rule = fg.CrossEntropy(torch.tensor([0, 2, 1])), for_training(estimator, 1)[1]
    shapes = [(3, 6, 6), (4, 2, 2), (5,), (4,)]
    noise = [torch.randn(3 if k < shared else 6, *shape).double() for k, shape in enumerate(shapes)]
    losses = bounds.mean_losses(net, x, objective, 2, estimator=rule, noise=noise, shared=shared)
    copies = [[z if k < shared else z[3 * s : 3 * s + 3] for k, z in enumerate(noise)] for s in range(2)]
    loop = torch.stack([net(x, objective, estimator=rule, noise=z) for z in copies]).mean(0)
    assert_same(losses, loop)
    assert_same(gradients(losses.sum(), net), gradients(loop.sum(), net))


def test_draws_that_share_layers_may_be_antithetic_and_have_binary_weights():
    net = reference.randomized(
        fg.Sequential(
            fg.BinaryLinear(2, 5, weights="binary", weight_noise=fg.Logistic(0.5)),
            fg.BinaryLinear(5, 4, weights="binary", weight_noise=fg.Logistic(0.5)),
            head=nn.Linear(4, 3),
        )
    )
    x, objective = torch.randn(3, 2).double(), fg.CrossEntropy(torch.tensor([0, 2, 1]))
    drawn = [layer.weight_noise.sample_like(layer.weight.detach()) for layer in net.binary_layers]

    def seeded(**options) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return bounds.mean_losses(net, x, objective, 2, estimator=fg.PSA(), weight_noise=drawn, generator=generator, **options)

    generator = torch.Generator().manual_seed(0)
    first, second = (net.binary_layers[0].noise.sample((3, width), generator=generator, dtype=x.dtype) for width in (5, 4))
    pairs = seeded(shared=1, antithetic=True)
    how = {"estimator": fg.PSA(), "weight_noise": drawn}
    loop = (net(x, objective, noise=[first, second], **how) + net(x, objective, noise=[first, -second], **how)) / 2
    assert_same(pairs, loop)
    assert_same(gradients(pairs.sum(), net), gradients(loop.sum(), net))


def test_draws_of_the_upper_layers_have_the_same_mean_and_less_variance():
    """The gradient of the last layer and the head, in which PSA is unbiased: within 5 standard errors of the exact one."""
    net, x, objective = fully_connected(2, 6, 6, 3, scale=1.0), *batch((3, 2))
    exact.expected_loss(net, x, objective).mean().backward()
    unbiased = (net.binary_layers[-1].weight, net.head.weight)
    truth = {name: each.grad.clone() for name, each in net.named_parameters() if any(each is one for one in unbiased)}
    assert len(truth) == 2
    variances = {}
    for samples, shared in ((1, 0), (2, 1)):
        generator, rows = torch.Generator().manual_seed(0), []
        for _ in range(600):
            rule = fg.PSA(inputs="rao-blackwell")
            how = {"estimator": rule, "generator": generator, "antithetic": samples == 2, "shared": shared}
            rows.append(gradients(bounds.mean_losses(net, x, objective, samples, **how).mean(), net))
        for name, exact_gradient in truth.items():
            drawn = torch.stack([row[name] for row in rows])
            assert bool(((drawn.mean(0) - exact_gradient).abs() < 5 * drawn.std(0) / 600**0.5).all())
        variances[samples] = torch.stack([row["head.weight"] for row in rows]).var(0).sum()
    assert variances[2] < 0.9 * variances[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shared": 2},
            "shared=2: of the 2 binary layers of the network the last is drawn anew for every draw; share at most 1",
        ),
        ({"shared": -1}, "shared=-1: several draws may share the states of the first layers; give the number of these layers"),
        ({"shared": 1, "samples": 1}, "shared=1: several draws may share .* and samples=2 or more"),
        ({"shared": 1, "estimator": fg.REINFORCE()}, "shared=1: REINFORCE looks at whole paths, .* use fg.PSA"),
    ],
    ids=["too many", "negative", "one draw", "paths"],
)
def test_refuses_layers_that_cannot_be_shared(problem, options, message):
    net, x, objective = problem
    with pytest.raises(fg.InputError, match=message):
        bounds.mean_losses(net, x, objective, **{"samples": 2, **options})


def test_refuses_to_share_layers_but_of_a_chain():
    chain_only = "shared=1: draws of the upper layers alone are for a chain, fg.Sequential without fg.Concat"
    x, objective = torch.randn(4, 2), fg.CrossEntropy(torch.tensor([0, 1, 1, 0]))
    layers = (fg.BinaryLinear(2, 3), fg.Concat(nn.Identity(), fg.BinaryLinear(3, 3)), fg.BinaryLinear(6, 3))
    by_hand = nn.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), nn.Linear(3, 2))
    for net in (fg.Sequential(*layers, head=nn.Linear(3, 2)), fg.Graph(by_hand, x)):
        with pytest.raises(fg.InputError, match=chain_only):
            bounds.mean_losses(net, x, objective, 2, estimator=fg.PSA(), shared=1)


def test_refuses_what_has_no_pairs(problem):
    net, x, objective = problem
    with pytest.raises(fg.InputError, match="samples=3: antithetic draws come in pairs; give an even number"):
        bounds.mean_losses(net, x, objective, 3, antithetic=True)
    with pytest.raises(fg.InputError, match="antithetic=True draws noise for pairs: give an even batch, and no noise"):
        net(x, objective, antithetic=True)
    with pytest.raises(fg.InputError, match="antithetic=True draws noise for pairs: give an even batch, and no noise"):
        bounds.mean_losses(net, x, objective, 2, antithetic=True, noise=[torch.zeros(6, 3)] * 2)


@pytest.mark.parametrize("function", [bounds.mean_losses, bounds.bound_losses])
def test_baselines_know_which_example_a_copy_is_of(problem, function):
    net, x, objective = problem
    estimator = fg.REINFORCE(fg.RunningBaseline(10).double())
    function(net, x, objective, 4, estimator=estimator, index=torch.tensor([7, 2, 5]))
    assert estimator.baseline.seen.nonzero().flatten().tolist() == [2, 5, 7]


def test_the_estimators_own_parameters_learn_as_fast_as_without_copies(problem):
    """REBAR's pace is a fixed share of its gradient's size, which is then the same whatever the number of copies."""
    net, x, objective = problem
    rates = {}
    for samples in (1, 8):
        slopes = []
        for seed in range(50):
            rebar = fg.REBAR().double()
            generator = torch.Generator().manual_seed(seed)
            loss = bounds.bound_losses(net, x, objective, samples, estimator=rebar, generator=generator).mean()
            slopes.append(torch.autograd.grad(loss, rebar.log_scale)[0])
        rates[samples] = torch.stack(slopes).abs().mean().item()
    assert rates[8] < 1.5 * rates[1]


def test_the_score_function_profits_from_the_baseline(problem):
    """Without it the variance would grow with the copies, as every one of them counts the whole bound; here it falls."""
    net, x, objective = problem
    generator = torch.Generator().manual_seed(0)

    def variance(samples):
        drawn = [
            gradients(
                bounds.bound_losses(net, x, objective, samples, estimator=fg.REINFORCE(), generator=generator).mean(), net
            )["0.weight"]
            for _ in range(300)
        ]
        return torch.stack(drawn).var(0).sum().item()

    assert variance(10) < 0.5 * variance(1)


@pytest.mark.parametrize("function", [bounds.mean_losses, bounds.bound_losses])
@pytest.mark.parametrize("estimator", [fg.PSA(), fg.Exact()], ids=["PSA", "Exact"])
def test_a_wrapped_network_is_called_like_the_network(problem, function, estimator):
    class Wrapper(torch.nn.Module):
        """As those of distributed training, which must see every evaluation."""

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, *arguments, **options):
            return self.net(*arguments, **options)

    net, x, objective = problem
    wrapped, bare = (
        function(model, x, objective, 3, estimator=estimator, generator=torch.Generator().manual_seed(0))
        for model in (Wrapper(net), net)
    )
    assert_same(wrapped, bare, 0)


def test_an_empty_batch_has_no_losses(problem):
    net, x, objective = problem
    for function in (bounds.mean_losses, bounds.bound_losses):
        assert function(net, x[:0], objective.select(slice(0)), 3, estimator=fg.PSA()).shape == (0,)


def test_large_losses_neither_overflow_nor_underflow(problem):
    net, x, objective = problem
    losses = bounds.bound_losses(net, x, lambda outputs: 1e4 + 1e3 * objective(outputs), 5, estimator=fg.PSA())
    assert bool(torch.isfinite(losses).all())
    assert all(bool(torch.isfinite(g).all()) for g in gradients(losses.sum(), net).values())


def test_an_estimator_that_evaluates_nothing_is_refused(problem):
    class Zero(fg.Estimator):
        unbiased, citation = False, "none"

        def passes(self, depth):
            return 0

        def losses(self, net, batch):
            return batch.x.new_zeros(len(batch.x))

    net, x, objective = problem
    with pytest.raises(fg.InputError, match="never evaluated the objective"):
        bounds.bound_losses(net, x, objective, 2, estimator=Zero())


def train_on_toy(samples):
    """A network of 5 units trained by PSA with the ``samples``-sample bound."""
    data = toy().train
    torch.manual_seed(0)
    net = toy_net(2, [5], 2)
    net.initialize(data.x, moments=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, nesterov=True, fused=True)
    for _ in range(100):
        for part in data.batches(50, generator=generator):
            objective = fg.CrossEntropy(part.y)
            loss = bounds.bound_losses(net, part.x, objective, samples, estimator=fg.PSA(), generator=generator).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


def test_training_by_the_bound_fits_uncertainty():
    """The classes overlap: the expected loss makes the network sure of itself, the bound on the marginal loss does not."""
    data = toy().train
    objective = fg.CrossEntropy(data.y)
    expected, bound = (train_on_toy(samples) for samples in (1, 10))
    with torch.no_grad():
        losses = {
            name: [loss(net, data.x, objective).mean().item() for net in (expected, bound)]
            for name, loss in (("marginal", exact.marginal_loss), ("expected", exact.expected_loss))
        }
    assert losses["marginal"][1] < losses["marginal"][0] - 0.03
    # It pays with the loss of one draw, which it does not minimise.
    assert losses["expected"][1] > losses["expected"][0] + 0.1


@pytest.mark.parametrize("function", [bounds.expected_loss, bounds.marginal_loss, bounds.mean_losses, bounds.bound_losses])
def test_refuses_what_is_no_sequential_and_wraps_none(function):
    model = fg.use(torch.nn.Sequential(fg.BinaryLinear(2, 3), torch.nn.Linear(3, 2)), fg.PSA())
    with pytest.raises(fg.InputError, match=r"bounds takes a flipgrad.Sequential"):
        function(model, torch.zeros(1, 2), fg.CrossEntropy(torch.tensor([0])), 3)
