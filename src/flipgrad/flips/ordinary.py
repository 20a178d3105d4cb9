"""The ordinary gradients of fully connected layers and convolutions, which fast sums over flips are made of."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flipgrad.guards import cannot_look, capturing

# Pre-activations that are worked on at once on a CPU: with more, the memory allocator returns the temporary tensors to the
# system every time, and to fault the pages in anew costs more than the arithmetic.
ACTIVATIONS_AT_ONCE = 2**21

# Terms of a product from which on bfloat16 is faster, and sizes of its matrices, of a convolution the numbers of its channels:
# below that it costs more to convert the numbers. Those of fully connected layers, whose weight has 2 dimensions, and of
# convolutions.
LEAST_NARROW_TERMS, LEAST_NARROW_SIZE = {2: 2**22, 4: 2**20}, {2: 64, 4: 8}

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


def has_channels_last(t: Tensor) -> bool:
    """Whether the channels of images [B, C, H, W] lie next to each other in memory, without gaps."""
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def in_fast_order(images: Tensor) -> Tensor:
    """Images with their numbers in the order with which convolutions are fastest: on a processor, with channels last.

    So are the pre-activations, and with them the states and all that is computed of these. In the paper's network a step takes
    12 % less time for it, at a quarter of its width 20 to 30 %.
    """
    # Whoever captures a graph decides on such orders as well.
    if cannot_look() or images.device.type != "cpu" or images.dtype != torch.float32:
        return images
    return images.contiguous(memory_format=torch.channels_last) if torch.backends.mkldnn.is_available() else images


def as_rows(t: Tensor) -> Tensor:
    """Images with channels last as the matrix [B H W, C] that their memory is; any other tensor as it is.

    So their places are the examples of a fully connected layer, for all that looks at one place at a time.
    """
    return t.permute(0, 2, 3, 1).flatten(0, 2) if has_channels_last(t) else t


def as_images(rows: Tensor, like: Tensor) -> Tensor:
    """What was computed of the :func:`as_rows` of a tensor, in its order; channels may be more or fewer."""
    if not has_channels_last(like):
        return rows
    return rows.view(len(like), *like.shape[2:], rows.shape[1]).permute(0, 3, 1, 2)


def ordered_as(t: Tensor, like: Tensor) -> Tensor:
    """Images ``t`` with their numbers in the order of those of ``like``, so that passes over both may be compiled."""
    if t.dim() != 4 or t.stride() == like.stride() or cannot_look():
        return t
    return t.contiguous(memory_format=torch.channels_last if has_channels_last(like) else torch.contiguous_format)


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
    return input_gradient(grad.to(narrow), weight.to(narrow), torch.empty_like(x, dtype=narrow), geometry).to(x.dtype)


def narrow_pays(places: int, weight: Tensor) -> bool:
    """Whether products of so many ``places`` with a ``weight`` [out, in, ...] are faster in bfloat16.

    They are where the processor multiplies pairs of such numbers at once, and there is enough to do.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or capturing() or not _narrow_is_fast():
        return False
    kind = weight.dim()
    return min(weight.shape[:2]) >= LEAST_NARROW_SIZE[kind] and places * weight.numel() >= LEAST_NARROW_TERMS[kind]


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
