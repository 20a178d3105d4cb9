"""Residual streams: jets against PSA over the whole graph, both against sums over all states, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.contract import LayerCall
from flipgrad.estimators import _sample_analytic
from flipgrad.exact import enumerate_states

DOUBLE = torch.float64


def randomised(net: fg.Sequential, seed: int, size: float) -> fg.Sequential:
    """The network in float64 and eval mode, its branches' weights of that size and its norms away from the identity."""
    net = net.double().eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, mean: float, deviation: float) -> None:
        like.data.copy_(mean + deviation * torch.randn(like.shape, generator=generator, dtype=DOUBLE))

    for block in net.binary_layers:
        assert isinstance(block, fg.Residual)
        normal(block.branch.weight, 0, size)
        for norm in (block.norm, block.branch.norm):
            if isinstance(norm, fg.ScaleShift):
                normal(norm.scale, 1, 0.2)
                normal(norm.shift, 0, 0.3)
            elif norm is not None:
                normal(norm.running_mean, 0, 0.3)
                norm.running_var.copy_(1 + torch.rand(norm.running_var.shape, generator=generator, dtype=DOUBLE))
    return net


def connected(seed: int = 0, size: float = 0.5, units: int = 3, blocks: int = 3, **options: object) -> fg.Sequential:
    """A small fully connected stream."""
    torch.manual_seed(seed)
    parts = [fg.ResidualLinear(units, units, **{"norm": fg.ScaleShift(units), **options}) for _ in range(blocks)]
    return randomised(fg.Sequential(nn.Linear(2, units), *parts, head=nn.Linear(units, 3)), seed, size)


def convolutional(seed: int = 0, size: float = 0.3, *, flat: bool = False, **options: object) -> fg.Sequential:
    """A small stream of images, with a stride, channels that are doubled, norms, and average pooling before the head."""
    torch.manual_seed(seed)
    blocks = [
        fg.ResidualConv2d(2, 2, norm=nn.BatchNorm2d(2), branch_norm=nn.BatchNorm2d(2), bias=False, **options),
        fg.ResidualConv2d(2, 4, stride=2, norm=fg.ScaleShift(2), branch_norm=fg.ScaleShift(4), **options),
        fg.ResidualConv2d(4, 4, norm=nn.BatchNorm2d(4), branch_norm=fg.ScaleShift(4), **options),
    ]
    tail = [nn.Flatten()] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = nn.Linear(16 if flat else 4, 3)
    return randomised(fg.Sequential(nn.Conv2d(1, 2, 3, padding=1), *blocks, *tail, head=head), seed, size)


NETS: dict[str, tuple[Callable[..., fg.Sequential], tuple[int, ...]]] = {
    "connected": (connected, (2,)),
    "convolutional": (convolutional, (1, 4, 4)),
    "flattened": (lambda seed=0, size=0.3: convolutional(seed, size, flat=True), (1, 4, 4)),
}


