"""Writing files so that nothing is lost or half-written, reading them so that damage is noticed, and where numbers came from.

What flipgrad writes and reads back, JSON or tensors, has a checksum of its content in it. It tells damage and edits by hand; it
is no protection from somebody who means harm, who would write a right one.
"""

import json
import os
import platform
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flipgrad.errors import InputError, StorageError
from flipgrad.machine import cores

CHECKSUM = "checksum"
# What we say of tensors in the metadata of their file.
HEADER = "flipgrad"
# Bytes. JSON files of ours are smaller; what is larger is not read into memory.
LARGEST_JSON = 2**30
# Added to the ways to open a file that others may have prepared: a link would lead the writer elsewhere.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a kill, a crash of the machine or a full disk leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        # Made anew: what an earlier attempt left there, or a link to another file, is not written to.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            _write_through(file, content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _failed(path, error) from error


def _write_through(file: IO[bytes], content: bytes) -> None:
    """Write, and wait until it has reached the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _failed(path: Path, error: OSError) -> StorageError | InputError:
    """What to raise where a file cannot be written, appended to or removed."""
    if path.is_dir():
        return InputError(f"cannot write '{path}': it is a folder; remove it")
    return StorageError(f"cannot write '{path}': {error.strerror or error}; what was stored before is kept")


def remove(path: Path) -> None:
    """Remove a file that may not be there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _failed(path, error) from error


def write_json(path: Path, value: Mapping[str, object], *, indent: int | None = 2) -> None:
    """Write ``value`` with its checksum as JSON for people and programs: indented, numbers in full, no NaN."""
    write(path, (json.dumps(with_checksum(value), indent=indent, allow_nan=False) + "\n").encode())


def append_json(path: Path, value: Mapping[str, object]) -> None:
    """Add ``value`` with its checksum as one line to a file of such lines; a failure may leave the beginning of the line."""
    try:
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666)) as file:
            _write_through(file, json_line(value).encode() + b"\n")
    except OSError as error:
        raise _failed(path, error) from error


def json_line(value: Mapping[str, object]) -> str:
    """A line of :func:`append_json`."""
    return json.dumps(with_checksum(value))


def with_checksum(value: Mapping[str, object]) -> dict[str, object]:
    """What JSON makes of ``value``, with its checksum.

    >>> with_checksum({"epoch": 3})
    {'epoch': 3, 'checksum': 'a6a7faca'}
    """
    plain = json.loads(json.dumps({key: part for key, part in value.items() if key != CHECKSUM}))
    return {**plain, CHECKSUM: _json_checksum(plain)}


def read_json(path: Path, *, missing: str, broken: str, most: int = LARGEST_JSON) -> dict[str, Any]:
    """What :func:`write_json` wrote into a file of at most ``most`` bytes.

    Raises:
        InputError: with the advice ``missing`` if it cannot be read, and ``broken`` if it is no JSON of ours, or was changed.
    """
    return _parsed(_read(path, missing, broken, most), f"'{path}'", broken)


def read_json_lines(path: Path, *, missing: str, broken: str, count: int | None = None) -> list[dict[str, Any]]:
    """The first ``count`` lines (by default all) that :func:`append_json` wrote, as :func:`read_json` reads files.

    The beginning of a line at the end, which a kill in its writing left, does not count.
    """
    *lines, last = _read(path, missing, broken, LARGEST_JSON).split(b"\n")
    if not _is_beginning(last):
        lines.append(last)
    return [_parsed(line, f"'{path}', line {number}:", broken) for number, line in enumerate(lines[:count], 1)]


def _is_beginning(line: bytes) -> bool:
    """Whether a line ends before its object does; what we write is ASCII."""
    try:
        json.JSONDecoder().raw_decode(line.decode("ascii"))
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _parsed(content: bytes, where: str, broken: str) -> dict[str, Any]:
    """The object that JSON with a checksum holds, without the checksum; an error begins with ``where`` it is."""
    try:
        value = json.loads(content.decode())
        checksum = value.pop(CHECKSUM, None) if isinstance(value, dict) else None
        actual = _json_checksum(value)
    except RecursionError:
        raise InputError(f"{where} is not JSON of ours: it is nested too deeply; {broken}") from None
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); {broken}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} is no file of flipgrad: it must hold fields by name; {broken}")
    if checksum is None:
        raise InputError(f"{where} has no checksum: it was written by hand, or by an older version; {broken}")
    if checksum != actual:
        raise InputError(f"{where} was edited or damaged: its checksum is wrong; {broken}")
    return value


def _json_checksum(value: Any) -> str:
    """Of the content: blanks and the order of keys do not count."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


def _read(path: Path, missing: str, broken: str, most: int) -> bytes:
    try:
        _check_ordinary(path, broken)
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror}); {missing}") from None
    if len(content) > most:
        raise InputError(f"'{path}' has more than {most:,} bytes, and is no such file of flipgrad; {broken}")
    return content


def _check_ordinary(path: Path, broken: str) -> None:
    """Refuse folders, and pipes and devices, whose reading may have no end."""
    if path.exists() and not path.is_file():
        raise InputError(f"'{path}' is a {'folder' if path.is_dir() else 'device'}, expected a file; {broken}")


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
        _check_ordinary(path, broken)
        with safetensors.safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"'{path}' is missing; {missing}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"'{path}' is truncated or damaged ({error}); {broken}") from None
    try:
        header = _parsed(metadata.get(HEADER, "{}").encode(), "", "")
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


def new_folder(path: Path, *, overwrite: bool = False) -> Path:
    """Make a folder for results; refuse one that cannot be written, or that holds something not to be overwritten."""
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"output '{path}' is a file; give a folder")
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            raise InputError(f"output folder '{path}' exists and is not empty; give another --output, or --overwrite")
        path.mkdir(parents=True, exist_ok=True)
        # Find out now, not after the work, whether files can be written.
        probe = path / ".probe.part"
        probe.unlink(missing_ok=True)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to output folder '{path}': {error.strerror}; give another --output") from None
    return path


def provenance() -> dict[str, object]:
    """The command, the versions and the machine behind a result."""
    versions = {name: version(name) for name in ("flipgrad", "torch", "numpy")} | {"python": platform.python_version()}
    threads = {"threads": torch.get_num_threads(), "cores": cores()}
    machine = {"system": platform.system(), "processor": platform.machine(), **threads}
    return {"command": sys.argv[1:], "versions": versions, "machine": machine}
