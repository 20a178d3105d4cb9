"""Reads PNG and JPEG files; needs no torch."""

from pathlib import Path

from PIL import Image, ImageOps

from flipgrad.errors import InputError

ENDINGS = {".png", ".jpg", ".jpeg"}
GREY = {"1", "L"}
COLOUR = {"RGB", "P"}


def read_image(file: Path, fix: str) -> Image.Image:
    """An image of 8-bit grey (mode "L") or RGB pixels, upright as its camera says.

    Raises:
        InputError: if it is damaged, or of another kind, which ends with the advice ``fix``.
    """
    try:
        # The checksums of a PNG file, which decoding passes over.
        with Image.open(file, formats=["PNG", "JPEG"]) as stored:
            stored.verify()
        with Image.open(file, formats=["PNG", "JPEG"]) as stored:
            mode, transparent = stored.mode, "transparency" in stored.info
            image = ImageOps.exif_transpose(stored).convert("L" if mode in GREY else "RGB")
    # A damaged image fails in as many ways as there are steps in Pillow's decoders: a PNG file without pixels is an IndexError.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"'{file}' cannot be read as PNG or JPEG: {reason}; {fix}") from None
    if mode not in GREY | COLOUR or transparent:
        kind = f"{mode} with transparency" if transparent else mode
        raise InputError(f"'{file}' has pixels of the kind {kind}, expected 8-bit grey or RGB without transparency; convert it")
    return image


def resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """The image with other numbers of pixels, with antialiasing."""
    return image.resize((width, height), Image.Resampling.BILINEAR)
