"""A folder of images becomes a data set, or the odd file is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from flipgrad.data import image_folder
from flipgrad.errors import InputError
from torture.samples import grey


@pytest.fixture
def folder(tmp_path):
    """Twenty images each of cats, 0 to 19 in grey, and ants, 100 to 119."""
    for name, start in (("cats", 0), ("ants", 100)):
        (tmp_path / name).mkdir()
        for i in range(20):
            grey(start + i).save(tmp_path / name / f"{i}.png")
    return tmp_path


def values(split):
    return ((split.x[:, 0, 0, 0] + 1) * 127.5).round().long()


def test_sub_folders_are_classes_in_the_order_of_their_names(folder):
    (folder / ".hidden").write_bytes(b"")
    (folder / "cats" / ".hidden").write_bytes(b"")
    data = image_folder(folder)
    assert (data.name, data.classes, data.background) == (folder.name, 2, 0.0)
    assert data.with_validation(0.5).class_names == ("ants", "cats")
    assert data.train.x.shape == (36, 1, 4, 6)
    assert data.train.x.dtype == torch.float32
    assert data.test.y.tolist() == [0, 0, 1, 1]
    every = torch.cat([values(data.train), values(data.test)])
    assert every.sort().values.tolist() == [*range(20), *range(100, 120)]
    for split in data.train, data.test:
        assert torch.equal(split.y, (values(split) < 100).long())


def test_the_seed_decides_on_the_test_part_and_the_share_on_its_size(folder):
    one, same, other = image_folder(folder), image_folder(folder, seed=0), image_folder(folder, seed=1)
    assert torch.equal(values(one.test), values(same.test))
    assert not torch.equal(values(one.test), values(other.test))
    assert len(image_folder(folder, test_share=0.25).test) == 10
    with pytest.raises(InputError, match=r"a share of 0\.0 of 40 examples leaves a part empty"):
        image_folder(folder, test_share=0.0)


def test_colour_images_have_three_channels_and_grey_ones_among_them_too(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "ants" / "0.png")
    Image.fromarray(pixels).quantize(256).save(folder / "ants" / "1.png")
    data = image_folder(folder)
    x = torch.cat([data.train.x, data.test.x])
    assert x.shape == (40, 3, 4, 6)
    wanted = torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1
    assert ((x - wanted).abs().amax((1, 2, 3)) < 1e-6).sum() >= 1
    assert ((x - x[:, :1]).abs().amax((1, 2, 3)) == 0).sum() == 38


def test_jpeg_files_and_both_ends_of_the_scale(folder):
    grey(255).save(folder / "cats" / "white.JPEG")
    grey(255).convert("1").save(folder / "cats" / "two.png")
    data = image_folder(folder)
    x = torch.cat([data.train.x, data.test.x])
    assert len(x) == 42
    assert x.min() == -1
    assert (x.amin((1, 2, 3)) == 1).sum() == 2


def test_a_photograph_is_turned_upright(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    grey(50, 6, 4).save(folder / "cats" / "0.jpg", exif=exif)
    assert image_folder(folder).train.x.shape[2:] == (4, 6)


def test_images_of_several_sizes_need_one(folder):
    grey(7, 5, 6).save(folder / "cats" / "3.png")
    with pytest.raises(
        InputError, match=r"cats.3\.png' has 5x6 pixels, but '.*0\.png' has 4x6 pixels; resize all of them with size="
    ):
        image_folder(folder)
    data = image_folder(folder, size=3)
    assert data.train.x.shape == (36, 1, 3, 3)
    assert torch.cat([values(data.train), values(data.test)]).sort().values[:8].tolist() == [0, 1, 2, 4, 5, 6, 7, 7]
    with pytest.raises(InputError, match=r"image_folder\(size=0\): give at least one pixel"):
        image_folder(folder, size=0)


def png(image):
    def write(path):
        image.save(path)

    return write


def damaged_png(path):
    grey(3, 64, 64).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def png_without_pixels(path):
    """The header and the end, with right checksums, and nothing between them."""
    grey(3).save(path)
    content = path.read_bytes()
    path.write_bytes(content[:33] + content[-12:])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("0.png", lambda path: path.write_bytes(b""), "cannot be read as PNG or JPEG: .*; replace or remove it"),
        ("0.png", lambda path: path.write_bytes(b"GIF89a" + bytes(50)), "cannot be read as PNG or JPEG"),
        ("0.png", damaged_png, "cannot be read as PNG or JPEG"),
        ("0.png", lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50)), "cannot be read as PNG or JPEG"),
        ("0.png", png_without_pixels, "cannot be read as PNG or JPEG: list index out of range"),
        ("0.png", png(Image.new("RGBA", (6, 4))), "has pixels of the kind RGBA, expected 8-bit grey or RGB"),
        ("0.png", png(Image.new("I;16", (6, 4))), "has pixels of the kind I;16, expected 8-bit grey or RGB"),
        ("0.jpg", png(Image.new("CMYK", (6, 4))), "has pixels of the kind CMYK, expected 8-bit grey or RGB"),
        ("0.png", lambda path: grey(9).save(path, transparency=9), "has pixels of the kind L with transparency"),
        (
            "notes.txt",
            lambda path: path.write_bytes(b""),
            "is not a .png, .jpg or .jpeg file; a class folder holds nothing else",
        ),
        ("more", lambda path: path.mkdir(), "is not a .png, .jpg or .jpeg file"),
    ],
)
def test_an_odd_file_is_named(folder, name, write, message):
    write(folder / "cats" / name)
    with pytest.raises(InputError, match=rf"cats.{name}' {message}"):
        image_folder(folder)


def test_a_bomb_is_named_and_not_unpacked(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(InputError, match=r"ants.0\.png' cannot be read as PNG or JPEG: Image size \(24 pixels\) exceeds limit"):
        image_folder(folder)


def test_a_folder_that_is_no_set_of_classes_is_named(folder):
    with pytest.raises(
        InputError, match=r"cannot list '.*nowhere': No such file or directory; give a folder with a sub-folder"
    ):
        image_folder(folder / "nowhere")
    with pytest.raises(InputError, match=r"'.*cats.0\.png' is not in the folder of a class; move it"):
        image_folder(folder / "cats")
    (folder / "bees").mkdir()
    with pytest.raises(InputError, match=r"the class folder '.*bees' is empty; put its images there, or remove it"):
        image_folder(folder)
    with pytest.raises(InputError, match="bees' has 0 sub-folders, expected two or more"):
        image_folder(folder / "bees")


@pytest.mark.parametrize("size", [100_000, 2**31])
def test_images_that_cannot_fit_into_memory_are_refused_before_they_are_made(folder, size):
    with pytest.raises(InputError, match=rf"images of {size}x{size} pixels need .* GiB, more than this .*--image-size 32"):
        image_folder(folder, size)


def test_images_of_their_own_size_that_cannot_fit_are_refused_after_the_first(folder, monkeypatch):
    monkeypatch.setattr("flipgrad.memory.installed", lambda: 1000)
    with pytest.raises(InputError, match="images of 4x6 pixels need"):
        image_folder(folder)
