"""MNIST: 70,000 handwritten digits of 28x28 pixels, read from the files of its distribution."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flipgrad.data.sets import DataSet, Split, advising, from_bytes
from flipgrad.errors import InputError

PIXELS = 28
CLASSES = 10
# Of the larger part: no file is read beyond that many images.
MOST_IMAGES = 60_000
FIX = "download MNIST's four files again and give their folder"


@advising(FIX)
def mnist(folder: Path) -> DataSet:
    """60,000 training and 10,000 test images [1, 28, 28] with values in [-1, 1].

    LeCun, Bottou, Bengio, Haffner. Gradient-Based Learning Applied to Document Recognition. Proceedings of the IEEE
    86(11), 1998. Other sets in the same files, such as Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), are read as well.

    Args:
        folder: with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``, each as it is or gzipped with the ending ``.gz``.

    Raises:
        InputError: if a file is missing, truncated or not what its name says.
    """
    return DataSet("mnist", _split(folder, "train"), _split(folder, "t10k"), classes=CLASSES, background=-1.0)


def _split(folder: Path, part: str) -> Split:
    images = _read_idx(_find(folder, f"{part}-images-idx3-ubyte"), (PIXELS, PIXELS))
    file = _find(folder, f"{part}-labels-idx1-ubyte")
    labels = _read_idx(file, ())
    if len(labels) != len(images):
        raise InputError(f"'{file}' has {len(labels)} labels for {len(images)} images")
    if labels.max() >= CLASSES:
        raise InputError(f"'{file}' has a label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return Split(from_bytes(images[:, None]), labels.long())


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise InputError(f"'{folder / name}' is missing, and so is '{name}.gz'")


def _read_idx(file: Path, shape: tuple[int, ...]) -> Tensor:
    """An IDX file of bytes, [N, *shape]: magic number (type 8, number of dimensions), dimensions as big-endian int32, data."""
    header_size = 4 * (2 + len(shape))
    item_size = int(np.prod(shape))
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            content = stream.read(header_size + item_size * MOST_IMAGES + 1)
    except EOFError:
        raise InputError(f"'{file}' is truncated: its gzip stream ends early") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"'{file}' cannot be read: {error}") from None
    if len(content) < header_size:
        raise InputError(f"'{file}' is truncated: {len(content)} bytes, expected a header of {header_size}")
    magic, count, *dimensions = struct.unpack_from(f">{2 + len(shape)}I", content)
    expected = 0x0800 + 1 + len(shape)
    if magic != expected:
        raise InputError(f"'{file}' begins with the magic number {magic}, expected {expected}: it is another kind of file")
    if tuple(dimensions) != shape:
        raise InputError(f"'{file}' has images of {'x'.join(map(str, dimensions))} pixels, expected {PIXELS}x{PIXELS}")
    if not 0 < count <= MOST_IMAGES:
        raise InputError(f"'{file}' announces {count} examples, expected 1 to {MOST_IMAGES}")
    size = header_size + count * item_size
    if len(content) != size:
        fault = f"is truncated: {len(content)} bytes" if len(content) < size else f"goes on after {size} bytes"
        raise InputError(f"'{file}' {fault}, expected {size} for the {count} examples of its header")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header_size).copy()).reshape(count, *shape)
