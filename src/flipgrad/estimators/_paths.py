"""Estimators that look at sampled paths through the network and attach their gradient to the pre-activations.

Whatever they do, it ends in an estimate g^k of the expected loss's gradient in every layer's pre-activations a^k; ordinary
backpropagation carries it on to the parameters, and to real-valued modules in front.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._base import Estimator
from flipgrad.layers import LayerCall
from flipgrad.network import Batch, Sequential
from flipgrad.noise import Noise, sign
from flipgrad.objectives import evaluate


@final
@dataclass(frozen=True)
class Path:
    """One sampled path of a batch.

    Attributes:
        net: the network.
        batch: the inputs, the objective and the source of noise.
        inputs: what the first binary layer saw.
        calls: the evaluation of every layer, in order.
        a: the pre-activations of every layer, differentiable in its parameters (not through states).
        z: the noise of every layer.
        states: the sampled states of every layer, without a gradient.
        losses: of the path, [B], differentiable in the head's parameters.
    """

    net: Sequential
    batch: Batch
    inputs: Tensor
    calls: tuple[LayerCall, ...]
    a: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    losses: Tensor

    @staticmethod
    def sample(net: Sequential, batch: Batch) -> Path:
        """Sample every layer in turn."""
        calls: list[LayerCall] = []
        a: list[Tensor] = []
        z: list[Tensor] = []
        states: list[Tensor] = []

        def visit(call: LayerCall) -> Tensor:
            calls.append(call)
            a.append(call.affine(call.x))
            z.append(call.draw(call.noise, a[-1].detach()))
            states.append(sign(a[-1].detach() - z[-1]))
            return states[-1]

        inputs = net.front(batch.x)
        losses = evaluate(batch.objective, net.outputs(net.run(inputs, visit, batch.draw)))
        return Path(net, batch, inputs, tuple(calls), tuple(a), tuple(z), tuple(states), losses)

    @property
    def noises(self) -> list[Noise]:
        """The distribution of every layer's noise."""
        return [call.noise for call in self.calls]

    @torch.no_grad()
    def tail(self, k: int, states: Tensor) -> Tensor:
        """The losses [B] if layer ``k`` (from 0) had other ``states``: earlier layers as on the path, later ones anew."""
        return self.continued(k, states, lambda call: call.sample(call.affine(call.x)))

    def continued(self, k: int, states: Tensor, visit: Callable[[LayerCall], Tensor]) -> Tensor:
        """The losses [B] with layer ``k``'s ``states`` replaced, earlier layers as on the path and ``visit`` for later ones."""
        given = iter([*self.states[:k], states])

        def replay(call: LayerCall) -> Tensor:
            known = next(given, None)
            return visit(call) if known is None else known

        return evaluate(self.batch.objective, self.net.outputs(self.net.run(self.inputs, replay, self.batch.draw)))


class PathEstimator(Estimator):
    """An estimator of the gradient in the pre-activations, from a sampled path."""

    @final
    def losses(self, net: Sequential, batch: Batch) -> Tensor:
        path = Path.sample(net, batch)
        losses = path.losses
        for a, gradient in zip(path.a, self.gradients(path), strict=True):
            # Its value is 0: it only carries the gradient.
            losses = losses + ((a - a.detach()) * gradient.detach()).flatten(1).sum(1)
        return losses

    @abstractmethod
    def gradients(self, path: Path) -> Sequence[Tensor]:
        """For every layer, the estimated gradient of each example's expected loss in its pre-activations, like ``path.a``."""


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """``values`` [B] with the dimensions of ``like`` [B, ...], to be broadcast over units."""
    return values.view(-1, *[1] * (like.dim() - 1))


def derivative(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """The derivative of an elementwise ``function`` at ``a``, without a gradient."""
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(a).sum(), a)
    return slope


def score(noise: Noise, states: Tensor, a: Tensor) -> Tensor:
    """d log p(states | a) / da."""
    return derivative(lambda t: noise.log_prob(states, t), a)


def logit_slope(noise: Noise, a: Tensor) -> Tensor:
    """d logit(F(a)) / da: by the chain rule, turns a gradient in the logits of a layer into one in its pre-activations."""
    return derivative(lambda t: noise.log_cdf(t) - noise.log_cdf(-t), a)
