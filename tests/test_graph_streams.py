"""Residual streams in models written by hand, as networks: Sign, blocks, and ordinary modules between them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flipgrad as fg
import reference
from hand_written import ByHand
from reference import batch, randomized


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blocks(**options) -> fg.Sequential:
    """A real-valued front, two residual blocks with norms, a sign, a binary layer and a head."""
    residual = [
        fg.ResidualLinear(4, 4, norm=fg.ScaleShift(4), **options),
        fg.ResidualLinear(4, 8, norm=nn.BatchNorm1d(4), branch_norm=fg.ScaleShift(8), bias=False),
    ]
    return fg.Sequential(nn.Linear(2, 4), *residual, fg.Sign(), fg.BinaryLinear(8, 3), head=nn.Linear(3, 3))


@pytest.mark.parametrize("options", [{}, {"weights": "binary", "weight_noise": fg.Logistic(0.5)}], ids=["real", "binary"])
def test_a_twin_with_residual_blocks_is_the_same_to_the_bit(options):
    net = randomized(blocks(**options)).eval()
    x, objective = batch((6, 2))
    other = fg.Graph(ByHand(copy.deepcopy(net)), x)
    results = []
    for each in (net, other):
        each.initialize(x, generator=seeded())
        losses = each(x, objective, estimator=fg.ST(), generator=seeded(1))
        results.append(
            [
                each.predict(x, 3, generator=seeded()),
                each.deterministic(x),
                each.member(x, generator=seeded(2))(x),
                losses.detach(),
                *(p.detach() for p in each.parameters()),
                *torch.autograd.grad(losses.sum(), list(each.parameters())),
            ]
        )
    assert len(other.binary_layers) == 4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Stream(nn.Module):
    """``x + linear(sign(x))`` of an ordinary module, twice."""

    def __init__(self):
        super().__init__()
        self.signs = nn.ModuleList([fg.Sign(fg.Normal(0.7)), fg.Sign(norm=fg.ScaleShift(3))])
        self.mix, self.maps, self.head = nn.Linear(2, 3), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Linear(3, 3)

    def forward(self, x):
        stream = self.mix(x)
        for sign, linear in zip(self.signs, self.maps, strict=True):
            stream = stream + linear(sign(stream))
        return self.head(stream)


def expected_loss(model: Stream, x: torch.Tensor, objective) -> torch.Tensor:
    """By the sum over the 64 states of all units, with the layers' probabilities written out."""
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=x.dtype)] * 6)
    total = torch.zeros(len(x), dtype=x.dtype)
    for first, second in zip(*states.split(3, 1), strict=True):
        stream = model.mix(x)
        p = (0.5 * (1 + torch.erf(first * stream / (0.7 * 2**0.5)))).prod(1)
        stream = stream + model.maps[0](first)
        norm = model.signs[1].norm
        p = p * torch.sigmoid(second * (stream * norm.scale + norm.shift)).prod(1)
        total = total + p * objective(model.head(stream + model.maps[1](second)))
    return total


def test_the_reference_of_a_residual_stream_is_the_exact_gradient_within_its_error():
    """Fails by chance less than once in 10^4 seeds: the squared distance over its mean has 10 or more degrees of freedom."""
    x, objective = batch((2, 2))
    model = randomized(Stream())
    net = fg.Graph(model, x)
    exact = reference.gradients(expected_loss(model, x, objective).mean(), net)
    result = fg.gradeval.evaluate(net, x, objective, [fg.ST(), fg.LEG()], 2000, reference_samples=40_000)
    found, layer = result.reference, result.reference.layers[-1]
    names = [name for name in exact if ".signs." in name] + [name for name in exact if ".signs." not in name]
    truth = torch.cat([exact[name].flatten() for name in names])
    distance = (found.gradient - truth).norm().item()
    assert [part.name for part in found.layers] == ["layer 2", "others", "all"]
    assert 0.1 * layer.error * layer.length < distance < 3 * layer.error * layer.length
    assert layer.error < 0.05
    # What is unbiased agrees, and straight-through is seen to be biased.
    assert result.accuracy("LEG").bias_low == 0
    assert result.accuracy("ST").bias_low > 0


def test_moments_take_a_stream_for_the_mean_that_it_has():
    """What an ordinary module makes of means counts as real values: of its variance nothing is known."""
    x, _ = batch((50, 2))
    model = randomized(Stream())
    fg.Graph(model, x).initialize(x, moments=True)
    with torch.no_grad():
        stream = model.mix(x)
        stream = stream + model.maps[0](fg.Normal(0.7).mean_sign(stream))
    reference.assert_same(model.signs[1].norm.scale.detach(), 1 / stream.std(0, correction=0))
