"""HardST against its formula, and where it is ST."""

from __future__ import annotations

import pytest
import torch
from local_checks import NAMES, assert_is, literal, seeded, straight

import flipgrad as fg
import reference
from reference import build, chain, fully_connected, gradients


@pytest.mark.parametrize("noise", reference.NOISES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "front"])
def test_is_its_formula(name, noise):
    """Not for the net "front", where the clamp lets no gradient through to the first layers."""
    net, x, objective = build(name, noise)
    outputs = literal(
        chain(net), x, seeded(), lambda node, a, z, _: straight(reference.states(a, z), ((a > -1) & (a < 1)).to(a.dtype), a)
    )
    assert_is(fg.HardST(), net, x, objective, objective(outputs))


@pytest.mark.parametrize(("noise", "same"), [(fg.Uniform(1.0), True), (fg.Uniform(2.0), False), (fg.Logistic(), False)])
def test_is_st_for_uniform_noise_of_scale_1(noise, same):
    net = fully_connected(2, 4, 4, 3, noise=[noise])
    x, objective = reference.batch((5, 2))
    hard, soft = (
        gradients(net(x, objective, estimator=kind, generator=seeded()).sum(), net) for kind in (fg.HardST(), fg.ST())
    )
    assert all(torch.equal(hard[name], soft[name]) for name in hard) == same
