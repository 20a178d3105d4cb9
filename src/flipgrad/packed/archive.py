"""The file of a packed network: arrays and facts in the safetensors format, read with numpy alone and nothing taken on trust.

The format is eight bytes with the length of a JSON header, the header, and the arrays one after the other. It says of every
array its dtype, its shape, and where it lies; our own facts are in one entry of its metadata, with a checksum.
"""

import json
import math
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.packed.parts import Array

# The kind of the file, with the version of its meaning.
KIND = "packed 1"
# The entry of the metadata that is ours, as in all our files.
HEADER = "flipgrad"
# Bytes, of the file and of its header.
LARGEST_FILE, LARGEST_HEADER = 2**31, 2**22
# Of the arrays that we store, largest items first, so that every array is aligned.
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I16": np.dtype("<i2"), "U8": np.dtype("u1")}
AGAIN = "pack the network again: flipgrad pack RUN --output FILE"


def to_bytes(arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> bytes:
    """The content of a file with these arrays, of one of ``DTYPES`` each, and facts."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    entries: dict[str, Any] = {}
    contents: list[bytes] = []
    end = 0
    for name in ordered:
        values = arrays[name]
        contents.append(values.astype(values.dtype.newbyteorder("<")).tobytes())
        begin, end = end, end + len(contents[-1])
        entries[name] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    data = b"".join(contents)
    told = files.json_line({"kind": KIND, "facts": dict(facts), "arrays": f"{zlib.crc32(data):08x}"})
    header = json.dumps({"__metadata__": {HEADER: told}, **entries}, separators=(",", ":")).encode()
    # Arrays begin at a multiple of eight.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and the facts of a file of :func:`to_bytes`.

    Raises:
        InputError: if it is missing or damaged, or not such a file.
    """
    return from_bytes(files.read(path, missing="give a file of flipgrad pack", broken=AGAIN, most=LARGEST_FILE), f"'{path}'")


def from_bytes(content: bytes, where: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """See :func:`read`; an error begins with ``where`` the content was."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= length <= min(LARGEST_HEADER, len(content) - 8):
        raise _damaged(where, "it is no safetensors file, or ends too early")
    data = memoryview(content)[8 + length :]
    try:
        header = json.loads(content[8 : 8 + length].decode())
    except (ValueError, RecursionError):
        raise _damaged(where, "its header is no JSON") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    told = metadata.get(HEADER) if isinstance(metadata, dict) else None
    if not isinstance(told, str):
        raise InputError(f"{where} is no packed network of flipgrad; {AGAIN}")
    # What is no text of ours is no JSON of ours either.
    told = files.parse_json(told.encode(errors="replace"), f"{where}: its description", AGAIN)
    if told.get("kind") != KIND:
        raise InputError(f"{where} is no packed network of this version of flipgrad ({KIND}); {AGAIN}")
    if told.get("arrays") != f"{zlib.crc32(data):08x}" or not isinstance(told.get("facts"), dict):
        raise _damaged(where, "its checksum is wrong")
    return _arrays(header, data, where), told["facts"]


def _arrays(header: Mapping[str, Any], data: memoryview, where: str) -> dict[str, Array]:
    """The arrays that the ``header`` tells of, which must cover the ``data`` from its beginning to its end."""
    described = {name: _description(entry) for name, entry in header.items()}
    found: dict[str, Array] = {}
    end = 0
    for name, entry in sorted(described.items(), key=lambda item: item[1].begin if item[1] else -1):
        if entry is None:
            raise _damaged(where, f"array {name!r:.100} is not described as ours are")
        if entry.begin != end or entry.end - end != math.prod(entry.shape) * entry.dtype.itemsize or entry.end > len(data):
            raise _damaged(where, f"array {name!r:.100} does not lie where it should")
        # Aligned, whatever the length of the header is.
        found[name] = np.require(np.frombuffer(data[end : entry.end], entry.dtype).reshape(entry.shape), requirements="A")
        end = entry.end
    if end != len(data):
        raise _damaged(where, "it is longer than its arrays")
    return found


class _Description(NamedTuple):
    dtype: np.dtype[Any]
    shape: list[int]
    begin: int
    end: int


def _description(entry: Any) -> _Description | None:
    """What the header tells of an array, or None if that is not as ours is."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return None
    if not _whole_numbers(shape, 1, range(1, 5)) or not _whole_numbers(offsets, 0, [2]):
        return None
    return _Description(DTYPES[dtype], shape, *offsets)


def _whole_numbers(value: Any, low: int, lengths: Container[int]) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) not in lengths:
        return False
    return all(type(each) is int and low <= each <= LARGEST_FILE for each in value)


def _damaged(where: str, why: str) -> InputError:
    return InputError(f"{where} is damaged: {why}; {AGAIN}")
