"""The ways of averaging that are compared, and what was found out about them in one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, final

from flipgrad.estimators import Estimator
from flipgrad.estimators.names import for_training

# The paper's own first: psa:sampled is PSA, st is ST, psa:enhanced the head of its appendix.
OPTIONS = (
    "psa:sampled",
    "psa:enhanced",
    "psa:posterior",
    "psa:rao-blackwell",
    "psa:mean",
    "st:sampled",
    "st:posterior",
    "st:rao-blackwell",
    "st:mean",
)
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


@final
@dataclass(frozen=True)
class Net:
    """One network in one state.

    Attributes:
        name: for a table.
        title: for a figure.
        wide: whether errors are relative to the mean of very many draws of PSA instead of to the exact gradient.
        reference: what they are relative to, in words.
        layers: "front", "layer 1", ..., "head", and "all" of them.
        options: the numbers in every layer by option and key; see :data:`KEYS`.
        draws: likewise of estimates that are made of several draws.
        cost: the time of a gradient over that of PSA, by option.
    """

    name: str
    title: str
    wide: bool
    reference: str
    layers: list[str]
    options: Mapping[str, Mapping[str, list[float]]]
    draws: Mapping[str, Mapping[str, list[float]]]
    cost: Mapping[str, float]

    @property
    def averaged(self) -> list[str]:
        """The layers whose inputs are sampled states, and the head."""
        return [layer for layer in self.parts if layer not in REAL]

    @property
    def parts(self) -> list[str]:
        """The layers and the head, without the whole."""
        return [layer for layer in self.layers if layer != WHOLE]

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
