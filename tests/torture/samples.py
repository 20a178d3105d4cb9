"""Small data sets in the files of large ones: MNIST, CIFAR-10 in both versions and their archives, folders of images."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MNIST_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
# Images per file of CIFAR-10, instead of 10,000: what reads them has to be told.
RECORDS = 4

Files = dict[str, bytes]


def idx(values: NDArray[Any]) -> bytes:
    """An IDX file of bytes."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def mnist_arrays() -> list[NDArray[Any]]:
    """The images and labels of seven training and three test examples."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 256, (count, 28, 28)) if "images" in name else np.arange(count) % 10
        for name, count in zip(MNIST_NAMES, (7, 7, 3, 3), strict=True)
    ]


def mnist_files(*, zipped: bool) -> Files:
    """The four files of MNIST, with seven training and three test images."""
    plain = {name: idx(values) for name, values in zip(MNIST_NAMES, mnist_arrays(), strict=True)}
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in plain.items()} if zipped else plain


def cifar_batch(number: int) -> tuple[NDArray[Any], list[int]]:
    """The pixels and labels of one file of CIFAR-10."""
    random = np.random.default_rng(number)
    return random.integers(0, 256, (RECORDS, 3072), np.uint8), random.integers(0, 10, RECORDS).tolist()


def encode_cifar(pixels: NDArray[Any], labels: list[int], suffix: str) -> bytes:
    """A file of the binary (".bin") or the python version ("")."""
    if suffix:
        return b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))
    return pickle.dumps({b"batch_label": b"a batch", b"labels": labels, b"data": pixels, b"filenames": [b"a.png"]}, 2)


def cifar_files(suffix: str) -> Files:
    """The six files of CIFAR-10."""
    return {name + suffix: encode_cifar(*cifar_batch(number), suffix) for number, name in enumerate(CIFAR_NAMES)}


def archive(files: Mapping[str, bytes], folder: str, mode: str = "w:gz") -> bytes:
    """A tar file with the ``files`` in a ``folder``."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:  # type: ignore[call-overload]
        for name, part in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))
    return content.getvalue()


def grey(value: int, height: int = 4, width: int = 6) -> Image.Image:
    """An image of one grey."""
    return Image.fromarray(np.full((height, width), value, np.uint8))


def image_files(kind: str) -> Files:
    """Six images each of ants and cats: "grey" or "palette" PNG, or "jpeg"."""
    found = {}
    for i in range(12):
        image = grey(20 * i)
        if kind == "palette":
            image = Image.fromarray(np.random.default_rng(i).integers(0, 256, (4, 6, 3), np.uint8)).quantize(16)
        content = io.BytesIO()
        image.save(content, "JPEG" if kind == "jpeg" else "PNG")
        name, ending = ("cats" if i % 2 else "ants"), ("jpg" if kind == "jpeg" else "png")
        found[f"{name}/{i}.{ending}"] = content.getvalue()
    return found


def store(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
