"""The ways of averaging that are compared, one draw or several, and what was found out about them in one network."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, final

import torch
from torch import Tensor

from flipgrad.bounds import MeanOfDraws
from flipgrad.contract import Estimator, LayerCall, LocalEstimator, Network
from flipgrad.estimators.names import for_training
from flipgrad.objectives import Objective
from flipgrad.sampling import states as sampled_states

# The paper's own first: psa:sampled is PSA, st is ST, psa:enhanced the head of its appendix.
OPTIONS = (
    *("psa:sampled", "psa:enhanced", "psa:posterior", "psa:rao-blackwell", "psa:mean"),
    *("st:sampled", "st:posterior", "st:rao-blackwell", "st:mean"),
)
# How a gradient is made of several draws, by what tables call it: the option, and how.
WAYS = {
    "PSA posterior, 2 draws": ("psa:posterior", "independent"),
    "PSA posterior, Z and −Z": ("psa:posterior", "antithetic"),
    "PSA mean, 2 draws": ("psa:mean", "independent"),
    "PSA mean, Z and −Z": ("psa:mean", "antithetic"),
    "PSA mean, 4 of the last layer": ("psa:mean", "last 4"),
    "PSA mean, 16 of the last layer": ("psa:mean", "last 16"),
}
# What is compared with, and the option that is recommended.
PAPER, RECOMMENDED = "PSA", "PSA posterior"
# The numbers of an option in a layer, all relative to the length of the gradient, of one draw.
KEYS = ("rmse", "bias", "bias_low", "bias_high", "std", "cosine")
# Parts of a network whose inputs are no sampled states: no option changes their gradient.
REAL = ("front", "layer 1")
# The gradient of all parts.
WHOLE = "all"


def named(specification: str) -> tuple[str, Estimator]:
    """What figures call an option, and its estimator.

    >>> named("psa:sampled")[0], named("psa:mean")[0]
    ('PSA', 'PSA mean')
    """
    return for_training(specification, points=1)


# What figures call the options.
LABELS = [named(option)[0] for option in OPTIONS]


def of_draws(option: str, way: str) -> Estimator:
    """The estimator of an option (a specification) with "one" draw, or in one of the :data:`WAYS`."""
    rule = named(option)[1]
    if way == "one":
        return rule
    if way.startswith("last ") and isinstance(rule, LocalEstimator):
        return LastLayer(rule, int(way.removeprefix("last ")))
    return MeanOfDraws(rule, 2, antithetic=way == "antithetic")


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


@final
@dataclass(frozen=True)
class Net:
    """One network in one state.

    Tables call it ``name``, figures ``title``. Errors are relative to the exact gradient, in ``wide`` networks to the mean of
    very many draws of PSA; ``reference`` says so. The ``layers`` are "front", "layer 1", ..., "head", and "all" of them. The
    numbers in every layer are by option and key, see :data:`KEYS`, those of several ``draws`` likewise. The ``cost`` is the
    time of a gradient over that of PSA.
    """

    name: str
    title: str
    wide: bool
    reference: str
    layers: list[str]
    options: Mapping[str, Mapping[str, list[float]]]
    draws: Mapping[str, Mapping[str, list[float]]]
    cost: Mapping[str, float]

    def value(self, option: str, key: str, layer: str) -> float:
        """One number."""
        found = self.options[option] if option in self.options else self.draws[option]
        return found[key][self.layers.index(layer)]

    def ratio(self, option: str, key: str, layer: str) -> float:
        """A number over PSA's."""
        return self.value(option, key, layer) / self.value(PAPER, key, layer)

    def std_at_cost(self, option: str, layer: str) -> float:
        """The standard deviation times the root of the cost, in units of PSA's."""
        return self.value(option, "std", layer) * sqrt(self.cost[option])

    def equal_cost(self, option: str, layer: str) -> float:
        """RMSE times the root of the cost, over PSA's: below 1, the same time spent on averaged draws gives a lower error.

        It is so as far as errors are variance; a bias is not averaged away.
        """
        return self.ratio(option, "rmse", layer) * sqrt(self.cost[option])


def per_layer(entries: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The numbers of one draw from accuracies as :mod:`flipgrad.gradeval` gives them, layer by layer."""
    rows = [{**entry, "rmse": entry["rmse"][0], "cosine": entry["cosine_mean"][0]} for entry in entries]
    # In few digits: a file to be kept.
    return {key: [float(f"{row[key]:.5g}") for row in rows] for key in KEYS}
