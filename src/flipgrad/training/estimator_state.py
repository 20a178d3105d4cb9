"""What estimators learn while they are used, kept the same in all processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flipgrad.errors import InputError
from flipgrad.estimators import Baseline, ConstantBaseline, Estimator, LearnedBaseline, RunningBaseline
from flipgrad.estimators._tuned import TunedEstimator
from flipgrad.training.processes import Processes

# Modules whose buffers are known to be shareable, or never change.
SHAREABLE = (TunedEstimator, RunningBaseline, ConstantBaseline, LearnedBaseline)


class EstimatorState:
    """The parameters and buffers of an estimator, which need not have any.

    Args:
        estimator: the estimator.
        processes: those that use it together.

    Raises:
        InputError: if many processes use an estimator whose state would differ between them.
    """

    def __init__(self, estimator: Estimator, processes: Processes) -> None:
        self.module = estimator if isinstance(estimator, nn.Module) else nn.Module()
        self._processes = processes
        strangers = [m for m in self.module.modules() if _own_buffers(m) and not isinstance(m, SHAREABLE)]
        strangers += [m for m in self.module.modules() if isinstance(m, Baseline) and not isinstance(m, SHAREABLE)]
        if processes.size > 1 and strangers:
            raise InputError(
                f"{type(estimator).__name__} keeps a state in {type(strangers[0]).__name__} that many processes cannot share; "
                "train with one process, or with another estimator"
            )

    def agree(self, mine: Tensor, count: int) -> None:
        """After a backward pass: the same gradients and averages in all processes.

        Args:
            mine: the examples that this process used.
            count: examples of the whole batch; the others have at most their share of it.
        """
        if self._processes.size == 1:
            return
        self._processes.average(self.module.parameters())
        for module in self.module.modules():
            if isinstance(module, TunedEstimator):
                module.level.copy_(self._processes.sum(module.level) / self._processes.size)
            elif isinstance(module, RunningBaseline):
                self._share_averages(module, mine, count)

    def _share_averages(self, baseline: RunningBaseline, mine: Tensor, count: int) -> None:
        """Every process learned about its own examples: all learn what the others did."""
        largest = -(-count // self._processes.size)
        index = torch.full((largest,), -1, device=mine.device)
        values = baseline.average.new_zeros(largest)
        # A process without examples of its own has looked at one of another's.
        if count > self._processes.rank:
            index[: len(mine)], values[: len(mine)] = mine, baseline.average[mine]
        everyone, averages = self._processes.gather(index).flatten(), self._processes.gather(values).flatten()
        known = everyone >= 0
        baseline.average[everyone[known]] = averages[known]
        baseline.seen[everyone[known]] = True


def _own_buffers(module: nn.Module) -> bool:
    return next(module.buffers(recurse=False), None) is not None
