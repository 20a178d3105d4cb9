"""What sums over flips take and give: right shapes, dtypes and devices, a flat geometry, a memory format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips.ordinary import Geometry, has_channels_last
from flipgrad.noise import Noise


def flat(geometry: Geometry | None) -> list[int]:
    """The geometry as an operator takes it: seven numbers, or none for a fully connected layer."""
    return [] if geometry is None else [*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups]


def unflat(shape: Sequence[int]) -> Geometry | None:
    """The geometry that :func:`flat` was given."""
    if not shape:
        return None
    return Geometry((shape[0], shape[1]), (shape[2], shape[3]), (shape[4], shape[5]), shape[6])


def check_devices(*tensors: Tensor) -> None:
    """Refuse tensors on different devices: if one is "meta", torch asks for a result without numbers, and gets it as one."""
    devices = {str(t.device) for t in tensors}
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


def check_shapes(
    x: Tensor, weight: Tensor, geometry: Geometry | None, *, share: Tensor | None = None, **of_outputs: Tensor
) -> None:
    """Refuse shapes that do not belong together: a kernel would read other memory than the tensors'."""
    if share is not None and share.shape != x.shape:
        raise InputError(f"share has shape {tuple(share.shape)}, but the states have {tuple(x.shape)}: give a factor for each")
    _check_kind_of_layer(x, weight, geometry)
    places: tuple[int, ...] = ()
    groups = 1
    if geometry is not None:
        sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
        places = tuple((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        groups = geometry.groups
    units, outputs = (x.shape[0], groups * weight.shape[1], *x.shape[2:]), (x.shape[0], weight.shape[0], *places)
    for name, t in (*of_outputs.items(), ("x", x)):
        expected = units if name == "x" else outputs
        if tuple(t.shape) != expected:
            raise InputError(f"{name} has shape {tuple(t.shape)}, but the layer's weight and states make it {expected}")


def _check_kind_of_layer(x: Tensor, weight: Tensor, geometry: Geometry | None) -> None:
    """Refuse states and weights of another kind of layer, and the geometry of no convolution."""
    if geometry is None and x.dim() != 2:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, in]: give the geometry of a convolution, e.g. Geometry()")
    if geometry is not None and x.dim() != 4:
        raise InputError(f"x has shape {tuple(x.shape)}, not [B, C, H, W]: a fully connected layer has no geometry")
    if weight.dim() != x.dim():
        wanted = "[out, in]" if geometry is None else "[out, C / groups, kh, kw]"
        raise InputError(f"weight has shape {tuple(weight.shape)}, not {wanted} as the states {tuple(x.shape)} need")
    if geometry is None:
        return
    stride, padding, dilation, groups = geometry
    if min(*stride, *dilation, *weight.shape[2:], groups) < 1 or min(padding) < 0 or weight.shape[0] % groups:
        raise InputError(
            f"{geometry} of a weight {tuple(weight.shape)}: kernel, stride, dilation and groups must be at least 1, the "
            "padding at least 0, and the groups must divide the outputs"
        )


def check_layer(kernel: str, noise: Noise, geometry: Geometry | None, **tensors: Tensor) -> None:
    """Refuse, on behalf of a ``kernel`` for logistic noise, other noises, and shapes that do not belong together."""
    if not noise.compiled:
        raise InputError(f"noise={noise!r}: the {kernel} flip product is for Logistic noise; use flipgrad.flips for the others")
    check_shapes(geometry=geometry, **tensors)


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that a result like ``x`` is given."""
    return torch.channels_last if has_channels_last(x) else torch.contiguous_format
