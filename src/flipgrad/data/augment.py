"""Augmentations of batches of images, on tensors."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional


def shift(images: Tensor, pixels: int, fill: float, *, generator: Generator | None = None) -> Tensor:
    """Every image [B, C, H, W] moved by up to ``pixels`` along each axis, at random; what comes in from outside is ``fill``."""
    batch, _, height, width = images.shape
    padded = functional.pad(images, (pixels,) * 4, value=fill)
    offset = torch.randint(2 * pixels + 1, (2, batch, 1), generator=generator).to(images.device)
    rows = offset[0] + torch.arange(height, device=images.device)
    columns = offset[1] + torch.arange(width, device=images.device)
    example = torch.arange(batch, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