def problem(shape: Sequence[int], batch: int = 3) -> tuple[Tensor, fg.CrossEntropy]:
    x = torch.randn(batch, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    return x, fg.CrossEntropy(torch.arange(batch) % 3)


def drawn(net: fg.Sequential, x: Tensor, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Noise of every block, and the states that it gives."""
    generator = torch.Generator().manual_seed(seed)
    noise: list[Tensor] = []
    states: list[Tensor] = []

    def visit(call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        noise.append(call.noise.sample(tuple(a.shape), generator=generator, dtype=a.dtype))
        states.append(torch.where(a >= noise[-1], 1.0, -1.0).to(a.dtype))
        return states[-1]

    net.run(net.front(x), visit, lambda *_: pytest.fail("nothing is drawn"))
    return noise, states


def evaluated(net: fg.Sequential, x: Tensor, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The pre-activations of every block, and the outputs, with given states: differentiable in the parameters."""
    given, a = iter(states), []

    def visit(call: LayerCall) -> Tensor:
        call.weight_rule = lambda weights: weights.sample() + (weights.latent - weights.latent.detach())
        a.append(call.affine(call.x))
        return next(given)

    outputs = net.outputs(net.run(net.front(x), visit, lambda *_: pytest.fail("nothing is drawn")))
    return a, outputs


def signals(net: fg.Sequential, x: Tensor, objective: fg.CrossEntropy, states: list[Tensor]) -> list[Tensor]:
    """PSA's signals over the whole graph: every unit is flipped, and its effect on all later layers and the loss added up."""
    noises = [block.noise for block in net.binary_layers]
    u: list[Tensor] = [torch.zeros_like(s) for s in states]
    with torch.no_grad():
        a, outputs = evaluated(net, x, states)
        for k in reversed(range(len(states))):
            for i in range(states[k][0].numel()):
                flipped = states[k].clone()
                flipped.view(len(x), -1)[:, i] *= -1
                there, moved = evaluated(net, x, [*states[:k], flipped, *states[k + 1 :]])
                change = (objective(outputs) - objective(moved)) / 2
                for later in range(k + 1, len(states)):
                    difference = (noises[later].cdf(a[later]) - noises[later].cdf(there[later])) * u[later]
                    change = change + difference.flatten(1).sum(1)
                u[k].view(len(x), -1)[:, i] = states[k].view(len(x), -1)[:, i] * change
    return u


def over_the_graph(net: fg.Sequential, x: Tensor, objective: fg.CrossEntropy, states: list[Tensor]) -> list[Tensor]:
    """PSA's gradient over the whole graph."""
    u, noises = signals(net, x, objective, states), [block.noise for block in net.binary_layers]
    a, outputs = evaluated(net, x, states)
    surrogate = objective(outputs).sum()
    for signal, noise, mean in zip(u, noises, a, strict=True):
        surrogate = surrogate + (signal * 2 * noise.cdf(mean)).sum()
    return list(torch.autograd.grad(surrogate, list(net.parameters())))


def gradient(
    net: fg.Sequential, x: Tensor, objective: fg.CrossEntropy, noise: list[Tensor], rule: fg.Estimator
) -> list[Tensor]:
    losses = net(x, objective, estimator=rule, noise=noise)
    return list(torch.autograd.grad(losses.sum(), list(net.parameters())))


def distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Relative to the second."""
    one, two = (torch.cat([part.flatten() for part in parts]) for parts in (first, second))
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", NETS)
def test_jets_agree_with_the_graph_to_their_order(name: str, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    monkeypatch.setattr(_sample_analytic, "order_for", lambda *_: order)
    x, objective = problem(shape)
    errors = []
    for size in (0.1, 0.05):
        net = make(0, size)
        noise, states = drawn(net, x)
        expected = over_the_graph(net, x, objective, states)
        # Without a tolerance the head is flipped exactly.
        errors.append(distance(gradient(net, x, objective, noise, fg.PSA(tolerance=1e-12)), expected))
    # Terms that are left out are of the order w^(M + 1), those of first order w.
    assert errors[0] < 0.3 * 0.3**order
    assert errors[1] < errors[0] * 0.5**order * 1.3


def test_jets_agree_with_the_graph_through_modules_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sample_analytic, "order_for", lambda *_: 3)
    torch.manual_seed(0)
    blocks = [fg.ResidualConv2d(2, 2, norm=fg.ScaleShift(2)) for _ in range(4)]
    middle = [nn.AvgPool2d(2), blocks[1], nn.Identity(), blocks[2], nn.Flatten(), nn.Unflatten(1, (2, 2, 2)), blocks[3]]
    net = fg.Sequential(nn.Conv2d(1, 2, 1), blocks[0], *middle, nn.Flatten(), head=nn.Linear(8, 3))
    x, objective = problem((1, 4, 4))
    net = randomised(net, 0, 0.05)
    noise, states = drawn(net, x)
    expected = over_the_graph(net, x, objective, states)
    assert distance(gradient(net, x, objective, noise, fg.PSA(tolerance=1e-12)), expected) < 5e-5
    assert distance(gradient(net, x, objective, noise, fg.ST()), expected) > 1e-3


def test_behind_prelu_derivatives_are_ordinary() -> None:
    net = connected(units=4, prelu=True)
    x, objective = problem((2,))
    noise, _ = drawn(net, x)
    found, ordinary = (gradient(net, x, objective, noise, rule) for rule in (fg.PSA(tolerance=1e-12), fg.ST()))
    assert distance(found, ordinary) < 1e-12


def test_flips_reach_a_sign_before_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sample_analytic, "order_for", lambda *_: 3)
    net = connected(size=0.05, blocks=2, shortcut="project")
    x, objective = problem((2,))
    noise, states = drawn(net, x)
    expected = over_the_graph(net, x, objective, states)
    assert distance(gradient(net, x, objective, noise, fg.PSA(tolerance=1e-12)), expected) < 1e-4
    assert distance(gradient(net, x, objective, noise, fg.ST()), expected) > 1e-3


def test_the_head_is_flipped_behind_projections() -> None:
    # One block: nothing but the head is behind its units.
    net = connected(units=4, blocks=1, shortcut="project")
    x, objective = problem((2,))
    noise, states = drawn(net, x)
    expected = over_the_graph(net, x, objective, states)
    assert distance(gradient(net, x, objective, noise, fg.PSA(tolerance=1e-12)), expected) < 1e-12


def test_a_head_that_is_flipped_in_vain_is_linearised() -> None:
    net = convolutional(size=1e-4)
    x, objective = problem((1, 4, 4))
    noise, _ = drawn(net, x)
    fast, slow = (gradient(net, x, objective, noise, fg.PSA(tolerance=tolerance)) for tolerance in (1e-3, 1e-12))
    assert 0 < distance(fast, slow) < 1e-3


def means(net: fg.Sequential, x: Tensor, objective: fg.CrossEntropy, rule: fg.Estimator) -> list[Tensor]:
    """The mean of an estimate over all states of all units."""
    _, states = drawn(net, x)
    shapes = [s.shape[1:] for s in states]
    sizes = [shape.numel() for shape in shapes]
    parameters = list(net.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for row in enumerate_states((sum(sizes),), x):
        forced = [part.view(1, *shape).expand(len(x), *shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
        with torch.no_grad():
            a, _ = evaluated(net, x, forced)
            blocks = zip(net.binary_layers, forced, a, strict=True)
            probability = sum(block.noise.log_prob(s, mean).flatten(1).sum(1) for block, s, mean in blocks).exp()
        losses = net(x, objective, estimator=rule, noise=[-1e6 * s for s in forced])
        parts = torch.autograd.grad((losses * probability).sum(), parameters)
        total = [sum_ + part for sum_, part in zip(total, parts, strict=True)]
    return total


def test_bias_of_small_streams() -> None:
    net, (x, objective) = connected(size=0.5), problem((2,))
    names = [name for name, _ in net.named_parameters()]
    exact = torch.autograd.grad(fg.exact.expected_loss(net, x, objective).sum(), list(net.parameters()))

    def bias(rule: fg.Estimator) -> dict[str, float]:
        parts = zip(names, means(net, x, objective, rule), exact, strict=True)
        return {name: float((mean - truth).norm() / truth.norm()) for name, mean, truth in parts}

    psa, st = bias(fg.PSA(tolerance=1e-12)), bias(fg.ST())
    # Of what the last two blocks add, the loss is known at every flip, and the effect on the last block's units exact or none.
    assert psa["3.branch.weight"] < 1e-9
    assert psa["3.norm.scale"] < 1e-9 < 1e-3 < st["3.norm.scale"]
    assert psa["1.branch.weight"] < 0.5 * st["1.branch.weight"]
    assert psa["0.weight"] < 0.5 * st["0.weight"]
    # The relaxed layers in front of a stream have a gradient, too.
    assert psa["1.norm.shift"] < st["1.norm.shift"]


def test_sums_over_all_states_agree_with_samples() -> None:
    net = connected()
    x, objective = problem((2,))
    exact = fg.exact.expected_loss(net, x, objective)
    draws = torch.stack([objective(net(x, generator=torch.Generator().manual_seed(seed))) for seed in range(2000)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()
    total = fg.exact.predictive(net, x)
    assert torch.allclose(total.sum(1), torch.ones(len(x), dtype=DOUBLE))


@pytest.mark.parametrize(
    "rule", [fg.REINFORCE(), fg.ARM(), fg.DisARM(), fg.ARMS(4), fg.BitFlip(), fg.LEG(), fg.MuProp(), fg.REBAR(), fg.DoubleCV()],
    ids=lambda rule: type(rule).__name__,
)  # fmt: skip
def test_unbiased_estimators_are_unbiased_on_streams(rule: fg.Estimator) -> None:
    net, (x, objective) = connected(size=0.7, units=2, blocks=2), problem((2,))
    draws = 4000
    result = fg.gradeval.evaluate(net, x, objective, [rule], samples=draws, seed=3)
    assert result.reference.kind == "exact"
    (measured,) = result.estimators.values()
    for layer in measured.layers:
        # The length of the mean's error has about this size if the mean is right: of each parameter, its standard error.
        assert layer.bias < 2.5 * layer.std / math.sqrt(draws), layer


@pytest.mark.parametrize("order", [2, 3])
def test_flips_of_binary_weights_agree_with_the_graph(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In weights that are signs, the discrete derivative in all later layers; the loss itself is linearised in them."""
    monkeypatch.setattr(_sample_analytic, "order_for", lambda *_: order)
    x, objective = problem((1, 4, 4))
    errors = []
    for size in (0.1, 0.05):
        torch.manual_seed(0)
        blocks = [fg.ResidualConv2d(2, 2, norm=fg.ScaleShift(2), weights="binary", bias=False) for _ in range(3)]
        net = randomised(fg.Sequential(nn.Conv2d(1, 2, 1), *blocks, nn.Flatten(), head=nn.Linear(32, 3)), 0, 1.0)
        for block in blocks:
            block.branch.weight_scale.data.mul_(size)
        noise, states = drawn(net, x)
        names = [name for name, _ in net.named_parameters()]
        found = dict(zip(names, gradient(net, x, objective, noise, fg.PSA(tolerance=1e-12)), strict=True))
        expected = flips_of_weights(net, x, objective, states, blocks[0])
        errors.append(distance([found["1.branch.weight"]], [expected]))
    assert errors[0] < 0.3 * 0.3**order
    assert errors[1] < errors[0] * 0.5**order * 1.3


def flips_of_weights(
    net: fg.Sequential, x: Tensor, objective: fg.CrossEntropy, states: list[Tensor], block: fg.Residual
) -> Tensor:
    """For every binary weight of the first block, PSA's derivative over the graph, with signals of the units over the graph."""
    noises = [layer.noise for layer in net.binary_layers]
    a, outputs = evaluated(net, x, states)
    u = signals(net, x, objective, states)
    weight = block.branch.weight
    (ordinary,) = torch.autograd.grad(objective(outputs).sum(), weight, retain_graph=True)
    result = ordinary.clone()
    with torch.no_grad():
        for index in range(weight.numel()):
            kept = weight.view(-1)[index].item()
            weight.view(-1)[index] = -kept
            there, _ = evaluated(net, x, states)
            weight.view(-1)[index] = kept
            change = sum(((noises[k].cdf(a[k]) - noises[k].cdf(there[k])) * u[k]).sum() for k in range(1, len(states)))
            result.view(-1)[index] += math.copysign(1, kept) * change
    return result


@pytest.mark.parametrize(
    "rule", [fg.PSA(), fg.ST(), fg.HardST(), fg.Concrete(), fg.ZGR(), fg.Tanh()], ids=lambda r: type(r).__name__
)
def test_a_block_in_a_graph_written_by_hand(rule: fg.LocalEstimator) -> None:
    """Blocks, and ``x + conv(sign(x))`` of ordinary modules, have one and the same gradient there: that of ST, for PSA."""
    torch.manual_seed(0)
    block = fg.ResidualLinear(4, 4).double()
    linear, sign = nn.Linear(4, 4).double(), fg.Sign()
    linear.load_state_dict(block.branch.state_dict())
    x = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    results = []
    for model in (block, sign):
        fg.use(model, rule, generator=torch.Generator().manual_seed(1))
        h = block(x) if model is block else x + linear(sign(x))
        results.append((h, torch.autograd.grad(h.square().sum(), x)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-12)
    if isinstance(rule, fg.PSA):
        fg.use(block, fg.ST(), generator=torch.Generator().manual_seed(1))
        assert torch.allclose(results[0][1], torch.autograd.grad(block(x).square().sum(), x)[0], rtol=1e-12)


def test_states_of_a_sign_are_units_of_the_next_layer() -> None:
    """In a graph written by hand, and at the end of a stream in Sequential: a layer behind it flips them."""
    torch.manual_seed(0)
    sign, layer = fg.Sign(norm=fg.ScaleShift(4)), fg.BinaryLinear(4, 3)
    net = fg.Sequential(nn.Linear(2, 4), fg.ResidualLinear(4, 4), sign, layer, head=nn.Linear(3, 2)).double()
    x, _ = problem((2,))
    exact = torch.autograd.grad(fg.exact.expected_loss(net, x, fg.CrossEntropy(torch.tensor([0, 1, 1]))).sum(), layer.weight)
    assert all(part.isfinite().all() for part in exact)
    noise = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 3)]
    losses = net(x, fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.PSA(inputs="sampled", flip_head=False), noise=noise)
    by_net = torch.autograd.grad(losses.sum(), sign.norm.scale)[0]
    fg.use(net, fg.PSA(inputs="sampled"))
    hidden = layer(sign(net[1](net[0](x), noise=noise[0]), noise=noise[1]), noise=noise[2])
    by_hand = torch.autograd.grad(fg.CrossEntropy(torch.tensor([0, 1, 1]))(net.head(hidden)).sum(), sign.norm.scale)[0]
    assert torch.allclose(by_net, by_hand, rtol=1e-10)
    with pytest.raises(fg.InputError, match=r"fg\.Sign"):
        layer(net[1](net[0](x)))


def test_everything_else_that_networks_do() -> None:
    torch.manual_seed(0)
    norms = {"norm": nn.BatchNorm2d(4), "branch_norm": nn.BatchNorm2d(4)}
    binary = {"weights": "binary", "weight_noise": fg.Logistic(0.1)}
    blocks = [fg.ResidualConv2d(4, 4, **norms), fg.ResidualConv2d(4, 8, stride=2, norm=fg.ScaleShift(4), **binary)]
    net = fg.Sequential(nn.Conv2d(1, 4, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head=nn.Linear(8, 3))
    x = torch.randn(6, 1, 6, 6)
    net.initialize(x)
    assert (blocks[1].norm.scale != 1).all()
    net(x, fg.CrossEntropy(torch.zeros(6, dtype=torch.long))).mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    net.eval()
    assert net.predict(x, samples=3).shape == net.deterministic(x).shape == (6, 3)
    member = net.member(x)
    assert torch.equal(member(x), member(x))
    assert len(member.noise) == 2
    assert len(member.weight_noise) == 1
    rows = {row.name: row for row in fg.summary(net, x).rows}
    assert rows["2"].bits == 1
    assert rows["2"].binary_operations == 8 * 4 * 9 * 2 * 2
    assert rows["1"].float_operations == 0 or rows["1"].bits == 32


def test_batch_norm_in_training_moves_the_stream_of_all_examples() -> None:
    """With statistics of the batch the first order is ordinary backpropagation: ST's gradient is that of torch's modules."""
    torch.manual_seed(0)
    block = fg.ResidualLinear(4, 4, norm=nn.BatchNorm1d(4), branch_norm=nn.BatchNorm1d(4), bias=False).double()
    net = fg.Sequential(nn.Linear(2, 4), block, head=nn.Linear(4, 3)).double()
    x, objective = problem((2,), batch=5)
    z = torch.randn(5, 4, dtype=DOUBLE)
    first = torch.autograd.grad(net(x, objective, estimator=fg.ST(), noise=[z]).sum(), net[0].weight)[0]
    h = net[0](x)
    a = block.norm(h)
    mean = 2 * torch.sigmoid(a)
    states = torch.where(a >= z, 1.0, -1.0).to(DOUBLE) + mean - mean.detach()
    out = h + block.branch.norm(nn.functional.linear(states, block.branch.weight))
    second = torch.autograd.grad(objective(net.head(out)).sum(), net[0].weight)[0]
    assert torch.allclose(first, second, rtol=1e-10)


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_streams_compile() -> None:
    net = connected(units=4).float()
    x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 2]))
    noise = [torch.randn(3, 4) for _ in range(3)]
    compiled = torch.compile(net, backend="aot_eager")
    results = []
    for model in (net, compiled):
        net.zero_grad()
        model(x, objective, estimator=fg.PSA(tolerance=1e-6), noise=noise).sum().backward()
        results.append([parameter.grad.clone() for parameter in net.parameters()])
    assert distance(*results) < 1e-5


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "states come in": (
        lambda: fg.Sequential(fg.BinaryLinear(2, 4), fg.ResidualLinear(4, 4), head=nn.Linear(4, 2)),
        "adds to real numbers, and here states",
    ),
    "a layer on the stream": (
        lambda: fg.Sequential(fg.ResidualLinear(4, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2)),
        r"end the stream before it with fg.Sign\(noise, norm\)",
    ),
    "an unknown module": (
        lambda: fg.Sequential(fg.ResidualLinear(4, 4), nn.GELU(), head=nn.Linear(4, 2)),
        "GELU.* is not known on a residual stream",
    ),
    "PReLU at the end": (
        lambda: fg.Sequential(fg.ResidualLinear(4, 4), nn.PReLU(), head=nn.Linear(4, 2)),
        "belongs into the head",
    ),
    "channels": (lambda: fg.ResidualLinear(4, 6), "give a multiple of 4, or shortcut='project'"),
    "shortcut": (lambda: fg.ResidualConv2d(4, 4, shortcut="skip"), "choose 'repeat' or 'project'"),
    "norm": (lambda: fg.ResidualConv2d(4, 8, norm=nn.BatchNorm2d(8)), "the norm is for 8 channels, the layer has 4"),
    "a norm that was replaced": (
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(connected(norm=nn.BatchNorm1d(3)))(torch.ones(2, 2, dtype=DOUBLE)),
        "a norm must scale and shift",
    ),
    "norm of a sign": (lambda: fg.Sign(norm=nn.LayerNorm(4)), "a norm must scale and shift"),
    "sizes": (
        lambda: fg.ResidualConv2d(2, 2, 3, padding=0)(torch.randn(1, 2, 4, 4)),
        r"the branch gives \[1, 2, 2, 2\] and the shortcut \[1, 2, 4, 4\]",
    ),
    "states to a sign": (lambda: fg.Sign()(torch.ones(1, 2), binary=True), "states go to fg.BinaryLinear"),
    "exact flips": (lambda: estimated(fg.PSA(exact=True)), "leave out exact=True"),
    "posterior": (lambda: estimated(fg.PSA(inputs="posterior")), "use inputs='sampled' or 'auto'"),
    "enhanced": (lambda: estimated(fg.PSA(head="enhanced")), "use head='sampled'"),
    "moments": (lambda: estimated(fg.ADF()), "ADF is not for residual streams"),
    "too many units": (
        lambda: fg.exact.expected_loss(connected(units=8), torch.ones(1, 2, dtype=DOUBLE), fg.CrossEntropy(torch.tensor([0]))),
        "24 have 2\\^24 states",
    ),
}


def estimated(rule: fg.Estimator) -> Tensor:
    x, objective = problem((2,))
    return connected()(x, objective, estimator=rule)


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(fg.InputError, match=message):
        make()
