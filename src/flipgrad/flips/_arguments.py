"""What operators of torch take and give: a flat geometry, right shapes and dtypes, a memory format.

The kernels for one device compute convolutions; a fully connected layer is one of one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips.ordinary import Geometry

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def flat(geometry: Geometry | None) -> list[int]:
    """The geometry as an operator takes it: seven numbers, or none for a fully connected layer."""
    return [] if geometry is None else [*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups]


def unflat(shape: Sequence[int]) -> Geometry | None:
    """The geometry that :func:`flat` was given."""
    if not shape:
        return None
    return Geometry((shape[0], shape[1]), (shape[2], shape[3]), (shape[4], shape[5]), shape[6])


def check_dtypes(taker: str, **tensors: Tensor) -> None:
    """Refuse tensors of different dtypes, or of those that the kernel, ``taker``, does not take."""
    first, like = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {t.dtype}: {taker} {', '.join(str(dtype) for dtype in DTYPES)}")
        if t.dtype != like.dtype:
            raise InputError(f"{name} has dtype {t.dtype}, but {first} has {like.dtype}: give them one dtype")


def check_dimensions(x: Tensor, geometry: Geometry | None) -> None:
    """Refuse states of another kind of layer."""
    if geometry is None and x.dim() != 2:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, in]: give the geometry of a convolution, e.g. Geometry()")
    if geometry is not None and x.dim() != 4:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, C, H, W]: a fully connected layer has no geometry")


def check_shapes(x: Tensor, weight: Tensor, geometry: Geometry | None, **of_outputs: Tensor) -> None:
    """Refuse shapes that do not belong together: a kernel would read other memory than the tensors'."""
    check_dimensions(x, geometry)
    places: tuple[int, ...] = ()
    if geometry is not None:
        sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
        places = tuple((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
    groups = 1 if geometry is None else geometry.groups
    for name, t in of_outputs.items():
        _check_shape(name, t, (x.shape[0], weight.shape[0], *places))
    _check_shape("x", x, (x.shape[0], groups * weight.shape[1], *x.shape[2:]))


def _check_shape(name: str, t: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(t.shape) != expected:
        raise InputError(f"{name} has shape {tuple(t.shape)}, but the layer's weight and states make it {expected}")


def kernel_operator(convolution: Callable[..., Tensor], given: str) -> Callable[..., Tensor]:
    """The implementation of an operator, by a kernel for convolutions.

    Args:
        convolution: the sum over flips of x, a, what is given for every output, weight, scale and geometry.
        given: the name of what is given for every output.
    """

    def operator(x: Tensor, a: Tensor, outputs: Tensor, weight: Tensor, scale: float, shape: Sequence[int]) -> Tensor:
        geometry = unflat(shape)
        check_shapes(x, weight, geometry, a=a, **{given: outputs})
        if geometry is not None:
            return convolution(x, a, outputs, weight, scale, geometry)
        x4, a4, outputs4, weight4 = (t[:, :, None, None] for t in (x, a, outputs, weight))
        return convolution(x4, a4, outputs4, weight4, scale, Geometry()).reshape(x.shape).contiguous()

    return operator


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that a result like ``x`` is given."""
    channels_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def fake_per_unit(x: Tensor, *_: object) -> Tensor:
    """What an operator with one number per unit returns, without the numbers."""
    return torch.empty_like(x, memory_format=memory_format(x))
