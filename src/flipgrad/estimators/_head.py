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

Flips are evaluated in chunks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeGuard, final, get_args

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
from flipgrad.guards import cannot_look, has_hooks, once
from flipgrad.objectives import Objective, check_alone, evaluate
from flipgrad.steps import Sample

HeadGradient = Literal["sampled", "enhanced", "rao-blackwell"]

# Numbers held at once: flipped outputs of a linear head, flipped states of any other.
CHUNK = 2**20


def check_head(estimator: str, head: str) -> None:
    """Refuse what is no gradient of a head, on behalf of an ``estimator``."""
    if head not in get_args(HeadGradient):
        raise InputError(f"{estimator}(head={head!r}): choose {', '.join(map(repr, get_args(HeadGradient)))}")


def head_losses(
    net: Network, last: LayerCall, states: Tensor, objective: Objective, gradient: HeadGradient, *, flip: bool
) -> Tensor:
    """The losses [B] of the last layer's states, differentiable in these and in the head's parameters.

    Args:
        net: the network.
        last: the evaluation of the last layer.
        states: what it gave.
        objective: maps outputs [..., B, K] to losses [..., B].
        gradient: that in the head's parameters.
        flip: whether the derivative in the states is the discrete one, or the ordinary one.
    """
    x = states.detach()
    behind_layer = isinstance(net.steps[-1], Sample)
    if gradient == "rao-blackwell" and not (is_linear(net.head) and behind_layer):
        gradient = "sampled"
    if gradient == "sampled" and not flip:
        return evaluate(objective, net.outputs(states))
    if gradient == "enhanced" and not behind_layer:
        raise InputError("head='enhanced' needs a binary layer, not Concat, before the head; use head='sampled'")
    if gradient == "rao-blackwell" and is_linear(net.head):
        outputs, losses, flipped = _rao_blackwell(net, net.head, x, _opposite(last, x), objective)
    else:
        outputs = net.outputs(x)
        losses = evaluate(objective, outputs)
        with torch.set_grad_enabled(gradient == "enhanced" and torch.is_grad_enabled()):
            flipped = flipped_losses(net, x, outputs, objective)
        if gradient == "enhanced":
            correction = ((flipped - losses) * _opposite(last, x)).mean(0)
            losses = losses + (correction - correction.detach())
    check_alone(objective, outputs, losses)
    if flip:
        discrete = (losses.detach() - flipped.detach()).t().reshape(x.shape) * x / 2
        attached: Tensor = AttachGradient.apply(losses, states, discrete)  # type: ignore[no-untyped-call]
        return attached
    return losses + _without_parameters(net, states, outputs, objective)


