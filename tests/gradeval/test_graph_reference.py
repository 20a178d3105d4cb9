"""Estimators of models written by hand, measured against the mean of very many draws of an unbiased one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flipgrad as fg
import reference
from flipgrad.gradeval.draws import Problem, Sampler, one_by_one, vectorised
from hand_written import Branches, ByHand, Images, Shared, Skip
from reference import batch, fully_connected, paper_psa, randomized

ESTIMATORS = {
    "psa": fg.PSA(),
    "st": fg.ST(),
    "concrete": fg.Concrete(),
    "reinforce": fg.REINFORCE(),
    "disarm": fg.DisARM(),
    "muprop": fg.MuProp(),
}


def problem(kind, examples=3) -> Problem:
    x, objective = batch((examples, *kind.shape[1:]))
    return Problem(fg.Graph(randomized(kind()), x), x, objective)


@pytest.mark.parametrize("kind", [Skip, Shared, Images])
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_vectorised_draws_equal_sequential_ones(kind, estimator):
    """Also where autograd's record is hidden: which layers see states is known from an ordinary evaluation."""
    given, generator, noise = problem(kind), torch.Generator().manual_seed(5), []

    def record(distribution: fg.Noise, a: torch.Tensor) -> torch.Tensor:
        noise.append(distribution.sample((3, *a.shape), generator=generator, dtype=a.dtype))
        return noise[-1][0]

    def refuse(distribution: fg.Noise, a: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("more noise was asked for than was recorded")

    one_by_one(given, estimator, 1, record)
    expected = one_by_one(given, estimator, 3, refuse, noise)
    assert bool(expected.any())
    reference.assert_same(vectorised(given, estimator, 3, refuse, noise), expected, 1e-9)
    assert Sampler(given, estimator, [0], 1).vectorised


def test_what_cannot_be_vectorised_is_drawn_one_by_one():
    assert not Sampler(problem(Shared), fg.PSA(inputs="posterior"), [0], 1).vectorised


@pytest.mark.parametrize("kind", [Skip, Branches, Shared])
def test_the_reference_is_the_exact_gradient_within_its_error(kind):
    """Fails by chance less than once in 10^4 seeds: the squared distance over its mean has 10 or more degrees of freedom."""
    given = problem(kind, examples=2)
    exact = reference.gradients(reference.expected_loss(given.net.model.graph(), given.x, given.objective).mean(), given.net)
    truth = torch.cat([exact[name].flatten() for name in given.parameters()])
    result = fg.gradeval.evaluate(given.net, given.x, given.objective, [fg.LEG()], 2000, reference_samples=40_000)
    assert (result.reference.kind, result.reference.estimator) == ("draws", "DisARM")
    layer = result.reference.layers[-1]
    distance = (result.reference.gradient - truth).norm().item()
    assert 0.1 * layer.error * layer.length < distance < 3 * layer.error * layer.length
    assert layer.error < 0.05
    # The other unbiased one agrees with it.
    assert result.accuracy("LEG").bias_low == 0


def test_a_twin_is_measured_the_same_to_the_bit():
    net = fully_connected(2, 4, 3, 2)
    x, objective = batch((5, 2), classes=2)
    rules = {"PSA": paper_psa(flip_head=False), "ARM": fg.ARM()}
    nets = (net, fg.Graph(ByHand(copy.deepcopy(net)), x))
    results = [
        fg.gradeval.evaluate(net, x, objective, rules, 50, reference=fg.DisARM(), reference_samples=2000) for net in nets
    ]
    for name in rules:
        for layer in ("layer 1", "layer 2", "all"):
            assert results[0].accuracy(name, layer) == results[1].accuracy(name, layer)
    assert results[0].accuracy("PSA", "head").rmse == results[1].accuracy("PSA", "others").rmse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": fg.Exact()}, "exact: the states of a model written by hand are not summed over, .* e.g. fg.DisARM"),
        ({"weights": "binary"}, "exact: the states of a model written by hand are not summed over"),
        (
            {"weights": "binary", "reference": fg.DisARM()},
            "DisARM takes binary weights for random variables, and these are not drawn",
        ),
    ],
)
def test_references_that_do_not_exist_are_refused(options, message):
    reference = {name: options[name] for name in ("reference",) if name in options}
    layers = [fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3, weights=options.get("weights", "real"))]
    x, objective = batch((4, 2), classes=2)
    net = fg.Graph(nn.Sequential(*layers, nn.Linear(3, 2)).double(), x)
    with pytest.raises(fg.InputError, match=message):
        fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 20, **reference)
