"""The processes that train one network together: this one alone, or many that ``torchrun`` started.

Every process has a part of each batch, and noise of its own. What they do is one update of the whole batch: gradients are
weighted by the parts' sizes and added up.
"""

import gc
import os
import warnings
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flipgrad.errors import InputError
from flipgrad.estimators import Baseline, ConstantBaseline, LearnedBaseline, RunningBaseline
from flipgrad.estimators._tuned import TunedEstimator
from flipgrad.machine import started_by_torchrun

# What many processes compute on, and how they talk to one another there.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Modules of estimators whose buffers are known to be shareable, or never change.
SHAREABLE = (TunedEstimator, RunningBaseline, ConstantBaseline, LearnedBaseline)


@final
class Processes:
    """By default this process alone; :func:`connect` gives those of ``torchrun``.

    Attributes:
        device: where this one computes.
        rank: the number of this process, from 0; process 0 writes the files.
        size: how many there are.
    """

    def __init__(self, device: str | torch.device = "cpu", rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = torch.device(device), rank, size

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def wrap(self, net: nn.Module) -> nn.Module:
        """The network whose backward pass adds up the gradients of all processes."""
        if self.size == 1:
            return net
        return DistributedDataParallel(net, device_ids=[self.device] if self.device.type == "cuda" else None)

    def share(self, batch: Tensor) -> tuple[Tensor, float]:
        """This process' part of a ``batch`` [B] of examples, and the factor of each example's loss.

        A mean over processes of the sums over their parts times the factor is the mean over the batch. A process without a
        part gets the first example with the factor 0, since all of them have to go backward.
        """
        mine = batch[self.rank :: self.size]
        return (mine, self.size / len(batch)) if len(mine) else (batch[:1], 0.0)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone().to(self.device)
        distributed.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, [size, ...]; they have one shape."""
        if self.size == 1:
            return tensor[None]
        mine = tensor.detach().to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine)
        return torch.stack(parts).to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of process 0."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def check_shareable(self, estimator: nn.Module) -> None:
        """Refuse an estimator whose state would differ between many processes."""
        for module in estimator.modules() if self.size > 1 else ():
            learns = isinstance(module, Baseline) or any(True for _ in module.buffers(recurse=False))
            if learns and not isinstance(module, SHAREABLE):
                raise InputError(
                    f"{type(estimator).__name__} keeps a state in {type(module).__name__} that many processes cannot share; "
                    "train with one process, or with another estimator"
                )

    def agree(self, estimator: nn.Module, mine: Tensor, count: int) -> None:
        """After a backward pass, give an estimator the same gradients and averages in all processes.

        ``mine`` are the examples that this process used, of ``count`` in the whole batch.
        """
        if self.size == 1:
            return
        for parameter in estimator.parameters():
            if parameter.grad is not None:
                parameter.grad = self.sum(parameter.grad) / self.size
        for module in estimator.modules():
            if isinstance(module, TunedEstimator):
                module.level.copy_(self.sum(module.level) / self.size)
            elif isinstance(module, RunningBaseline):
                self._share_averages(module, mine, count)

    def _share_averages(self, baseline: RunningBaseline, mine: Tensor, count: int) -> None:
        """Every process learned about its own examples: all learn what the others did."""
        largest = -(-count // self.size)
        index = torch.full((largest,), -1, device=mine.device)
        values = baseline.average.new_zeros(largest)
        # A process without examples of its own has looked at one of another's.
        if count > self.rank:
            index[: len(mine)], values[: len(mine)] = mine, baseline.average[mine]
        everyone, averages = self.gather(index).flatten(), self.gather(values).flatten()
        known = everyone >= 0
        baseline.average[everyone[known]] = averages[known]
        baseline.seen[everyone[known]] = True

    def close(self) -> None:
        """Part from the others."""
        if self.size > 1:
            distributed.destroy_process_group()
            # Wrappers of networks hold the group in cycles. One that lives until the interpreter ends may abort the process:
            # github.com/pytorch/pytorch/issues/190489.
            gc.collect()


def connect(device: str) -> Processes:
    """The processes that train together: those that ``torchrun`` started, or this one alone."""
    if not started_by_torchrun():
        return Processes(device)
    if device not in BACKENDS:
        raise InputError(f"device '{device}': many processes take 'cpu' or 'cuda', and a GPU each by themselves")
    # Gradients of convolutions may be in another memory format than their weights, which costs nothing to speak of.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    distributed.init_process_group(BACKENDS[device])
    return Processes(own, distributed.get_rank(), distributed.get_world_size())
