"""A folder of trained networks: each has its weights in NAME.safetensors and its card in NAME.json; nothing there could run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as brief
from typing import final

import numpy as np
import torch
from torch import Tensor

from flipgrad import files, tensor_files
from flipgrad.data import SOURCES, VARIABLE, DataSet, Split, usual_folder
from flipgrad.errors import InputError
from flipgrad.network import BinaryNetwork
from flipgrad.training import Run, load_data, make_net
from flipgrad.training.config import check_device
from flipgrad.zoo.cards import Card

# The kind of the files of weights.
FORMAT = "zoo 1"
# What the name of a weight ends with that is stored in bits.
BITS = ".bits"
# Bytes, of all networks and cards together: what a repository and a wheel can carry.
LARGEST_ZOO = 6_000_000
AGAIN = "install flipgrad again"


@final
class Zoo:
    """The trained networks in a folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """The networks that are there, by name."""
        return sorted(file.stem for file in self.path.glob("*.json"))

    def card(self, name: str) -> Card:
        """What is told of a network.

        Raises:
            InputError: if there is no such network; it names those there are.
        """
        known = self.names()
        if name not in known:
            raise InputError(
                f"there is no network {brief(name)} in the zoo; choose from {', '.join(known) or 'none: it is empty'}"
            )
        file = self._file(name, "json")
        return Card.from_json(files.read_json(file, missing=AGAIN, broken=AGAIN), f"'{file}'")

    def load(self, name: str, *, device: str = "cpu") -> BinaryNetwork:
        """A trained network, in eval mode and single precision.

        It is made from the name and the options of one of our own networks, and gets its weights from a file of tensors.

        Args:
            name: one of :meth:`names`.
            device: where to put it.

        Raises:
            InputError: if there is no such network, or its files are damaged.
        """
        check_device(device)
        card = self.card(name)
        file = self._file(name, "safetensors")
        stored, _ = tensor_files.read_tensors(file, FORMAT, missing=AGAIN, broken=AGAIN)
        if tensor_files.tensors_checksum(stored) != card.weights:
            raise InputError(f"'{file}' holds other weights than its card tells; {AGAIN}")
        net = _rebuilt(card)
        try:
            net.load_state_dict(full_precision(stored, net.state_dict()))
        except RuntimeError as error:
            reason = str(error).replace("\n", " ")
            raise InputError(f"'{file}' does not fit the network of its card ({reason:.200}); {AGAIN}") from None
        return net.to(device).eval()

    def load_run(self, name: str, *, device: str | None = None, data_folder: str | None = None) -> Run:
        """A trained network with the data set that it is for, as :func:`flipgrad.training.load_run` gives those of a run.

        The files of a data set are in ``data_folder`` or, without one, in the data set's folder of ``$FLIPGRAD_DATA``.
        """
        card = self.card(name)
        config = replace(card.config, device=device or card.config.device)
        if SOURCES[config.data].needs_folder and data_folder is None:
            usual = usual_folder(config.data)
            if usual is None:
                fix = f"give their folder, --data-folder, or set ${VARIABLE}"
                raise InputError(f"{name!r} is for the files of {config.data}: {fix}")
            data_folder = str(usual)
        data = load_data(replace(config, data_folder=data_folder))
        return Run(config, self.load(name, device=config.device), data, data.fingerprint == card.data)

    def store(self, card: Card, weights: bytes) -> None:
        """Put a network there, in place of one of the same name.

        Raises:
            InputError: if the folder would become too large.
        """
        described = (json.dumps(files.with_checksum(card.to_json()), indent=1) + "\n").encode()
        others = sum(file.stat().st_size for file in self.path.glob("*") if file.stem != card.name)
        total = others + len(described) + len(weights)
        if total > LARGEST_ZOO:
            raise InputError(
                f"with {card.name!r} ({len(weights):,} bytes) the zoo would have {total:,} bytes, and may have "
                f"{LARGEST_ZOO:,}; train a smaller network, or remove another one"
            )
        # The card last: it makes the network known.
        files.write(self._file(card.name, "safetensors"), weights)
        files.write(self._file(card.name, "json"), described)

    def _file(self, name: str, ending: str) -> Path:
        return self.path / f"{name}.{ending}"


def _rebuilt(card: Card) -> BinaryNetwork:
    """The network of a card with its first weights; the data set is told by its shape alone."""
    blank = Split(torch.zeros(2, *card.inputs), torch.zeros(2, dtype=torch.long))
    return make_net(card.config, DataSet(card.config.data, blank, blank, card.classes, background=0.0))


def half_precision(tensor: Tensor) -> Tensor:
    """A tensor of floats rounded to half precision, others as they are; no number changes its sign, however small.

    A binary weight is the sign of its latent one, and 0 is positive: what would be rounded to 0 from below becomes the smallest
    negative number instead.

    >>> half_precision(torch.tensor([-1e-9, 1e-9, 0.5]))
    tensor([-5.9605e-08,  0.0000e+00,  5.0000e-01], dtype=torch.float16)
    """
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.half()
    smallest = -torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    return torch.where((rounded == 0) & (tensor < 0), smallest, rounded)


def as_bits(weights: Tensor) -> Tensor:
    """The signs of ``weights`` as bytes of eight bits, of which 1 is positive, as 0 is.

    >>> as_bits(torch.tensor([[1.0, -1.0], [0.0, -0.5]]))
    tensor([160], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits((weights.flatten() >= 0).cpu().numpy()))


def full_precision(stored: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network whose tensors are ``like`` that: floats in single precision, and bits as weights ±1.

    Raises:
        RuntimeError: if there are bits for no weight, or other numbers of them.
    """
    weights = {}
    for key, tensor in stored.items():
        name = key.removesuffix(BITS)
        if name == key:
            weights[key] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        if name not in like or tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) != -(-like[name].numel() // 8):
            raise RuntimeError(f"{key} does not hold the bits of a weight")
        bits = torch.from_numpy(np.unpackbits(tensor.cpu().numpy(), count=like[name].numel()))
        weights[name] = (2.0 * bits - 1).view(like[name].shape)
    return weights
