"""Objectives: losses of the head's output that accept extra leading dimensions, so that flips can be evaluated at once.

An objective maps outputs [..., B, K] to losses [..., B]; targets of a batch [B, ...] are broadcast over the dimensions in
front. Any callable that does the same is an objective, for example ``lambda out: out.square().sum(-1)``. Those that add up over
the outputs, likelihoods and squares, have cheap flips behind a linear head however many outputs there are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad import memory
from flipgrad.errors import InputError
from flipgrad.flips import heads
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

    def select(self, index: slice | Tensor) -> _BatchObjective:
        """The objective of part of the batch."""
        return type(self)(self.targets[index])

    @final
    def repeated(self, times: int) -> _BatchObjective:
        """The objective of the whole batch, ``times`` times, one copy after the other."""
        return self.select(torch.arange(len(self.targets), device=self.targets.device).repeat(times))


class LinearHeadObjective(_BatchObjective):
    """An objective whose losses at flips of the units behind a linear head are known without evaluating them there."""

    # Whether the averaged gradient in the head's parameters is known, too.
    knows_average: ClassVar[bool] = True

    @abstractmethod
    def at_flips(
        self,
        x: Tensor,
        outputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        opposite: Tensor | None,
        *,
        flip: bool,
        tolerance: float,
    ) -> HeadFlips | None:
        """What is known of the flips of states ``x`` [B, n], whose ``outputs`` [B, K] are by this ``weight`` [K, n].

        With the probabilities ``opposite`` [B, n] of the states other than ``x`` the gradient in ``weight`` and ``bias`` is
        averaged; with ``flip`` the discrete derivative is wanted, to a relative L2 error ``tolerance``. None where the losses
        must be evaluated at flips.
        """


@final
class HeadFlips(NamedTuple):
    """The losses [B], averaged where that is known, and the discrete derivative [B, n], if asked for."""

    losses: Tensor
    derivative: Tensor | None


class AdditiveObjective(LinearHeadObjective):
    """An objective that adds up over the outputs: flips behind a linear head are then sums over flips.

    Nothing is as large as outputs times flips, see :mod:`flipgrad.flips.heads`.
    """

    def __init__(self, targets: Tensor, who: str, name: str) -> None:
        if targets.dim() != 2:
            raise InputError(
                f"{who} takes {name} [B, K], got shape {list(targets.shape)}; use {name.split()[-1]}[:, None] for K = 1"
            )
        super().__init__(targets)

    @final
    def losses(self, outputs: Tensor) -> Tensor:
        self._check_size(outputs)
        return self.sums(outputs)

    def _check_size(self, outputs: Tensor) -> None:
        if outputs.shape[-1] != self.targets.shape[1]:
            raise InputError(
                f"{type(self).__name__}: the target has {self.targets.shape[1]} values per example, the head "
                f"{outputs.shape[-1]}"
            )

    @abstractmethod
    def sums(self, outputs: Tensor) -> Tensor:
        """The losses [..., B] of ``outputs`` [..., B, K] of the right size."""

    @abstractmethod
    def discrete_derivative(self, x: Tensor, outputs: Tensor, weight: Tensor, tolerance: float) -> Tensor:
        """That in every one of the states ``x`` [B, n], of which ``weight`` [K, n] gives the ``outputs`` [B, K].

        With the relative L2 error ``tolerance``, 0 for none.
        """

    @final
    def at_flips(
        self,
        x: Tensor,
        outputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        opposite: Tensor | None,
        *,
        flip: bool,
        tolerance: float,
    ) -> HeadFlips:
        self._check_size(outputs)
        losses = None if opposite is None else self.averaged_losses(x, outputs, opposite, weight, bias)
        derivative = self.discrete_derivative(x, outputs.detach(), weight.detach(), tolerance) if flip else None
        return HeadFlips(self(outputs) if losses is None else losses, derivative)

    def means(self, outputs: Tensor) -> Tensor:
        """The means of what has this likelihood, given the outputs; by default these."""
        return outputs

    def averaged_losses(
        self, x: Tensor, outputs: Tensor, opposite: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """The losses [B], whose gradient in each weight is averaged over the states of its own unit; None if not known.

        ``opposite`` [B, n] are the probabilities of the states other than ``x``; in the ``bias`` the gradient is the mean over
        all units of such averages.
        """
        return None


@final
class BernoulliLikelihood(AdditiveObjective):
    """-log p(targets) of independent bits with the outputs for logits, summed over these, per example.

    Args:
        targets: 0 or 1, or probabilities between them, [B, K].

    >>> BernoulliLikelihood(torch.ones(2, 4))(torch.zeros(5, 2, 4)).shape
    torch.Size([5, 2])
    """

    knows_average = False

    def __init__(self, targets: Tensor) -> None:
        super().__init__(targets, "BernoulliLikelihood", "targets")
        if not targets.is_floating_point():
            raise InputError(f"BernoulliLikelihood takes targets of floating point, got {targets.dtype}: give targets.float()")
        if not cannot_look() and not bool(((targets >= 0) & (targets <= 1)).all()):
            raise InputError("BernoulliLikelihood: targets must be from 0 to 1; scale or binarise them first")

    def sums(self, outputs: Tensor) -> Tensor:
        targets = self.targets.expand_as(outputs)
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(-1)

    def discrete_derivative(self, x: Tensor, outputs: Tensor, weight: Tensor, tolerance: float) -> Tensor:
        return heads.bernoulli(x, outputs, self.targets, weight, tolerance=tolerance)

    def means(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


@final
class GaussianLikelihood(AdditiveObjective):
    """-log p(targets) of independent normal variables with the outputs for means, summed over these, per example.

    Args:
        targets: [B, K].
        scale: their standard deviation, a positive number, or a positive tensor [K], which may be learned.

    >>> GaussianLikelihood(torch.ones(2, 4), scale=0.5)(torch.zeros(5, 2, 4)).shape
    torch.Size([5, 2])
    """

    def __init__(self, targets: Tensor, scale: Tensor | float = 1.0) -> None:
        super().__init__(targets, "GaussianLikelihood", "targets")
        self.scale = torch.as_tensor(scale, dtype=targets.dtype, device=targets.device)
        shaped = self.scale.shape in ((), targets.shape[1:])
        if not shaped or not (cannot_look() or bool((self.scale > 0).all() and torch.isfinite(self.scale).all())):
            raise InputError(
                f"GaussianLikelihood: the scale must be a positive number, or {targets.shape[1]} of them, one per output; got "
                f"shape {list(self.scale.shape)}"
            )

    def select(self, index: slice | Tensor) -> GaussianLikelihood:
        return GaussianLikelihood(self.targets[index], self.scale)

    def sums(self, outputs: Tensor) -> Tensor:
        constant = (self.scale.log() + 0.5 * math.log(2 * math.pi)).expand(outputs.shape[-1]).sum()
        return ((outputs - self.targets) / self.scale).square().sum(-1) / 2 + constant

    def discrete_derivative(self, x: Tensor, outputs: Tensor, weight: Tensor, tolerance: float) -> Tensor:
        scale = self.scale.expand(weight.shape[0])
        return heads.quadratic(x, (outputs - self.targets) / scale, weight / scale[:, None])

    def averaged_losses(
        self, x: Tensor, outputs: Tensor, opposite: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        losses = self.sums(outputs.detach())
        precision = self.scale.detach().expand(weight.shape[0]) ** -2
        return losses + heads.averaged_quadratic(x, outputs - self.targets, precision, opposite, weight, bias)


class _SoftmaxObjective(LinearHeadObjective):
    """A cross-entropy of softmax(outputs)."""

    @abstractmethod
    def distribution(self, classes: int) -> Tensor:
        """The targets as distributions [B, K] over the classes."""

    @final
    def at_flips(
        self,
        x: Tensor,
        outputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        opposite: Tensor | None,
        *,
        flip: bool,
        tolerance: float,
    ) -> HeadFlips | None:
        losses = self(outputs if opposite is None else outputs.detach())
        if opposite is None and not flip:
            return HeadFlips(losses, None)
        flips = heads.SoftmaxFlips.of(x, outputs, self.distribution(outputs.shape[1]).to(outputs), weight)
        if flips is None:
            return None
        if opposite is not None:
            losses = losses + flips.averaged(opposite, weight, bias).to(losses.dtype)
        return HeadFlips(losses, flips.derivative.to(outputs.dtype) if flip else None)


@final
class CrossEntropy(_SoftmaxObjective):
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

    def distribution(self, classes: int) -> Tensor:
        return functional.one_hot(self.labels, classes)

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
class SoftCrossEntropy(_SoftmaxObjective):
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

    def distribution(self, classes: int) -> Tensor:
        return self.p_star

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
class SquaredError(AdditiveObjective):
    """The squared distance of the outputs to a target, summed over the outputs, per example.

    Args:
        target: [B, K].
    """

    def __init__(self, target: Tensor) -> None:
        super().__init__(target, "SquaredError", "a target")
        self.target = target

    def sums(self, outputs: Tensor) -> Tensor:
        return (outputs - self.target).square().sum(-1)

    def discrete_derivative(self, x: Tensor, outputs: Tensor, weight: Tensor, tolerance: float) -> Tensor:
        return 2 * heads.quadratic(x, outputs - self.target, weight)

    def averaged_losses(
        self, x: Tensor, outputs: Tensor, opposite: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        precision = torch.full_like(weight[:, 0], 2.0).detach()
        carrier = heads.averaged_quadratic(x, outputs - self.target, precision, opposite, weight, bias)
        return self.sums(outputs.detach()) + carrier


def of_copies(objective: Objective, copies: int, batch: int) -> Objective:
    """The objective of ``copies`` of a ``batch``, one after the other: outputs [..., copies * batch, K] to losses.

    Of ours it is one of the same kind, which knows its flips as it does for one copy.
    """
    if isinstance(objective, _BatchObjective):
        return objective.repeated(copies)

    def losses(outputs: Tensor) -> Tensor:
        return evaluate(objective, outputs.unflatten(-2, (copies, batch))).flatten(-2)

    return losses


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
