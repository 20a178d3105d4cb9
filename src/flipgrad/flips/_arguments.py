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
    """Refuse sparse tensors, and those of different dtypes or of those that the kernel, ``taker``, does not take."""
    first, like = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.layout != torch.strided:
            raise InputError(f"{name} is {t.layout}: {taker} dense tensors, e.g. {name}.to_dense()")
        if t.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {t.dtype}: {taker} {', '.join(str(dtype) for dtype in DTYPES)}")
        if t.dtype != like.dtype:
            raise InputError(f"{name} has dtype {t.dtype}, but {first} has {like.dtype}: give them one dtype")


def check_devices(*arguments: object) -> None:
    """Refuse tensors on different devices: if one is "meta", torch asks for a result without numbers, and gets it as one."""
    devices = {str(t.device) for t in arguments if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise InputError(f"the tensors are on {' and '.join(sorted(devices))}: move them to one device")


def check_kinds(**tensors: Tensor) -> None:
    """Refuse tensors on different devices, sparse ones, and those of no real numbers: results have the states' dtype."""
    check_devices(*tensors.values())
    for name, t in tensors.items():
        if t.layout != torch.strided:
            raise InputError(f"{name} is {t.layout}: give it as {name}.to_dense()")
        if not t.is_floating_point():
            raise InputError(f"{name} has dtype {t.dtype}, expected floating point: give it as {name}.float()")


def check_shapes(x: Tensor, weight: Tensor, geometry: Geometry | None, **of_outputs: Tensor) -> None:
    """Refuse shapes that do not belong together: a kernel would read other memory than the tensors'."""
    _check_dimensions(x, weight, geometry)
    places: tuple[int, ...] = ()
    groups = 1
    if geometry is not None:
        _check_geometry(geometry, weight)
        sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
        places = tuple((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        groups = geometry.groups
    for name, t in of_outputs.items():
        _check_shape(name, t, (x.shape[0], weight.shape[0], *places))
    _check_shape("x", x, (x.shape[0], groups * weight.shape[1], *x.shape[2:]))


def _check_dimensions(x: Tensor, weight: Tensor, geometry: Geometry | None) -> None:
    """Refuse states and weights of another kind of layer."""
    if geometry is None and x.dim() != 2:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, in]: give the geometry of a convolution, e.g. Geometry()")
    if geometry is not None and x.dim() != 4:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, C, H, W]: a fully connected layer has no geometry")
    if weight.dim() != x.dim():
        wanted = "[out, in]" if geometry is None else "[out, C / groups, kh, kw]"
        raise InputError(f"weight has shape {tuple(weight.shape)}, not {wanted} as the states {tuple(x.shape)} need")


def _check_geometry(geometry: Geometry, weight: Tensor) -> None:
    """Refuse the geometry of no convolution."""
    stride, padding, dilation, groups = geometry
    if min(*stride, *dilation, groups) < 1 or min(padding) < 0 or weight.shape[0] % groups:
        raise InputError(
            f"{geometry} of a weight {tuple(weight.shape)}: stride, dilation and groups must be at least 1, the padding at "
            "least 0, and the groups must divide the outputs"
        )


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


def fake_per_unit(x: Tensor, *others: object) -> Tensor:
    """What an operator with one number per unit returns, without the numbers."""
    check_devices(x, *others)
    return torch.empty_like(x, memory_format=memory_format(x))
