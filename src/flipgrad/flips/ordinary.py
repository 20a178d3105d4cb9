"""The ordinary gradients of fully connected layers and convolutions, which fast sums over flips are made of."""

from typing import NamedTuple

import torch
from torch import Tensor


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


def weight_gradient(grad: Tensor, weight: Tensor, x: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient in the ``weight`` [out, in] or [out, C / groups, kh, kw], of which only the shape counts."""
    if geometry is None:
        return grad.t() @ x
    return _backward(grad, x, weight, geometry, (False, True, False))


def _backward(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]) -> Tensor:
    stride, padding, dilation, groups = geometry
    shape = stride, padding, dilation, False, (0, 0), groups
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(grad, x, weight, None, *shape, wanted)
    return gradients[wanted.index(True)]
