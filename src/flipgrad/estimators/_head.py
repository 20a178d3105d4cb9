r"""The head: the loss at every flip of one unit of the last binary layer, and what its own parameters' gradient is.

That gradient is one of three, all unbiased:

- "sampled": that of the sampled loss;
- "enhanced": averaged over the flips of all units with the weight 1/n, as the paper's appendix B.3 does;
- "rao-blackwell": the gradient of the weight :math:`W_{ki}` of a linear head, :math:`d_k(x)\, x_i` with
  :math:`d = \partial f / \partial` logits, averaged over the two states of its own unit i: with the probability
  :math:`\pi_i` of the state opposite to the sampled one, :math:`x_i [(1 - \pi_i)\, d_k(x) - \pi_i\, d_k(x_{\downarrow i})]`.
  Its variance is never larger than that of the sample, and much smaller at wide heads. The bias, which has no unit of its
  own, is enhanced. A head that is not linear, or that :class:`flipgrad.Concat` comes before, has no such form: its gradient
  is that of the sample.

Behind max-pooling the head's units are the pooled ones: a unit of the layer that decides its window is the pooled one, and a
flip of any other changes nothing.

An objective that knows its flips behind a linear head (:class:`flipgrad.objectives.LinearHeadObjective`: cross-entropies, and
what adds up over outputs) is not evaluated at them. Of others the flips are evaluated in chunks of bounded memory; if they are
not to be, the averaged gradient is that of the sample.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from flipgrad.affine import connect, folded_weight
from flipgrad.contract import LayerCall, Network
from flipgrad.errors import InputError
from flipgrad.guards import cannot_look, capturing, has_hooks
from flipgrad.jets import Added
from flipgrad.objectives import HeadFlips, LinearHeadObjective, Objective, check_alone, evaluate
from flipgrad.steps import Apply, PoolStates, Sample

HeadGradient = Literal["sampled", "enhanced", "rao-blackwell"]

# Numbers held at once: flipped outputs of a linear head, flipped states of any other.
NUMBERS_AT_ONCE = 2**18


def head_losses(
    net: Network,
    last: LayerCall,
    states: Tensor,
    objective: Objective,
    gradient: HeadGradient,
    *,
    flip: bool,
    tolerance: float = 0.0,
    evaluates_flips: bool = True,
) -> Tensor:
    """The losses [B] of the ``last`` layer's ``states``, differentiable in these and in the head's parameters.

    ``gradient`` is that in the head's parameters; ``flip``: whether that in the states is the discrete or the ordinary one, and
    then the ``tolerance`` is for an objective that adds up over the outputs of a linear head. Others are evaluated at flips,
    unless not even an averaged gradient may do so.
    """
    x = states.detach()
    behind_layer = isinstance(net.steps[-1 - len(_behind(net))], Sample)
    if gradient == "rao-blackwell" and not (is_linear(net.head) and behind_layer):
        gradient = "sampled"
    if gradient == "sampled" and not flip:
        return evaluate(objective, net.outputs(states))
    if gradient == "enhanced" and not behind_layer:
        raise InputError("head='enhanced' needs a binary layer, not Concat, before the head; use head='sampled'")
    discrete: Tensor | None = None
    flipped = x
    known = None
    if isinstance(objective, LinearHeadObjective) and is_linear(net.head) and gradient != "enhanced":
        averages = gradient == "rao-blackwell" and objective.knows_average and torch.is_grad_enabled()
        opposite = _opposite(net, last, x).t() if averages else None
        outputs, known = _at_flips(net, net.head, x, opposite, objective, tolerance, flip=flip)
    if known is not None:
        losses = known.losses
        discrete = None if known.derivative is None else known.derivative.view_as(x)
    elif gradient == "rao-blackwell" and not evaluates_flips:
        return evaluate(objective, net.outputs(states))
    elif gradient == "rao-blackwell" and is_linear(net.head):
        outputs, losses, flipped = _rao_blackwell(net, net.head, x, _opposite(net, last, x), objective)
    else:
        outputs = net.outputs(x)
        losses = evaluate(objective, outputs)
        with torch.set_grad_enabled(gradient == "enhanced" and torch.is_grad_enabled()):
            flipped = _flipped_losses(net, x, outputs, objective)
        if gradient == "enhanced":
            correction = ((flipped - losses) * _opposite(net, last, x)).mean(0)
            losses = losses + (correction - correction.detach())
    check_alone(objective, outputs, losses)
    if not torch.is_grad_enabled():
        return losses
    if flip:
        if discrete is None:
            discrete = (losses.detach() - flipped.detach()).t().reshape(x.shape) * x / 2
        # Its value is 0: it only carries the gradient.
        return losses + ((states - x) * discrete).flatten(1).sum(1)
    # The ordinary derivative in the states, and none in the head's parameters.
    parameters = {name: parameter.detach() for name, parameter in net.head.named_parameters()}
    again = torch.func.functional_call(net.head, parameters, (connect(net.tail, states),)).to(outputs.dtype)
    ordinary = evaluate(objective, again)
    return losses + (ordinary - ordinary.detach())


def stream_losses(
    net: Network, last: LayerCall, stream: Tensor, objective: Objective, tolerance: float, *, flip: bool
) -> Tensor:
    """The losses [B] of a residual ``stream`` that the ``last`` block has added to, differentiable in the ordinary way.

    With ``flip``, and a linear head, the units of all blocks on whose flips the outputs depend linearly get the discrete
    derivative in place of the ordinary one. A flip changes the outputs by a vector that is the same for all examples and,
    behind average pooling, at all places of a channel where the convolution sees as many pixels. So the losses at flips are
    evaluated once for each channel and kind of place. Where no flip moves an output by more than the ``tolerance``, the two
    derivatives agree to that.
    """
    outputs = net.outputs(stream)
    losses = evaluate(objective, outputs)
    trail = last.after.trail if last.after is not None else ()
    if not (flip and trail and is_linear(net.head) and torch.is_grad_enabled()):
        return losses
    check_alone(objective, outputs, losses)
    # What an entry of the stream adds to every output, [K, ...].
    share = folded_weight(net.head.weight.detach(), net.tail, stream).view(-1, *stream.shape[1:])
    for part in reversed(trail):
        if not isinstance(part, Added):
            share = part(share)
            continue
        states = part.states.detach()
        moved = part.affine.transposed(share, states[:1].expand(len(share), *states.shape[1:]))
        if capturing() or float(moved.abs().amax()) > tolerance:
            beyond = _beyond_ordinary(part, share, moved, states, outputs.detach(), objective)
            losses = losses + ((part.states - states) * beyond).flatten(1).sum(1)
        share = part.shortcut(share).detach()
    return losses


def _beyond_ordinary(
    part: Added, share: Tensor, moved: Tensor, states: Tensor, outputs: Tensor, objective: Objective
) -> Tensor:
    """The discrete derivative of the losses in every unit less the ordinary one, like the ``states``.

    ``moved`` [K, ...] is what every unit adds to the outputs.
    """
    places = _alike(part, share)
    # [units, K], or [channels * kinds, K]
    rows = (moved if places is None else moved.flatten(2)[:, :, places[0]]).flatten(1).t()
    with torch.enable_grad():
        at = outputs.requires_grad_()
        here = evaluate(objective, at)
        (slopes,) = torch.autograd.grad(here.sum(), at)

    def change(rows: Tensor) -> Tensor:
        """For every row [K] how the losses change by the flip of a unit +1 and of a unit -1, beyond the slope, [n, 2, B]."""
        step = torch.stack([2 * rows, -2 * rows], 1)[:, :, None]
        return here.detach() - evaluate(objective, outputs - step) - (step * slopes).sum(-1)

    with torch.no_grad():
        plus, minus = in_chunks(change, 2 * outputs.numel(), rows).permute(1, 2, 0) / 2
        parts = (plus - minus) / 2, (plus + minus) / 2
        if places is not None:
            parts = tuple(t.unflatten(1, (states.shape[1], -1))[:, :, places[1]] for t in parts)
        even, odd = (t.reshape(states.shape) for t in parts)
        return torch.addcmul(even, odd, states)


def _alike(part: Added, share: Tensor) -> tuple[Tensor, Tensor] | None:
    """Which places of a block's states, [H * W], are of the same kind: the first of each kind, and the kind of every place.

    Where all places of the stream add the same to the outputs, two of them differ only by which weights of the convolution
    they are multiplied with. None where that is not so, and for fully connected blocks.
    """
    geometry = part.affine.geometry
    if geometry is None or capturing() or not bool((share == share[:, :, :1, :1]).all()):
        return None
    taps = part.affine.weight.shape[2:].numel()
    # From a channel for every weight of the kernel to one channel.
    weight = torch.eye(taps, dtype=torch.float64, device=share.device).view(1, taps, *part.affine.weight.shape[2:])
    each = replace(part.affine, weight=weight, geometry=geometry._replace(groups=1))
    like = part.states.detach()[:1, :1].double().expand(-1, taps, -1, -1)
    used = each.transposed(share.new_ones(1, 1, *share.shape[2:], dtype=torch.float64), like)[0].flatten(1).t()
    kinds, first = torch.unique(used.round(), dim=0, return_inverse=True)
    return torch.stack([(first == kind).nonzero()[0, 0] for kind in range(len(kinds))]), first


def _flipped_losses(net: Network, x: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    """The losses [units, B] with one unit of the states ``x`` [B, ...] flipped, whose ``outputs`` [B, K] are known.

    A linear head is evaluated by adding to these, any other anew on every flipped batch.
    """
    if is_linear(net.head):
        # [units, B], [K, B] and [units, K]: the batch goes last, where operations are fast, and K may be as small as 1.
        units, transposed = x.flatten(1).t().contiguous(), outputs.t().contiguous()
        weight = folded_weight(net.head.weight, net.tail, x).t()

        def added(weight: Tensor, states: Tensor) -> Tensor:
            return evaluate(objective, (transposed - 2 * weight[:, :, None] * states[:, None]).transpose(1, 2))

        return in_chunks(added, outputs.numel(), weight, units)
    check_separable(net.head)
    check_head_alone(net, x, outputs)

    def anew(units: Tensor) -> Tensor:
        outputs = net.outputs(flipped_states(x, units).flatten(0, 1))
        return evaluate(objective, outputs.unflatten(0, (len(units), len(x))))

    return in_chunks(anew, x.numel(), torch.arange(x.flatten(1).shape[1], device=x.device))


def _at_flips(
    net: Network,
    head: nn.Linear,
    x: Tensor,
    opposite: Tensor | None,
    objective: LinearHeadObjective,
    tolerance: float,
    *,
    flip: bool,
) -> tuple[Tensor, HeadFlips | None]:
    """Outputs [B, K], and what the objective knows of flips behind a linear head; see its ``at_flips``."""
    outputs = net.outputs(x)
    units, weight = x.flatten(1).to(outputs.dtype), folded_weight(head.weight, net.tail, x).to(outputs.dtype)
    flip = flip and torch.is_grad_enabled()
    return outputs, objective.at_flips(units, outputs, weight, head.bias, opposite, flip=flip, tolerance=tolerance)


def _rao_blackwell(
    net: Network, head: nn.Linear, x: Tensor, opposite: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, K], losses [B] with that gradient, and the losses [units, B] at every flip, of a linear head.

    What a loss is differentiated in is only where its gradient is wanted: that of the sample in a weight times 1 - pi, that
    of a flip in the weights of its own unit alone times pi, the probability of the ``opposite`` state.
    """
    units, weight, bias = x.flatten(1).t().contiguous(), folded_weight(head.weight, net.tail, x), head.bias
    with torch.no_grad():
        outputs = net.outputs(x)
    kept = (units * (1 - opposite)).t()
    own = functional.linear(kept.to(weight.dtype), weight)
    sampled = outputs + (own - own.detach())
    if bias is not None:
        sampled = sampled + (bias - bias.detach()) * (1 - opposite.mean(0))[:, None]
    losses = evaluate(objective, sampled)
    transposed = outputs.t().contiguous()

    def at_flips(columns: Tensor, states: Tensor) -> Tensor:
        fixed = columns.detach()
        moved = transposed - 2 * fixed[:, :, None] * states[:, None]
        moved = moved - (columns - fixed)[:, :, None] * states[:, None]
        if bias is not None:
            moved = moved + ((bias - bias.detach()) / len(units))[:, None]
        return evaluate(objective, moved.transpose(1, 2))

    flipped = in_chunks(at_flips, outputs.numel(), weight.t(), units)
    correction = (flipped * opposite).sum(0)
    return outputs, losses + (correction - correction.detach()), flipped


