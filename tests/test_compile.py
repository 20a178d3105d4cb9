"""torch.compile sees a network as one graph, exports sample or say why not, and mixed precision keeps flips in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg


def problem(norm: str = "none") -> tuple[fg.Sequential, torch.Tensor, fg.CrossEntropy, list[torch.Tensor]]:
    torch.manual_seed(0)
    norms = {"none": [None] * 3, "affine": [fg.ScaleShift(n) for n in (4, 4, 8)]}
    norms["batch"] = [nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm1d(8)]
    first, second, third = norms[norm]
    net = fg.Sequential(
        fg.BinaryConv2d(1, 4, 3, norm=first),
        fg.BinaryConv2d(4, 4, 3, padding=1, norm=second),
        nn.Flatten(),
        fg.BinaryLinear(4 * 36, 8, norm=third),
        head=nn.Linear(8, 3),
    )
    z = [torch.randn(5, 4, 6, 6), torch.randn(5, 4, 6, 6), torch.randn(5, 8)]
    return net, torch.randn(5, 1, 8, 8), fg.CrossEntropy(torch.randint(3, (5,))), z


def gradients(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


def assert_compiles(rule: fg.Estimator, backend: str, norm: str = "none") -> None:
    net, x, objective, z = problem(norm)

    def step(x: torch.Tensor, *z: torch.Tensor) -> torch.Tensor:
        return net(x, objective, estimator=rule, noise=list(z)).mean()

    expected = gradients(net, step(x, *z))
    torch._dynamo.reset()
    actual = gradients(net, torch.compile(step, fullgraph=True, backend=backend)(x, *z))
    for g, h in zip(actual, expected, strict=True):
        assert torch.allclose(g, h, rtol=1e-4, atol=1e-6)
    # Layers draw their noise alike: a small network is enough.
    net, x = fg.Sequential(fg.BinaryLinear(4, 6), fg.BinaryLinear(6, 6), head=nn.Linear(6, 3)), torch.randn(5, 4)
    objective = fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1]))
    drawn = torch.compile(lambda x: net(x, objective, estimator=rule).mean(), fullgraph=True, backend=backend)(x)
    assert all(bool(torch.isfinite(g).all()) for g in gradients(net, drawn))


RULES = [
    fg.PSA(inputs="sampled", head="sampled"),
    fg.PSA(inputs="sampled", head="sampled", exact=True),
    fg.PSA(inputs="sampled", head="enhanced"),
    fg.PSA(),
    fg.PSA(inputs="rao-blackwell", head="rao-blackwell"),
    fg.ST(),
    fg.ST(inputs="mean", head="rao-blackwell"),
]
NAMES = ["psa", "psa-exact", "psa-enhanced", "psa-posterior", "psa-rao-blackwell", "st", "st-mean"]


# Two graphs with norms, in the next test, are for every day.
SLOW_NAMES = ("psa-enhanced", "psa-posterior", "psa-rao-blackwell", "st-mean")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=name, marks=pytest.mark.slow)
        for rule, name in zip(RULES, NAMES, strict=True)
        if name in SLOW_NAMES
    ],
)
def test_a_step_is_one_graph_with_the_same_gradients(rule):
    assert_compiles(rule, "aot_eager")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("rule", "norm"), [(fg.PSA(), "batch"), (fg.ST(), "affine")], ids=["psa", "st"])
def test_a_step_with_norms_is_one_graph(rule, norm):
    assert_compiles(rule, "aot_eager", norm)


def small() -> tuple[fg.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return fg.Sequential(fg.BinaryLinear(4, 6), head=nn.Linear(6, 3)).eval(), torch.randn(5, 4)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_sampled_pass_is_one_graph_and_has_no_gradient(mode):
    net, x, _, z = problem("batch")
    net.train(mode)
    outputs = compiled(lambda x, *z: net(x, noise=list(z)))(x, *z)
    assert torch.allclose(outputs, net(x, noise=z), atol=1e-6)
    outputs = compiled(net)(x)
    assert outputs.shape == (5, 3)
    with pytest.raises(RuntimeError, match=r"backward\(\) through sampled binary states without an estimator"):
        outputs.sum().backward()


@pytest.mark.filterwarnings("default")
def test_what_a_network_is_asked_for_is_one_graph():
    net, x = small()
    assert torch.allclose(compiled(net.deterministic)(x), net.deterministic(x), atol=1e-6)
    probabilities = compiled(lambda x: net.predict(x, samples=2))(x)
    assert torch.allclose(probabilities.sum(1), torch.ones(5), atol=1e-6)
    member = net.member(x)
    assert torch.allclose(compiled(member)(x), member(x), atol=1e-6)


@pytest.mark.filterwarnings("default")
def test_a_graph_is_good_for_batches_of_any_size():
    net, x = small()
    y = torch.tensor([0, 1, 2, 0, 1])
    losses = compiled(lambda x, y: net(x, fg.CrossEntropy(y), estimator=fg.ST()).mean())
    # The second one makes the size a symbol.
    for size in (5, 4, 3):
        assert all(bool(torch.isfinite(g).all()) for g in gradients(net, losses(x[:size], y[:size])))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1])),
        lambda: fg.SoftCrossEntropy(torch.eye(3)[[0, 1, 2, 0, 1]]),
        lambda: fg.SquaredError(torch.ones(5, 3)),
    ],
)
def test_objectives_can_be_made_inside_a_graph(make):
    net, x = small()
    z = torch.randn(5, 6)
    losses = compiled(lambda x, z: net(x, make(), estimator=fg.ST(), noise=[z]))(x, z)
    assert torch.allclose(losses, net(x, make(), estimator=fg.ST(), noise=[z]), atol=1e-5)


@pytest.mark.filterwarnings("default")
def test_an_estimator_can_be_made_inside_a_graph():
    """Also one that averages inputs, which needs a layer with binary ones."""
    torch.manual_seed(0)
    net, x = fg.Sequential(fg.BinaryLinear(4, 6), fg.BinaryLinear(6, 5), head=nn.Linear(5, 3)), torch.randn(5, 4)
    objective, z = fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1])), [torch.randn(5, 6), torch.randn(5, 5)]

    def loss(x):
        return net(x, objective, estimator=fg.PSA(), noise=z).mean()

    expected = gradients(net, loss(x))
    for g, h in zip(gradients(net, compiled(loss)(x)), expected, strict=True):
        assert torch.allclose(g, h, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", [fg.PSA(), fg.ST()], ids=["psa", "st"])
def test_a_network_with_an_estimator_of_its_own_is_one_graph(rule):
    net, x = small()
    fg.use(net, rule)
    z = torch.randn(5, 6)

    def loss(x, z):
        return net(x, noise=[z]).square().sum()

    expected = gradients(net, loss(x, z))
    for g, h in zip(gradients(net, compiled(loss)(x, z)), expected, strict=True):
        assert torch.allclose(g, h, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("default")
def test_a_generator_in_a_graph_is_refused():
    net, x = small()
    objective, generator = fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1])), torch.Generator()
    with pytest.raises(Exception, match=r"a generator cannot be part of a compiled or exported graph: leave it out"):
        compiled(lambda x: net(x, objective, generator=generator).mean())(x)


class Skipping(nn.Module):
    """A network written by hand: the first layer's states go to the second and to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.first, self.second, self.third = fg.BinaryLinear(4, 6), fg.BinaryLinear(6, 5), fg.BinaryLinear(11, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.front(x).tanh())
        return self.head(self.third(torch.cat([h, self.second(h)], 1)))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(fg.PSA(), id="psa"),
        # What is not compiled is not different for them.
        pytest.param(fg.PSA(inputs="sampled"), id="sampled", marks=pytest.mark.slow),
        pytest.param(fg.ST(), id="st", marks=pytest.mark.slow),
    ],
)
def test_graphs_written_by_hand_run_uncompiled_inside_compiled_ones(rule):
    torch.manual_seed(0)
    model, x = fg.use(Skipping(), rule), torch.randn(3, 4)

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return gradients(model, model(x).square().sum())

    expected = step(model)
    torch._dynamo.reset()
    for g, h in zip(step(torch.compile(model, backend="aot_eager")), expected, strict=True):
        assert torch.equal(g, h)
    with pytest.raises(Exception, match=r"cannot be one compiled graph: compile without fullgraph=True, and they run as they"):
        compiled(model)(x)
    with torch.no_grad():
        assert compiled(model)(x).shape == (3, 2)


