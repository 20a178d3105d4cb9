"""What the kernels for one device ask of their arguments, and a fully connected layer as a convolution of one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flipgrad.errors import InputError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_dtypes(taker: str, **tensors: Tensor) -> None:
    """Refuse tensors of different dtypes, or of those that the kernel, ``taker``, does not take."""
    first, like = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {t.dtype}: {taker} {', '.join(str(dtype) for dtype in DTYPES)}")
        if t.dtype != like.dtype:
            raise InputError(f"{name} has dtype {t.dtype}, but {first} has {like.dtype}: give them one dtype")


def check_linear(x: Tensor, weight: Tensor, **of_outputs: Tensor) -> None:
    """Refuse shapes that do not belong together: a kernel would read other memory than the tensors'."""
    _check_shapes((x.shape[0], weight.shape[0]), **of_outputs)
    _check_shapes((x.shape[0], weight.shape[1]), x=x)


def check_conv2d(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    **of_outputs: Tensor,
) -> None:
    """The same for a convolution."""
    places = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    _check_shapes((x.shape[0], weight.shape[0], *places), **of_outputs)
    _check_shapes((x.shape[0], groups * weight.shape[1], *x.shape[2:]), x=x)


def linear_as_convolution(
    product: Callable[..., Tensor], x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, scale: float
) -> Tensor:
    """The result of a convolution's ``product`` for a fully connected layer."""
    x4, a4, grad4, weight4 = (t[:, :, None, None] for t in (x, a, grad, weight))
    return product(x4, a4, grad4, weight4, scale, (1, 1), (0, 0), (1, 1), 1).reshape(x.shape).contiguous()


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that a result like ``x`` is given."""
    channels_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def _check_shapes(expected: tuple[int, ...], **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if tuple(t.shape) != expected:
            raise InputError(f"{name} has shape {tuple(t.shape)}, but the layer's weight and states make it {expected}")