def _behind(net: Network) -> list[Apply | PoolStates]:
    """What moves or pools the states behind the last layer, in order; the head's units are those after it."""
    steps: list[Apply | PoolStates] = []
    for step in reversed(net.steps):
        if not isinstance(step, Apply | PoolStates):
            break
        steps.insert(0, step)
    return steps


def _opposite(net: Network, last: LayerCall, x: Tensor) -> Tensor:
    """The probability [units, B] of every unit's other state: 1 - p(x_i), which is what the paper's pi means.

    Its printed formula has a sign slip.
    """
    if last.distribution is None:
        raise RuntimeError("the last layer drew no states")
    steps = _behind(net)
    if steps:
        log_odds = reduce(lambda log_odds, step: step.moved(log_odds), steps, last.distribution.log_odds())
        return torch.sigmoid(-x * log_odds).flatten(1).t()
    return last.noise.cdf(-x * last.distribution.a).flatten(1).t()


def in_chunks(losses: Callable[..., Tensor], numbers: int, *of_units: Tensor) -> Tensor:
    """The losses [units, B] of tensors [units, ...]; one flip holds this many ``numbers``.

    Where gradients are wanted, each of several chunks is computed again on the way back.
    """
    size = max(1, NUMBERS_AT_ONCE // max(1, numbers))
    chunks = list(zip(*(t.split(size) for t in of_units), strict=True))
    if torch.is_grad_enabled() and len(chunks) > 1:
        return torch.cat([checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks])
    return torch.cat([losses(*chunk) for chunk in chunks])


def flipped_states(x: Tensor, units: Tensor) -> Tensor:
    """Copies of the states ``x`` [B, ...], each with one of the ``units`` flipped, [len(units), B, ...]."""
    flat = x.flatten(1)
    signs = 1 - 2 * functional.one_hot(units, flat.shape[1]).to(x.dtype)
    return (flat * signs[:, None]).view(len(units), *x.shape)


def is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the head is ``nn.Linear`` and nothing besides, parametrised or not: its flipped outputs need no evaluation.

    A subclass, or hooks (also those of ``prune`` and the old ``weight_norm``), may do anything; such a head is evaluated.
    """
    kind = type(head).__bases__[0] if parametrize.is_parametrized(head) else type(head)
    return kind is nn.Linear and not has_hooks(head)


def check_separable(head: nn.Module, *, evaluated_once: bool = False) -> None:
    """Flips compare losses of one example, so the head must treat examples alone and twice alike.

    Dropout is right where the head is ``evaluated_once``.
    """
    for module in head.modules():
        if module.training and (isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and not evaluated_once)):
            raise InputError(
                f"the estimator evaluates the head on other states, and {module} in training mode mixes examples or draws at "
                "random; use LayerNorm, put that module in eval mode, or linearise the head with fg.PSA(flip_head=False)"
            )


def check_head_alone(net: Network, x: Tensor, outputs: Tensor) -> None:
    """Refuse a head whose ``outputs`` for an example depend on the rest of the batch ``x``, or are drawn at random."""
    if is_linear(net.head):
        return
    check_separable(net.head, evaluated_once=True)
    if not can_compare(net.head, x):
        return
    with torch.no_grad():
        alone = net.outputs(x[:1])
    if differs(alone, outputs):
        raise InputError(
            "the estimator evaluates the head on other states, and the head gives an example other outputs alone than in the "
            "batch: it mixes examples or draws at random; change it, or linearise it with fg.PSA(flip_head=False, "
            "head='sampled')"
        )


def can_compare(module: nn.Module, x: Tensor) -> bool:
    """Whether what a ``module`` gives for the first example of ``x`` can be compared with what it gave for the batch.

    Not with dropout, which is known to draw, and to be right where the module is evaluated once.
    """
    drops = any(isinstance(part, _DropoutNd) and part.training for part in module.modules())
    return len(x) > 0 and not drops and not cannot_look()


def differs(alone: Tensor, together: Tensor) -> bool:
    """Whether values of the first example ``alone`` are not those in the batch, beyond rounding, which depends on its size."""
    together = together.detach()
    rounding = 1e3 * torch.finfo(together.dtype).eps * together.abs().max()
    return alone.shape[1:] != together.shape[1:] or not bool(((alone - together[:1]).abs() <= rounding).all())
