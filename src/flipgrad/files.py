"""Writing files and folders so that nothing is lost or half-written, and where numbers came from."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO

import torch

from flipgrad.errors import InputError, StorageError


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a kill, a crash of the machine or a full disk leaves the old one or the new one.

    Raises:
        StorageError: if that cannot be done.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            _reach_the_disk(file)
        os.replace(temporary, path)
    except OSError as error:
        _discard(temporary)
        raise _failed(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; of a line that could not be written whole, a part may be left at its end.

    Raises:
        StorageError: if that cannot be done.
    """
    try:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            _reach_the_disk(file)
    except OSError as error:
        raise _failed(path, error) from error


def _reach_the_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _failed(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write '{path}': {error.strerror or error}; what was stored before is kept")


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON for people and programs: indented, numbers in full, no NaN."""
    write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def new_folder(path: Path, *, overwrite: bool = False) -> Path:
    """Make a folder for results.

    Args:
        path: where to make it.
        overwrite: whether files of an earlier run there may be replaced.

    Raises:
        InputError: if it holds something already, or cannot be written.
    """
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"output '{path}' is a file; give a folder")
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            raise InputError(f"output folder '{path}' exists and is not empty; give another --output, or --overwrite")
        path.mkdir(parents=True, exist_ok=True)
        # Find out now, not after the work, whether files can be written.
        probe = path / ".probe.part"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to output folder '{path}': {error.strerror}; give another --output") from None
    return path


def provenance() -> dict[str, object]:
    """The command, the versions and the machine behind a result."""
    versions = {name: version(name) for name in ("flipgrad", "torch", "numpy")}
    versions["python"] = platform.python_version()
    machine = {"system": platform.system(), "processor": platform.machine(), "threads": torch.get_num_threads()}
    machine["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"command": sys.argv[1:], "versions": versions, "machine": machine}
