r"""The negative ELBO as costs of neighbouring layers, which the estimators see as a network's head and objective.

With :math:`z^0 = x`, the recognition layers :math:`q(z^k | z^{k-1})` and the generative ones :math:`p(z^{k-1} | z^k)`,

.. math:: -\mathrm{ELBO} = E_q \Big[\sum_k -H(q(\cdot | z^{k-1})) - \log p(z^{k-1} | z^k)\Big] - E_q \log p(z^L).

Entropies, and the prior's cross-entropy with the last layer, are functions of the layer before in closed form ("analytic"); or
they are sampled with the states, :math:`\log q(z^k | z^{k-1})` and :math:`-\log p(z^L)`, as in most of the literature. The
derivative of a sampled :math:`\log q` in its own parameters has mean 0, and is left out.

States between -1 and +1, as relaxations have, take the continuation of the log-probabilities that is linear in every state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad.affine import Affine
from flipgrad.contract import CostHead, Known, Latents, LayerCall, Network, OfDecoder, Step, Visit, run_steps
from flipgrad.errors import InputError
from flipgrad.flips import heads
from flipgrad.noise import Noise
from flipgrad.objectives import AdditiveObjective, _BatchObjective
from flipgrad.sampling import Draw
from flipgrad.steps import Apply, Sample

Entropy = Literal["analytic", "sampled"]

# What costs are worth to a unit nearly cancels as training goes on: errors of sums over flips are to be this much smaller.
TOLERANCE_SHARE = 0.1


@final
@dataclass(frozen=True)
class Stage(Step):
    """A latent layer, and what moves the states before it; the last one gives the states of all layers.

    ``shapes`` are those of one example's states in every layer, as they were last seen.
    """

    moves: tuple[Apply, ...]
    sample: Sample
    number: int
    last: bool
    shapes: dict[int, torch.Size]

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        before = known.states if isinstance(known, Latents) else ()
        z, _ = run_steps((*self.moves, self.sample), x, None, visit, draw)
        self.shapes[self.number] = z.shape[1:]
        states = (*before, z.flatten(1))
        if not self.last:
            return z, Latents(states)
        return states[0] if len(states) == 1 else torch.cat(states, 1), None

    def layers(self) -> tuple[nn.Module, ...]:
        return (self.sample.layer,)

    def modules(self) -> tuple[nn.Module, ...]:
        return (*(step.module for step in self.moves), self.sample.layer)

    def moved(self, z: Tensor) -> Tensor:
        """What the layer is given of the flattened states ``z`` before it."""
        x: Tensor = z.unflatten(-1, self.shapes[self.number - 1])
        for step in self.moves:
            x = step.module.forward(x)
        return x

    def affine(self) -> Affine:
        """The map to the layer's pre-activations."""
        affine = self.sample.layer.affine(self.sample.views)
        if not isinstance(affine, Affine):
            raise InputError(f"Variational: {type(self.sample.layer).__name__} needs norm=fg.ScaleShift(channels), or none")
        return affine

    @property
    def noise(self) -> Noise:
        """That of the layer."""
        return self.sample.layer.noise