@pytest.mark.filterwarnings("default")
def test_a_model_written_by_hand_as_a_network_runs_as_it_is_where_it_is_compiled():
    """Also without gradients, where nothing else keeps its layers from being compiled apart from the network's noise."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    net = fg.Graph(Skipping(), x)
    torch._dynamo.reset()
    captured = torch.compile(net, backend="aot_eager")
    noise = net.member(x).noise
    with torch.no_grad():
        assert torch.equal(captured(x, noise=noise), net(x, noise=noise))
    objective = fg.CrossEntropy(torch.tensor([0, 1, 1]))
    for g, h in zip(*(gradients(net, each(x, objective, noise=noise).sum()) for each in (captured, net)), strict=True):
        assert torch.equal(g, h)
    net.model.second = torch.compile(net.model.second, backend="aot_eager")
    with pytest.raises(fg.InputError, match=r"does not evaluate its binary layer 'second._orig_mod'.* before torch.compile"):
        fg.Graph(net.model, x)


class Moving(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.flip(1)


@pytest.mark.filterwarnings("default")
def test_compiled_code_between_layers_of_a_graph_written_by_hand_is_refused_with_a_way_out():
    model = fg.use(nn.Sequential(fg.BinaryLinear(4, 6), Moving(), fg.BinaryLinear(6, 2)), fg.ST())
    x = torch.randn(3, 4)
    torch._dynamo.reset()
    with pytest.raises(fg.InputError, match=r"went through compiled code, .* = torch.compiler.disable\(model.forward\)"):
        torch.compile(model, backend="aot_eager")(x)
    model.forward = torch.compiler.disable(model.forward)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert model[0].weight.grad is not None


def wide() -> tuple[fg.Sequential, torch.Tensor]:
    """So many units that they are sampled in compiled code, with a seed that must not become part of a graph."""
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(3, 300), fg.BinaryLinear(300, 300), head=nn.Linear(300, 2))
    return net.eval(), torch.randn(50, 3)


CAPTURES = {
    "trace": lambda net, x: torch.jit.trace(net, x, check_trace=False),
    "export": lambda net, x: torch.export.export(net, (x,)).module(check_guards=False),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_an_exported_network_samples_anew_each_time(capture):
    net, x = wide()
    with torch.no_grad():
        captured = capture(net, x)
        draws = torch.stack([captured(x) for _ in range(200)])
        expected = torch.stack([net(x) for _ in range(200)])
    assert not torch.equal(draws[0], draws[1])
    # Five standard errors, and a hundred numbers: false alarms are one in ten thousand.
    error = ((draws.var(0) + expected.var(0)) / 200).sqrt()
    assert bool(((draws.mean(0) - expected.mean(0)).abs() < 5 * error).all())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("make", [lambda: wide()[0], lambda: fg.use(nn.Sequential(fg.BinaryLinear(3, 2)), fg.PSA())])
def test_an_export_that_would_lose_gradients_is_refused(capture, make):
    with pytest.raises(fg.InputError, match=r"silently have no gradient of any estimator: export it under torch.no_grad\(\)"):
        capture(make(), torch.randn(5, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [lambda: wide()[0], lambda: nn.Sequential(fg.BinaryLinear(3, 2))])
def test_scripting_is_refused(make):
    with pytest.raises(fg.InputError, match=r"torch.jit.script cannot express .*: capture it under torch.no_grad\(\) with"):
        torch.jit.script(make())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_step_compiles_with_inductor(rule):
    assert_compiles(rule, "inductor")


# Flip products of two layers, and as many log ratios.
@pytest.mark.parametrize(("rule", "sums"), [(fg.PSA(inputs="sampled"), 2), (fg.PSA(), 4)], ids=["sampled", "default"])
def test_autocast_computes_flips_and_losses_in_float32(rule, sums, monkeypatch):
    net, x, objective, z = problem()
    seen = []

    def noting(chosen):
        def note(weight, *arguments, **options):
            seen.append(weight.dtype)
            return chosen(weight, *arguments, **options)

        return note

    for name in ("choose", "choose_ratio"):
        monkeypatch.setattr(f"flipgrad.flips.{name}", noting(getattr(fg.flips, name)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = net(x, objective, estimator=rule, noise=z)
    assert losses.dtype == torch.float32
    mixed = gradients(net, losses.mean())
    assert set(seen) == {torch.float32}
    assert len(seen) == sums
    full = gradients(net, net(x, objective, estimator=rule, noise=z).mean())
    for g, h in zip(mixed, full, strict=True):
        assert g.dtype == torch.float32
        # Pre-activations have 8 bits; a unit near its threshold may change its state.
        assert torch.nn.functional.cosine_similarity(g.flatten(), h.flatten(), 0) > 0.9
