"""Metrics for TensorBoard, which is an extra."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flipgrad.errors import InputError


@contextmanager
def board(folder: Path, epoch: int = 0) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes the metrics of an epoch for TensorBoard into ``folder``.

    What an interrupted run wrote after ``epoch``, the last whole one, is dropped.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("TensorBoard is not installed: pip install 'flipgrad[tensorboard]'") from None
    with SummaryWriter(str(folder), purge_step=epoch + 1) as writer:

        def write(record: Mapping[str, Any]) -> None:
            for name, value in record.items():
                for part, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                    if isinstance(number, int | float):
                        writer.add_scalar(f"{name}/{part}" if part else name, number, record["epoch"])
            writer.flush()

        yield write
