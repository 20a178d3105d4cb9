"""Estimators that look at sampled paths through the network and attach their gradient to the pre-activations.

Whatever they do, it ends in an estimate g^k of the expected loss's gradient in every layer's pre-activations a^k; ordinary
backpropagation carries it on to the parameters, and to real-valued modules in front.

Binary weights that are drawn are one more set of binary variables before each layer, with the latent weights in place of the
pre-activations. All examples share them, and all continuations of a path, but for the one set that is changed. An estimate for
them is made of numbers for every example times directions that are the same for all, so that nothing is as large as examples
times weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from flipgrad.contract import Batch, Estimator, LayerCall, Network, Visit, WeightCall
from flipgrad.errors import InputError
from flipgrad.estimators._head import can_compare, check_head_alone, check_separable, differs
from flipgrad.guards import check_not_checkpointed
from flipgrad.noise import Noise, Uniform, sign
from flipgrad.objectives import check_alone, evaluate
from flipgrad.sampling import for_weights, unmirrored

# For every set of binary variables, numbers [B] and directions like the variables: an estimate is the sum of their products.
Products = Iterable[tuple[Tensor, Tensor]]


@final
class DrawnWeights(NamedTuple):
    """The binary weights of a layer on a path: the latent ones, differentiable, their noise, its draw Z, and the signs."""

    latent: Tensor
    noise: Noise
    z: Tensor
    signs: Tensor

    @staticmethod
    def draw(call: WeightCall) -> DrawnWeights:
        """A draw from the source of noise; weights that are not drawn were refused before."""
        if call.noise is None:
            raise RuntimeError("binary weights that are not drawn are no variables of a path")
        latent = call.latent.detach()
        z = for_weights(call.draw)(call.noise, latent).expand_as(latent)
        return DrawnWeights(call.latent, call.noise, z, sign(latent - z))


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
        drawn: the binary weights of every layer; None where these are real.
        losses: of the path, [B], differentiable in the head's parameters.
    """

    net: Network
    batch: Batch
    inputs: Tensor
    calls: tuple[LayerCall, ...]
    a: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    drawn: tuple[DrawnWeights | None, ...]
    losses: Tensor

    @staticmethod
    def sample(net: Network, batch: Batch) -> Path:
        """Sample every layer in turn."""
        net.check_examples_alone("an estimator that looks at sampled paths")
        layers: list[tuple[LayerCall, Tensor, Tensor, Tensor, DrawnWeights | None]] = []

        def visit(call: LayerCall) -> Tensor:
            drawn: list[DrawnWeights] = []

            def signs(weights: WeightCall) -> Tensor:
                drawn.append(DrawnWeights.draw(weights))
                return drawn[0].signs

            call.weight_rule = signs
            call.binary_weights()
            a = call.affine(call.x)
            z = call.draw(call.noise, a.detach())
            states = sign(a.detach() - z)
            layers.append((call, a, z, states, drawn[0] if drawn else None))
            return states

        inputs = net.front(batch.x)
        last = net.run(inputs, visit, batch.draw)
        outputs = net.outputs(last)
        losses = evaluate(batch.objective, outputs)
        calls, a, z, states, drawn = zip(*layers, strict=True)
        check_head_alone(net, last, outputs)
        check_alone(batch.objective, outputs, losses)
        path = Path(net, batch, inputs, calls, a, z, states, drawn, losses)
        if net.by_hand:
            _check_model_alone(path, outputs)
        return path

    @property
    def noises(self) -> list[Noise]:
        """The distribution of every layer's noise."""
        return [call.noise for call in self.calls]

    def units(self, k: int) -> Variables:
        """The units of layer ``k``, from 0."""
        return Variables(self, k, False, self.a[k], self.noises[k], self.z[k], self.states[k])

    @property
    def weights(self) -> list[Variables]:
        """The binary weights of every layer that has them, in order."""
        found = ((k, drawn) for k, drawn in enumerate(self.drawn) if drawn is not None)
        return [Variables(self, k, True, w.latent[None], w.noise, w.z[None], w.signs[None]) for k, w in found]

    @torch.no_grad()
    def tail(self, k: int, states: Tensor) -> Tensor:
        """The losses [B] if layer ``k`` (from 0) had other ``states``: earlier layers as on the path, later ones anew."""
        return self.continued(k, states, _anew)

    @torch.no_grad()
    def weight_tail(self, k: int, signs: Tensor) -> Tensor:
        """The losses [B] if layer ``k`` had other weights ``signs``: earlier layers as on the path, it and later ones anew."""
        return evaluate(self.batch.objective, self._outputs(self.inputs, self.states[:k], _anew, {k: signs}))

    @torch.no_grad()
    def weight_replayed(self, k: int, signs: Tensor) -> Tensor:
        """The losses [B] if layer ``k`` had other weights ``signs``, with all else as on the path, the noise too."""
        z = iter(self.z[k:])
        outputs = self._outputs(self.inputs, self.states[:k], lambda call: sign(call.affine(call.x) - next(z)), {k: signs})
        return evaluate(self.batch.objective, outputs)

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

    def _outputs(
        self, inputs: Tensor, known: Sequence[Tensor], visit: Visit, changed: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """The head's outputs where the first layers have ``known`` states and ``visit`` gives those of the others.

        Binary weights are those of the path, other than the ``changed`` ones of some layers.
        """
        check_separable(self.net.head)
        given, signs = iter(known), [None if drawn is None else drawn.signs for drawn in self.drawn]
        for k, other in (changed or {}).items():
            signs[k] = other
        remaining = iter(signs)

        def replay(call: LayerCall) -> Tensor:
            states, weights = next(given, None), next(remaining)
            if weights is not None:
                # Where the states are known, too: what a residual block adds to the stream is made of both.
                call.weight_rule = lambda _: weights
            return visit(call) if states is None else states

        return self.net.outputs(self.net.run(inputs, replay, self.batch.draw))


@final
@dataclass(frozen=True)
class Variables:
    """Independent binary variables sign(a - Z) on a path: the units of a layer, or its binary weights, which examples share.

    Attributes:
        path: the path.
        k: the layer's number, from 0.
        shared: whether they are weights, the same ones for all examples.
        parameter: units' pre-activations [B, ...], or latent weights [1, ...]; differentiable.
        noise: the distribution of Z.
        z: the noise on the path, like ``a``.
        states: the states on the path, like ``a``.
    """

    path: Path
    k: int
    shared: bool
    parameter: Tensor
    noise: Noise
    z: Tensor
    states: Tensor

    @property
    def a(self) -> Tensor:
        """The pre-activations, or latent weights, without a gradient."""
        return self.parameter.detach()

    def uniform(self, like: Tensor) -> Tensor:
        """Independent variables uniform in (0, 1), in the shape of ``like``, from the batch's source of noise."""
        # Halves of weights are not halves of the batch, of which the second may have the opposite noise.
        draw = unmirrored(self.path.batch.draw) if self.shared else self.path.batch.draw
        u = (draw(Uniform(), like.detach()) + 1) / 2
        limits = torch.finfo(u.dtype)
        return u.clamp(limits.tiny, 1 - limits.eps / 2)

    def tail(self, states: Tensor) -> Tensor:
        """The losses [B] if they had other ``states``: what comes before as on the path, what depends on them anew."""
        return self.path.weight_tail(self.k, states[0]) if self.shared else self.path.tail(self.k, states)

    def replayed(self, states: Tensor) -> Tensor:
        """The losses [n, B] with each of n other ``states`` [n, ...], the rest as on the path, the noise too."""
        if self.shared:
            return torch.stack([self.path.weight_replayed(self.k, signs[0]) for signs in states])
        return self.path.replayed(self.k, states)

    def carry(self, direction: Tensor) -> Tensor:
        """Of value 0, [B] or, of weights, [1]: its gradient in the ``parameter`` is the ``direction``."""
        return ((self.parameter - self.a) * direction.detach()).flatten(1).sum(1)


class PathEstimator(Estimator):
    """An estimator of the gradient in the pre-activations, and in latent weights, from a sampled path.

    Besides the path it evaluates ``tails`` continuations of it for every layer, and as many again for its binary weights. A
    subclass writes one of three: :meth:`products`, for units and binary weights alike; or :meth:`gradient`, or
    :meth:`gradients`, for units, with :meth:`weight_term` where it knows what to do with binary weights.

    Attributes:
        units_only: why binary weights are refused, in words; empty where they are not.
    """

    tails: int = 0
    units_only: ClassVar[str] = ""

    def passes(self, depth: int) -> int:
        return 1 + self.tails * depth

    @final
    def losses(self, net: Network, batch: Batch) -> Tensor:
        self.check_weights(net)
        path = Path.sample(net, batch)
        losses = path.losses
        if path.weights:
            losses = losses + self.weight_term(path).to(losses.dtype)
        for a, gradient in zip(path.a, self.gradients(path), strict=True):
            # Its value is 0: it only carries the gradient.
            losses = losses + ((a - a.detach()) * gradient.detach()).flatten(1).sum(1)
        extra = self.extra(path)
        return losses if extra is None else losses + extra

    @final
    def check_weights(self, net: Network) -> None:
        """Refuse binary weights that have no gradient here."""
        name = type(self).__name__
        for layer in net.binary_layers:
            if layer.weights == "binary" and self.units_only:
                raise _no_weights(name, self.units_only)
            if layer.weights == "binary" and layer.weight_noise is None:
                raise InputError(
                    f"{name} takes binary weights for random variables, and these are not drawn: give the layer a "
                    "weight_noise, e.g. fg.Logistic(0.1), or use fg.PSA(), fg.ST() or fg.HardST()"
                )

    def gradients(self, path: Path) -> Sequence[Tensor]:
        """For every layer, the estimated gradient of each example's expected loss in its pre-activations, like ``path.a``.

        By default :meth:`gradient` of each layer in turn.
        """
        return [self.gradient(path, k) for k in range(len(path.a))]

    def gradient(self, path: Path, k: int) -> Tensor:
        """That of layer ``k``, from 0; by default the sum of the :meth:`products`."""
        units = path.units(k)
        return reduce(torch.add, (per_example(numbers, units.a) * direction for numbers, direction in self.products(units)))

    def weight_term(self, path: Path) -> Tensor:
        """A term [B] of value 0: its gradient is the estimate for each example's expected loss in all latent weights.

        By default made of the :meth:`products`.
        """
        terms = (numbers.detach() * w.carry(direction) for w in path.weights for numbers, direction in self.products(w))
        return reduce(torch.add, terms)

    def products(self, variables: Variables) -> Products:
        """The estimate for a set of binary variables: numbers [B], each times a direction like the variables' ``a``."""
        name = type(self).__name__
        if variables.shared:
            raise _no_weights(name, "it has a gradient in units alone; write products(variables), for both")
        raise InputError(
            f"{name} has no gradient: write gradient(path, k), for one layer, or gradients(path), for all; or "
            "products(variables), for units and binary weights alike"
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
    known, mixing = iter(zip(path.a, path.states, path.drawn, strict=True)), []

    def visit(call: LayerCall) -> Tensor:
        a, states, drawn = next(known)
        if drawn is not None:
            call.weight_rule = lambda _: drawn.signs
        mixing.append(differs(call.affine(call.x), a))
        return states[:1]

    alone = net.outputs(net.run(net.front(x[:1]), visit, path.batch.draw))
    if any(mixing) or differs(alone, outputs):
        raise InputError(
            "an estimator that looks at sampled paths needs examples that do not depend on each other, and the model gives an "
            "example other values alone than in the batch, or draws at random; change it, or use one such as fg.PSA()"
        )


def _no_weights(name: str, why: str) -> InputError:
    """The error of an estimator that is asked for the gradient of binary weights and has none."""
    return InputError(
        f"{name} has no rule for binary weights: {why}. Use fg.PSA(), fg.ST() or fg.HardST(), or weights='real'; where weights "
        "are drawn also fg.REINFORCE(), fg.ARM(), fg.DisARM(), fg.ARMS(), fg.BitFlip() or fg.LEG()"
    )


def _anew(call: LayerCall) -> Tensor:
    """The states of a layer, sampled."""
    return call.sample(call.affine(call.x))


def straight_through(call: LayerCall, z: Tensor) -> Tensor:
    """The states sampled with the noise ``z``, with the gradient of their mean."""
    a = call.affine(call.x)
    m = call.noise.mean_sign(a)
    return sign(a.detach() - z) + (m - m.detach())


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
