"""Estimators that look at sampled paths through the network and attach their gradient to the pre-activations.

Whatever they do, it ends in an estimate g^k of the expected loss's gradient in every layer's pre-activations a^k; ordinary
backpropagation carries it on to the parameters, and to real-valued modules in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flipgrad.contract import Batch, Estimator, LayerCall, Network, Visit
from flipgrad.errors import InputError
from flipgrad.estimators._head import can_compare, check_head_alone, check_separable, differs
from flipgrad.guards import check_not_checkpointed
from flipgrad.noise import Noise, Uniform, sign
from flipgrad.objectives import check_alone, evaluate


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

    net: Network
    batch: Batch
    inputs: Tensor
    calls: tuple[LayerCall, ...]
    a: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    losses: Tensor

    @staticmethod
    def sample(net: Network, batch: Batch) -> Path:
        """Sample every layer in turn."""
        net.check_examples_alone("an estimator that looks at sampled paths")
        layers: list[tuple[LayerCall, Tensor, Tensor, Tensor]] = []

        def visit(call: LayerCall) -> Tensor:
            a = call.affine(call.x)
            z = call.draw(call.noise, a.detach())
            states = sign(a.detach() - z)
            layers.append((call, a, z, states))
            return states

        inputs = net.front(batch.x)
        last = net.run(inputs, visit, batch.draw)
        outputs = net.outputs(last)
        losses = evaluate(batch.objective, outputs)
        calls, a, z, states = zip(*layers, strict=True)
        check_head_alone(net, last, outputs)
        check_alone(batch.objective, outputs, losses)
        path = Path(net, batch, inputs, calls, a, z, states, losses)
        if net.by_hand:
            _check_model_alone(path, outputs)
        return path

    @property
    def noises(self) -> list[Noise]:
        """The distribution of every layer's noise."""
        return [call.noise for call in self.calls]

    def uniform(self, like: Tensor) -> Tensor:
        """Independent variables uniform in (0, 1), in the shape of ``like``, from the batch's source of noise."""
        u = (self.batch.draw(Uniform(), like.detach()) + 1) / 2
        limits = torch.finfo(u.dtype)
        return u.clamp(limits.tiny, 1 - limits.eps / 2)

    @torch.no_grad()
    def tail(self, k: int, states: Tensor) -> Tensor:
        """The losses [B] if layer ``k`` (from 0) had other ``states``: earlier layers as on the path, later ones anew."""
        return self.continued(k, states, lambda call: call.sample(call.affine(call.x)))

    def continued(self, k: int, states: Tensor, visit: Visit) -> Tensor:
        """The losses [B] with layer ``k``'s ``states`` replaced, earlier layers as on the path and ``visit`` for later ones."""
        return evaluate(self.batch.objective, self._outputs(self.inputs, [*self.states[:k], states], visit))

    def continued_with_noise(self, k: int, states: Tensor, rule: Callable[[LayerCall, Tensor], Tensor]) -> Tensor:
        """Like :meth:`continued`, with later layers by a ``rule`` of their evaluation and their noise Z on the path.

        That noise is independent of layer k's and of all before, so whatever is unbiased for every fixed noise of the later
        layers is unbiased.
        """
        z = iter(self.z[k + 1 :])
        return self.continued(k, states, lambda call: rule(call, next(z)))

    @torch.no_grad()
    def replayed(self, k: int, states: Tensor) -> Tensor:
        """The losses [n, B] with each of n other ``states`` [n, B, ...] of layer ``k``, the rest as on the path.

        Earlier layers keep their states and later ones their noise: the n continuations have common random numbers.
        """

        def copies(t: Tensor) -> Tensor:
            return t.expand(len(states), *t.shape).flatten(0, 1)

        known = [*map(copies, self.states[:k]), states.flatten(0, 1)]
        z = iter([copies(z.expand_as(a)) for z, a in zip(self.z[k + 1 :], self.a[k + 1 :], strict=True)])
        outputs = self._outputs(copies(self.inputs), known, lambda call: sign(call.affine(call.x) - next(z)))
        return evaluate(self.batch.objective, outputs.unflatten(0, states.shape[:2]))

    def _outputs(self, inputs: Tensor, known: Sequence[Tensor], visit: Visit) -> Tensor:
        """The head's outputs where the first layers have ``known`` states and ``visit`` gives those of the others."""
        check_separable(self.net.head)
        given = iter(known)

        def replay(call: LayerCall) -> Tensor:
            states = next(given, None)
            return visit(call) if states is None else states

        return self.net.outputs(self.net.run(inputs, replay, self.batch.draw))


