"""Files as inputs of a packed network: images by the rule that its own file tells, and arrays."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.packed.network import PackedNetwork
from flipgrad.packed.parts import Array

ARRAY, IMAGES = ".npy", (".png", ".jpg", ".jpeg")
# How Pillow calls pixels of so many channels.
MODES = {1: "L", 3: "RGB"}


class Inputs(NamedTuple):
    """Inputs [B, ...] of a network, and whether they were an image of another size."""

    x: Array
    resized: bool = False


def read_inputs(path: Path, net: PackedNetwork) -> Inputs:
    """What a file holds for a network.

    An image, PNG or JPEG, is one input: it becomes grey or coloured as the network needs it, is resized with antialiasing, and
    its pixels are scaled as the network's file says. An array, .npy, is one input [...] or a batch [B, ...]; bytes in it are
    pixels, other numbers are taken as they are.

    Raises:
        InputError: if the file is missing, damaged or does not fit the network.
    """
    ending = path.suffix.lower()
    if ending not in (ARRAY, *IMAGES):
        raise InputError(f"'{path}' is no image and no array: give {', '.join(IMAGES)} or {ARRAY} files")
    if not path.exists():
        raise InputError(f"'{path}' does not exist; give a file that does")
    files.check_ordinary(path, f"give {', '.join(IMAGES)} or {ARRAY} files")
    return Inputs(_read_array(path, net)) if ending == ARRAY else _read_image(path, net)


def _read_image(path: Path, net: PackedNetwork) -> Inputs:
    # Pillow is for images alone.
    from flipgrad.image_files import read_image, resized

    if len(net.inputs) != 3 or net.inputs[0] not in MODES or net.facts.pixel_scale is None:
        raise InputError(f"'{path}' is an image, and the network takes {_shape(net)}: give these as an array in a {ARRAY} file")
    channels, height, width = net.inputs
    image = read_image(path, "give an image that a viewer opens")
    other = image.size != (width, height)
    image = image.convert(MODES[channels])
    pixels = np.asarray(resized(image, width, height) if other else image, np.uint8).reshape(1, height, width, channels)
    return Inputs(_scaled(pixels.transpose(0, 3, 1, 2), net), other)


def _read_array(path: Path, net: PackedNetwork) -> Array:
    advice = f"write it with numpy.save, {_shape(net)} or a batch of these"
    try:
        # Mapped, so that no room is made for an array that the file does not hold.
        found: Array = np.lib.format.open_memmap(path, mode="r")
    # A damaged header, which is Python's notation of a dictionary, fails in as many ways as this can be wrong.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"'{path}' cannot be read as an array: {reason:.200}; {advice}") from None
    if found.dtype.kind not in "fiub":
        raise InputError(f"'{path}' holds {found.dtype}, not real numbers; {advice}")
    if found.shape == net.inputs:
        found = found[None]
    if found.shape[1:] != net.inputs or not len(found):
        raise InputError(f"'{path}' has the shape {list(found.shape)}; {advice}")
    x = _scaled(found, net) if found.dtype == np.uint8 and net.facts.pixel_scale is not None else np.asarray(found, np.float32)
    if not np.isfinite(x).all():
        raise InputError(f"'{path}' holds numbers that are not finite; {advice}")
    return x


def _scaled(pixels: Array, net: PackedNetwork) -> Array:
    scale, shift = net.facts.pixel_scale, net.facts.pixel_shift
    if scale is None or shift is None:
        raise InputError("the network's file does not tell how pixels become its inputs")
    return (pixels * scale + shift).astype(np.float32)


def _shape(net: PackedNetwork) -> str:
    return f"inputs [{', '.join(map(str, net.inputs))}]"
