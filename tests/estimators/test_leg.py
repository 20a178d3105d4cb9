"""LEG against its formula on one draw, against PSA where they agree, and against the exact gradient by sampling."""

from __future__ import annotations

import pytest
import torch
from unbiasedness import (
    NOISES,
    assert_less_variance,
    random_net,
)

import flipgrad as fg
import reference
from flipgrad.estimators import _head
from reference import assert_same, batch, build, chain, fully_connected, gradients, noise_like, paper_psa


def literal(graph, x, z, objective):
    """The surrogate whose gradient is the formula: unit by unit, both states set, the later layers sampled again."""
    h = reference.sample(graph, x, z)
    total = objective(graph.outputs(h))
    for k, node in enumerate(graph.nodes, start=1):
        p = node.F(node.a(h)).flatten(1)
        for i in range(p.shape[1]):
            f = {}
            for state in (-1, 1):
                x_k = h[k].flatten(1).clone()
                x_k[:, i] = state
                changed = [*h[:k], x_k.view_as(h[k])]
                for later, z_later in zip(graph.nodes[k:], z[k:], strict=True):
                    changed.append(reference.states(later.a(changed), z_later))
                f[state] = objective(graph.outputs(changed)).detach()
            total = total + p[:, i] * (f[1] - f[-1])
    return total


def compared(net, graph, x, objective):
    z = noise_like(graph, x)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    losses = net(x, objective, estimator=fg.LEG(), noise=z)
    assert_same(losses.detach(), objective(graph.outputs(reference.sample(graph, x, z))).detach())
    expected = gradients(literal(graph, x, z, objective) @ weights, net, input=x)
    # With common noise no flip of some layer may matter, but that is rare.
    assert sum(bool((gradient != 0).any()) for gradient in expected.values()) > len(expected) / 2
    assert_same(gradients(losses @ weights, net, input=x), expected)


@pytest.mark.parametrize("noise", ["logistic", "mixed"])
@pytest.mark.parametrize("name", reference.NETS)
def test_is_its_formula(name, noise):
    net, x, objective = build(name, noise)
    compared(net, chain(net), x, objective)


@pytest.mark.parametrize("then", [True, False])
def test_is_its_formula_with_concatenated_branches(then):
    net, graph, x, objective = reference.concatenated("mixed", then)
    compared(net, graph, x.requires_grad_(), objective)


def test_flips_in_chunks(monkeypatch):
    net, x, objective = build("conv")
    z = noise_like(chain(net), x)

    def result():
        return gradients(net(x, objective, estimator=fg.LEG(), noise=z).sum(), net)

    whole = result()
    for chunk in (1, 5 * 120):
        monkeypatch.setattr(_head, "NUMBERS_AT_ONCE", chunk)
        assert_same(result(), whole)


def test_replays_noise_that_is_broadcast():
    net, x, objective = build("fc3")
    medians = [torch.zeros((), dtype=x.dtype)] * 3
    full = [torch.zeros(len(x), n, dtype=x.dtype) for n in (5, 4, 3)]
    results = [gradients(net(x, objective, estimator=fg.LEG(), noise=z).sum(), net) for z in (medians, full)]
    assert_same(*results, 0)


def test_an_empty_batch_gives_no_losses():
    net = fully_connected(2, 3, 3, 3)
    x, objective = batch((0, 2))
    assert net(x, objective, estimator=fg.LEG()).shape == (0,)


@pytest.mark.parametrize("noise", ["logistic", "normal"])
@pytest.mark.parametrize("name", ["fc3", "conv"])
def test_is_psa_in_the_last_layer(name, noise):
    net, x, objective = build(name, noise)
    z = noise_like(chain(net), x)
    psa, result = (gradients(net(x, objective, estimator=kind, noise=z).sum(), net) for kind in (paper_psa(), fg.LEG()))
    last = list(psa)[-4]
    assert_same(result[last], psa[last])
    assert (result["0.weight"] - psa["0.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("noise", reference.NOISES)
def test_is_psa_with_one_hidden_layer(noise):
    net = fully_connected(2, 5, 3, noise=reference.NOISES[noise])
    x, objective = batch((3, 2))
    z = noise_like(chain(net), x)
    psa, result = (gradients(net(x, objective, estimator=kind, noise=z).sum(), net) for kind in (paper_psa(), fg.LEG()))
    assert_same(result, psa)


@NOISES
def test_has_less_variance_than_reinforce_with_one_hidden_layer(noise):
    """Given the other units, LEG is REINFORCE's mean over the unit's own state."""
    assert_less_variance(*random_net((4,), noise), fg.LEG(), fg.REINFORCE())
