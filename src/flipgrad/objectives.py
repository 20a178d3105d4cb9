"""Objectives: losses of the head's output that accept extra leading dimensions, so that flips can be evaluated at once.

An objective maps outputs [..., B, K] to losses [..., B]; targets of a batch [B, ...] are broadcast over the dimensions in
front. Any callable that does the same is an objective, for example ``lambda out: out.square().sum(-1)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad import memory
from flipgrad.errors import InputError
from flipgrad.guards import cannot_look, capturing

Objective = Callable[[Tensor], Tensor]


class _BatchObjective(ABC):
    """An objective with one target per example, [B, ...], which treats every example alone."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    @final
    def __call__(self, outputs: Tensor) -> Tensor:
        if outputs.dim() < 2 or outputs.shape[-2] != len(self.targets):
            raise InputError(
                f"{type(self).__name__} has targets for {len(self.targets)} examples, the head's output has shape "
                f"{list(outputs.shape)} (examples are its last but one dimension): give the inputs and the targets of the "
                "same batch"
            )
        return self.losses(outputs)

    @abstractmethod
    def losses(self, outputs: Tensor) -> Tensor:
        """The losses [..., B] of ``outputs`` [..., B, K]."""

    @final
    def select(self, index: slice | Tensor) -> _BatchObjective:
        """The objective of part of the batch."""
        return type(self)(self.targets[index])


@final
class CrossEntropy(_BatchObjective):
    """-log softmax(outputs)[label], per example.

    Args:
        labels: class indices [B].

    >>> CrossEntropy(torch.tensor([0, 1]))(torch.zeros(5, 2, 4)).shape
    torch.Size([5, 2])
    """

    def __init__(self, labels: Tensor) -> None:
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
            raise InputError(
                f"CrossEntropy takes class indices [B], got {labels.dtype} of shape {list(labels.shape)}; for label "
                "distributions use SoftCrossEntropy"
            )
        # Where labels cannot be looked at, numbers that nothing is wrong with.
        known = labels.numel() and not capturing()
        smallest, self._largest = (int(labels.min()), int(labels.max())) if known else (0, -1)
        if smallest < 0:
            raise InputError(f"CrossEntropy: label {smallest} is negative; labels count from 0")
        self.labels = labels.long()
        super().__init__(self.labels)
        # The sign with which the logit of class 1 over class 0 counts against the label.
        self._other = 1 - 2 * self.labels

    def losses(self, outputs: Tensor) -> Tensor:
        if self._largest >= outputs.shape[-1]:
            raise InputError(
                f"CrossEntropy: label {self._largest} but the head has {outputs.shape[-1]} outputs; labels count from 0"
            )
        if outputs.shape[-1] == 2:
            # The same in a third of the operations.
            return functional.softplus((outputs[..., 1] - outputs[..., 0]) * self._other)
        index = self.labels[:, None].expand(*outputs.shape[:-1], 1)
        return outputs.logsumexp(-1) - outputs.gather(-1, index).squeeze(-1)


@final
class SoftCrossEntropy(_BatchObjective):
    """Cross-entropy of softmax(outputs) relative to a label distribution p*, per example.

    Args:
        p_star: probabilities [B, K]; every row sums to 1.
    """

    def __init__(self, p_star: Tensor) -> None:
        if p_star.dim() != 2 or not p_star.is_floating_point():
            raise InputError(
                f"SoftCrossEntropy takes probabilities [B, K], got {p_star.dtype} of shape {list(p_star.shape)}; for class "
                "indices use CrossEntropy"
            )
        if not capturing() and (bool((p_star < 0).any()) or not torch.allclose(p_star.sum(1), p_star.new_ones(()), atol=1e-4)):
            raise InputError("SoftCrossEntropy: every row of p_star must be non-negative and sum to 1; normalise it first")
        super().__init__(p_star)
        self.p_star = p_star

    def losses(self, outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != self.p_star.shape[1]:
            raise InputError(
                f"SoftCrossEntropy: p_star has {self.p_star.shape[1]} classes, the head {outputs.shape[-1]} outputs"
            )
        return -(self.p_star * functional.log_softmax(outputs, -1)).sum(-1)


@final
class LogisticLoss(_BatchObjective):
    """log(1 + exp(-label * output)) of a head with one output, per example.

    Args:
        labels: -1 or +1 for each example, [B].
    """

    def __init__(self, labels: Tensor) -> None:
        if labels.dim() != 1 or labels.dtype == torch.bool or not (capturing() or bool((labels.abs() == 1).all())):
            raise InputError(f"LogisticLoss takes labels -1 or +1 of shape [B], got shape {list(labels.shape)}; map 0 to -1")
        super().__init__(labels)
        self.labels = labels

    def losses(self, outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            raise InputError(f"LogisticLoss takes one output per example, the head has {outputs.shape[-1]}; use CrossEntropy")
        return functional.softplus(-(self.labels * outputs.squeeze(-1)))


@final
class SquaredError(_BatchObjective):
    """The squared distance of the outputs to a target, summed over the outputs, per example.

    Args:
        target: [B, K].
    """

    def __init__(self, target: Tensor) -> None:
        if target.dim() != 2:
            raise InputError(
                f"SquaredError takes a target [B, K], got shape {list(target.shape)}; use target[:, None] for K = 1"
            )
        super().__init__(target)
        self.target = target

    def losses(self, outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != self.target.shape[1]:
            raise InputError(
                f"SquaredError: the target has {self.target.shape[1]} values per example, the head {outputs.shape[-1]}"
            )
        return (outputs - self.target).square().sum(-1)


def evaluate(objective: Objective, outputs: Tensor) -> Tensor:
    """The losses [..., B] of ``outputs`` [..., B, K], refusing an objective that returns another shape."""
    if not callable(objective):
        raise InputError(f"the objective must be callable, e.g. fg.CrossEntropy(labels), got {type(objective).__name__}")
    losses = _called(objective, outputs)
    if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:-1]:
        came = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"the objective must map outputs {list(outputs.shape)} to one loss per example, {list(outputs.shape[:-1])}, got "
            f"{came}: reduce over the last dimension only (reduction='none', sum(-1))"
        )
    return losses


def check_alone(objective: Objective, outputs: Tensor, losses: Tensor) -> None:
    """Refuse an objective whose ``losses`` [B] at ``outputs`` [B, K] are not each a function of one example's outputs.

    Flips and other paths of one example are compared with the rest of the batch as it is, and would change the others' losses
    unnoticed. Ours treat examples alone.
    """
    if isinstance(objective, _BatchObjective) or cannot_look():
        return
    with torch.no_grad():
        moved = outputs.detach().clone()
        moved[:1] += 1
        others = objective(moved)
    if not torch.equal(others[1:], losses.detach()[1:]):
        raise InputError(
            "the objective lets examples depend on each other: another output of the first changed other losses (or it draws "
            "at random). Estimators by flips and paths need losses of single examples; use fg.ST(), or "
            "fg.PSA(flip_head=False, head='sampled')"
        )


def _called(objective: Objective, outputs: Tensor) -> Tensor:
    """What the objective returns; if it fails, an error that says what is asked of it."""
    if capturing():
        return objective(outputs)
    try:
        return objective(outputs)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if memory.ran_out(error):
            raise
        name = getattr(objective, "__name__", type(objective).__name__)
        raise InputError(
            f"the objective {name} failed on outputs {list(outputs.shape)} ({' '.join(str(error).split()):.200}): it takes "
            "these alone, [..., B, K] with any dimensions in front, and returns one loss per example, [..., B]; e.g. "
            "fg.CrossEntropy(labels), fg.SquaredError(target)"
        ) from error
