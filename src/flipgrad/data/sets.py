"""What a data set is: tensors in memory, split into a training and a test part, and a validation part where wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from flipgrad.errors import InputError
from flipgrad.tensor_files import tensors_checksum


@contextmanager
def advising(fix: str) -> Iterator[None]:
    """Errors in the files of a data set end with what to do; also a decorator of the function that reads them."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; {fix}") from None


def from_bytes(pixels: Tensor) -> Tensor:
    """Pixels of 0 to 255 as numbers in [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1)


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

    def divide(self, share: float, *, seed: int = 0) -> tuple[Split, Split]:
        """Two parts drawn at random, the second with ``share`` of the examples and, within one example, of every class.

        Both parts keep the order of the whole.

        Raises:
            InputError: if a part would be empty.
        """
        total = len(self)
        count = round(share * total) if 0 < share < 1 else 0
        if not 0 < count < total:
            fix = "give a share between 0 and 1 that does not"
            raise InputError(f"a share of {share} of {total} examples leaves a part empty; {fix}")
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        # Sorted by class, in random order within each, evenly spaced picks take the same share of every class.
        order = order[self.y.cpu()[order].argsort(stable=True)]
        position = torch.arange(total)
        chosen = torch.empty(total, dtype=torch.bool)
        chosen[order] = (position + 1) * count // total > position * count // total
        chosen = chosen.to(self.y.device)
        return Split(self.x[~chosen], self.y[~chosen]), Split(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class DataSet:
    """A named classification problem; ``background`` is the input value of an empty pixel, ``class_names`` if they have any."""

    name: str
    train: Split
    test: Split
    classes: int
    background: float
    validation: Split | None = None
    class_names: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of all examples, which tells whether two data sets are the same."""
        tensors = {"train.x": self.train.x, "train.y": self.train.y, "test.x": self.test.x, "test.y": self.test.y}
        if self.validation is not None:
            tensors |= {"validation.x": self.validation.x, "validation.y": self.validation.y}
        return tensors_checksum(tensors)

    def with_validation(self, share: float = 0.1, *, seed: int = 0) -> DataSet:
        """The same problem with a ``share`` of the training examples put aside for validation; the test part stays.

        To choose a learning rate or when to stop: on the test part that would flatter the result.

        >>> from flipgrad.data import digits
        >>> data = digits().with_validation()
        >>> len(data.train), len(data.validation), len(data.test)
        (1293, 144, 360)
        """
        if self.validation is not None:
            raise InputError(f"the data set '{self.name}' has a validation part already; split the original one")
        train, validation = self.train.divide(share, seed=seed)
        return replace(self, train=train, validation=validation)
