r"""Average pooling followed by a convolution, as one convolution: what the flips of pooled states need.

Pooling with kernel q and stride s, then a convolution with kernel k, dilation d and stride c, has the kernel of size
:math:`(k - 1) d s + q` that places :math:`w / q^2` on a box at every tap, and the stride :math:`c s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.flips.ordinary import Geometry

PoolModule = nn.AvgPool2d | nn.AdaptiveAvgPool2d


@dataclass(frozen=True)
class Pool:
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


def check_even(module: PoolModule) -> None:
    """Refuse a pooling whose windows weigh pixels differently at the border; adaptive ones are checked with their input."""
    if isinstance(module, nn.AvgPool2d) and (module.ceil_mode or (any(_pair(module.padding)) and not module.count_include_pad)):
        raise InputError(
            f"{module} between binary layers: its border windows weigh pixels differently; use ceil_mode=False and "
            "count_include_pad=True"
        )


@dataclass(frozen=True)
class Axis:
    """Along one axis, a convolution of the first ``used`` of ``size`` pixels, zero-padded ``before`` and ``after``."""

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


@dataclass(frozen=True)
class PooledConv:
    """A convolution that sees its input through average poolings, as one convolution of that input."""

    weight: Tensor
    axes: tuple[Axis, Axis]

    @staticmethod
    def fold(
        weight: Tensor,
        geometry: Geometry,
        sides: tuple[int, int, int, int],
        modules: Sequence[PoolModule],
        size: Sequence[int],
    ) -> PooledConv:
        """Fold ``modules``, applied in order to images of ``size``, into the convolution behind them.

        ``sides`` is its padding on the left, right, top and bottom, whatever the ``geometry`` says.
        """
        sizes, pools = [tuple(size)], []
        for module in modules:
            pool = Pool.of(module, sizes[-1])
            pools.append(pool)
            sizes.append(
                tuple(
                    (n + 2 * p - k) // s + 1
                    for n, k, s, p in zip(sizes[-1], pool.kernel, pool.stride, pool.padding, strict=True)
                )
            )
        axes = tuple(
            Axis(
                weight.shape[2 + i], geometry.stride[i], geometry.dilation[i], sides[2 - 2 * i], sides[3 - 2 * i], sizes[-1][i]
            )
            for i in range(2)
        )
        for pool, before in zip(reversed(pools), reversed(sizes[:-1]), strict=True):
            spread = (axes[0].dilation * pool.stride[0], axes[1].dilation * pool.stride[1])
            weight = _spread(weight, spread, pool)
            axes = tuple(axes[i].behind(before[i], pool.kernel[i], pool.stride[i], pool.padding[i]) for i in range(2))
        return PooledConv(weight, (axes[0], axes[1]))

    @property
    def stride(self) -> tuple[int, int]:
        return self.axes[0].stride, self.axes[1].stride

    def prepare(self, x: Tensor) -> Tensor:
        """The part of ``x`` [B, C, H, W] that is used, zero-padded: convolve it without further padding."""
        rows, columns = self.axes
        pads = (columns.before, columns.after, rows.before, rows.after)
        return functional.pad(x[:, :, : rows.used, : columns.used], pads)


def _spread(weight: Tensor, step: tuple[int, int], pool: Pool) -> Tensor:
    """Replace every tap of the kernel by the pooling's box, ``step`` apart."""
    box = weight.new_full((1, 1, *pool.kernel), pool.weight)
    taps = weight.flatten(0, 1)[:, None]
    spread: Tensor = functional.conv_transpose2d(taps, box, stride=step)
    return spread.view(*weight.shape[:2], *spread.shape[2:])


def _pair(value: object) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second
