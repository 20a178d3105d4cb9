"""All that is needed to go on with a run, in one file: tensors and JSON in safetensors, nothing that could run."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flipgrad.errors import InputError

# Changes with the meaning of what is stored.
FORMAT = "flipgrad checkpoint 1"


@final
@dataclass(frozen=True)
class Checkpoint:
    """The state of a training between two updates.

    Attributes:
        tensors: by name, with the part that they belong to in front ("net.head.weight").
        facts: the position and the configuration, in what JSON can hold.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, without its name."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def to_bytes(self) -> bytes:
        """The content of the file."""
        # Copies, as a file must not hold the same memory twice.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        facts = json.dumps(self.facts)
        metadata = {"format": FORMAT, "facts": facts, "checksum": str(_checksum(tensors, facts))}
        return bytes(safetensors.torch.save(tensors, metadata))

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """The checkpoint in a ``file``.

        Raises:
            InputError: if there is none, or what is there is truncated, damaged or something else.
        """
        fix = "put the whole file back, or train anew with --overwrite"
        try:
            with safetensors.safe_open(file, framework="pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise InputError(
                f"'{file}' is missing: the run stopped before its first one; train anew with --overwrite"
            ) from None
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"'{file}' is truncated or damaged ({error}); {fix}") from None
        if metadata.get("format") != FORMAT:
            raise InputError(f"'{file}' is no checkpoint of this version of flipgrad ({FORMAT}); {fix}")
        facts = metadata.get("facts", "")
        if metadata.get("checksum") != str(_checksum(tensors, facts)):
            raise InputError(f"'{file}' is damaged: its checksum is wrong; {fix}")
        return cls(tensors, json.loads(facts))


def _checksum(tensors: dict[str, Tensor], facts: str) -> int:
    """Of names, kinds, shapes and values."""
    total = zlib.crc32(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return total
