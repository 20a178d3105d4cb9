r"""Average pooling followed by a convolution, as one convolution: what the flips of pooled states need.

Pooling with kernel q and stride s, then a convolution with kernel k, dilation d and stride c, has the kernel of size
:math:`(k - 1) d s + q` that places :math:`w / q^2` on a box at every tap, and the stride :math:`c s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.flips.ordinary import Geometry

PoolModule = nn.AvgPool2d | nn.AdaptiveAvgPool2d


class Pool(NamedTuple):
    """An average pooling along both axes; ``weight`` is what one pixel counts in its window."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    weight: float

    @staticmethod
    def of(module: PoolModule, size: Sequence[int]) -> Pool:
        """The pooling that ``module`` does on images of ``size`` (height, width), or an error if its windows differ."""
        if isinstance(module, nn.AdaptiveAvgPool2d):
            wanted = _pair(module.output_size)
            goal = tuple(n if m is None else m for n, m in zip(size, wanted, strict=True))
            if any(n % m for n, m in zip(size, goal, strict=True)):
                raise InputError(
                    f"{module} between binary layers: {size[0]}x{size[1]} is no multiple of {goal[0]}x{goal[1]}, so its "
                    "windows differ in size; choose an output_size that divides the input, or use AvgPool2d"
                )
            kernel = (size[0] // goal[0], size[1] // goal[1])
            return Pool(kernel, kernel, (0, 0), 1 / (kernel[0] * kernel[1]))
        kernel, padding = _pair(module.kernel_size), _pair(module.padding)
        check_even(module)
        weight = 1 / (module.divisor_override or kernel[0] * kernel[1])
        return Pool(kernel, _pair(module.stride), padding, weight)

    def output_size(self, size: Sequence[int]) -> Sequence[int]:
        """The height and the width of pooled images of ``size``."""
        along = zip(size, self.kernel, self.stride, self.padding, strict=True)
        return [(n + 2 * padding - kernel) // stride + 1 for n, kernel, stride, padding in along]


def check_even(module: PoolModule) -> None:
    """Refuse a pooling whose windows weigh pixels differently at the border; adaptive ones are checked with their input."""
    if isinstance(module, nn.AvgPool2d) and (module.ceil_mode or (any(_pair(module.padding)) and not module.count_include_pad)):
        raise InputError(
            f"{module} between binary layers: its border windows weigh pixels differently; use ceil_mode=False and "
            "count_include_pad=True"
        )


def overlaps(module: PoolModule) -> bool:
    """Whether windows of a pooling may share pixels; those of adaptive ones, where they are taken, do not."""
    return isinstance(module, nn.AvgPool2d) and any(
        kernel > stride for kernel, stride in zip(_pair(module.kernel_size), _pair(module.stride), strict=True)
    )


class Axis(NamedTuple):
    """Along rows or columns, a convolution of the first ``used`` pixels, zero-padded ``before`` and ``after``."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    used: int

    def behind(self, size: int, kernel: int, stride: int, padding: int) -> Axis:
        """The same convolution seen from the ``size`` pixels that a pooling turned into this axis's pixels."""
        if (self.before or self.after) and kernel > stride:
            raise InputError(
                f"average pooling with kernel {kernel} and stride {stride} before a padded convolution: overlapping windows "
                "and padding do not fold into one kernel; use a stride of at least the kernel, or padding=0 there"
            )
        outputs = (self.used + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1
        wide = (self.kernel - 1) * self.dilation * stride + kernel
        before = self.before * stride + padding
        extent = (outputs - 1) * self.stride * stride + wide
        # Pixels that no window covers must not be seen by the windows that stand for the padding.
        last = self.used * stride - padding if self.after else size
        used = min(size, last, extent - before)
        return Axis(wide, self.stride * stride, 1, before, extent - before - used, used)


def fold(
    weight: Tensor, geometry: Geometry, sides: tuple[int, int, int, int], pools: Sequence[PoolModule], size: Sequence[int]
) -> tuple[Tensor, Geometry, Callable[[Tensor], Tensor]]:
    """A convolution that sees images of ``size`` through ``pools``, in order, as one convolution of these images.

    ``sides`` is its padding on the left, right, top and bottom, whatever the ``geometry`` says.

    Returns:
        The weight and the geometry, without padding, of the one convolution. And what gives its input: the part of the images
        [B, C, H, W] that is used, zero-padded.
    """
    seen, sizes = [], [size]
    for module in pools:
        seen.append(Pool.of(module, sizes[-1]))
        sizes.append(seen[-1].output_size(sizes[-1]))
    (height, width), stride, dilation = sizes[-1], geometry.stride, geometry.dilation
    left, right, top, bottom = sides
    rows = Axis(weight.shape[2], stride[0], dilation[0], top, bottom, height)
    columns = Axis(weight.shape[3], stride[1], dilation[1], left, right, width)
    for pool, before in zip(reversed(seen), reversed(sizes[:-1]), strict=True):
        # Every tap of the kernel becomes the pooling's box.
        box = weight.new_full((1, 1, *pool.kernel), pool.weight)
        apart = (rows.dilation * pool.stride[0], columns.dilation * pool.stride[1])
        spread: Tensor = functional.conv_transpose2d(weight.flatten(0, 1)[:, None], box, stride=apart)
        weight = spread.view(*weight.shape[:2], *spread.shape[2:])
        rows = rows.behind(before[0], pool.kernel[0], pool.stride[0], pool.padding[0])
        columns = columns.behind(before[1], pool.kernel[1], pool.stride[1], pool.padding[1])
    pads = (columns.before, columns.after, rows.before, rows.after)

    def prepare(x: Tensor) -> Tensor:
        return functional.pad(x[:, :, : rows.used, : columns.used], pads)

    return weight, Geometry((rows.stride, columns.stride), groups=geometry.groups), prepare


def _pair(value: object) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second
