"""Files that were cut off or changed anywhere are refused with one clear error, or read as what they then are.

Where a format has checksums (gzip, PNG) a changed file gives the original data or the error. Plain bytes have none: there a
changed byte is another pixel or label, but never another shape, a label beyond the classes, or a traceback.
"""

from __future__ import annotations

import importlib
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torture import readers
from torture.readers import FORMATS, same, well_formed
from torture.samples import RECORDS, store

few = settings(max_examples=3 * settings().max_examples)
# Where a file is cut off, or which of its bytes is changed, as a share of its length; and to what.
place = st.floats(0, 1, exclude_max=True)
change = st.integers(1, 255)
every_format = pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("png-palette", "jpeg")])


@pytest.fixture(autouse=True, scope="module")
def _few_records():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("flipgrad.data.cifar10"), "RECORDS", RECORDS)
        yield


def read(kind, changed):
    """The data set of a folder with some of its files ``changed``."""
    with tempfile.TemporaryDirectory() as folder:
        return FORMATS[kind].read(store(Path(folder), FORMATS[kind].files | changed))


@cache
def original(kind):
    """The data set of the whole files."""
    return read(kind, {})


def read_or_refused(kind, changed):
    """The same, or None where the files are refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        return readers.read_or_refused(FORMATS[kind], store(Path(folder), FORMATS[kind].files | changed))


@every_format
def test_whole_files_are_read(kind):
    data = read(kind, {})
    assert well_formed(data, data)


@every_format
@few
@given(which=place, end=place)
def test_a_file_that_was_cut_off_is_refused(kind, which, end):
    files = FORMATS[kind].files
    name = list(files)[int(which * len(files))]
    data = read_or_refused(kind, {name: files[name][: int(end * len(files[name]))]})
    # The last bytes of a PNG file only say that it ends.
    assert data is None or (kind == "png" and same(data, original(kind)))


@every_format
@few
@given(which=place, where=place, by=change)
# Another operation of a pickle, which Python refuses in two lines.
@example(which=0.0, where=0.0, by=208)
def test_a_changed_byte_ends_in_an_error_or_in_data_of_the_right_kind(kind, which, where, by):
    files = FORMATS[kind].files
    name = list(files)[int(which * len(files))]
    content = bytearray(files[name])
    content[int(where * len(content))] ^= by
    data = read_or_refused(kind, {name: bytes(content)})
    assert data is None or well_formed(data, original(kind))
    assert data is None or not FORMATS[kind].checked or same(data, original(kind))
