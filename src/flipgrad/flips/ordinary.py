"""The ordinary gradients of fully connected layers and convolutions, which fast sums over flips are made of."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flipgrad.guards import capturing

# Pre-activations that are worked on at once on a CPU: with more, the memory allocator returns the temporary tensors to the
# system every time, and to fault the pages in anew costs more than the arithmetic.
ACTIVATIONS_AT_ONCE = 2**21

# Terms of a product, and sizes of its matrices, from which on bfloat16 is faster: below that it costs more to convert the
# numbers.
LEAST_NARROW_TERMS, LEAST_NARROW_SIZE = 2**22, 64

# The root mean square error of a product by :func:`narrow_input_gradient`, relative to the root of the sum of its terms'
# squares: both factors and the result are rounded to 8 bits.
NARROW_ERROR = 2.8e-3

# The time of such a product, conversions included, relative to one in float32; measured on the processor of
# :mod:`flipgrad.flips.choice`.
NARROW_TIME = 0.55


class Geometry(NamedTuple):
    """Of a convolution with zero padding; a fully connected layer has none."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


def input_gradient(grad: Tensor, weight: Tensor, x: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient in the input ``x`` [B, in] or [B, C, H, W] for the gradient ``grad`` in the outputs."""
    if geometry is None:
        return grad @ weight
    return _backward(grad, x, weight, geometry, (True, False, False))


def narrow_input_gradient(grad: Tensor, weight: Tensor, x: Tensor, geometry: Geometry | None) -> Tensor:
    """:func:`input_gradient` to a relative error of :data:`NARROW_ERROR`: factors in bfloat16, if that is faster, sums not."""
    if not narrow_pays(grad.numel() // max(1, grad.shape[1]), weight):
        return input_gradient(grad, weight, x, geometry)
    narrow = torch.bfloat16
    # Of the input only the shape counts.
    return input_gradient(grad.to(narrow), weight.to(narrow), x.new_empty(x.shape, dtype=narrow), geometry).to(x.dtype)


def narrow_pays(places: int, weight: Tensor) -> bool:
    """Whether products of so many ``places`` with a ``weight`` [out, in, ...] are faster in bfloat16.

    They are where the processor multiplies pairs of such numbers at once, and there is enough to do.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or capturing() or not _narrow_is_fast():
        return False
    sizes = weight.shape[0], weight[:1].numel()
    return min(sizes) >= LEAST_NARROW_SIZE and places * weight.numel() >= LEAST_NARROW_TERMS


@lru_cache(maxsize=1)
def _narrow_is_fast() -> bool:
    """Whether the processor has instructions for products of bfloat16, and torch's library for them is there."""
    # Not public, so maybe not there; then products are in float32.
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return torch.backends.mkldnn.is_available() and any(ask is not None and ask() for ask in asked)


def by_examples(function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, a: Tensor, given: Tensor) -> Tensor:
    """The ``function`` of states, pre-activations and what is given with these, some examples at a time if that is faster."""
    if x.device.type != "cpu" or a.numel() <= ACTIVATIONS_AT_ONCE or torch.compiler.is_compiling():
        return function(x, a, given)
    size = math.ceil(len(x) / math.ceil(a.numel() / ACTIVATIONS_AT_ONCE))
    return torch.cat([function(*some) for some in zip(*(t.split(size) for t in (x, a, given)), strict=True)])


def weight_gradient(grad: Tensor, weight: Tensor, x: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient in the ``weight`` [out, in] or [out, C / groups, kh, kw], of which only the shape counts."""
    if geometry is None:
        return grad.t() @ x
    return _backward(grad, x, weight, geometry, (False, True, False))


def gradients(grad: Tensor, weight: Tensor, x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Those of a convolution in its input ``x`` and in its ``weight``, in less time than one after the other."""
    in_x, in_weight, _ = _backwards(grad, x, weight, geometry, (True, True, False))
    return in_x, in_weight


def _backward(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]) -> Tensor:
    return _backwards(grad, x, weight, geometry, wanted)[wanted.index(True)]


def _backwards(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    stride, padding, dilation, groups = geometry
    shape = stride, padding, dilation, False, (0, 0), groups
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(grad, x, weight, None, *shape, wanted)
    return found
