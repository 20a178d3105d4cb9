"""torch.compile sees a PSA step as one graph, and mixed precision keeps flips in float32."""

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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", RULES[2:5] + RULES[6:], ids=NAMES[2:5] + NAMES[6:])
def test_a_step_is_one_graph_with_the_same_gradients(rule):
    assert_compiles(rule, "aot_eager")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("rule", "norm"), [(fg.PSA(), "batch"), (fg.ST(), "affine")], ids=["psa", "st"])
def test_a_step_with_norms_is_one_graph(rule, norm):
    assert_compiles(rule, "aot_eager", norm)


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
    choose = fg.flips.choose

    def note(weight, *arguments, **options):
        seen.append(weight.dtype)
        return choose(weight, *arguments, **options)

    monkeypatch.setattr("flipgrad.flips.choose", note)
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