class PathEstimator(Estimator):
    """An estimator of the gradient in the pre-activations, from a sampled path.

    Besides the path it evaluates ``tails`` continuations of it for every layer.
    """

    tails: int = 0

    def passes(self, depth: int) -> int:
        return 1 + self.tails * depth

    @final
    def losses(self, net: Network, batch: Batch) -> Tensor:
        net.check_real_weights(type(self).__name__)
        path = Path.sample(net, batch)
        losses = path.losses
        for a, gradient in zip(path.a, self.gradients(path), strict=True):
            # Its value is 0: it only carries the gradient.
            losses = losses + ((a - a.detach()) * gradient.detach()).flatten(1).sum(1)
        extra = self.extra(path)
        return losses if extra is None else losses + extra

    def gradients(self, path: Path) -> Sequence[Tensor]:
        """For every layer, the estimated gradient of each example's expected loss in its pre-activations, like ``path.a``.

        By default :meth:`gradient` of each layer in turn; a subclass writes one of the two.
        """
        return [self.gradient(path, k) for k in range(len(path.a))]

    def gradient(self, path: Path, k: int) -> Tensor:
        """That of layer ``k``, from 0."""
        raise InputError(
            f"{type(self).__name__} has no gradient: write gradient(path, k), for one layer, or gradients(path), for all"
        )

    def extra(self, path: Path) -> Tensor | None:
        """A term [B] of value 0 whose gradient trains the estimator's own parameters; asked for after :meth:`gradients`."""
        return None


@torch.no_grad()
def _check_model_alone(path: Path, outputs: Tensor) -> None:
    """Refuse a model written by hand that gives an example other values alone than in the batch, on the same ``path``."""
    net, x = path.net, path.batch.x
    if not can_compare(net.head, x):
        return
    known, mixing = iter(zip(path.a, path.states, strict=True)), []

    def visit(call: LayerCall) -> Tensor:
        a, states = next(known)
        mixing.append(differs(call.affine(call.x), a))
        return states[:1]

    alone = net.outputs(net.run(net.front(x[:1]), visit, path.batch.draw))
    if any(mixing) or differs(alone, outputs):
        raise InputError(
            "an estimator that looks at sampled paths needs examples that do not depend on each other, and the model gives an "
            "example other values alone than in the batch, or draws at random; change it, or use one such as fg.PSA()"
        )


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """``values`` [B] with the dimensions of ``like`` [B, ...], to be broadcast over units."""
    return values.view(-1, *[1] * (like.dim() - 1))


def value_and_slope(function: Callable[[Tensor], Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
    """The values [B] of a ``function`` of a batch that treats its examples separately, and their gradient in ``t``.

    Both are differentiable in what else the function depends on. The functional form also works where draws are vectorised.
    """
    check_not_checkpointed()
    transform: Any = torch.func.vjp(function, t.detach())
    value, pullback = transform
    (slope,) = pullback(torch.ones_like(value))
    return value, slope


def logit_slope(noise: Noise, a: Tensor) -> Tensor:
    """d logit(F(a)) / da: by the chain rule, turns a gradient in the logits of a layer into one in its pre-activations."""
    a = a.detach()
    one = torch.ones_like(a)
    return noise.score(one, a) - noise.score(-one, a)
