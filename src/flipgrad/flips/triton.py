r"""The flip product and the log ratio of logistic noise on a GPU, as one Triton kernel: exact, terms never in memory.

It is an implicit matrix product: a program computes a tile of places and input channels and loops over the kernel's positions
and tiles of output channels; ``_triton_kernel.py`` has the arithmetic. Functions of the weights are computed beforehand, those
of the pre-activations in the kernel. Float32 results have a relative error (in the norm) below 1e-5, float64 ones below 1e-12;
half precision is computed in float32. Log ratios have errors below 5e-6 and 1e-12, relative to the sum of their terms'
absolute values where that is above 1. Tensors with gaps are copied.

The kernel has been tested in Triton's interpreter and has not been timed on a GPU.

Triton comes with torch's CUDA builds. Without it, or without a GPU, :func:`available` is False and :func:`reason` says why.
With the environment variable ``TRITON_INTERPRET=1``, set before Triton is first imported, it takes tensors on the CPU: for
tests.
"""

import math
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips._arguments import check_devices, check_layer, memory_format
from flipgrad.flips.ordinary import Geometry
from flipgrad.native.library import check_dtypes
from flipgrad.noise import Noise

# Of one program: terms that it computes at once, and the most input and output channels and places among them.
TERMS, INPUTS, OUTPUTS, PLACES = 4096, 32, 4, 256


def available() -> bool:
    """Whether there are Triton and a GPU, or Triton's interpreter."""
    return not reason()


def reason() -> str:
    """Why the kernel is not :func:`available`, or an empty string."""
    if find_spec("triton") is None:
        return "triton is not installed: it comes with torch's CUDA builds, or pip install triton"
    if not torch.cuda.is_available() and not _interpreted():
        return "torch sees no GPU (torch.cuda.is_available() is False)"
    return ""


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.flip_product` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    The result has the memory format of ``x``.
    """
    return _sum(False, noise, geometry, x=x, a=a, grad=grad, weight=weight)


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio`, like :func:`flip_product`; an output state that is 0 adds nothing."""
    return _sum(True, noise, geometry, x=x, a=a, states=states, weight=weight)


def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, by the rule of Triton itself."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _sum(ratio: bool, noise: Noise, geometry: Geometry | None, **tensors: Tensor) -> Tensor:
    if not available():
        raise InputError(f"flipgrad's Triton kernel is not available: {reason()}")
    allowed = ("cuda", "cpu") if _interpreted() else ("cuda",)
    for name, t in tensors.items():
        if t.device.type not in allowed:
            raise InputError(f"{name} is on {t.device}: the Triton kernel needs tensors on a GPU, e.g. {name}.cuda()")
    check_devices(*tensors.values())
    check_dtypes("the Triton kernel takes", **tensors)
    check_layer("Triton", noise, geometry, **tensors)
    if geometry is not None:
        return _convolution(ratio, noise, geometry, *tensors.values())
    # A fully connected layer is a convolution of one place.
    u = _convolution(ratio, noise, Geometry(), *(t[:, :, None, None] for t in tensors.values()))
    return u.reshape(tensors["x"].shape).contiguous()


def _convolution(ratio: bool, noise: Noise, geometry: Geometry, x: Tensor, a: Tensor, given: Tensor, weight: Tensor) -> Tensor:
    """The log ratio or the flip product; ``given`` are the output states, or the gradient in them."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    u = torch.empty(x.shape, dtype=dtype, device=x.device)
    if u.numel() == 0:
        return u.to(x.dtype)
    # Imported late: triton need not be there, and takes its time.
    from flipgrad.flips._triton_kernel import flip_kernel

    stride, padding, dilation, groups = geometry
    tensors = [*(t.detach().to(dtype).contiguous() for t in (x, a, given)), u]
    w = weight.detach().double()
    functions = [2 * w / noise.scale] if ratio else _flip_functions(w / noise.scale)
    tables = torch.stack(functions).to(dtype).unflatten(1, (groups, -1)).permute(0, 1, 4, 5, 2, 3).contiguous()
    # A number would go to the kernel in float32.
    scales = torch.full((1,), noise.scale, dtype=dtype, device=x.device)
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    # The places of one phase: all that have the same coordinates modulo the stride.
    places = x.shape[0] * math.ceil(x.shape[2] / stride[0]) * math.ceil(x.shape[3] / stride[1])
    tile = _tile(places, inputs)
    programs = math.ceil(places / tile[0]) * stride[0] * stride[1] * groups * math.ceil(inputs / tile[1])
    with torch.cuda.device_of(x):
        flip_kernel[(programs,)](
            *(*tensors, tables, scales),
            *(x.shape[0], inputs, outputs, *x.shape[2:], *a.shape[2:]),
            *(groups, *weight.shape[2:], *stride, *padding, *dilation),
            *(*tile, ratio),
        )
    return u.to(x.dtype).contiguous(memory_format=memory_format(x))


def _flip_functions(w: Tensor) -> list[Tensor]:
    """Of weights w: T = tanh w, and the mantissas and exponents of 1 / (1 + exp(d)) and of 1 / (1 + exp(-d)), with d = 2w."""
    functions = [w.tanh()]
    for sign in (1, -1):
        logarithm = torch.nn.functional.logsigmoid(-2 * sign * w) / math.log(2)
        exponent = logarithm.floor()
        functions += [(logarithm - exponent).exp2(), exponent]
    return functions


def _tile(places: int, inputs: int) -> tuple[int, int, int]:
    """Places, input channels and output channels of a program, powers of two: more places where there are few channels."""
    # The smallest powers of two that are not below the numbers.
    all_places, channels = (int(2 ** (number - 1).bit_length()) for number in (places, inputs))
    channels = min(INPUTS, channels)
    return min(PLACES, TERMS // (channels * OUTPUTS), all_places), channels, OUTPUTS
