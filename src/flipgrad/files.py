"""Writing files so that nothing is lost or half-written, reading them so that damage is noticed, and where numbers came from.

What flipgrad writes and reads back, JSON or tensors (:mod:`flipgrad.tensor_files`), has a checksum of its content in it. It
tells damage and edits by hand; it is no protection from somebody who means harm, who would write a right one.
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

from flipgrad.errors import InputError, StorageError
from flipgrad.machine import cores

CHECKSUM = "checksum"
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
    return parse_json(read(path, missing=missing, broken=broken, most=most), f"'{path}'", broken)


def read_json_lines(path: Path, *, missing: str, broken: str, count: int | None = None) -> list[dict[str, Any]]:
    """The first ``count`` lines (by default all) that :func:`append_json` wrote, as :func:`read_json` reads files.

    The beginning of a line at the end, which a kill in its writing left, does not count.
    """
    *lines, last = read(path, missing=missing, broken=broken, most=LARGEST_JSON).split(b"\n")
    if not _is_beginning(last):
        lines.append(last)
    return [parse_json(line, f"'{path}', line {number}:", broken) for number, line in enumerate(lines[:count], 1)]


def _is_beginning(line: bytes) -> bool:
    """Whether a line ends before its object does; what we write is ASCII."""
    try:
        json.JSONDecoder().raw_decode(line.decode("ascii"))
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def parse_json(content: bytes, where: str, broken: str) -> dict[str, Any]:
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


def read(path: Path, *, missing: str, broken: str, most: int) -> bytes:
    """The content of a file of at most ``most`` bytes, or an :class:`InputError` with the advice ``missing`` or ``broken``."""
    try:
        check_ordinary(path, broken)
        with path.open("rb") as file:
            # Python takes memory for all that it is asked to read: it is asked for what there is.
            size = os.fstat(file.fileno()).st_size
            content = file.read(size + 1) if size <= most else None
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror}); {missing}") from None
    if content is None or len(content) > most:
        raise InputError(f"'{path}' has more than {most:,} bytes, and is no such file of flipgrad; {broken}")
    return content


def check_ordinary(path: Path, broken: str) -> None:
    """Refuse folders, and pipes and devices, whose reading may have no end."""
    if path.exists() and not path.is_file():
        raise InputError(f"'{path}' is a {'folder' if path.is_dir() else 'device'}, expected a file; {broken}")


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
    # Files are written and read without torch, too.
    import torch

    versions = {name: version(name) for name in ("flipgrad", "torch", "numpy")} | {"python": platform.python_version()}
    threads = {"threads": torch.get_num_threads(), "cores": cores()}
    machine = {"system": platform.system(), "processor": platform.machine(), **threads}
    return {"command": sys.argv[1:], "versions": versions, "machine": machine}
