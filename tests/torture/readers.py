"""Damaged files given to the readers of data sets.

Where a format has checksums (gzip, PNG) a changed file gives the original data or an error. Plain bytes have none: there a
changed byte is another pixel or label, but never another shape, a label beyond the classes, or a traceback. The same holds
for files that were changed inside and packed anew, with right checksums.
"""

from __future__ import annotations

import gzip
import importlib
import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import final

import torch

from flipgrad.data import DataSet, Split, cifar10, image_folder, mnist
from flipgrad.errors import InputError
from torture.attack import ACCEPTED, REFUSED, Attack, FaultError, Outcome
from torture.damage import NUMBERS, damaged, noise
from torture.samples import RECORDS, Files, archive, cifar_files, image_files, mnist_files, store

Inside = Callable[[bytes, Random], bytes]


@final
@dataclass(frozen=True)
class Format:
    """A data set's files.

    Attributes:
        files: by name.
        read: reads a folder of them.
        checked: whether every change of a file shows.
        inside: changes what is inside of a file, with right checksums.
    """

    files: Files
    read: Callable[[Path], DataSet]
    checked: bool
    inside: Inside = damaged


def inside_gzip(content: bytes, random: Random) -> bytes:
    """Other content, rightly packed."""
    return gzip.compress(damaged(gzip.decompress(content), random), compresslevel=1, mtime=0)


def inside_png(content: bytes, random: Random) -> bytes:
    """A PNG file of other chunks, each with its right checksum: other sizes and kinds of pixels, wrong data, lost chunks."""
    chunks, place = [], 8
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    which = random.randrange(len(chunks))
    kind, data = chunks[which]
    action = random.random()
    if kind == b"IHDR" and action < 0.8:
        fields = list(struct.unpack(">IIBBBBB", data))
        field = random.randrange(7)
        fields[field] = abs(int(random.choice(NUMBERS[:8]))) % (2**32 if field < 2 else 256)
        data = struct.pack(">IIBBBBB", *fields)
    elif kind == b"IDAT" and action < 0.6:
        data = zlib.compress(damaged(zlib.decompress(data), random))
    elif action < 0.8:
        data = damaged(data, random)
    elif action < 0.9:
        kind = random.choice(
            [b"IDAT", b"IEND", b"tRNS", b"PLTE", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"gAMA", b"xxxx"]
        )
    chunks[which] = (kind, data)
    if action > 0.9:
        chunks.insert(random.randrange(len(chunks) + 1), chunks.pop(which) if action < 0.95 else (b"zTXt", noise(random)))
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return content[:8] + b"".join(packed)


def inside_archive(content: bytes, random: Random) -> bytes:
    """An archive of other members: a damaged one, one that is lost, is there twice, has another name, or is no file."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {Path(member.name).name: part.read() for member in tar if (part := tar.extractfile(member)) is not None}
    name = random.choice(list(files))
    action = random.random()
    if action < 0.4:
        files[name] = damaged(files[name], random)
    elif action < 0.6:
        tar_file = damaged(archive(files, "cifar-10-batches-bin", "w"), random)
        return gzip.compress(tar_file, compresslevel=1, mtime=0)
    elif action < 0.7:
        files[random.choice(["data_batch_1", "../../" + name, "/etc/" + name, "x" * 200, "ü" + name])] = files.pop(name)
    else:
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as tar:
            for other, data in files.items():
                member = tarfile.TarInfo(f"folder/{other}")
                member.size = len(data)
                if other == name:
                    member.type = random.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"\xff"])
                    member.linkname = random.choice(["/etc/passwd", "folder/test_batch.bin", f"folder/{other}", ""])
                    member.size = 0
                tar.addfile(member, io.BytesIO(data))
        return gzip.compress(plain.getvalue(), compresslevel=1, mtime=0)
    return archive(files, "cifar-10-batches-bin", random.choice(["w", "w:gz"]))


def inside_image(content: bytes, random: Random) -> bytes:
    return inside_png(content, random) if content.startswith(b"\x89PNG") else damaged(content, random)


def read_images(folder: Path) -> DataSet:
    return image_folder(folder, None, test_share=0.25, seed=0)


def read_resized_images(folder: Path) -> DataSet:
    return image_folder(folder, 5, test_share=0.25, seed=0)


def read_archive(folder: Path) -> DataSet:
    return cifar10(folder / "all.tar.gz")


FORMATS: dict[str, Format] = {
    "mnist": Format(mnist_files(zipped=False), mnist, checked=False),
    "mnist-gzip": Format(mnist_files(zipped=True), mnist, True, inside_gzip),
    "cifar10-binary": Format(cifar_files(".bin"), cifar10, checked=False),
    "cifar10-python": Format(cifar_files(""), cifar10, checked=False),
    "cifar10-archive": Format(
        {"all.tar.gz": archive(cifar_files(".bin"), "cifar-10-batches-bin")}, read_archive, True, inside_archive
    ),
    "png": Format(image_files("grey"), read_images, True, inside_png),
    "png-palette": Format(image_files("palette"), read_images, True, inside_png),
    "jpeg": Format(image_files("jpeg"), read_resized_images, checked=False),
}


def few_records() -> None:
    """Let CIFAR-10's files have a few images each, instead of 10,000."""
    # The package's attribute of that name is the function.
    importlib.import_module("flipgrad.data.cifar10").RECORDS = RECORDS  # type: ignore[attr-defined]


