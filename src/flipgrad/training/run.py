"""The folder of a run: configuration, metrics, weights. Every file is written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy
import safetensors.torch
import torch

import flipgrad
from flipgrad.errors import InputError


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
        try:
            if path.exists() and not path.is_dir():
                raise InputError(f"output '{path}' is a file; give a folder")
            if path.is_dir() and any(path.iterdir()) and not overwrite:
                raise InputError(f"output folder '{path}' exists and is not empty; give another --output, or --overwrite")
            path.mkdir(parents=True, exist_ok=True)
            for name in (self.METRICS, self.SUMMARY, self.WEIGHTS, self.ESTIMATOR, self.CURVE):
                (path / name).unlink(missing_ok=True)
            self._write(self.METRICS, b"")
        except OSError as error:
            raise InputError(f"cannot write to output folder '{path}': {error.strerror}; give another --output") from None

    def write_config(self, config: Mapping[str, object]) -> None:
        """The configuration, with what is needed to tell where numbers came from."""
        versions = {"flipgrad": flipgrad.__version__, "torch": torch.__version__, "numpy": numpy.__version__}
        machine = {"system": platform.system(), "processor": platform.machine(), "threads": torch.get_num_threads()}
        versions["python"] = platform.python_version()
        self._write_json(
            self.CONFIG,
            {"config": dict(config), "command": sys.argv[1:], "versions": versions, "machine": machine},
        )

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """One line of JSON per epoch."""
        with (self.path / self.METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(record)) + "\n")

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """The final numbers."""
        self._write_json(self.SUMMARY, dict(summary))

    def save_weights(self, net: torch.nn.Module) -> None:
        """The network's state in safetensors, which holds tensors and nothing that could run."""
        self._write(self.WEIGHTS, _tensors(net))

    def save_estimator(self, estimator: torch.nn.Module) -> None:
        """The state of an estimator that has one, such as a baseline."""
        if estimator.state_dict():
            self._write(self.ESTIMATOR, _tensors(estimator))

    def _write_json(self, name: str, value: object) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.part"
        temporary.write_bytes(content)
        os.replace(temporary, self.path / name)


def _tensors(module: torch.nn.Module) -> bytes:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    return safetensors.torch.save(state)
