r"""Max-pooling of ±1 states: a window is +1 if one of its units is, -1 if all are -1.

That is a function of every unit's state alone, the others being given, so it has a continuation that is linear in each of them:

.. math:: y = 1 - 2 \prod_i \frac{1 - x_i}{2}, \qquad \frac{\partial y}{\partial x_i} = \prod_{j \ne i} \frac{1 - x_j}{2}.

Of states it is their maximum, and its derivative is the discrete one, :math:`D_i y = (y(x_i{=}{+}1) - y(x_i{=}{-}1))/2`: 1 if
all other units of the window are -1, so that this one decides, else 0. (The derivative that ``nn.MaxPool2d`` has goes to one of
the largest units, wherever several are, and has no such meaning.) Of the means of independent units it is the mean of y. So
one formula serves samples, means and relaxed states, and the relaxed ones of independent units have the right mean where these
have.

Windows must not overlap: then a unit is a part of one window, pooled states are independent units as their units are, and a
flip of a unit is a flip of its pooled state, or none. PSA's derivatives through it are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad.contract import CERTAIN
from flipgrad.errors import InputError
from flipgrad.guards import capturing, check_exportable, refuse_scripting, uncompiled
from flipgrad.record import Record, mark


@final
@dataclass(frozen=True)
class Windows:
    """Windows over the last two dimensions, which do not overlap. Positions beyond the border are no units.

    >>> Windows((2, 2), (2, 2), (0, 0), False).states(torch.tensor([[[[-1.0, 1, -1], [-1, -1, 1]]]]))
    tensor([[[[1.]]]])
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool

    @staticmethod
    def of(module: nn.MaxPool2d) -> Windows:
        """Those of a module, or an error that names what is not known to be right."""
        kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        if _pair(module.dilation) != (1, 1) or module.return_indices:
            raise InputError(f"{module} of binary states: use dilation=1 and return_indices=False")
        if any(n < 1 for n in (*kernel, *stride)) or any(not 0 <= 2 * p <= k for p, k in zip(padding, kernel, strict=True)):
            raise InputError(
                f"{module} of binary states: kernel_size and stride must be positive, padding at most half of kernel_size"
            )
        if any(k > s for k, s in zip(kernel, stride, strict=True)):
            raise InputError(
                f"{module} of binary states: its windows overlap, so that a unit is a part of several pooled states, which are "
                "then no independent units, and a flip of it is no flip of one of them; use a stride of at least kernel_size"
            )
        return Windows(kernel, stride, padding, module.ceil_mode)

    def states(self, x: Tensor) -> Tensor:
        """The maximum of states ``x`` [B, C, H, W] in every window, or its continuation; differentiable."""
        return 1 - 2 * self._over((1 - x) / 2, torch.mul, 1.0)

    def log_odds(self, log_odds: Tensor) -> Tensor:
        """log p(+1) / p(-1) of the maximum of independent units, from theirs: never less precise than these."""
        return self._over(log_odds.clamp(-CERTAIN, CERTAIN), _either, -CERTAIN)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """How many windows there are, as ``nn.MaxPool2d`` counts them."""
        return self._outputs(0, height), self._outputs(1, width)

    def _outputs(self, axis: int, size: int) -> int:
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        count = (size + 2 * padding - kernel + (stride - 1) * self.ceil_mode) // stride + 1
        # The last window must begin in front of the border behind.
        return count - (self.ceil_mode and (count - 1) * stride >= size + padding)

    def _over(self, t: Tensor, combine: Callable[[Tensor, Tensor], Tensor], neutral: float) -> Tensor:
        """Numbers ``t`` [..., H, W] of units, combined in every window; those ``neutral`` change nothing.

        Rows first, where numbers that are combined are far apart in memory and their neighbours are combined alike.
        """
        counts = self.output_size(t.shape[-2], t.shape[-1])
        pads: list[int] = []
        for axis in (1, 0):
            # Every window has the space of its stride: what is not in the kernel is left out.
            after = counts[axis] * self.stride[axis] - self.padding[axis] - t.shape[axis - 2]
            pads += [self.padding[axis], after]
        if any(pads):
            t = functional.pad(t, pads, value=neutral)
        rows = t.unflatten(-2, (counts[0], self.stride[0])).unbind(-2)[: self.kernel[0]]
        columns = reduce(combine, rows).unflatten(-1, (counts[1], self.stride[1])).unbind(-1)[: self.kernel[1]]
        result: Tensor = reduce(combine, columns)
        return result

    def check(self, x: Tensor) -> None:
        """Refuse what is not [batch, channels, height, width], or too small for one window."""
        if x.dim() != 4 or min(self.output_size(x.shape[2], x.shape[3])) < 1:
            raise InputError(
                f"max-pooling of binary states with kernel {self.kernel[0]}x{self.kernel[1]} takes [batch, channels, height, "
                f"width] of at least that size, got {list(x.shape)}: move it before nn.Flatten, put nn.Unflatten before it, or "
                "leave it out"
            )


