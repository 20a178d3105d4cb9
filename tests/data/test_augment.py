"""Augmentations do what they say, compared with loops over pixels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flipgrad.data import AUGMENTATIONS, affine, flip_and_crop
from flipgrad.data.augment import warp
from flipgrad.errors import InputError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def naive_warp(image, degrees, right, down, fill):
    """One image [C, H, W] in float64, pixel by pixel: turned counter-clockwise, then moved, both in pixels."""
    channels, height, width = image.shape
    out = torch.empty_like(image)
    a = math.radians(degrees)
    for i in range(height):
        for j in range(width):
            x, y = j - (width - 1) / 2 - right, i - (height - 1) / 2 - down
            column = x * math.cos(a) - y * math.sin(a) + (width - 1) / 2
            row = x * math.sin(a) + y * math.cos(a) + (height - 1) / 2
            for c in range(channels):
                out[c, i, j] = 0
                for r in (math.floor(row), math.floor(row) + 1):
                    for k in (math.floor(column), math.floor(column) + 1):
                        inside = 0 <= r < height and 0 <= k < width
                        weight = (1 - abs(row - r)) * (1 - abs(column - k))
                        out[c, i, j] += weight * (image[c, r, k] if inside else fill)
    return out


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_warp_is_the_naive_loop(channels, height, width, seed):
    generator = seeded(seed)
    images = torch.randn(2, channels, height, width, dtype=torch.float64, generator=generator)
    degrees = 360 * torch.rand(2, dtype=torch.float64, generator=generator) - 180
    shift = torch.rand(2, 2, dtype=torch.float64, generator=generator) - 0.5
    moved = warp(images, degrees, shift, fill=0.7)
    for n in range(2):
        wanted = naive_warp(images[n], degrees[n].item(), width * shift[0, n].item(), height * shift[1, n].item(), 0.7)
        torch.testing.assert_close(moved[n], wanted, atol=1e-9, rtol=0)


def test_a_quarter_turn_and_a_shift_by_whole_pixels():
    images = torch.arange(1.0, 26.0).reshape(1, 1, 5, 5)
    zero = torch.zeros(2, 1)
    quarter = warp(images, torch.tensor([90.0]), zero, fill=-3.0)
    torch.testing.assert_close(quarter, images.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    right = warp(images, zero[0], torch.tensor([[0.4], [0.0]]), fill=-3.0)
    torch.testing.assert_close(right[..., 2:], images[..., :3], atol=1e-4, rtol=0)
    torch.testing.assert_close(right[..., :2], torch.full((1, 1, 5, 2), -3.0), atol=1e-4, rtol=0)
    down = warp(images, zero[0], torch.tensor([[0.0], [0.2]]), fill=-3.0)
    torch.testing.assert_close(down[:, :, 1:], images[:, :, :4], atol=1e-4, rtol=0)


def test_zero_strength_changes_nothing():
    images = torch.randn(5, 3, 7, 9)
    torch.testing.assert_close(affine(images, 0.0, 0.0, fill=-1.0), images, atol=1e-5, rtol=0)
    assert AUGMENTATIONS["none"](images, -1.0, None) is images
    out = flip_and_crop(images, 0, fill=-1.0, generator=seeded())
    assert all(torch.equal(o, i) or torch.equal(o, i.flip(2)) for o, i in zip(out, images, strict=True))


def test_affine_draws_uniform_shifts_and_angles_within_the_limits():
    """From the images of linear functions, whose value at the centre is the shift; false alarm one in 10,000 per mean."""
    count, size = 4000, 21
    columns = (torch.arange(size, dtype=torch.float64) - 10).expand(count, 1, size, size)
    across = affine(columns, 0.1, 0.0, fill=0.0, generator=seeded())[:, 0, 10, 10]
    upright = affine(columns.mT, 0.1, 0.0, fill=0.0, generator=seeded())[:, 0, 10, 10]
    turned = affine(columns, 0.0, 30.0, fill=0.0, generator=seeded())[:, 0]
    angles = torch.atan2(turned[:, 5, 10] - turned[:, 10, 10], turned[:, 10, 15] - turned[:, 10, 10]) * 180 / math.pi
    for values, limit in ((across, 2.1), (upright, 2.1), (angles, 30.0)):
        assert values.abs().max() <= limit * (1 + 1e-6)
        assert values.abs().max() > 0.99 * limit
        assert values.mean().abs() < 3.9 * limit / math.sqrt(3 * count)
        # The square of a uniform variable has the mean 1/3 and the variance 4/45.
        assert ((values / limit).square().mean() - 1 / 3).abs() < 3.9 * math.sqrt(4 / 45 / count)
    # Shifts along the two axes are independent draws.
    assert (across * upright).mean().abs() < 3.9 * 2.1**2 / 3 / math.sqrt(count)


def test_half_of_the_images_are_mirrored():
    """Within 3.9 standard errors: a false alarm in 10,000."""
    count = 4000
    images = torch.tensor([0.0, 1.0]).expand(count, 2, 3, 2)
    out = flip_and_crop(images, 0, fill=9.0, generator=seeded())
    mirrored = out[:, 0, 0, 0]
    assert (mirrored.mean() - 0.5).abs() < 3.9 * 0.5 / math.sqrt(count)
    # Whole images: all rows and channels alike.
    assert torch.equal(out[..., 0], mirrored[:, None, None].expand(-1, 2, 3))


def test_flip_and_crop_gives_every_crop_of_the_padded_image_and_its_mirror_and_no_others():
    image = torch.arange(1.0, 13.0).reshape(1, 1, 3, 4)
    out = flip_and_crop(image.repeat(800, 1, 1, 1), 1, fill=-7.0, generator=seeded())
    wanted = set()
    for source in image, image.flip(3):
        padded = torch.full((5, 6), -7.0)
        padded[1:4, 1:5] = source[0, 0]
        wanted |= {padded[r : r + 3, c : c + 4].contiguous().numpy().tobytes() for r in range(3) for c in range(3)}
    # With 800 draws, missing one of the 18 has probability below 18 * (17/18)**800 < 1e-18.
    assert {o.contiguous().numpy().tobytes() for o in out} == wanted


def test_constant_images_of_the_fill_stay_and_others_show_it():
    for name in ("shift", "affine", "flip-crop"):
        constant = torch.full((50, 1, 12, 12), 0.25)
        torch.testing.assert_close(AUGMENTATIONS[name](constant, 0.25, seeded()), constant)
        assert AUGMENTATIONS[name](constant, -1.0, seeded()).amin() < 0.25


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_augmentation_keeps_shape_dtype_and_device_and_repeats_with_its_seed(name, dtype):
    images = torch.randn(6, 3, 9, 7).to(dtype)
    before = images.clone()
    one, same, other = (AUGMENTATIONS[name](images, -1.0, seeded(seed)) for seed in (1, 1, 2))
    assert (one.shape, one.dtype, one.device) == (images.shape, dtype, images.device)
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (name == "none")
    assert torch.equal(images, before)
    assert AUGMENTATIONS[name](images[:0], -1.0, None).shape == (0, 3, 9, 7)


def test_half_precision_is_as_exact_as_its_numbers():
    images = torch.rand(4, 1, 16, 16)
    exact = affine(images, fill=0.0, generator=seeded())
    torch.testing.assert_close(affine(images.half(), fill=0.0, generator=seeded()).float(), exact, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: affine(torch.zeros(3, 8, 8), fill=0.0), r"images have the shape \[3, 8, 8\], expected \[batch, channels"),
        (lambda: flip_and_crop(torch.zeros(8, 8), fill=0.0), r"images have the shape \[8, 8\], expected \[batch, channels"),
        (lambda: flip_and_crop(torch.zeros(1, 1, 8, 8), -1, fill=0.0), r"flip_and_crop\(pixels=-1\): give 0 or more"),
        (
            lambda: affine(torch.zeros(1, 1, 8, 8), -0.1, fill=0.0),
            r"affine\(shift=-0.1, degrees=10.0\): give a shift from 0 to 1",
        ),
        (lambda: affine(torch.zeros(1, 1, 8, 8), degrees=math.nan, fill=0.0), r"degrees=nan\).*degrees from 0 to 180"),
        (lambda: affine(torch.zeros(1, 1, 8, 8).byte(), fill=0.0), r"torch.uint8 cannot be interpolated; convert them"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
