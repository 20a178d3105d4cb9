"""MNIST is read from whole and true files, and from no others."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from flipgrad.data import mnist
from flipgrad.errors import InputError
from torture.samples import MNIST_NAMES, idx, mnist_arrays

REAL = Path(os.environ.get("FLIPGRAD_DATA", Path(__file__).parents[2] / "../shared/data")) / "mnist"


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def folder(request, tmp_path):
    for name, values in zip(MNIST_NAMES, mnist_arrays(), strict=True):
        store(tmp_path / name, idx(values), request.param)
    return tmp_path


def store(path, content, zipped):
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def replace(folder, name, content):
    """Write a file's content anew, gzipped if it was."""
    store(folder / name, content, not (folder / name).exists())


def test_images_and_labels_come_as_they_were_written(folder):
    data = mnist(folder)
    x, y, test_x, test_y = mnist_arrays()
    assert (data.name, data.classes, data.background) == ("mnist", 10, -1.0)
    for split, images, labels in ((data.train, x, y), (data.test, test_x, test_y)):
        assert split.x.dtype == torch.float32
        assert split.x.shape == (len(labels), 1, 28, 28)
        torch.testing.assert_close(split.x[:, 0], torch.tensor(images) / 127.5 - 1, atol=1e-6, rtol=0)
        assert split.y.tolist() == labels.tolist()
    assert data.train.x.min() == -1
    assert data.train.x.max() == 1


@pytest.mark.parametrize("name", MNIST_NAMES)
def test_a_missing_file_is_named(folder, name):
    for path in folder.glob(f"{name}*"):
        path.unlink()
    with pytest.raises(InputError, match=f"{name}' is missing, and so is '{name}.gz'; download"):
        mnist(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.train-images-idx3-ubyte' is missing"):
        mnist(tmp_path / "nowhere")


@pytest.mark.parametrize("name", MNIST_NAMES)
@pytest.mark.parametrize("keep", [0, 3, -1])
def test_a_truncated_file_is_named(folder, name, keep):
    content = idx(mnist_arrays()[MNIST_NAMES.index(name)])
    replace(folder, name, content[:keep])
    with pytest.raises(InputError, match=rf"{name}(\.gz)?' is truncated: \d+ bytes, expected"):
        mnist(folder)


def test_a_longer_file_is_named(folder):
    replace(folder, MNIST_NAMES[1], idx(mnist_arrays()[1]) + b"\0")
    with pytest.raises(InputError, match="goes on after 15 bytes, expected 15 for the 7 examples of its header"):
        mnist(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (MNIST_NAMES[0], b"GIF89a" + bytes(100), "begins with the magic number 1195984440, expected 2051"),
        (MNIST_NAMES[0], idx(np.zeros(20)), "begins with the magic number 2049, expected 2051"),
        (MNIST_NAMES[1], idx(np.zeros((7, 28, 28))), "begins with the magic number 2051, expected 2049"),
        (MNIST_NAMES[0], idx(np.zeros((7, 14, 56))), "has images of 14x56 pixels, expected 28x28"),
        (MNIST_NAMES[0], struct.pack(">4I", 2051, 2**32 - 1, 28, 28), "announces 4294967295 examples, expected 1 to 60000"),
        (MNIST_NAMES[0], idx(np.zeros((0, 28, 28))), "announces 0 examples"),
        (MNIST_NAMES[1], idx(np.zeros(6)), "has 6 labels for 7 images"),
        (MNIST_NAMES[3], idx(np.array([1, 10, 2])), "has a label 10, expected 0 to 9"),
    ],
)
def test_a_foreign_file_is_named(folder, name, content, message):
    replace(folder, name, content)
    with pytest.raises(InputError, match=rf"{name}(\.gz)?' {message}.*; download MNIST"):
        mnist(folder)


def test_a_gzip_file_that_ends_early_or_is_none_is_named(tmp_path):
    path = tmp_path / f"{MNIST_NAMES[0]}.gz"
    whole = gzip.compress(idx(mnist_arrays()[0]))
    path.write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"idx3-ubyte\.gz' is truncated: its gzip stream ends early"):
        mnist(tmp_path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"idx3-ubyte\.gz' cannot be read: Not a gzipped file"):
        mnist(tmp_path)
    path.write_bytes(whole[:2000] + bytes(500) + whole[2500:])
    with pytest.raises(InputError, match=r"idx3-ubyte\.gz' (cannot be read|is truncated)"):
        mnist(tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason="MNIST is not here: set FLIPGRAD_DATA to the folder that has it as mnist/")
def test_the_real_files():
    data = mnist(REAL)
    assert data.train.x.shape == (60_000, 1, 28, 28)
    assert data.test.x.shape == (10_000, 1, 28, 28)
    # As published, e.g. 5,923 zeros and 6,742 ones; the mean is the familiar 0.1307 of values in [0, 1].
    assert data.train.y.bincount()[:2].tolist() == [5923, 6742]
    assert data.train.x.mean().item() == pytest.approx(2 * 0.1307 - 1, abs=1e-4)
