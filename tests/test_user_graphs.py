"""Networks written by hand, with skips, branches and shared layers, against algorithm 1 and 2 on their graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg
import reference
from hand_written import Branches, Images, Shared, Skip
from reference import (
    assert_same,
    batch,
    concatenated,
    fully_connected,
    gradients,
    noise_like,
    paper_psa,
    randomized,
)

ESTIMATORS = {
    "psa": (paper_psa(), lambda *args: reference.psa(*args, head="linear")),
    "st": (fg.ST(), reference.st),
}

each_estimator = pytest.mark.parametrize(("estimator", "literal"), ESTIMATORS.values(), ids=ESTIMATORS.keys())


@each_estimator
@pytest.mark.parametrize("kind", [Skip, Branches, Shared, Images])
def test_used_estimator_is_the_literal_algorithm(kind, estimator, literal):
    model = randomized(kind())
    x, objective = batch(kind.shape)
    x.requires_grad_()
    graph = model.graph()
    z = noise_like(graph, x, seed=5)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    fg.use(model, estimator, generator=torch.Generator().manual_seed(5))
    losses = objective(model(x))
    assert_same(losses.detach(), objective(graph.outputs(reference.sample(graph, x, z))).detach())
    expected = gradients(literal(graph, x, z, objective) @ weights, model, input=x)
    assert all(bool((g != 0).any()) for g in expected.values())
    assert_same(gradients(losses @ weights, model, input=x), expected)


# An ordinary loss linearises the head: what fg.use gives is Sequential's estimator with an unflipped head.
def used_and_whole(inputs: str):
    pairs = [
        (paper_psa(), paper_psa(flip_head=False)),
        (fg.PSA(inputs=inputs), fg.PSA(inputs=inputs, head="sampled", flip_head=False)),
        (fg.ST(), fg.ST()),
    ]
    return pytest.mark.parametrize(("estimator", "whole"), pairs, ids=["paper's psa", f"psa {inputs}", "st"])


@used_and_whole("posterior")
def test_three_ways_agree(estimator, whole):
    """Sequential, fg.use with an ordinary loss, and calls layer by layer: the same losses and gradients for one draw."""
    net = fully_connected(2, 4, 4, 3, 3, noise=reference.NOISES["mixed"])
    x, objective = batch((5, 2))
    z = noise_like(reference.chain(net), x, seed=2)
    losses = net(x, objective, estimator=whole, noise=z)
    expected = gradients(losses.sum(), net)

    # An estimator handed in takes precedence over the one in use.
    fg.use(net, fg.ST() if isinstance(estimator, fg.PSA) else fg.PSA())
    h = x
    for layer, z_k in zip(net.binary_layers, z, strict=True):
        h = layer(h, estimator=estimator, noise=z_k)
    by_layers = objective(net.head(h))
    assert_same(by_layers, losses)
    assert_same(gradients(by_layers.sum(), net), expected)

    fg.use(net, estimator, generator=torch.Generator().manual_seed(2))
    used = torch.nn.functional.cross_entropy(net(x), objective.labels, reduction="none")
    assert_same(used, losses)
    assert_same(gradients(used.sum(), net), expected)
    # Taken away again, the gradient is undefined again.
    fg.use(net, None)
    with pytest.raises(RuntimeError, match="without an estimator"):
        net(x).sum().backward()


@pytest.mark.parametrize("noise", ["logistic", "mixed"])
@pytest.mark.parametrize("then", [True, False], ids=["then a layer", "then the head"])
@pytest.mark.parametrize(
    ("estimator", "literal"),
    [(paper_psa(), reference.psa), (paper_psa(flip_head=False), ESTIMATORS["psa"][1]), (fg.ST(), reference.st)],
    ids=["flipped head", "linear head", "st"],
)
def test_concat_is_the_literal_algorithm(estimator, literal, then, noise):
    net, graph, x, objective = concatenated(noise, then)
    x.requires_grad_()
    z = noise_like(graph, x)
    actual = gradients(net(x, objective, estimator=estimator, noise=z).sum(), net, input=x)
    assert_same(actual, gradients(literal(graph, x, z, objective).sum(), net, input=x))


@used_and_whole("auto")
def test_concat_is_the_hand_written_skip(estimator, whole):
    model = randomized(Skip())
    net = fg.Sequential(model.l1, fg.Concat(nn.Identity(), model.l2), model.l3, head=model.head)
    x, objective = batch((4, 2))
    z = noise_like(model.graph(), x, seed=3)
    expected = gradients(net(x, objective, estimator=whole, noise=z).sum(), model)
    fg.use(model, estimator, generator=torch.Generator().manual_seed(3))
    assert_same(gradients(objective(model(x)).sum(), model), expected)


def test_concat_of_images_in_a_sequential():
    model = randomized(Images())
    net = fg.Sequential(
        model.front, nn.ReLU(), model.c1, fg.Concat(nn.Identity(), model.c2), nn.Flatten(), model.l3, head=model.head
    )
    x, objective = batch(Images.shape)
    z = noise_like(model.graph(), x)
    actual = gradients(net(x, objective, estimator=paper_psa(), noise=z).sum(), model)
    assert_same(actual, gradients(reference.psa(model.graph(), x, z, objective).sum(), model))


@pytest.mark.parametrize("twice", [fg.Concat(nn.Identity(), fg.BinaryLinear(3, 1)), nn.Flatten()], ids=["nested", "flat"])
def test_concat_refuses_a_unit_twice(twice):
    """Flips of one copy alone are not flips of the unit."""
    with pytest.raises(fg.InputError, match="more than one branch hands the same states on"):
        fg.Sequential(fg.BinaryLinear(2, 3), fg.Concat(nn.Identity(), twice), head=nn.Linear(6, 2))
