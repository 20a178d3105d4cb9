"""All that is needed to go on with a run, in one file: tensors and JSON in safetensors, nothing that could run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from flipgrad import files

# Changes with the meaning of what is stored.
FORMAT = "checkpoint 2"


@final
@dataclass(frozen=True)
class Checkpoint:
    """The state of a training between two updates.

    Attributes:
        tensors: by name, with the part that they belong to in front ("net.head.weight").
        facts: the position, the configuration and the data's fingerprint, in what JSON can hold.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, without its name."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return files.tensors_to_bytes(FORMAT, self.tensors, self.facts)

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """The checkpoint in a ``file``.

        Raises:
            InputError: if there is none, or what is there is truncated, damaged or something else.
        """
        fix = "put the whole file back, or train anew with --overwrite"
        return cls(*files.read_tensors(file, FORMAT, missing=fix, broken=fix))
