"""CIFAR-10 is read from both official versions, in folders and archives, whole and true or not at all."""

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from flipgrad.data import cifar10
from flipgrad.errors import InputError
from torture.samples import RECORDS, archive, cifar_batch, cifar_files, encode_cifar, store

SUBFOLDER = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
every_version = pytest.mark.parametrize("suffix", [".bin", ""], ids=["binary", "python"])


@pytest.fixture(autouse=True)
def _few_records(monkeypatch):
    """Batches of 4 images instead of 10,000; the package's attribute of that name is the function."""
    monkeypatch.setattr(importlib.import_module("flipgrad.data.cifar10"), "RECORDS", RECORDS)


def archive_of(path, files, folder):
    path.write_bytes(archive(files, folder))
    return path


def check(data):
    assert (data.name, data.classes, data.background) == ("cifar10", 10, 0.0)
    for split, numbers in ((data.train, range(5)), (data.test, [5])):
        assert split.x.dtype == torch.float32
        assert split.x.shape == (RECORDS * len(numbers), 3, 32, 32)
        assert split.y.tolist() == [label for number in numbers for label in cifar_batch(number)[1]]
        # The third channel's value in row 5, column 7.
        wanted = np.concatenate([cifar_batch(number)[0] for number in numbers])[:, 2 * 1024 + 5 * 32 + 7] / 127.5 - 1
        np.testing.assert_allclose(split.x[:, 2, 5, 7].numpy(), wanted, atol=1e-6)
    assert data.train.x.min() == -1
    assert data.train.x.max() == 1


@every_version
def test_folders_and_archives_of_both_versions(tmp_path, suffix):
    files = cifar_files(suffix)
    check(cifar10(store(tmp_path / "flat", files)))
    store(tmp_path / "above" / SUBFOLDER[suffix], files)
    check(cifar10(tmp_path / "above"))
    before = sorted(tmp_path.rglob("*"))
    archive = archive_of(tmp_path / "cifar.tar.gz", {"readme.html": b"", **files}, SUBFOLDER[suffix])
    check(cifar10(archive))
    assert sorted(tmp_path.rglob("*")) == sorted([*before, archive])


def test_the_binary_version_is_preferred(tmp_path):
    store(tmp_path / SUBFOLDER[".bin"], cifar_files(".bin"))
    store(tmp_path / SUBFOLDER[""], {"data_batch_1": b"damaged"})
    check(cifar10(tmp_path))


@every_version
def test_a_missing_file_is_named(tmp_path, suffix):
    files = cifar_files(suffix)
    del files["data_batch_3" + suffix]
    for path in store(tmp_path / "folder", files), archive_of(tmp_path / "a.tar.gz", files, "x"):
        with pytest.raises(InputError, match=f"'data_batch_3{suffix}' is missing in '{path}'; download"):
            cifar10(path)


def test_where_nothing_is_the_message_says_what_was_expected(tmp_path):
    for path in tmp_path, tmp_path / "nowhere":
        with pytest.raises(
            InputError, match=f"no CIFAR-10 in '{path}': expected data_batch_1.bin or data_batch_1 there or in cifar"
        ):
            cifar10(path)
    with pytest.raises(InputError, match="no CIFAR-10 in the archive"):
        cifar10(archive_of(tmp_path / "a.tar.gz", {"other": b""}, "x"))


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".bin", bytes(RECORDS * 3073 - 1), "is truncated: 12291 bytes, expected 12292"),
        (".bin", bytes(RECORDS * 3073 + 1), "is too long: 12293 bytes, expected 12292"),
        (".bin", bytes(RECORDS * 3073 + 1001), "has 13293 bytes, expected no more than 13292"),
        (".bin", b"\x0a" + bytes(RECORDS * 3073 - 1), "has a label 10, expected 0 to 9"),
        ("", bytes(RECORDS * 3073 * 4), "has 49168 bytes, expected no more than 37876"),
        ("", encode_cifar(*cifar_batch(0), "")[:-100], "is a damaged pickle, or none"),
        ("", b"<html>", "is a damaged pickle, or none"),
        ("", pickle.dumps([]), "holds a list, expected a dictionary"),
        ("", encode_cifar(cifar_batch(0)[0][:3], [0] * 4, ""), "has no b'data' that is an array of 4x3072 bytes"),
        ("", encode_cifar(cifar_batch(0)[0].view(np.int8), [0] * 4, ""), "has no b'data' that is an array of 4x3072 bytes"),
        ("", encode_cifar(None, [0] * 4, ""), "has no b'data' that is an array"),
        ("", encode_cifar(cifar_batch(0)[0], [0] * 3, ""), "has no b'labels' that is a list of 4 numbers"),
        ("", encode_cifar(cifar_batch(0)[0], None, ""), "has no b'labels' that is a list of 4 numbers"),
        ("", encode_cifar(cifar_batch(0)[0], [0, 1, -1, 2], ""), "has a label -1, expected 0 to 9"),
        ("", encode_cifar(cifar_batch(0)[0], [0, 1, "2", 2], ""), "has a label '2', expected 0 to 9"),
    ],
)
def test_a_truncated_or_foreign_file_is_named(tmp_path, suffix, content, message):
    files = cifar_files(suffix) | {"data_batch_2" + suffix: content}
    for path in store(tmp_path / "folder", files), archive_of(tmp_path / "a.tar.gz", files, "x"):
        with pytest.raises(InputError, match=rf"data_batch_2{suffix}' in '{path}' {message}.*; download CIFAR-10"):
            cifar10(path)


@every_version
def test_a_truncated_archive_is_named(tmp_path, suffix):
    whole = archive_of(tmp_path / "a.tar.gz", cifar_files(suffix), "x").read_bytes()
    path = tmp_path / "b.tar.gz"
    for keep in (5, 100, len(whole) // 2, len(whole) - 20000):
        path.write_bytes(whole[:keep])
        with pytest.raises(InputError, match=rf"'{path}'.* is (truncated or damaged: .*|missing.*); download CIFAR-10"):
            cifar10(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=rf"'x/data_batch_\d{suffix}' in '{path}' is truncated or damaged: "):
        cifar10(path)
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"the archive .* is truncated or damaged: file could not be opened"):
        cifar10(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    store(tmp_path, cifar_files(".bin"))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"_batch\w*\.bin' cannot be read: Permission denied; download"):
        cifar10(tmp_path)


class Malicious:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_malicious_pickle_does_not_run(tmp_path):
    target = tmp_path / "made"
    files = cifar_files("") | {"test_batch": pickle.dumps({b"data": Malicious(target), b"labels": [0] * 4}, 2)}
    with pytest.raises(
        InputError, match=r"'test_batch' in .* names (posix|nt)\.mkdir, which flipgrad refuses to run; download"
    ):
        cifar10(store(tmp_path / "folder", files))
    assert not target.exists()
