"""CIFAR-10: 60,000 colour photographs of 32x32 pixels in ten classes, read from its official files."""

import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from flipgrad.data._unpickle import Pickled, unpickle
from flipgrad.data.sets import DataSet, Split, advising, from_bytes
from flipgrad.errors import InputError

RECORDS = 10_000
VALUES = 3 * 32 * 32
CLASSES = 10
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = ["test_batch"]
BATCHES = {name + suffix for name in TRAIN + TEST for suffix in ("", ".bin")}
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
    parts = [decode(files.pop(name + suffix), f"'{name}{suffix}' in '{path}'") for name in TRAIN + TEST]
    train, test = _split(parts[: len(TRAIN)]), _split(parts[len(TRAIN) :])
    return DataSet("cifar10", train, test, classes=CLASSES, background=0.0)


def _split(parts: list[tuple[Bytes, Bytes]]) -> Split:
    pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return Split(from_bytes(pixels.reshape(-1, 3, 32, 32)), labels.long())


def _read_folder(path: Path) -> dict[str, bytes]:
    """The contents of the batches in the first folder that has any."""
    for folder in (path, *(path / name for name in FOLDERS)):
        contents = {}
        for file in folder.glob("*"):
            if not (file.name in BATCHES and file.is_file()):
                continue
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
                if not (name in BATCHES and member.isfile()):
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
    """Before anything is read. A pickle may hold its bytes as text, in up to two bytes each."""
    most = RECORDS * (1 + VALUES) * (1 if name.endswith(".bin") else 3) + 1000
    if size > most:
        raise InputError(f"{where} has {size} bytes, expected no more than {most}")


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
    pixels = data.bytes_of_shape((RECORDS, VALUES)) if isinstance(data, Pickled) else None
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
