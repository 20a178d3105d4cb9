"""Metrics for TensorBoard, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from flipgrad.errors import InputError


@final
class Board:
    """Writes the metrics of every epoch for TensorBoard.

    Args:
        folder: where its files go.
        epoch: how many epochs are done; what an interrupted run wrote after them is dropped.

    Raises:
        InputError: if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, epoch: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard is not installed: pip install 'flipgrad[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder), purge_step=epoch + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """The numbers of one epoch."""
        for name, value in record.items():
            values = value.items() if isinstance(value, Mapping) else [("", value)]
            for part, number in values:
                if isinstance(number, int | float):
                    self._writer.add_scalar(f"{name}/{part}" if part else name, number, record["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
