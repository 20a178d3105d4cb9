"""Estimates from several draws: what more of them are worth, and whether they can be had for less."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from flipgrad.bounds import MeanOfDraws
from flipgrad.contract import Estimator, LayerCall, LocalEstimator, Network
from flipgrad.objectives import Objective
from flipgrad.reproduce.beyond.options import named
from flipgrad.sampling import states as sampled_states


@final
class LastLayer(LocalEstimator):
    """One draw of all layers but the last, ``count`` of the last: its signals and the head's gradient are averaged.

    Not for posterior inputs of the last layer: these belong to one draw of its states.
    """

    unbiased = False
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def __init__(self, rule: LocalEstimator, count: int) -> None:
        self.rule, self.count = rule, count

    def passes(self, depth: int) -> int:
        return self.rule.passes(depth)

    def states(self, call: LayerCall) -> Tensor:
        return self.rule.states(call)

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        if last.distribution is None:
            raise RuntimeError("the last layer drew no states")
        # Other values, the same gradient: what comes back to all of them goes on to the layer once, added up.
        carried = states - states.detach()
        every = [states, *(sampled_states(last.draw, last.noise, last.distribution.a) + carried for _ in range(self.count - 1))]
        return torch.stack([self.rule.head(net, last, some, objective) for some in every]).mean(0)


# How a gradient is made of draws, by what tables call it: the option, and how.
WAYS: dict[str, tuple[str, str]] = {
    "PSA posterior, 2 draws": ("psa:posterior", "independent"),
    "PSA posterior, Z and −Z": ("psa:posterior", "antithetic"),
    "PSA mean, 2 draws": ("psa:mean", "independent"),
    "PSA mean, Z and −Z": ("psa:mean", "antithetic"),
    "PSA mean, 4 of the last layer": ("psa:mean", "last 4"),
    "PSA mean, 16 of the last layer": ("psa:mean", "last 16"),
}


def of_draws(option: str, way: str) -> Estimator:
    """The estimator of an option (a specification) with one draw, or in one of the :data:`WAYS`."""
    rule = named(option)[1]
    if way == "one":
        return rule
    if way.startswith("last ") and isinstance(rule, LocalEstimator):
        return LastLayer(rule, int(way.removeprefix("last ")))
    return MeanOfDraws(rule, 2, antithetic=way == "antithetic")
