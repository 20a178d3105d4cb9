"""A trained network for commands that write it for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import flipgrad.zoo
from flipgrad import files
from flipgrad.cli._shared import ZOO, check_no_own_code
from flipgrad.data import SOURCES
from flipgrad.errors import InputError
from flipgrad.network import BinaryNetwork
from flipgrad.training import RunFolder, TrainConfig, load_run

# Inputs that are taken of a data set.
EXAMPLES = 256


@final
@dataclass(frozen=True)
class Trained:
    """A trained network, and what is told of it.

    Attributes:
        net: the network, on the processor and in eval mode.
        examples: inputs [B, ...]; those of a network of the zoo, whose data need not be there, are noise.
        config: how it was trained.
        class_names: what its classes are called; those without names have their numbers.
        accuracy: measured on the test examples, with one, many and no samples; None if the run is not finished.
        origin: of a network of the zoo, its name and its recipe.
    """

    net: BinaryNetwork
    examples: Tensor
    config: TrainConfig
    class_names: tuple[str, ...]
    accuracy: dict[str, float] | None
    origin: dict[str, str]


def trained(run: str, *, data_folder: str | None, model: str | None, estimator: str | None) -> Trained:
    """The network of a folder of ``flipgrad train`` or, as ``zoo:NAME``, of the zoo; for the rest see ``load_run``."""
    if run.startswith(ZOO):
        check_no_own_code(model, estimator)
        if data_folder is not None:
            raise InputError("--data-folder is for runs: a network of the zoo is written without its data; leave it out")
        name = run.removeprefix(ZOO)
        card = flipgrad.zoo.card(name)
        examples = torch.randn(EXAMPLES, *card.inputs, generator=torch.Generator().manual_seed(0)).clamp_(-1, 1)
        names = _class_names(card.config, (), card.classes)
        origin = {"name": name, "command": card.command}
        return Trained(flipgrad.zoo.load(name), examples, card.config, names, _accuracy(card.test), origin)
    loaded = load_run(run, device="cpu", data_folder=data_folder, model=model, estimator=estimator)
    file, fix = Path(run) / RunFolder.SUMMARY, "remove it, and the accuracies are left out"
    found = _accuracy(files.read_json(file, missing=fix, broken=fix)) if file.exists() else None
    names = _class_names(loaded.config, loaded.data.class_names, loaded.data.classes)
    return Trained(loaded.net, loaded.data.test.x[:EXAMPLES], loaded.config, names, found, {})


def _class_names(config: TrainConfig, told: tuple[str, ...], classes: int) -> tuple[str, ...]:
    return told or SOURCES[config.data].class_names or tuple(map(str, range(classes)))


def _accuracy(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Of an :class:`~flipgrad.training.Evaluation` as JSON, the accuracies by name."""
    names = {"accuracy_1": "1 sample", "accuracy_n": f"{numbers['samples']} samples", "accuracy_deterministic": "deterministic"}
    return {name: float(numbers[key]) for key, name in names.items()}