def flipped_losses(net: Network, x: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    """The losses [units, B] with one unit of the states ``x`` [B, ...] flipped.

    Args:
        net: the network. A linear head is evaluated by adding to its ``outputs``, any other anew on every flipped batch.
        x: the last layer's states.
        outputs: the head's outputs [B, K] for ``x``.
        objective: maps outputs [..., B, K] to losses [..., B].
    """
    if is_linear(net.head):
        return _linear(net, net.head, x, outputs, objective)
    check_separable(net.head)
    check_head_alone(net, x, outputs)
    return _general(net, x, objective)


def _rao_blackwell(
    net: Network, head: nn.Linear, x: Tensor, opposite: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, K], losses [B] with that gradient, and the losses [units, B] at every flip, of a linear head.

    What a loss is differentiated in is only where its gradient is wanted: that of the sample in a weight times 1 - pi, that
    of a flip in the weights of its own unit alone times pi.
    """
    units, share = x.flatten(1).t().contiguous(), opposite
    weight = folded_weight(head.weight, net.tail, x)
    bias = head.bias
    kept = (units * (1 - share)).t()
    with torch.no_grad():
        outputs = net.outputs(x)
    own = functional.linear(kept.to(weight.dtype), weight)
    sampled = outputs + (own - own.detach())
    if bias is not None:
        sampled = sampled + (bias - bias.detach()) * (1 - share.mean(0))[:, None]
    losses = evaluate(objective, sampled)
    columns, transposed = weight.t(), outputs.t().contiguous()

    def at_flips(columns: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
        fixed = columns.detach()
        moved = transposed - 2 * fixed[:, :, None] * states[:, None]
        moved = moved - (columns - fixed)[:, :, None] * states[:, None]
        if bias is not None:
            moved = moved + ((bias - bias.detach()) / len(units))[:, None]
        return evaluate(objective, moved.transpose(1, 2))

    size = max(1, CHUNK // max(1, outputs.numel()))
    starts = range(0, len(units), size)
    flipped = _chunked([(at_flips, (columns[i : i + size], units[i : i + size], bias)) for i in starts])
    correction = (flipped * share).sum(0)
    return outputs, losses + (correction - correction.detach()), flipped


def _without_parameters(net: Network, states: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    """Zeros [B] with the ordinary derivative of the losses in the states, and none in the head's parameters."""
    parameters = {name: parameter.detach() for name, parameter in net.head.named_parameters()}
    connected = connect(net.tail, states)
    losses = evaluate(objective, torch.func.functional_call(net.head, parameters, (connected,)).to(outputs.dtype))
    return losses - losses.detach()


def _opposite(last: LayerCall, x: Tensor) -> Tensor:
    """The probability [units, B] of every unit's other state: 1 - p(x_i), which is what the paper's pi means.

    Its printed formula has a sign slip.
    """
    if last.distribution is None:
        raise RuntimeError("the last layer drew no states")
    return last.noise.cdf(-x * last.distribution.a).flatten(1).t()


def _linear(net: Network, head: nn.Linear, x: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    # [units, B], [K, B] and [units, K]: the batch goes last, where operations are fast, and K may be as small as 1.
    units, transposed = x.flatten(1).t().contiguous(), outputs.t().contiguous()
    weight = folded_weight(head.weight, net.tail, x).t()

    def losses(outputs: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        return evaluate(objective, (outputs - 2 * weight[:, :, None] * states[:, None]).transpose(1, 2))

    size = max(1, CHUNK // max(1, outputs.numel()))
    return _chunked([(losses, (transposed, weight[i : i + size], units[i : i + size])) for i in range(0, len(units), size)])


def _general(net: Network, x: Tensor, objective: Objective) -> Tensor:
    units = x.flatten(1)
    count = units.shape[1]

    def losses(first: int, last: int) -> Tensor:
        outputs = net.outputs(flipped_states(x, torch.arange(first, last, device=x.device)).flatten(0, 1))
        outputs = outputs.unflatten(0, (last - first, len(x)))
        return evaluate(objective, outputs)

    size = max(1, CHUNK // max(1, units.numel()))
    return _chunked([(losses, (i, min(i + size, count))) for i in range(0, count, size)])


def flipped_states(x: Tensor, units: Tensor) -> Tensor:
    """Copies of the states ``x`` [B, ...], each with one of the ``units`` flipped, [len(units), B, ...]."""
    flat = x.flatten(1)
    signs = 1 - 2 * functional.one_hot(units, flat.shape[1]).to(x.dtype)
    return (flat * signs[:, None]).view(len(units), *x.shape)


def _chunked(parts: list[tuple[Callable[..., Tensor], tuple[object, ...]]]) -> Tensor:
    """The parts' results in one tensor; where gradients are wanted, each part is computed again on the way back."""
    if torch.is_grad_enabled() and len(parts) > 1:
        return torch.cat([checkpoint(part, *inputs, use_reentrant=False) for part, inputs in parts])
    return torch.cat([part(*inputs) for part, inputs in parts])


def is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the head is ``nn.Linear`` and nothing besides, parametrised or not: its flipped outputs need no evaluation.

    A subclass, or hooks (also those of ``prune`` and the old ``weight_norm``), may do anything; such a head is evaluated.
    """
    kind = type(head).__bases__[0] if parametrize.is_parametrized(head) else type(head)
    return kind is nn.Linear and not has_hooks(head)


def check_separable(head: nn.Module) -> None:
    """Flips compare losses of one example, so the head must treat examples alone and twice alike."""
    for module in head.modules():
        if isinstance(module, _BatchNorm | _DropoutNd) and module.training:
            raise InputError(
                f"the estimator evaluates the head on other states, and {module} in training mode mixes examples or draws at "
                "random; use LayerNorm, put that module in eval mode, or linearise the head with fg.PSA(flip_head=False)"
            )


def check_head_alone(net: Network, x: Tensor, outputs: Tensor) -> None:
    """Refuse a head whose ``outputs`` for an example depend on the rest of the batch ``x``, or are drawn at random.

    Dropout is known to draw, and to be right where the head is evaluated once.
    """
    drops = any(isinstance(module, _DropoutNd) and module.training for module in net.head.modules())
    if is_linear(net.head) or drops or not len(x) or cannot_look():
        return
    check_separable(net.head)
    with torch.no_grad():
        alone = net.outputs(x[:1])
    # Rounding depends on the size of a batch.
    rounding = 1e3 * torch.finfo(outputs.dtype).eps * outputs.detach().abs().max()
    if not bool(((alone - outputs.detach()[:1]).abs() <= rounding).all()):
        raise InputError(
            "the estimator evaluates the head on other states, and the head gives an example other outputs alone than in the "
            "batch: it mixes examples or draws at random; change it, or linearise it with fg.PSA(flip_head=False, "
            "head='sampled')"
        )


@final
class AttachGradient(torch.autograd.Function):
    """The losses as they are; backward, the given gradient [B, ...] to the states besides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(losses: Tensor, states: Tensor, gradient: Tensor) -> Tensor:
        return losses.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient * grad.view(-1, *[1] * (gradient.dim() - 1)), None