@final
class MaxPool2d(nn.MaxPool2d):
    """Max-pooling of binary states, for networks written by hand; in :class:`flipgrad.Sequential` ``nn.MaxPool2d`` will do.

    Its result holds states, which the next binary layer takes for units: their discrete derivative and their probabilities are
    known, see :mod:`flipgrad.max_pooling`. Relaxed states and means are not replaced by their maximum, but by the
    continuation of it that is linear in every unit, which of the means of independent units gives the mean.

    It is for states behind the last binary layer too, where torch's own would be accepted as a part of the head, and give its
    gradient to one of several equal units. Of real values take ``nn.MaxPool2d``.

    Args:
        kernel_size, padding, ceil_mode: as for ``nn.MaxPool2d``. Padding is no unit.
        stride: at least ``kernel_size``, its default: windows that overlap are refused, and so is a dilation.

    >>> import flipgrad as fg
    >>> first, pool, second = fg.BinaryConv2d(1, 4, 3), MaxPool2d(2), fg.BinaryConv2d(4, 4, 3)
    >>> model = fg.use(nn.Sequential(first, pool, second), fg.PSA())
    >>> model(torch.randn(2, 1, 10, 10)).shape
    torch.Size([2, 4, 2, 2])
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        *,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode=ceil_mode)
        Windows.of(self)

    def forward(self, x: Tensor, *, within: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The pooled states of ``x`` [B, C, H, W].

        Args:
            x: states of binary layers, each entry one unit, moved or with its sign changed, or a constant ±1.
            within: how :class:`flipgrad.Sequential` evaluates it; nothing else counts then.
        """
        if within is not None:
            return within(x)
        check_exportable()
        return uncompiled(self._alone, x)

    def _alone(self, x: Tensor) -> Tensor:
        """The states in a graph written by hand."""
        windows = Windows.of(self)
        windows.check(x)
        record = Record.of(x)
        self._check_states(x, known=bool(record.states))
        record.check("MaxPool2d", 3, relaxed=True, told=True, otherwise="")
        read = x.view_as(x)
        result = windows.states(read)
        if record.states:
            prior = record.prior()
            if prior is not None:
                units = prior.log_odds
                prior = replace(prior, log_odds=lambda: windows.log_odds(units()), watch=lambda: record.watch(read))
            mark(result, prior, record.sources)
        return result

    def _check_states(self, x: Tensor, *, known: bool) -> None:
        """Refuse what is no state; values between -1 and 1 are relaxed ones if it is ``known`` that they are states.

        Without gradients nothing is known of an input.
        """
        if capturing():
            return
        right = x.detach().abs() <= 1 if known or not torch.is_grad_enabled() else x.detach().abs() == 1
        if not bool(right.all()):
            wrong = x.detach()[~right].flatten()[0].item()
            raise InputError(
                f"fg.MaxPool2d was handed {wrong:g}, which is no state of a binary layer: of real values take nn.MaxPool2d, "
                "before the first binary layer or behind the last"
            )


def _either(first: Tensor, second: Tensor) -> Tensor:
    """The log-odds that one of two independent units is +1, or both: log(e^a + e^b + e^(a + b)), which never overflows."""
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    # Below the threshold the logarithm is exact in double precision.
    return high + functional.softplus(low + functional.softplus(-high, threshold=50), threshold=50)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second
