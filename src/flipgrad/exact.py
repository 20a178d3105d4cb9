r"""The exact expectation of a small network, by transfer matrices.

Layer k's states :math:`x^k` take :math:`2^n` values and form a Markov chain with transition matrices :math:`P^k`, so

.. math:: E_Z[f] = P^1 P^2 \cdots P^L f

costs :math:`L \cdot 4^n` per data point instead of the :math:`2^{nL}` of enumerating all paths, and autograd gives the exact
gradient in every parameter (paper, section 2.1). Only :math:`P^1` depends on the data.

With residual blocks a layer depends on all before it, and there is no such chain: all states of all units together are
enumerated, up to 14 units.

Of a latent-variable model the same matrices take the costs of neighbouring layers along: with the values
:math:`V^k(z^k)` of all that comes behind, :math:`V^{k-1}(z^{k-1}) = -H + \sum_{z^k} P^k (-\log p(z^{k-1} | z^k) + V^k(z^k))`.

Binary weights that are drawn are summed over too: every configuration of them is a network, and the expectation is that over
these networks. Of weights that are not drawn, sign(latent), the expected loss is a step function of the latent weights, whose
derivative is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flipgrad.affine import called
from flipgrad.contract import LayerCall, Network, Step
from flipgrad.errors import InputError
from flipgrad.guards import keeping_buffers
from flipgrad.latent import Elbo, ElboHead, Variational, bernoulli
from flipgrad.network import Sequential, check_sequential, probabilities
from flipgrad.noise import sign
from flipgrad.objectives import Objective, evaluate
from flipgrad.residual import Sign
from flipgrad.sampling import fresh
from flipgrad.steps import Apply, Branch, PoolStates, Sample

# Entries of one transition matrix: 2**24 is 12 units to 12 units, or 64 MiB in float32.
BUDGET = 2**24
# States of all units of a network with residual blocks.
PATH_BUDGET = 2**14
# Configurations of all drawn binary weights, and of these, numbers of the matrices that are held at once.
WEIGHT_BUDGET, NUMBERS_AT_ONCE = 2**14, 2**22

# The binary weights of layers.
Weights = Mapping[nn.Module, Tensor]


def expected_loss(net: Sequential | Network, x: Tensor, objective: Objective) -> Tensor:
    """The expected losses E_Z[f] of ``x`` [B, ...], exact and differentiable, [B].

    Of a latent-variable model :func:`negative_elbo` gives them.

    In the precision of the parameters and the input, also under autocast: use float64 for a reference. Real-valued modules
    before the first binary layer are evaluated as they are.

    Raises:
        InputError: if two neighbouring binary layers have more than 24 units together (with residual blocks, all layers more
            than 14), or more than 14 binary weights are drawn; the message says what would fit.
    """
    if isinstance(net, Network) and isinstance(net.head, ElboHead) and isinstance(objective, Elbo):
        return _negative_elbo(net, x, objective)
    return _per_example(
        net,
        x,
        objective,
        lambda distribution, f: (distribution * f).sum(1),
        lambda log_p, losses: (log_p.exp()[:, None] * losses).sum(0),
    )


def marginal_loss(net: Sequential | Network, x: Tensor, objective: Objective) -> Tensor:
    """The losses -log E_Z[exp(-f)] of the expected predictor, [B]: for a cross-entropy, -log E_Z[p(y | x)].

    Exact, differentiable and refusing as :func:`expected_loss`.
    """

    def combine(distribution: Tensor, f: Tensor) -> Tensor:
        # The clamp is for impossible states: exp of the sum is then as good as 0.
        tiny = torch.finfo(distribution.dtype).tiny
        return -torch.logsumexp(distribution.clamp(min=tiny).log() - f, 1)

    return _per_example(net, x, objective, combine, lambda log_p, losses: -torch.logsumexp(log_p[:, None] - losses, 0))


def negative_elbo(model: Variational, x: Tensor) -> Tensor:
    """The negative ELBOs of data ``x`` [B, ...], exact and differentiable, [B]; refusing as :func:`expected_loss`."""
    _check_model(model, "negative_elbo")
    net = model.network()
    return _negative_elbo(net, x, model.objective(x, net))


def log_likelihood(model: Variational, x: Tensor) -> Tensor:
    """log p(x) of every example, [B], summed over all states of the latents; exact, differentiable and refusing as the rest."""
    _check_model(model, "log_likelihood")
    if not len(x):
        raise InputError("exact: the batch is empty; give at least one example")
    like = model.prior.detach()
    with _full_precision(x):
        _check_budget(1, len(like))
        states = enumerate_states(like.shape, like)
        log_p = -bernoulli(model.prior, states)
        for module in reversed(model.decoder[1:]):
            units = int(module.out_features)  # type: ignore[arg-type]
            _check_budget(len(states), units)
            before = enumerate_states((units,), like)
            log_p = torch.logsumexp(log_p - _pairs(module(states), before), 1)
            states = before
        outputs = model.decoder[0](states).flatten(1)
        _check_budget(len(x), (len(states) - 1).bit_length())
        losses = model.data_likelihood(x)(outputs[:, None].expand(-1, len(x), -1))
        return torch.logsumexp(log_p[:, None] - losses, 0)


def _check_model(model: object, who: str) -> None:
    if not isinstance(model, Variational):
        raise InputError(f"exact.{who} takes a flipgrad.Variational, got {type(model).__name__}")


def _pairs(logits: Tensor, states: Tensor) -> Tensor:
    """-log p of each of the ``states`` [N, n] under each of the ``logits`` [M, n], [N, M]."""
    return torch.nn.functional.softplus(logits).sum(1) - (states + 1) / 2 @ logits.t()


def _negative_elbo(net: Network, x: Tensor, objective: Elbo) -> Tensor:
    """Of the network of a latent-variable model, with the objective of the data ``x``."""
    head = net.head
    if not isinstance(head, ElboHead) or not len(x):
        raise InputError("exact: the batch is empty; give at least one example")
    net.check_examples_alone("exact")
    with _full_precision(x):
        first, *others = head.stages
        inputs = net.front(x)
        matrix, states = _layer(first.sample, inputs, {})
        first.shapes[0] = states.shape[1:]
        every, matrices = [states], []
        for stage in others:
            transition, states = _layer(stage.sample, stage.moved(every[-1].flatten(1)), {})
            stage.shapes[stage.number] = states.shape[1:]
            every.append(states)
            matrices.append(transition)
        behind = states.new_zeros(len(states))
        for stage, transition in zip(reversed(others), reversed(matrices), strict=True):
            before = every[stage.number - 1].flatten(1)
            pairs = _pairs(head.decoder[stage.number](every[stage.number].flatten(1)), before)
            entropies = head.entropies(stage, stage.affine()(stage.moved(before)).flatten(1))
            behind = entropies + (transition * (pairs + behind)).sum(1)
        outputs = head.decoder[0](every[0].flatten(1)).flatten(1)
        losses = objective.likelihood(outputs[:, None].expand(-1, len(x), -1))
        of_data = head.entropies(first, first.affine()(inputs).flatten(1))
        return of_data + (matrix * (losses.t() + behind)).sum(1)


def predictive(net: Sequential, x: Tensor) -> Tensor:
    """The exact predictive probabilities E_Z[p(y | x)], [B, K]; refusing as :func:`expected_loss`."""

    def of(weights: Weights) -> Tensor:
        if network.streams:
            distribution, outputs = _all_paths(network, inputs, weights)
            return (distribution[:, :, None] * probabilities(outputs).transpose(0, 1)).sum(1)
        chain = _Chain.of(network, inputs, weights)
        p = probabilities(chain.outputs)
        return torch.cat([chain.distribution(part) @ p for part in chain.inputs.split(chain.rows)])

    check_sequential(net, "exact")
    network = net.network()
    with keeping_buffers(net), _full_precision(x):
        inputs = network.front(x)
        return _over_weights(network, of, lambda log_p, p: (log_p.exp()[:, None, None] * p).sum(0), len(x))


def _per_example(
    net: Sequential | Network,
    x: Tensor,
    objective: Objective,
    combine: Callable[[Tensor, Tensor], Tensor],
    mix: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Combine, for every example, the probabilities [b, 2**n] of the last states with their losses.

    Large batches go in parts, each computed again on the way back, if the objective can be split. The results of several
    configurations of weights are mixed by the logarithms of their probabilities.
    """
    if not isinstance(net, Network):
        check_sequential(net, "exact")
        net = net.network()
    if net.by_hand:
        raise InputError(
            "exact: the states of a model written by hand are not summed over, as only fg.Sequential tells which layers follow "
            "one another; take another estimator, e.g. fg.PSA(), or an unbiased one, e.g. fg.DisARM()"
        )
    network = net

    def of(weights: Weights) -> Tensor:
        if network.streams:
            distribution, outputs = _all_paths(network, inputs, weights)
            return combine(distribution, evaluate(objective, outputs).t())
        chain = _Chain.of(network, inputs, weights)

        def part(inputs: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
            # [2**n, b]
            f = evaluate(objective, outputs[:, None].expand(-1, len(inputs), -1))
            return combine(chain.distribution(inputs), f.t())

        # Configurations that are evaluated at once (vmap) are computed again as a whole.
        vectorised = any(map(torch._C._functorch.is_batchedtensor, weights.values()))
        if vectorised or len(x) <= chain.rows or not hasattr(objective, "select"):
            return part(chain.inputs, chain.outputs, objective)
        losses = []
        for i in range(0, len(x), chain.rows):
            rows = slice(i, i + chain.rows)
            losses.append(checkpoint(part, chain.inputs[rows], chain.outputs, objective.select(rows), use_reentrant=False))
        return torch.cat(losses)

    with _full_precision(x):
        # Once, however many configurations of weights there are: modules in front may draw, or keep statistics.
        inputs = network.front(x)
        return _over_weights(network, of, mix, len(x))


def _all_paths(net: Network, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The probabilities [B, 2**n] of all states of all n units of a network, and its outputs [2**n, B, K] with them.

    ``x`` [B, ...] is what the first layer sees.
    """
    if not len(x):
        raise InputError("exact: the batch is empty; give at least one example")
    net.check_examples_alone("exact")
    shapes: list[torch.Size] = []

    def look(call: LayerCall) -> Tensor:
        call.weight_rule = lambda _: weights[call.layer]
        shapes.append(call.affine(call.x).shape[1:])
        return call.x.new_ones(1, *shapes[-1])

    with torch.no_grad():
        net.run(x[:1], look, fresh(None))
    sizes = [shape.numel() for shape in shapes]
    if sum(sizes) >= PATH_BUDGET.bit_length():
        raise InputError(
            f"exact: with residual blocks all units are enumerated together, and {sum(sizes)} have 2^{sum(sizes)} states; the "
            f"budget is 2^{PATH_BUDGET.bit_length() - 1}. Estimate with flipgrad.bounds.expected_loss"
        )
    every = enumerate_states((sum(sizes),), x).split(sizes, 1)
    given = iter([part.view(-1, 1, *shape) for part, shape in zip(every, shapes, strict=True)])
    log_p: list[Tensor] = []

    def visit(call: LayerCall) -> Tensor:
        call.weight_rule = lambda _: weights[call.layer]
        a = call.affine(call.x)
        states: Tensor = next(given).expand(-1, len(x), *a.shape[1:]).flatten(0, 1)
        log_p.append(call.noise.log_prob(states, a).flatten(1).sum(1))
        return states

    paths = 2 ** sum(sizes)
    outputs = net.outputs(net.run(x.expand(paths, *x.shape).flatten(0, 1), visit, fresh(None)))
    total = torch.stack(log_p).sum(0).view(paths, len(x))
    return total.t().exp(), outputs.unflatten(0, (paths, len(x)))


def _over_weights(
    net: Network, of: Callable[[Weights], Tensor], mix: Callable[[Tensor, Tensor], Tensor], examples: int
) -> Tensor:
    """What ``of`` gives for the network's binary weights, mixed over all configurations of those that are drawn."""
    binary = [layer for layer in dict.fromkeys(net.binary_layers) if layer.weights == "binary"]
    fixed = {layer: sign(layer.weight.detach()) for layer in binary if layer.weight_noise is None}
    drawn = [layer for layer in binary if layer.weight_noise is not None]
    if not drawn:
        return of(fixed)
    for layer in drawn:
        if net.binary_layers.count(layer) > 1:
            raise InputError(
                f"exact: {type(layer).__name__} stands in the network more than once and draws its weights anew each time, "
                "which is not summed over; take weight_noise=None, give each place a layer of its own, or estimate with "
                "flipgrad.bounds.expected_loss"
            )
    sizes = [layer.weight.numel() for layer in drawn]
    if sum(sizes) >= WEIGHT_BUDGET.bit_length():
        most = WEIGHT_BUDGET.bit_length() - 1
        raise InputError(
            f"exact: {sum(sizes)} binary weights are drawn, which have 2^{sum(sizes)} configurations; the budget is 2^{most}: "
            f"up to {most} drawn weights fit (those of 2 inputs and layers of 2 and 3 units are 10), or any number with "
            "weight_noise=None. Estimate others with flipgrad.bounds.expected_loss"
        )
    bits = enumerate_states((sum(sizes),), drawn[0].weight.detach())
    split = zip(drawn, bits.split(sizes, 1), strict=True)
    every = [part.view(-1, *layer.weight.shape) for layer, part in split]
    log_p = sum(
        layer.weight_noise.log_prob(part, layer.weight).flatten(1).sum(1) for layer, part in zip(drawn, every, strict=True)
    )

    def some(*weights: Tensor) -> Tensor:
        return torch.vmap(lambda *one: of({**fixed, **dict(zip(drawn, one, strict=True))}), randomness="different")(*weights)

    # A guess of the units of a layer, to bound memory; fg.Sign has as many as what comes before it.
    widest = max(min(12, len(layer.weight)) for layer in net.binary_layers if not isinstance(layer, Sign))
    count = max(1, NUMBERS_AT_ONCE // max(1, examples * 2**widest))
    chunks = zip(*(part.split(count) for part in every), strict=True)
    return mix(log_p, torch.cat([checkpoint(some, *chunk, use_reentrant=False) for chunk in chunks]))


def _full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast: what everything is compared with must not be rounded to three digits."""
    return torch.autocast(x.device.type, enabled=False)


def enumerate_states(shape: Sequence[int], like: Tensor) -> Tensor:
    """All ``2**n`` states of units of the given ``shape``, ``[2**n, *shape]``; the last unit changes fastest.

    >>> enumerate_states((2,), torch.zeros(()))
    tensor([[-1., -1.],
            [-1.,  1.],
            [ 1., -1.],
            [ 1.,  1.]])
    """
    n = torch.Size(shape).numel()
    index = torch.arange(2**n, device=like.device)
    bits = (index[:, None] >> torch.arange(n - 1, -1, -1, device=like.device)) & 1
    return (2 * bits - 1).to(like.dtype).view(-1, *shape)


@dataclass(frozen=True)
class _Chain:
    """The Markov chain of a network on a batch: what the first binary layer sees, [B, ...], and the step of that layer.

    Then the transition matrices of the steps after it, the head's outputs [2**n, K] for all states of the last layer, and how
    many examples (``rows``) fit the budget at once.
    """

    inputs: Tensor
    first: Step
    weights: Weights
    matrices: list[Tensor]
    outputs: Tensor
    rows: int

    @staticmethod
    def of(net: Network, x: Tensor, weights: Weights) -> _Chain:
        """That of what the first binary layer sees, ``x``."""
        if not len(x):
            raise InputError("exact: the batch is empty; give at least one example")
        net.check_examples_alone("exact")
        with torch.no_grad():
            _, states = _transitions(net.steps[:1], x[:1], weights)
        matrices, last = _transitions(net.steps[1:], states, weights)
        widest = max([len(states), *(matrix.shape[1] for matrix in matrices)])
        return _Chain(x, net.steps[0], weights, matrices, net.outputs(last), max(1, BUDGET // 8 // widest))

    def distribution(self, inputs: Tensor) -> Tensor:
        """The probabilities [b, 2**n] of the last layer's states, for some of the ``inputs``."""
        (distribution,), _ = _transitions([self.first], inputs, self.weights)
        for matrix in self.matrices:
            distribution = distribution @ matrix
        return distribution


def _transitions(steps: Iterable[Step], x: Tensor, weights: Weights) -> tuple[list[Tensor], Tensor]:
    """The matrices [N, 2**n] of ``steps`` from each of their N inputs, ``x`` for the first, and the states after the last."""
    matrices = []
    for step in steps:
        if isinstance(step, Apply):
            x = called([step.module], x)
            continue
        if isinstance(step, PoolStates):
            # Several states before it may be one after it, whose probabilities add up where they are used.
            x = step.states(x)
            continue
        if isinstance(step, Sample):
            matrix, x = _layer(step, x, weights)
        elif isinstance(step, Branch):
            matrix, x = _joint([_branch(chain, x, weights) for chain in step.chains], step.dim)
        else:
            raise InputError(
                f"exact: the transitions of {type(step).__name__} are not known; use flipgrad.bounds.expected_loss"
            )
        matrices.append(matrix)
    return matrices, x


def _layer(step: Sample, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The transition matrix of a layer from the inputs ``x`` [N, ...], and the layer's states."""
    evaluated: list[Tensor] = []

    def visit(call: LayerCall) -> Tensor:
        call.weight_rule = lambda _: weights[call.layer]
        evaluated.append(call.affine(call.x))
        return sign(evaluated[0].detach())

    # As in a sampled pass, with the layer's hooks.
    step.run(x, None, visit, fresh(None))
    a, noise = evaluated[0], step.layer.noise
    n = a[0].numel()
    _check_budget(len(a), n)
    plus, minus = noise.cdf(a).flatten(1), noise.cdf(-a).flatten(1)
    matrix = a.new_ones(len(a), 1)
    for unit in range(n):
        # Each unit doubles the columns, its own state changing fastest.
        both = torch.stack([minus[:, unit], plus[:, unit]], 1)
        matrix = (matrix[:, :, None] * both[:, None]).flatten(1)
    return matrix, enumerate_states(a.shape[1:], a)


def _branch(chain: Sequence[Step], x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The matrix from each of the inputs ``x`` to the states after a chain of steps, and these states."""
    matrices, states = _transitions(chain, x, weights)
    if matrices:
        return reduce(torch.matmul, matrices), states
    # A branch that only moves units around leads from every state to itself.
    _check_budget(len(states), (len(states) - 1).bit_length())
    return torch.eye(len(states), dtype=states.dtype, device=states.device), states


def _joint(branches: list[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    """The transition to the concatenated states of branches, which are independent given their common input."""
    matrix, states = branches[0]
    for other, more in branches[1:]:
        _check_budget(len(matrix), (matrix.shape[1] * other.shape[1] - 1).bit_length())
        first = states.repeat_interleave(len(more), 0)
        second = more.repeat(len(states), *[1] * (more.dim() - 1))
        matrix = (matrix[:, :, None] * other[:, None]).flatten(1)
        states = torch.cat([first, second], dim)
    return matrix, states


def _check_budget(rows: int, units: int) -> None:
    # Rows are the states of the layer before, a power of two, or examples.
    before = (rows - 1).bit_length()
    if before + units > BUDGET.bit_length() - 1:
        raise InputError(
            f"exact: a layer of {units} units after {rows} states needs 2^{before + units} transition probabilities, over the "
            f"budget of 2^{BUDGET.bit_length() - 1}; neighbouring binary layers may have {BUDGET.bit_length() - 1} units "
            "together (12-12-12 fits). Estimate wider nets with flipgrad.bounds.expected_loss"
        )
