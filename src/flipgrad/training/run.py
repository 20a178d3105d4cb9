"""The folder of a run: configuration, metrics, weights. Every file is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from flipgrad import files


class RunFolder:
    """A new folder that belongs to one run.

    Args:
        path: where to make it.
        overwrite: whether the files of an earlier run there may be replaced.

    Raises:
        InputError: if the folder holds something already, or cannot be written.
    """

    CONFIG = "config.json"
    METRICS = "metrics.jsonl"
    WEIGHTS = "weights.safetensors"
    ESTIMATOR = "estimator.safetensors"
    SUMMARY = "summary.json"
    CURVE = "curve.png"

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        files.new_folder(path, overwrite=overwrite)
        for name in (self.METRICS, self.SUMMARY, self.WEIGHTS, self.ESTIMATOR, self.CURVE):
            (path / name).unlink(missing_ok=True)
        files.write(path / self.METRICS, b"")

    def write_config(self, config: Mapping[str, object]) -> None:
        """The configuration, with what is needed to tell where numbers came from."""
        files.write_json(self.path / self.CONFIG, {"config": dict(config), **files.provenance()})

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """One line of JSON per epoch."""
        with (self.path / self.METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(record)) + "\n")

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """The final numbers."""
        files.write_json(self.path / self.SUMMARY, dict(summary))

    def save_weights(self, net: torch.nn.Module) -> None:
        """The network's state in safetensors, which holds tensors and nothing that could run."""
        files.write(self.path / self.WEIGHTS, _tensors(net))

    def save_estimator(self, estimator: torch.nn.Module) -> None:
        """The state of an estimator that has one, such as a baseline."""
        if estimator.state_dict():
            files.write(self.path / self.ESTIMATOR, _tensors(estimator))


def _tensors(module: torch.nn.Module) -> bytes:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    return safetensors.torch.save(state)