def read_or_refused(kind: Format, folder: Path) -> DataSet | None:
    """The data set, or None where it is refused in one line."""
    try:
        return kind.read(folder)
    except InputError as error:
        if "\n" in str(error):
            raise FaultError("message", f"more than one line: {error}") from None
        return None


def well_formed(data: DataSet, like: DataSet) -> bool:
    """Whether shapes, kinds and ranges are as they should be."""
    return all(
        part.x.shape == wanted.x.shape
        and part.x.dtype == torch.float32
        and bool((part.x.abs() <= 1).all())
        and bool(((part.y >= 0) & (part.y < data.classes)).all())
        for part, wanted in ((data.train, like.train), (data.test, like.test))
    )


def same(data: DataSet, other: DataSet) -> bool:
    """Whether two data sets hold the same examples."""
    pairs = ((data.train, other.train), (data.test, other.test))
    return all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs)


class ReaderAttack(Attack):
    """Damaged files of one format."""

    part = "inputs"

    def __init__(self, kind: str, full: int, seconds: float) -> None:
        self.kind, self.full, self.seconds = kind, full, seconds
        self.name, self.title = f"read-{kind}", f"data files: {kind}"

    def prepare(self, shared: Path, scratch: Path) -> None:
        super().prepare(shared, scratch)
        few_records()
        torch.set_num_threads(1)
        self.format = FORMATS[self.kind]
        store(scratch, self.format.files)
        self.original = self.format.read(scratch)

    def attempt(self, number: int, random: Random) -> Outcome:
        name = random.choice(list(self.format.files))
        content = self.format.files[name]
        repacked = random.random() < 0.4
        changed = (self.format.inside if repacked else damaged)(content, random)
        (self.scratch / name).write_bytes(changed)
        try:
            data = read_or_refused(self.format, self.scratch)
        finally:
            (self.scratch / name).write_bytes(content)
        if data is None:
            return REFUSED
        if not self._shapes_are_right(data):
            raise FaultError("difference", f"{name} ({len(changed)} bytes) gives tensors of wrong shapes, kinds or values")
        if self.format.checked and not repacked and not same(data, self.original):
            raise FaultError("difference", f"{name} was damaged, is accepted, and gives other data")
        return ACCEPTED

    def _shapes_are_right(self, data: DataSet) -> bool:
        # A colour image among grey ones makes all of them colour images.
        if self.kind == "png" and data.train.x.shape[1] == 3 and self.original.train.x.shape[1] == 1:
            train, test = (Split(part.x.expand(-1, 3, -1, -1), part.y) for part in (self.original.train, self.original.test))
            return well_formed(data, replace(self.original, train=train, test=test))
        return well_formed(data, self.original)
