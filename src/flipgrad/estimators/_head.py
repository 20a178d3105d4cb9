"""The loss at every flip of one unit of the last binary layer, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from flipgrad.affine import folded_weight
from flipgrad.errors import InputError
from flipgrad.layers import BinaryLayer
from flipgrad.network import Readout
from flipgrad.objectives import Objective, evaluate

# Numbers held at once: flipped outputs of a linear head, flipped states of any other.
CHUNK = 2**20


def flipped_losses(readout: Readout, x: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    """The losses [units, B] with one unit of the states ``x`` [B, ...] flipped.

    Args:
        readout: the head. A linear one is evaluated by adding to its ``outputs``, any other anew on every flipped batch.
        x: the last layer's states.
        outputs: the head's outputs [B, K] for ``x``.
        objective: maps outputs [..., B, K] to losses [..., B].
    """
    if is_linear(readout.head):
        return _linear(readout, readout.head, x, outputs, objective)
    check_separable(readout.head)
    return _general(readout, x, objective)


def _linear(readout: Readout, head: nn.Linear, x: Tensor, outputs: Tensor, objective: Objective) -> Tensor:
    # [units, B], [K, B] and [units, K]: the batch goes last, where operations are fast, and K may be as small as 1.
    units, transposed = x.flatten(1).t().contiguous(), outputs.t().contiguous()
    weight = folded_weight(head.weight, readout.tail, x).t()

    def losses(outputs: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        return evaluate(objective, (outputs - 2 * weight[:, :, None] * states[:, None]).transpose(1, 2))

    size = max(1, CHUNK // max(1, outputs.numel()))
    return _chunked([(losses, (transposed, weight[i : i + size], units[i : i + size])) for i in range(0, len(units), size)])


def _general(readout: Readout, x: Tensor, objective: Objective) -> Tensor:
    units = x.flatten(1)
    count = units.shape[1]

    def losses(first: int, last: int) -> Tensor:
        outputs = readout(flipped_states(x, torch.arange(first, last, device=x.device)).flatten(0, 1))
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
    """Whether the head is an ordinary linear layer, parametrised or not, whose flipped outputs need no evaluation."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and not isinstance(head, BinaryLayer)


def check_separable(head: nn.Module) -> None:
    """Flips compare losses of one example, so the head must treat examples alone and twice alike."""
    for module in head.modules():
        if isinstance(module, _BatchNorm | _DropoutNd) and module.training:
            raise InputError(
                f"the estimator evaluates the head on other states, and {module} in training mode mixes examples or draws at "
                "random; use LayerNorm, put that module in eval mode, or linearise the head with fg.PSA(flip_head=False)"
            )
