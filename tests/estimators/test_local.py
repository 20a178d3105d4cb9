"""What every local estimator must do, beside its own formula."""

from __future__ import annotations

import local_checks
import pytest

import flipgrad as fg

RELAXED = {"tanh": fg.Tanh(), "concrete": fg.Concrete(0.7), "adf": fg.ADF(), "local-reparam": fg.LocalReparam()}
SAMPLED = {
    "hard-st": fg.HardST(),
    "zgr": fg.ZGR(),
    "zgr-half": fg.ZGR(0.5),
    "zgr-tau": fg.ZGR(tau=0.8),
    "gumbel-rao": fg.GumbelRao(3, 0.8),
}
LOCAL = RELAXED | SAMPLED

each = pytest.mark.parametrize("estimator", LOCAL.values(), ids=LOCAL.keys())


@each
def test_convolution_is_the_fully_connected_net_with_its_matrix(estimator):
    local_checks.assert_convolution_is_its_matrix(estimator)


@each
def test_works_in_graphs_written_by_hand(estimator):
    local_checks.assert_works_in_hand_written_graphs(estimator)


@each
def test_stays_finite_in_saturated_nets(estimator):
    local_checks.assert_finite_when_saturated(estimator)


@each
def test_takes_an_empty_batch(estimator):
    local_checks.assert_empty_batch(estimator)


@pytest.mark.parametrize("estimator", RELAXED.values(), ids=RELAXED.keys())
def test_relaxed_gradient_is_a_true_derivative(estimator):
    local_checks.assert_true_derivative(estimator)


@pytest.mark.parametrize("estimator", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_states_are_exactly_binary(estimator):
    layer = fg.BinaryLinear(3, 50).double()
    states = layer(local_checks.batch((20, 3))[0], estimator=estimator)
    assert states.requires_grad
    assert sorted(states.unique().tolist()) == [-1, 1]
