"""Files that were cut off or changed anywhere are refused with one clear error, or read as what they then are.

Where a format has checksums (gzip, PNG) a changed file gives the original data or the error. Plain bytes have none: there a
changed byte is another pixel or label, but never another shape, a label beyond the classes, or a traceback.
"""

from __future__ import annotations

import gzip
import importlib
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cifar10 import RECORDS, archive_of, contents, folder_of
from test_images import grey
from test_mnist import NAMES, arrays, idx

from flipgrad.data import DataSet, cifar10, image_folder, mnist
from flipgrad.errors import InputError

few = settings(max_examples=3 * settings().max_examples)
# Where a file is cut off, or which of its bytes is changed, as a share of its length; and to what.
place = st.floats(0, 1, exclude_max=True)
change = st.integers(1, 255)


@pytest.fixture(autouse=True, scope="module")
def _few_records():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("flipgrad.data.cifar10"), "RECORDS", RECORDS)
        yield


def mnist_files(zipped):
    encode, ending = (gzip.compress, ".gz") if zipped else (bytes, "")
    return {name + ending: encode(idx(values)) for name, values in zip(NAMES, arrays(), strict=True)}


def cifar_archive():
    with tempfile.TemporaryDirectory() as folder:
        path = archive_of(Path(folder) / "all.tar.gz", contents(".bin"), "cifar-10-batches-bin")
        return {"all.tar.gz": path.read_bytes()}


def images():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.png"
        found = {}
        for i in range(12):
            grey(20 * i).save(path)
            found[f"{'cats' if i % 2 else 'ants'}-{i}.png"] = path.read_bytes()
        return found


def read_images(folder):
    for file in list(folder.iterdir()):
        if file.suffix == ".png":
            (folder / file.name[:4]).mkdir(exist_ok=True)
            file.rename(folder / file.name[:4] / file.name)
    return image_folder(folder, None, test_share=0.25, seed=0)


FORMATS = {
    "mnist": (mnist_files(False), mnist),
    "mnist, gzipped": (mnist_files(True), mnist),
    "cifar10, binary": (contents(".bin"), cifar10),
    "cifar10, python": (contents(""), cifar10),
    "cifar10, archive": (cifar_archive(), lambda folder: cifar10(folder / "all.tar.gz")),
    "images": (images(), read_images),
}
# Whose files tell when a byte is changed.
CHECKED = ("mnist, gzipped", "cifar10, archive", "images")
every_format = pytest.mark.parametrize("kind", FORMATS)


def read(kind, changed):
    """The data set of a folder with some of its files ``changed``."""
    files, reader = FORMATS[kind]
    with tempfile.TemporaryDirectory() as folder:
        return reader(folder_of(Path(folder), files | changed))


def read_or_refused(kind, changed):
    """The same, or None where the files are refused in one line."""
    try:
        return read(kind, changed)
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    return None


def well_formed(data: DataSet, like: DataSet) -> bool:
    return all(
        part.x.shape == wanted.x.shape
        and part.x.dtype == torch.float32
        and bool((part.x.abs() <= 1).all())
        and bool(((part.y >= 0) & (part.y < data.classes)).all())
        for part, wanted in ((data.train, like.train), (data.test, like.test))
    )


def same(data: DataSet, other: DataSet) -> bool:
    pairs = ((data.train, other.train), (data.test, other.test))
    return all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs)


@every_format
def test_whole_files_are_read(kind):
    data = read(kind, {})
    assert well_formed(data, data)


@every_format
@few
@given(which=place, end=place)
def test_a_file_that_was_cut_off_is_refused(kind, which, end):
    files = FORMATS[kind][0]
    name = list(files)[int(which * len(files))]
    data = read_or_refused(kind, {name: files[name][: int(end * len(files[name]))]})
    # The last bytes of a PNG file only say that it ends.
    assert data is None or (kind == "images" and same(data, read(kind, {})))


@every_format
@few
@given(which=place, where=place, by=change)
# Another operation of a pickle, which Python refuses in two lines.
@example(which=0.0, where=0.0, by=208)
def test_a_changed_byte_ends_in_an_error_or_in_data_of_the_right_kind(kind, which, where, by):
    files = FORMATS[kind][0]
    name = list(files)[int(which * len(files))]
    content = bytearray(files[name])
    content[int(where * len(content))] ^= by
    original = read(kind, {})
    data = read_or_refused(kind, {name: bytes(content)})
    assert data is None or well_formed(data, original)
    assert data is None or kind not in CHECKED or same(data, original)
