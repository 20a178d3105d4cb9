"""Baselines: guesses of the expected loss, which score-function estimators subtract from the sampled one.

Williams. Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning. Machine Learning, 1992.
Mnih, Gregor. Neural Variational Inference and Learning in Belief Networks. ICML 2014, for the learned one.

A baseline that does not depend on the current sample leaves the estimate unbiased, since E[score] = 0.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from flipgrad.contract import Batch
from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, PathEstimator


class Baseline(nn.Module, ABC):
    """What estimators ask of a baseline; its state is saved and moved as that of any module."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """The guesses [B] of the batch's expected losses, from what was known before the current sample."""

    @abstractmethod
    def learn(self, batch: Batch, losses: Tensor) -> Tensor | None:
        """Make later guesses better with the sampled ``losses`` [B].

        Returns:
            None, or a term [B] of value 0 whose gradient trains the baseline's parameters and reaches nothing else.
        """


@final
class ConstantBaseline(Baseline):
    """Given values, such as the exact expected losses.

    Args:
        values: one number for all examples; or one for each, [B]; or, for batches evaluated with ``index``, one for each
            example of the data set, picked by its number.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> perfect = fg.ConstantBaseline(fg.exact.expected_loss(net, x, objective))
    >>> net(x, objective, estimator=fg.REINFORCE(perfect)).mean().backward()
    """

    values: Tensor

    def __init__(self, values: Tensor | float) -> None:
        super().__init__()
        values = torch.as_tensor(values, dtype=None if isinstance(values, Tensor) else torch.get_default_dtype())
        if values.dim() > 1 or not bool(torch.isfinite(values).all()):
            raise InputError(f"ConstantBaseline takes a finite number, or one per example [B]; got shape {list(values.shape)}")
        self.register_buffer("values", values.detach().clone())

    def forward(self, batch: Batch) -> Tensor:
        examples = len(batch.x)
        if self.values.dim() == 0:
            return self.values.expand(examples)
        if batch.index is not None:
            return self.values[_checked_index(self, batch, len(self.values))]
        if len(self.values) != examples:
            raise InputError(
                f"ConstantBaseline holds {len(self.values)} values for a batch of {examples} examples: give one for each, or "
                "tell which examples these are with net(..., index=...)"
            )
        return self.values

    def learn(self, batch: Batch, losses: Tensor) -> None:
        """Nothing: the values are given."""


@final
class RunningBaseline(Baseline):
    r"""The exponential average of each data point's sampled losses: :math:`b \leftarrow \mu b + (1 - \mu) f`.

    It needs to know the data points: ``net(..., index=...)``. A data point that was not seen before has no average; its
    baseline is the mean of those of all others seen before, and 0 while there are none. Both come from earlier samples only,
    so the estimate stays unbiased. The first average is the first loss; if a data point stands in a batch more than once, its
    losses there are averaged and count as one. In evaluation mode (``estimator.eval()``) nothing is updated.

    Args:
        size: how many data points there are.
        momentum: the factor :math:`\mu`, from 0 to less than 1.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> estimator = fg.REINFORCE(fg.RunningBaseline(size=100))
    >>> net(x, objective, estimator=estimator, index=torch.tensor([7, 8, 99])).mean().backward()
    >>> int(estimator.baseline.seen.sum())
    3
    """

    average: Tensor
    seen: Tensor

    def __init__(self, size: int, momentum: float = 0.9) -> None:
        super().__init__()
        if size < 1:
            raise InputError(f"RunningBaseline(size={size}): give the number of data points, at least 1")
        if not 0 <= momentum < 1:
            raise InputError(f"RunningBaseline(momentum={momentum}): the momentum must be in [0, 1), e.g. 0.9")
        self.momentum = momentum
        self.register_buffer("average", torch.zeros(size))
        self.register_buffer("seen", torch.zeros(size, dtype=torch.bool))

    def forward(self, batch: Batch) -> Tensor:
        index = _checked_index(self, batch, len(self.average))
        others = self.average.sum() / self.seen.sum().clamp(min=1)
        return torch.where(self.seen[index], self.average[index], others)

    @torch.no_grad()
    def learn(self, batch: Batch, losses: Tensor) -> None:
        if not self.training:
            return
        points, which, counts = _checked_index(self, batch, len(self.average)).unique(return_inverse=True, return_counts=True)
        totals = self.average.new_zeros(len(points)).index_add_(0, which, losses.to(self.average.dtype))
        means = totals / counts
        averaged = self.momentum * self.average[points] + (1 - self.momentum) * means
        self.average[points] = torch.where(self.seen[points], averaged, means)
        self.seen[points] = True


@final
class LearnedBaseline(Baseline):
    """A network's guess from the input, as in NVIL.

    The same backward pass trains it: the estimator adds :math:`(f - b)^2` to every example's loss, with its value taken off
    again, so that only its gradient is seen, and that only by the network's parameters. Give these to an optimiser.

    Args:
        network: maps inputs [B, ...] to guesses [B] or [B, 1].

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> estimator = fg.REINFORCE(fg.LearnedBaseline(torch.nn.Linear(2, 1)))
    >>> optimizer = torch.optim.SGD([*net.parameters(), *estimator.parameters()], lr=0.1)
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=estimator).mean().backward()
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        examples = len(batch.x)
        guesses: Tensor = self.network(batch.x.detach())
        if guesses.shape not in ((examples,), (examples, 1)):
            raise InputError(
                f"LearnedBaseline: the network must map inputs {list(batch.x.shape)} to one number per example, "
                f"[{examples}] or [{examples}, 1]; it gave {list(guesses.shape)}"
            )
        return guesses.view(examples)

    def learn(self, batch: Batch, losses: Tensor) -> Tensor:
        error: Tensor = (losses - self(batch)).square()
        return error - error.detach()


class BaselineEstimator(nn.Module, PathEstimator):
    """An estimator with an optional baseline, which is a module of it."""

    # Not that of a module, which shows no arguments.
    __repr__ = PathEstimator.__repr__

    def __init__(self, baseline: Baseline | None = None) -> None:
        super().__init__()
        if not (baseline is None or isinstance(baseline, Baseline)):
            raise InputError(
                f"{type(self).__name__}(baseline={baseline!r}): give a baseline, such as fg.ConstantBaseline(...), "
                "fg.RunningBaseline(...) or fg.LearnedBaseline(...), or None"
            )
        self.baseline = baseline

    @torch.no_grad()
    def rewards(self, path: Path, otherwise: Tensor | float) -> Tensor:
        """The sampled losses [B] less the baseline's guesses; without a baseline, less what is given ``otherwise``."""
        guesses = otherwise if self.baseline is None else self.baseline(path.batch).to(path.losses.dtype)
        return path.losses - guesses

    @final
    def extra(self, path: Path) -> Tensor | None:
        return None if self.baseline is None else self.baseline.learn(path.batch, path.losses.detach())


def _checked_index(baseline: Baseline, batch: Batch, size: int) -> Tensor:
    """The batch's index, if it is there, fits the batch, and points into ``size`` data points."""
    name, index = type(baseline).__name__, batch.index
    if index is None:
        raise InputError(f"{name} knows data points by their numbers: tell them with net(..., index=...), one per example")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool or index.shape != batch.x.shape[:1]:
        raise InputError(
            f"{name}: index must be whole numbers of shape [{len(batch.x)}], one per example; got {index.dtype} of shape "
            f"{list(index.shape)}"
        )
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise InputError(
            f"{name} holds {size} data points, numbered from 0, and index goes from {int(index.min())} to {int(index.max())}"
        )
    return index.long()
