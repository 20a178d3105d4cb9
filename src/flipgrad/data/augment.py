"""Augmentations of batches of images, on tensors.

Each image [C, H, W] of a batch is changed in its own way, drawn from ``generator`` (on the CPU); what comes in from outside is
``fill``.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from flipgrad.errors import InputError

Augmentation = Callable[[Tensor, float, Generator | None], Tensor]


def shift(images: Tensor, pixels: int, fill: float, *, generator: Generator | None = None) -> Tensor:
    """Every image [B, C, H, W] moved by up to ``pixels`` along each axis, at random."""
    batch, _, height, width = images.shape
    padded = functional.pad(images, (pixels,) * 4, value=fill)
    offset = torch.randint(2 * pixels + 1, (2, batch, 1), generator=generator).to(images.device)
    rows = offset[0] + torch.arange(height, device=images.device)
    columns = offset[1] + torch.arange(width, device=images.device)
    example = torch.arange(batch, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flip_and_crop(images: Tensor, pixels: int = 4, *, fill: float, generator: Generator | None = None) -> Tensor:
    """Every image [B, C, H, W] mirrored left to right with probability 1/2, padded by ``pixels`` and cropped at random.

    The usual augmentation of CIFAR-10: He, Zhang, Ren, Sun. Deep Residual Learning for Image Recognition. CVPR 2016,
    section 4.2. A crop of the padded image is a shift.
    """
    _check(images)
    if pixels < 0:
        raise InputError(f"flip_and_crop(pixels={pixels}): give 0 or more")
    mirrored = torch.randint(2, (len(images), 1, 1, 1), generator=generator).to(images.device, torch.bool)
    return shift(torch.where(mirrored, images.flip(3), images), pixels, fill, generator=generator)


def affine(
    images: Tensor, shift: float = 0.05, degrees: float = 10.0, *, fill: float, generator: Generator | None = None
) -> Tensor:
    """Every image [B, C, H, W] turned and moved at random, with bilinear interpolation.

    Args:
        images: in floating point.
        shift: the largest shift along each axis, as a share of the image's size; both are uniform.
        degrees: the largest angle in either direction; uniform.
        fill: what comes in from outside.
        generator: of the draw, on the CPU.
    """
    _check(images)
    if not (0 <= shift <= 1 and 0 <= degrees <= 180):
        raise InputError(f"affine(shift={shift}, degrees={degrees}): give a shift from 0 to 1 and degrees from 0 to 180")
    draw = 2 * torch.rand(3, len(images), generator=generator) - 1
    return warp(images, degrees * draw[0], shift * draw[1:], fill=fill)


def warp(images: Tensor, degrees: Tensor, shift: Tensor, *, fill: float) -> Tensor:
    r"""Turn images [B, C, H, W] about their centres by ``degrees`` [B] counter-clockwise, then move them by ``shift``.

    The shift [2, B] is to the right and down, as a share of the width and the height. The output at p is the input at
    :math:`R^{-1}(p - t)`, in pixels from the centre, with bilinear interpolation.
    """
    if not images.is_floating_point():
        raise InputError(f"images of {images.dtype} cannot be interpolated; convert them with images.float()")
    if not images.numel():
        return images
    # Half precision is too coarse for coordinates.
    precise = images.to(torch.promote_types(images.dtype, torch.float32))
    angle = degrees.to(precise) * (math.pi / 180)
    right, down = 2 * shift.to(precise)
    height, width = images.shape[2:]
    cos, sin = angle.cos(), angle.sin()
    # Coordinates go from -1 to 1 along both axes, also where these are not equally long.
    slant, lean = sin * (height / width), sin * (width / height)
    row_x = torch.stack([cos, -slant, slant * down - cos * right], 1)
    row_y = torch.stack([lean, cos, -lean * right - cos * down], 1)
    grid = functional.affine_grid(torch.stack([row_x, row_y], 1), list(images.shape), align_corners=False)
    # Outside of the image are zeros, so fill has to be zero inside.
    moved = functional.grid_sample(precise - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill
    return moved.to(images.dtype)


def _check(images: Tensor) -> None:
    if images.ndim != 4:
        raise InputError(f"images have the shape {list(images.shape)}, expected [batch, channels, height, width]")


# By name, each with its usual strength; a shift is by one pixel.
AUGMENTATIONS: dict[str, Augmentation] = {
    "none": lambda images, fill, generator: images,
    "shift": lambda images, fill, generator: shift(images, 1, fill, generator=generator),
    "affine": lambda images, fill, generator: affine(images, fill=fill, generator=generator),
    "flip-crop": lambda images, fill, generator: flip_and_crop(images, fill=fill, generator=generator),
}
