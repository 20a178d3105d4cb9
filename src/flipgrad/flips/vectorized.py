r"""The flip product in vectorised torch operations, exact for every noise, in chunks of bounded memory.

Each term :math:`F(a_j) - F(a_j - s)` with :math:`s = 2 A_{ji} x_i` is formed, at most :data:`CHUNK` of them at a time.
By the noise's symmetry the term of a pre-activation on the upper tail is mirrored to the lower one, where
probabilities are small and their differences keep their relative precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flipgrad.noise import Noise

# Terms formed at once: 2**20 float32 numbers are 4 MiB, which stays in cache.
CHUNK = 2**20


def linear(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise) -> Tensor:
    """The flip product of a fully connected layer.

    Args:
        x: states [B, in].
        a: pre-activations [B, out] of ``x``.
        grad: the gradient [B, out] in the layer's output states.
        weight: [out, in].
        noise: the layer's noise.

    Returns:
        The discrete gradient [B, in] in the states ``x``.
    """
    u = torch.zeros_like(x)
    a, mirror = _mirrored(a)
    grad, flip = grad * mirror, 2 * mirror
    kept = (noise.cdf(a) * grad).sum(1, keepdim=True)
    for rows, columns in _chunks(x.shape[0], x.shape[1], weight.shape[0]):
        step = flip[rows, None, :] * weight.t()[None, columns] * x[rows, columns, None]
        moved = noise.cdf(a[rows, None, :] - step)
        u[rows, columns] = x[rows, columns] * (kept[rows] - torch.einsum("bij,bj->bi", moved, grad[rows]))
    return u


def conv2d(
    x: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The flip product of a convolution with zero padding.

    One kernel position at a time, every output looks at one input position: a batched matrix of terms
    [outputs, inputs] at each place of the output plane.

    Args:
        x: states [B, C, H, W]; a zero is no unit and gets no gradient.
        a: pre-activations [B, out, H', W'] of ``x``.
        grad: the gradient [B, out, H', W'] in the layer's output states.
        weight: [out, C / groups, kh, kw].
        noise: the layer's noise.
        stride: of the convolution, like ``padding``, ``dilation`` and ``groups``.

    Returns:
        The discrete gradient [B, C, H, W] in the states ``x``.
    """
    batch = x.shape[0]
    padded = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    u = torch.zeros_like(padded)
    a, mirror = _mirrored(a)
    grad, flip = grad * mirror, 2 * mirror
    kept = (noise.cdf(a) * grad).unflatten(1, (groups, -1)).sum(2, keepdim=True)
    # [B, groups, outputs or inputs of a group, H', W']
    a, grad, flip = (t.unflatten(1, (groups, -1)) for t in (a, grad, flip))
    kernels = weight.unflatten(0, (groups, -1))
    per_group, height, width = kernels.shape[2], *a.shape[3:]
    terms = a[:1].numel()
    for row in range(weight.shape[2]):
        for column in range(weight.shape[3]):
            top, left = row * dilation[0], column * dilation[1]
            place = (
                slice(top, top + (height - 1) * stride[0] + 1, stride[0]),
                slice(left, left + (width - 1) * stride[1] + 1, stride[1]),
            )
            # [groups, outputs, inputs, 1, 1]
            tap = kernels[:, :, :, row, column, None, None]
            for rows, inputs in _chunks(batch, per_group, terms):
                state = padded[rows, :, place[0], place[1]].unflatten(1, (groups, -1))[:, :, inputs]
                step = flip[rows, :, :, None] * tap[None, :, :, inputs] * state[:, :, None]
                moved = noise.cdf(a[rows, :, :, None] - step)
                change = kept[rows] - (moved * grad[rows, :, :, None]).sum(2)
                target = u[rows].unflatten(1, (groups, -1))[:, :, inputs, place[0], place[1]]
                target += state * change
    bottom, right = padded.shape[2] - padding[0], padded.shape[3] - padding[1]
    return u[:, :, padding[0] : bottom, padding[1] : right].contiguous()


def _mirrored(a: Tensor) -> tuple[Tensor, Tensor]:
    """-|a| and the factor m with F(a) - F(a - s) = m [F(-|a|) - F(-|a| - m s)]: -1 where a > 0, else 1."""
    return -a.abs(), 1 - 2 * (a > 0).to(a.dtype)


def _chunks(batch: int, inputs: int, terms_per_input: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of (batch, inputs) with at most CHUNK terms each: whole examples where they fit, else parts of one."""
    columns = max(1, min(inputs, CHUNK // max(1, terms_per_input)))
    rows = max(1, CHUNK // max(1, columns * terms_per_input)) if columns == inputs else 1
    for row in range(0, batch, rows):
        for column in range(0, inputs, columns):
            yield slice(row, row + rows), slice(column, column + columns)
