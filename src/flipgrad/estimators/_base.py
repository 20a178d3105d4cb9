"""What an estimator is: an object that gives losses whose gradient is its estimate, and states its facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

from torch import Tensor

from flipgrad.layers import LayerCall
from flipgrad.network import Batch, Sequential
from flipgrad.objectives import Objective, evaluate


class Estimator(ABC):
    """An estimator of the gradient of the expected loss.

    Attributes:
        unbiased: whether the estimate has the exact gradient as its mean, in every network.
        unbiased_in: where a biased estimator is unbiased all the same, in words.
        relaxed_objective: whether it differentiates a surrogate of the expected loss, which is then its loss value.
        second_derivatives: whether its losses are an ordinary function that may be differentiated twice; else that is an error.
        cost: the cost in words, where the number of passes does not tell it.
        citation: where it comes from.
    """

    unbiased: ClassVar[bool]
    unbiased_in: ClassVar[str] = ""
    relaxed_objective: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False
    cost: ClassVar[str] = ""
    citation: ClassVar[str]

    @abstractmethod
    def passes(self, depth: int) -> int:
        """How many evaluations of the network one estimate takes, for ``depth`` binary layers."""

    @abstractmethod
    def losses(self, net: Sequential, batch: Batch) -> Tensor:
        """Losses [B] of the batch: their value is the sampled (or relaxed) loss, their gradient the estimate.

        The objective is evaluated first on the outputs [B, K] whose losses are the value; then anywhere else. An estimator
        that samples nothing may evaluate it on more dimensions from the start. :func:`flipgrad.bounds.bound_losses` needs it
        so, to know what the batch's other draws came to.
        """


class LocalEstimator(Estimator):
    """An estimator that needs only the layer at hand, so that it also works in any graph of binary layers."""

    @abstractmethod
    def states(self, call: LayerCall) -> Tensor:
        """The layer's sampled (or relaxed) states, carrying the estimator's gradient."""

    @final
    def losses(self, net: Sequential, batch: Batch) -> Tensor:
        calls: list[LayerCall] = []

        def visit(call: LayerCall) -> Tensor:
            calls.append(call)
            return self.states(call)

        states = net.run(net.front(batch.x), visit, batch.draw)
        return self.head(net, calls[-1], states, batch.objective)

    @abstractmethod
    def head(self, net: Sequential, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        """The losses [B] of the ``states`` that the ``last`` layer's evaluation gave, and their gradient in both."""


class LinearHeadEstimator(LocalEstimator):
    """A local estimator that differentiates the head in the ordinary way."""

    @final
    def head(self, net: Sequential, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        return evaluate(objective, net.outputs(states))
