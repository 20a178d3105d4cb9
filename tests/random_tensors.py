"""Random tensors by a seed, in float64, and layouts of tensors in memory."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Generator, Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Between -1 and 1."""
    return 2 * torch.rand(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64) - 1


def states(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).sign()


def strided(t: Tensor) -> Tensor:
    """The same numbers, each the second of two in memory, the dimensions in reverse order."""
    apart = torch.stack([torch.full_like(t, torch.nan), t], -1)
    apart = apart.permute(*reversed(range(t.dim())), t.dim()).contiguous()
    return apart[..., 1].permute(*reversed(range(t.dim())))


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.t().contiguous().t()


layouts = st.sampled_from([torch.Tensor.contiguous, strided, channels_last])
