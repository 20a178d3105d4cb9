"""CIFAR-10: 60,000 colour photographs of 32x32 pixels in ten classes, read from its official files."""

from __future__ import annotations

import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from flipgrad.data._unpickle import PickledArray, unpickle
from flipgrad.data.sets import DataSet, Split, advising, from_bytes
from flipgrad.errors import InputError

RECORDS = 10_000
VALUES = 3 * 32 * 32
CLASSES = 10
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = ["test_batch"]
FOLDERS = ["cifar-10-batches-bin", "cifar-10-batches-py"]
FIX = "download CIFAR-10's binary or python version again and give its folder or .tar.gz"

Bytes = NDArray[np.uint8]


@advising(FIX)
def cifar10(path: Path) -> DataSet:
    """50,000 training and 10,000 test images [3, 32, 32] with values in [-1, 1].

    Krizhevsky. Learning Multiple Layers of Features from Tiny Images. Technical report, University of Toronto, 2009.

    The background is 0, mid-grey: a photograph has no empty pixels, and this is close to their mean. An archive is read
    in memory; of the pickles in the python version nothing is run. Where both versions are, the binary one is read.

    Args:
        path: the folder with ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or with the files of the
            python version, which have no ending; the folder above it; or the ``.tar.gz`` of either version.

    Raises:
        InputError: if a file is missing, truncated or not what its name says.
    """
    files = _read_archive(path) if path.is_file() else _read_folder(path)
    suffix = ".bin" if any(name.endswith(".bin") for name in files) else ""
    for name in TRAIN + TEST:
        if name + suffix not in files:
            raise InputError(f"'{name}{suffix}' is missing in '{path}'")
    decode = _decode_binary if suffix else _decode_python
    parts = {name: decode(files.pop(name + suffix), f"'{name}{suffix}' in '{path}'") for name in TRAIN + TEST}
    train, test = (_split([parts[name] for name in names]) for names in (TRAIN, TEST))
    return DataSet("cifar10", train, test, classes=CLASSES, background=0.0)


def _split(parts: list[tuple[Bytes, Bytes]]) -> Split:
    x = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).reshape(-1, 3, 32, 32)
    y = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    return Split(from_bytes(x), y.long())


def _largest(name: str) -> int:
    """More bytes than this a file cannot have: a pickle may hold its bytes as text, in up to two bytes each."""
    return RECORDS * (1 + VALUES) * (1 if name.endswith(".bin") else 3) + 1000


def _wanted(name: str) -> bool:
    return name.removesuffix(".bin") in TRAIN + TEST


def _read_folder(path: Path) -> dict[str, bytes]:
    """The contents of the batches in the first folder that has any."""
    for folder in (path, *(path / name for name in FOLDERS)):
        files = [file for file in folder.glob("*") if file.is_file() and _wanted(file.name)]
        contents = {}
        for file in files:
            _check_size(file.stat().st_size, f"'{file.name}' in '{path}'", file.name)
            try:
                contents[file.name] = file.read_bytes()
            except OSError as error:
                raise InputError(f"'{file}' cannot be read: {error.strerror}") from None
        if contents:
            return contents
    raise InputError(f"no CIFAR-10 in '{path}': expected data_batch_1.bin or data_batch_1 there or in {' or '.join(FOLDERS)}")


def _read_archive(path: Path) -> dict[str, bytes]:
    """The contents of the batches in an archive; nothing is written to disk."""
    contents = {}
    where = f"the archive '{path}'"
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if not (_wanted(name) and member.isfile()):
                    continue
                where = f"'{member.name}' in '{path}'"
                _check_size(member.size, where, name)
                stream = archive.extractfile(member)
                contents[name] = stream.read() if stream else b""
                where = f"the archive '{path}' after '{member.name}'"
            # The checksum is at the end, beyond the last member.
            while archive.fileobj is not None and archive.fileobj.read(2**20):
                pass
    except (EOFError, OSError, tarfile.TarError, zlib.error, LZMAError) as error:
        # One that is no archive of any kind is told of in as many lines as there are kinds.
        raise InputError(f"{where} is truncated or damaged: {str(error).splitlines()[0].rstrip(':')}") from None
    if not contents:
        raise InputError(f"no CIFAR-10 in the archive '{path}': expected data_batch_1.bin or data_batch_1")
    return contents


def _check_size(size: int, where: str, name: str) -> None:
    """Before anything is read."""
    if size > _largest(name):
        raise InputError(f"{where} has {size} bytes, expected no more than {_largest(name)}")


def _decode_binary(content: bytes, where: str) -> tuple[Bytes, Bytes]:
    """Records of a label and the pixels, channel by channel and row by row."""
    size = RECORDS * (1 + VALUES)
    if len(content) != size:
        fault = "is truncated" if len(content) < size else "is too long"
        raise InputError(f"{where} {fault}: {len(content)} bytes, expected {size}")
    records = np.frombuffer(content, np.uint8).reshape(RECORDS, 1 + VALUES)
    return records[:, 1:], _labels(records[:, 0].tolist(), where)


def _decode_python(content: bytes, where: str) -> tuple[Bytes, Bytes]:
    """A pickled dictionary of ``b"data"``, an array of the pixels in the same order, and ``b"labels"``, a list."""
    values = unpickle(content, where)
    data = values.get(b"data")
    pixels = data.bytes_of_shape((RECORDS, VALUES)) if isinstance(data, PickledArray) else None
    if pixels is None:
        raise InputError(f"{where} has no b'data' that is an array of {RECORDS}x{VALUES} bytes")
    return pixels, _labels(values.get(b"labels"), where)


def _labels(labels: object, where: str) -> Bytes:
    if not isinstance(labels, list) or len(labels) != RECORDS:
        raise InputError(f"{where} has no b'labels' that is a list of {RECORDS} numbers")
    for label in labels:
        if type(label) is not int or not 0 <= label < CLASSES:
            raise InputError(f"{where} has a label {label!r}, expected 0 to {CLASSES - 1}")
    return np.array(labels, dtype=np.uint8)
