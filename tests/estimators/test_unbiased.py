"""Every estimator that says so is unbiased, and the test that shows it catches a broken one."""

from __future__ import annotations

import pytest
from unbiasedness import ERRORS, NETS, Broken, assert_caught, assert_unbiased, random_conv_net, random_net

import flipgrad as fg
from flipgrad.estimators import ESTIMATORS

# With the draws that each needs for a 5 % error to be seen, at most. REBAR is frozen below: the same estimate, sooner.
SAMPLED = {
    fg.ARM: 6000,
    fg.ARMS: 1500,
    fg.BitFlip: 5000,
    fg.DisARM: 4000,
    fg.DoubleCV: 3000,
    fg.FlipCV: 3000,
    fg.LEG: 1300,
    fg.REBAR: 5000,
}
# Shown where they are tested: with their baselines or surrogates, which depend on the network, or without sampling.
ELSEWHERE = {fg.Exact, fg.MuProp, fg.REINFORCE, fg.RELAX}

# The share of these draws that the net of two layers needs.
TWO_LAYERS = 0.4

each = pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: kind.__name__)


def estimator(kind):
    made = kind()
    return made.requires_grad_(False) if kind is fg.REBAR else made


def test_no_unbiased_estimator_is_forgotten():
    assert {kind for kind in ESTIMATORS.values() if kind.unbiased} == SAMPLED.keys() | ELSEWHERE


@each
@NETS
def test_on_fully_connected_nets(kind, widths, noise):
    share = TWO_LAYERS if len(widths) == 2 else 1
    assert_unbiased(*random_net(widths, noise), estimator(kind), int(share * SAMPLED[kind]))


# Both noises are above, and with laplace and uniform noise estimators are tested in files of their own.
@pytest.mark.slow
@each
def test_with_another_noise(kind):
    assert_unbiased(*random_net((3, 3, 3), fg.Logistic()), estimator(kind), SAMPLED[kind])


@each
def test_on_a_convolutional_net(kind):
    assert_unbiased(*random_conv_net(fg.Normal(1.5)), estimator(kind), SAMPLED[kind])


@each
@ERRORS
def test_a_broken_variant_is_caught(kind, error, share):
    assert_caught(*random_net((3, 4), fg.Logistic()), Broken(estimator(kind), error), TWO_LAYERS * share * SAMPLED[kind])
