"""The folder of a run: configuration, metrics, weights, checkpoint. It is written by one process at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import safetensors.torch
import torch

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.training.checkpoint import Checkpoint
from flipgrad.training.config import TrainConfig
from flipgrad.training.lock import FolderLock
from flipgrad.training.search import Trial


@final
class RunFolder:
    """A folder that belongs to one run, new or gone on with; hold it with ``with``, or :meth:`close` it.

    Args:
        path: where to make it.
        overwrite: whether the files of an earlier run there may be replaced.

    Raises:
        InputError: if the folder holds something already, cannot be written, or is being written by another run.
    """

    CONFIG = "config.json"
    METRICS = "metrics.jsonl"
    WEIGHTS = "weights.safetensors"
    CHECKPOINT = "checkpoint.safetensors"
    SUMMARY = "summary.json"
    EVALUATION = "evaluation.json"
    SEARCH = "search.json"
    CURVE = "curve.png"
    REPORT = "report.html"

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = files.new_folder(path, overwrite=overwrite)
        self._lock = FolderLock(path)
        # The checkpoint first: what is half removed must not look like a run that can go on.
        earlier = (self.CHECKPOINT, self.METRICS, self.SUMMARY, self.WEIGHTS)
        for name in (*earlier, self.EVALUATION, self.SEARCH, self.CURVE, self.REPORT):
            (path / name).unlink(missing_ok=True)
        files.write(path / self.METRICS, b"")

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that is to go on; nothing in it is changed."""
        if not (path / cls.CONFIG).is_file():
            raise InputError(f"'{path}' is no folder of a run: it has no {cls.CONFIG}; give the --output of flipgrad train")
        folder = cls.__new__(cls)
        folder.path = path
        try:
            folder._lock = FolderLock(path)
        except OSError as error:
            raise InputError(f"cannot write to '{path}': {error.strerror}; allow it, or copy the run") from None
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs have the folder."""
        self._lock.release()

    def write_config(self, config: TrainConfig, **more: object) -> None:
        """The configuration, with what is needed to tell where numbers came from."""
        files.write_json(self.path / self.CONFIG, {"config": config.to_json(), **more, **files.provenance()})

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """One line of JSON per epoch."""
        files.append_line(self.path / self.METRICS, json.dumps(dict(record)))

    def keep_metrics(self, count: int) -> list[dict[str, float]]:
        """Drop the lines of epochs after the first ``count``: a kill may have come between a line and its checkpoint."""
        path = self.path / self.METRICS
        lines = path.read_bytes().splitlines() if path.is_file() else []
        try:
            records = [json.loads(line) for line in lines[:count]]
        except ValueError:
            records = []
        if len(records) < count:
            raise InputError(
                f"'{path}' does not hold the {count} epochs of the checkpoint; put it back, or train anew with --overwrite"
            )
        files.write(path, b"".join(line + b"\n" for line in lines[:count]))
        return records

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """The final numbers."""
        files.write_json(self.path / self.SUMMARY, dict(summary))

    @property
    def finished(self) -> bool:
        """Whether the run went to its end."""
        return (self.path / self.SUMMARY).is_file()

    def write_trials(self, trials: Sequence[Trial]) -> None:
        """What the search for the learning rate has tried so far."""
        files.write_json(self.path / self.SEARCH, [trial.as_json() for trial in trials])

    def save_weights(self, net: torch.nn.Module) -> None:
        """The network's state in safetensors, which holds tensors and nothing that could run."""
        # Copies, as a file must not hold the same memory twice.
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in net.state_dict().items()}
        files.write(self.path / self.WEIGHTS, safetensors.torch.save(state))

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """All that is needed to go on."""
        files.write(self.path / self.CHECKPOINT, checkpoint.to_bytes())

    def read_checkpoint(self) -> Checkpoint:
        """What was saved last."""
        return Checkpoint.read(self.path / self.CHECKPOINT)


def read_config(path: Path, *, device: str | None = None) -> TrainConfig:
    """The configuration of the run in the folder ``path``.

    Args:
        path: the folder.
        device: instead of the run's own, which may not be there.
    """
    file = path / RunFolder.CONFIG
    try:
        stored = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"'{path}' is no folder of a run: {file.name}: {error.strerror}; give the --output of a run") from None
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise InputError(f"'{file}' is not the configuration of a run; put it back, or train anew")
    values = stored["config"] if device is None else {**stored["config"], "device": device}
    return TrainConfig.from_json(values, f"'{file}'")


def read_trials(path: Path) -> list[Trial]:
    """What the search for the learning rate had tried in the folder ``path``."""
    file = path / RunFolder.SEARCH
    if not file.is_file():
        return []
    try:
        return [Trial.from_json(trial) for trial in json.loads(file.read_bytes())]
    except (ValueError, TypeError, AttributeError):
        raise InputError(f"'{file}' holds no trials of a search; remove it, and the search begins anew") from None
