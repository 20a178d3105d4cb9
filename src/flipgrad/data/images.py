"""A folder of images, sorted into classes by sub-folders."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flipgrad import memory
from flipgrad.data.sets import DataSet, Split, from_bytes
from flipgrad.errors import InputError
from flipgrad.image_files import ENDINGS, read_image, resized

# Of a grey pixel as a number in floating point; a coloured one has three such.
BYTES_PER_PIXEL = 4

Pixels = NDArray[np.uint8]


def image_folder(path: Path, size: int | None = None, test_share: float = 0.1, seed: int = 0) -> DataSet:
    """PNG and JPEG images as a data set with values in [-1, 1]: [1, H, W] if all of them are grey, else [3, H, W].

    Every sub-folder is a class; classes are numbered in the order of their names. Hidden files are passed over. As
    with :func:`cifar10` the background is 0, mid-grey.

    Args:
        path: the folder of sub-folders.
        size: the side in pixels that all images are resized to, with antialiasing; by default they must have one size.
        test_share: of the images, at random and within one image the same of every class, become the test part.
        seed: of that choice.

    Raises:
        InputError: naming the file or folder that is not as expected.
    """
    if size is not None and size < 1:
        raise InputError(f"image_folder(size={size}): give at least one pixel, or None for images of one size")
    classes = _entries(path)
    for entry in classes:
        if not entry.is_dir():
            raise InputError(f"'{entry}' is not in the folder of a class; move it into one, or elsewhere")
    if len(classes) < 2:
        raise InputError(f"'{path}' has {len(classes)} sub-folders, expected two or more: one per class, with its images")
    files = [(file, label) for label, folder in enumerate(classes) for file in _files(folder)]
    _check_memory(len(files), size or 1, size or 1)
    images: list[Pixels] = []
    for file, _ in files:
        images.append(_read(file, size))
        (height, width), wanted = images[-1].shape[:2], images[0].shape[:2]
        if len(images) == 1:
            _check_memory(len(files), height, width)
        if (height, width) != wanted:
            theirs = f"'{files[0][0]}' has {wanted[0]}x{wanted[1]} pixels"
            raise InputError(f"'{file}' has {height}x{width} pixels, but {theirs}; resize all of them with size=")
    channels = max(pixels.shape[2] for pixels in images)
    stacked = np.stack([np.broadcast_to(pixels, (*pixels.shape[:2], channels)) for pixels in images])
    x = from_bytes(torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous())
    train, test = Split(x, torch.tensor([label for _, label in files])).divide(test_share, seed=seed)
    names = tuple(folder.name for folder in classes)
    return DataSet(path.resolve().name, train, test, classes=len(classes), background=0.0, class_names=names)


def _check_memory(count: int, height: int, width: int) -> None:
    what, size = f"{count:,} images of {height}x{width} pixels", count * height * width * BYTES_PER_PIXEL
    memory.check_fits(size, what, "resize them to fewer pixels, e.g. --image-size 32")


def _entries(folder: Path) -> list[Path]:
    """What is in a folder and not hidden, sorted by name."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        fix = "give a folder with a sub-folder of images per class"
        raise InputError(f"cannot list '{folder}': {error.strerror}; {fix}") from None


def _files(folder: Path) -> list[Path]:
    """The images of a class."""
    files = _entries(folder)
    if not files:
        raise InputError(f"the class folder '{folder}' is empty; put its images there, or remove it")
    for file in files:
        if not file.is_file() or file.suffix.lower() not in ENDINGS:
            raise InputError(
                f"'{file}' is not a .png, .jpg or .jpeg file; a class folder holds nothing else: move it elsewhere"
            )
    return files


def _read(file: Path, size: int | None) -> Pixels:
    """The pixels [H, W, 1 or 3] of an image."""
    image = read_image(file, "replace or remove it")
    if size is not None:
        image = resized(image, size, size)
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, -1)
