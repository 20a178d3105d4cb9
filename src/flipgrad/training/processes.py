"""The processes that train one network together: this one alone, or many that ``torchrun`` started.

Every process has a part of each batch, and noise of its own. What they do is one update of the whole batch: gradients are
weighted by the parts' sizes and added up.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

from flipgrad.errors import InputError

# What Lightning Fabric can place processes on.
ACCELERATORS = ("cpu", "cuda", "mps")


class Processes:
    """This process alone.

    Attributes:
        rank: the number of this process, from 0; process 0 writes the files.
        size: how many there are.
        device: where this one computes.
    """

    rank = 0
    size = 1

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def wrap(self, net: nn.Module) -> nn.Module:
        """The network whose backward pass adds up the gradients of all processes."""
        return net

    def backward(self, loss: Tensor) -> None:
        """Go backward through a loss."""
        loss.backward()

    def share(self, batch: Tensor) -> tuple[Tensor, float]:
        """This process' part of a ``batch`` [B] of examples, and the factor of each example's loss.

        A mean over processes of the sums over their parts times the factor is the mean over the batch. A process without a
        part gets the first example with the factor 0, since all of them have to go backward.
        """
        mine = batch[self.rank :: self.size]
        return (mine, self.size / len(batch)) if len(mine) else (batch[:1], 0.0)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, [size, ...]; they have one shape."""
        return tensor[None]

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over processes, for parameters that are not the network's."""

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of process 0."""

    def close(self) -> None:
        """Part from the others."""


@final
class ManyProcesses(Processes):
    """Processes that ``torchrun`` started, brought together by Lightning Fabric: gloo on processors, nccl on GPUs."""

    def __init__(self, device: str) -> None:
        kind, _, number = device.partition(":")
        if kind not in ACCELERATORS or number:
            raise InputError(f"device '{device}': many processes take 'cpu' or 'cuda', and a GPU each by themselves")
        # Imported here, since it takes seconds and one process needs none of it.
        from lightning_fabric import Fabric

        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
        # Gradients of convolutions may be in another memory format than their weights, which costs nothing to speak of.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        local, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ["WORLD_SIZE"])
        self._fabric = Fabric(accelerator=kind, devices=local, num_nodes=size // local, strategy="ddp")
        self._fabric.launch()
        self.rank, self.size = self._fabric.global_rank, self._fabric.world_size
        super().__init__(str(self._fabric.device))

    def wrap(self, net: nn.Module) -> nn.Module:
        return self._fabric.setup_module(net)

    def backward(self, loss: Tensor) -> None:
        self._fabric.backward(loss)

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone().to(self.device)
        torch.distributed.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        mine = tensor.detach().to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(parts, mine)
        return torch.stack(parts).to(tensor.device)

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(int(flag))))

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether there are other processes that ``torchrun`` started with this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    """The number of this process, before it is brought together with the others."""
    return int(os.environ.get("RANK", "0"))


def connect(device: str) -> Processes:
    """The processes that train together: those that ``torchrun`` started, or this one alone."""
    return ManyProcesses(device) if started_by_torchrun() else Processes(device)
