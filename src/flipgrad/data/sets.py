"""What a data set is: tensors in memory, split into a training and a test part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class Split:
    """Inputs [N, ...] and class labels [N]; a batch also knows its examples' numbers in the whole, [N]."""

    x: Tensor
    y: Tensor
    index: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Split:
        """The same examples on another device."""
        return Split(self.x.to(device), self.y.to(device))

    def batches(self, size: int, *, generator: Generator | None = None) -> Iterator[Split]:
        """Batches of at most ``size`` examples: in random order with a ``generator``, else in the given order."""
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for index in order.split(size):
            index = index.to(self.y.device)
            yield Split(self.x[index], self.y[index], index)


@dataclass(frozen=True)
class DataSet:
    """A named classification problem; ``background`` is the input value of an empty pixel."""

    name: str
    train: Split
    test: Split
    classes: int
    background: float
