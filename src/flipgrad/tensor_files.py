"""Tensors as files that are checked when they are read: safetensors, in which nothing could run."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.files import check_ordinary, json_line, parse_json

# What we say of tensors in the metadata of their file.
HEADER = "flipgrad"


def tensors_to_bytes(kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> bytes:
    """Tensors by name, and facts about them, as a safetensors file with a checksum; nothing in it could run.

    ``kind`` is that of the file, with the version of its meaning: what :func:`read_tensors` is to ask for.
    """
    # Copies, as a file must not hold the same memory twice.
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # In one entry: safetensors writes several in any order, and the same content is to give the same bytes.
    header = json_line({"kind": kind, "facts": dict(facts or {}), "tensors": tensors_checksum(stored)})
    return bytes(safetensors.torch.save(stored, {HEADER: header}))


def read_tensors(path: Path, kind: str, *, missing: str, broken: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file of :func:`tensors_to_bytes`.

    Raises:
        InputError: with the advice ``missing`` if it is not there, and ``broken`` if it is damaged or of another ``kind``.
    """
    try:
        check_ordinary(path, broken)
        with safetensors.safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"'{path}' is missing; {missing}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"'{path}' is truncated or damaged ({error}); {broken}") from None
    try:
        header = parse_json(metadata.get(HEADER, "{}").encode(), "", "")
    except InputError:
        header = {}
    if header.get("kind") != kind:
        raise InputError(f"'{path}' is damaged, or no {kind.rsplit(' ', 1)[0]} of this version of flipgrad ({kind}); {broken}")
    if header["tensors"] != tensors_checksum(tensors):
        raise InputError(f"'{path}' is damaged: its checksum is wrong; {broken}")
    return tensors, header["facts"]


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, kinds, shapes and values."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