@final
class ElboHead(CostHead):
    """What comes behind the encoder: logits of the data, and the costs that do not depend on these.

    The outputs are the logits and, with several layers or sampled entropies, one number more: the costs of all layers behind
    the first one's states. With sampled entropies these states follow, which the objective compares with the data's.

    Args:
        decoder: the generative modules.
        prior: logits of the last layer's states.
        stages: the recognition layers.
        entropy: whether entropies are analytic or sampled.
    """

    def __init__(self, decoder: tuple[nn.Module, ...], prior: Tensor, stages: tuple[Stage, ...], entropy: Entropy) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(decoder)
        self.layers = nn.ModuleList(stage.sample.layer for stage in stages)
        self.prior = prior
        self.stages, self.entropy = stages, entropy

    def forward(self, states: Tensor) -> Tensor:
        z = self.split(states)
        logits = self.decoder[0](z[0])
        if not isinstance(logits, Tensor) or logits.dim() < 2 or len(logits) != len(states):
            came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(
                f"Variational: the first module of the decoder must map states {list(z[0].shape)} to outputs [batch, ...], it "
                f"gave {came}"
            )
        logits = logits.flatten(1)
        if len(z) == 1 and self.entropy == "analytic":
            return logits
        costs = sum((self._given_states(k, z) for k in range(1, len(z))), logits.new_zeros(len(states)))
        if self.entropy == "analytic":
            return torch.cat([logits, costs[:, None]], 1)
        return torch.cat([logits, (costs + bernoulli(self.prior, z[-1]))[:, None], z[0]], 1)

    def besides(self) -> int:
        """How many outputs come behind those of the decoder."""
        if self.entropy == "sampled":
            return 1 + self.stages[0].shapes[0].numel()
        return int(len(self.stages) > 1)

    def split(self, states: Tensor) -> tuple[Tensor, ...]:
        """The states of every layer, [B, units] each."""
        parts: tuple[Tensor, ...] = states.split([self.stages[0].shapes[k].numel() for k in range(len(self.stages))], 1)
        return parts

    def _given_states(self, k: int, z: tuple[Tensor, ...]) -> Tensor:
        """The costs [B] between layers k and k + 1: of generating the first, and of recognising the second."""
        stage, before, now = self.stages[k], z[k - 1], z[k]
        affine, x = stage.affine(), stage.moved(before)
        cost = bernoulli(self.decoder[k](now), before)
        if self.entropy == "sampled":
            return cost + log_probability(stage.noise, now, _fixed(affine)(x).flatten(1))
        return cost + self.entropies(stage, affine(x).flatten(1))

    def entropies(self, stage: Stage, a: Tensor) -> Tensor:
        """The negative entropies [B] of a layer with pre-activations ``a`` [B, n], of the last one relative to the prior."""
        costs = stage.noise.negative_entropy(a)
        if stage.last:
            costs = costs + functional.softplus(self.prior) - stage.noise.cdf(a) * self.prior
        return costs.sum(1)

    def losses(
        self,
        states: Tensor,
        calls: tuple[LayerCall, ...],
        objective: Elbo,
        of_decoder: OfDecoder,
        *,
        flips: bool,
        tolerance: float,
    ) -> Tensor:
        z = self.split(states)
        tolerance = TOLERANCE_SHARE * tolerance
        first = self.decoder[0]
        flat = first if isinstance(first, nn.Linear) else nn.Sequential(first, nn.Flatten())
        alone = Network((), (self.stages[0].sample,), (), flat)
        losses = of_decoder(alone, calls[0], z[0], objective.likelihood, tolerance) + self._of_data(calls[0], z[0])
        for k in range(1, len(z)):
            losses = losses + self._generated(k, z[k - 1], z[k], flips, tolerance)
            losses = losses + self._recognised(k, calls[k], z[k], flips, tolerance)
        if self.entropy == "sampled":
            losses = losses + bernoulli(self.prior, z[-1])
        return losses

    def _of_data(self, call: LayerCall, z: Tensor) -> Tensor:
        """The entropy of the first layer, whose derivative goes through the states: that of log q in a state is its signal.

        With analytic entropies the prior of a single layer, too: its derivative in a state is that in the mean.
        """
        stage, a = self.stages[0], _drawn_from(call).flatten(1)
        signal = stage.noise.log_odds(a) / 2
        if self.entropy == "sampled":
            value = log_probability(stage.noise, z.detach(), a)
        else:
            value = self.entropies(stage, a)
            if stage.last:
                signal = signal - self.prior.detach() / 2
        return value + ((z - z.detach()) * signal).sum(1)

    def _generated(self, k: int, before: Tensor, now: Tensor, flips: bool, tolerance: float) -> Tensor:
        """-log p of the states before, given those of layer k + 1; linear in the former."""
        module: Any = self.decoder[k]
        if not flips:
            return bernoulli(module(now), before)
        x = now.detach()
        logits = module(x)
        discrete = heads.bernoulli(x, logits, (before.detach() + 1) / 2, module.weight, tolerance=tolerance)
        return bernoulli(logits, before) + ((now - x) * discrete).sum(1)

    def _recognised(self, k: int, call: LayerCall, now: Tensor, flips: bool, tolerance: float) -> Tensor:
        """The entropy of layer k + 1, as a function of the states before."""
        stage, x, affine = self.stages[k], call.x, self.stages[k].affine()
        if self.entropy == "sampled":
            a = _fixed(affine)(x).flatten(1)
            signal = stage.noise.log_odds(a.detach()) / 2
            return log_probability(stage.noise, now.detach(), a) + ((now - now.detach()) * signal).sum(1)
        if not flips:
            return self.entropies(stage, affine(x).flatten(1))
        a = affine(x.detach())
        cost = self.entropies(stage, a.flatten(1))
        a = a.detach()
        grad = -self.prior.detach().expand_as(a.flatten(1)).view_as(a) if stage.last else torch.zeros_like(a)
        discrete = affine.entropy_product(x.detach(), a, grad, stage.noise, tolerance) / 2
        return cost + ((x - x.detach()) * discrete).flatten(1).sum(1)


