"""An estimator is shown with the arguments that are not its defaults."""

import pytest
import torch

import flipgrad as fg
from flipgrad.estimators import ESTIMATORS

SHOWN = {
    "PSA()": fg.PSA(),
    "PSA(inputs='mean', exact=True)": fg.PSA(inputs="mean", exact=True),
    "PSA(head='sampled', flip_head=False, tolerance=0.01)": fg.PSA(head="sampled", flip_head=False, tolerance=1e-2),
    "ST(inputs='posterior')": fg.ST(inputs="posterior"),
    "Concrete(t=0.1)": fg.Concrete(0.1),
    "ARMS(samples=8)": fg.ARMS(8),
    "REBAR(temperature=0.3)": fg.REBAR(0.3),
    "DoubleCV(samples=3, alpha=0.5)": fg.DoubleCV(3, 0.5),
    "REINFORCE(baseline=RunningBaseline())": fg.REINFORCE(fg.RunningBaseline(10)),
    "ZGR(lam=0.5)": fg.ZGR(0.5),
}


@pytest.mark.parametrize("text", SHOWN)
def test_arguments_are_shown_that_are_not_defaults(text):
    assert repr(SHOWN[text]) == text


def test_defaults_are_not_shown():
    for kind in ESTIMATORS.values():
        assert repr(kind()) == ("ZGR(lam=1)" if kind is fg.ZGR else f"{kind.__name__}()")


def test_learned_arguments_are_shown_as_they_are_now():
    estimator = fg.REBAR()
    with torch.no_grad():
        estimator.log_scale.fill_(0.0).add_(torch.tensor(2.0).log())
    assert repr(estimator) == "REBAR(scale=2)"


def test_an_estimator_of_ones_own_shows_its_attributes():
    class Soft(fg.LocalEstimator):
        unbiased = False
        citation = "a test"

        def __init__(self, t=2.0, hidden=None):
            self.t = t

        def states(self, call):
            raise NotImplementedError

    assert repr(Soft(3.0)) == "Soft(t=3)"