@final
class Elbo(_BatchObjective):
    """The objective to :class:`ElboHead`: of its outputs the negative ELBOs.

    Args:
        likelihood: of the data.
        first: gives the first layer's pre-activations [B, n], differentiable; asked for only if they are needed, and once.
        head: the head.
    """

    def __init__(self, likelihood: AdditiveObjective, first: Callable[[], Tensor], head: ElboHead) -> None:
        super().__init__(likelihood.targets)
        self.likelihood = likelihood
        self._of_data = _Once(first)
        self._head = head

    def losses(self, outputs: Tensor) -> Tensor:
        head, outcomes = self._head, self.targets.shape[1]
        found = outputs.shape[-1] - head.besides()
        if found != outcomes:
            raise InputError(f"Variational: the data have {outcomes} values per example, the decoder gives {found} outputs")
        losses: Tensor = self.likelihood(outputs[..., :outcomes])
        if outputs.shape[-1] > outcomes:
            losses = losses + outputs[..., outcomes]
        stage = head.stages[0]
        if head.entropy == "sampled":
            return losses + log_probability(stage.noise, outputs[..., outcomes + 1 :], self._of_data.value().detach())
        return losses + self._of_data.value(lambda a: head.entropies(stage, a))

    def select(self, index: slice | Tensor) -> Elbo:
        first = self._of_data
        return Elbo(self.likelihood.select(index), lambda: first.value()[index], self._head)  # type: ignore[arg-type]


@dataclass
class _Once:
    """A tensor that is computed when it is first asked for, as differentiable as when this was made; and a function of it."""

    compute: Callable[[], Tensor]
    _value: Tensor | None = None
    _result: Tensor | None = None
    _differentiable: bool = field(default_factory=torch.is_grad_enabled)

    def value(self, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        with torch.set_grad_enabled(self._differentiable):
            if self._value is None:
                self._value = self.compute()
            if function is None:
                return self._value
            if self._result is None:
                self._result = function(self._value)
        return self._result


def _fixed(affine: Affine) -> Affine:
    """A map whose parameters get no gradient."""
    return affine.with_tensors([None if t is None else t.detach() for t in affine.tensors])


def bernoulli(logits: Tensor, states: Tensor) -> Tensor:
    """-log p [B] of ``states`` with the ``logits`` for +1; linear in states that are relaxed."""
    return (functional.softplus(logits) - (states + 1) / 2 * logits).sum(-1)


def log_probability(noise: Noise, states: Tensor, a: Tensor) -> Tensor:
    """log p [B] of ``states`` with the pre-activations ``a``; linear in states that are relaxed."""
    above, below = noise.log_cdf(a), noise.log_cdf(-a)
    return ((above + below) / 2 + states * (above - below) / 2).sum(-1)


def _drawn_from(call: LayerCall) -> Tensor:
    if call.distribution is None:
        raise RuntimeError(f"{type(call.layer).__name__} drew no states")
    return call.distribution.a
