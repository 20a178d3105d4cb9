r"""Affine maps with binary weights: :math:`a_j = \gamma_j \sum_i W_{ji} x_i + b_j`, W = ±1, one scale per output channel.

The weights are one more set of binary units, which all examples of a batch share. For straight-through they are differentiated
in the ordinary way. The path sample-analytic estimator takes discrete derivatives in states and in weights, both of rank one
(:mod:`flipgrad.flips.rank_one`): exact, at the price of the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad import flips
from flipgrad.affine import Affine, AffineMap, Signal, over_channels, per_channel
from flipgrad.flips import averaging, ordinary, rank_one
from flipgrad.flips.averaging import Averaging
from flipgrad.guards import cannot_look
from flipgrad.noise import Noise

# Numbers of the patches of a convolution's input held at once.
NUMBERS_AT_ONCE = 2**22

# With at least this many inputs of an output, and a tolerance, the certainty of averaged units is that of an example.
LEAST_INPUTS = 64


@final
class Meetings(NamedTuple):
    """Which units binary weights meet in a batch.

    Attributes:
        alike: whether all units of an example are known to count alike: no zeros among them and, if averaged, one certainty.
        certainty: of averaged units, the mean of x times its average in every example, [B].
        mask: of zero padding around all examples and channels, [1, 1, H, W].
        all: whether every weight meets a unit at every output.
    """

    alike: bool
    certainty: Tensor | None = None
    mask: Tensor | None = None
    all: bool = False


@final
@dataclass
class BinaryWeightMap(AffineMap):
    r"""A map whose weights are ±1, then a scale and a shift of every output channel.

    ``inner`` is the map by the weights alone, ``scale`` [out] and ``bias`` [out] come after it. With average pooling whose
    windows overlap before it, flips of units are not of rank one, and are computed like those of real weights. So are flips of
    the weights where these are multiplied with other numbers than ±1: real-valued or pooled inputs.

    With inputs that are averages :math:`\bar x` the discrete derivative in a weight is its conditional expectation given all
    other units, :math:`\sum \bar x_i E_j + W_{ji} \sum x_i \bar x_i O_j`: the derivative is odd in the unit's state.
    The second sum, about a hundredth of the first in wide layers, is as costly. Where a tolerance is given it is made of the
    mean of :math:`x \bar x` in every example: an error of 1 to 3 % of one draw's gradient in the weights, most of which
    averages out over draws (measured: 1 % of the mean gradient is left in a trained network, less at its start). With
    ``inputs="rao-blackwell"``, or ``exact=True``, it is computed as it is.
    """

    inner: Affine
    scale: Tensor
    bias: Tensor | None
    _sums: Tensor | None = None

    @property
    def sums(self) -> Tensor:
        """What the weights made of the input of the last evaluation."""
        if self._sums is None:
            raise RuntimeError("a map with binary weights is differentiated once it was evaluated")
        return self._sums.detach()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.inner.weight, self.scale, self.bias, self.sums

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> BinaryWeightMap:
        weight, scale, bias, sums = tensors
        return BinaryWeightMap(replace(self.inner, weight=weight), scale, bias, sums)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        self._sums = self.inner(x)
        scale = self._over_channels(self.scale)
        return self._sums * scale if self.bias is None else torch.addcmul(self._over_channels(self.bias), self._sums, scale)

    def gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        if back.flips_units and not self.inner.views:
            return self._flip_gradients(back, of_x=of_x, of_parameters=of_parameters)
        slopes = back.slopes()
        grad_x = None
        if of_x and back.flips_units:
            grad_x = self.flip_product(back.x, back.a, back.grad, back.noise, back.tolerance)
        elif of_x:
            grad_x = self.inner.transposed(slopes * self._over_channels(self.scale), back.x)
        if not of_parameters:
            return grad_x, None, None, None, None
        rows, sums = self.inner.rows(slopes), self.inner.rows(self.sums)
        others = [dim for dim in range(rows.dim()) if dim != 1]
        grad_bias = None if self.bias is None else rows.sum(others)
        # The sampled states' own sums, whatever a weight takes for its input: the mean is the same.
        grad_scale = (rows * sums).sum(others)
        return grad_x, self.weight_gradient(back, slopes), grad_scale, grad_bias, None

    def _flip_gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        """The :meth:`gradients` where flips of units and of weights are of rank one, from one pass over memory."""
        meetings = self._meetings(back)
        parts = self._changes(back, self.sums, keep_even=of_parameters and not meetings.all)
        grad_x = self._over_units(back.x, parts) if of_x else None
        if not of_parameters:
            return grad_x, None, None, None, None
        grad_bias = None if self.bias is None else parts.slopes
        return grad_x, self._over_weights(back, parts, meetings), parts.scaled, grad_bias, None

    def weight_gradient(self, back: Signal, slopes: Tensor, besides: Tensor | None = None) -> Tensor:
        """The gradient in the weights ±1; ``besides`` is added to that in the sums by the weights, in the ordinary way."""
        if not back.flips:
            grad = slopes * self._over_channels(self.scale)
            result = self.inner.weight_gradient(back.inputs, grad if besides is None else grad + besides)
            if back.share is None:
                return result
            product = self._scaled().slope_product(back.x, back.share, back.a, 2 * back.grad, back.noise, back.tolerance)
            return result + per_channel(product, self.scale)
        if not back.binary or self.inner.views:
            product = self._weights_at_any_inputs(back)
            return product if besides is None else product + self.inner.weight_gradient(back.inputs, besides)
        meetings = self._meetings(back)
        return self._over_weights(back, self._changes(back, back.a, keep_even=not meetings.all), meetings, besides)

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        size = self._size_of_a_flip(x)
        if size is None:
            return self._scaled().flip_product(x, a, grad, noise, tolerance)
        a, grad = self._rows(a), self._rows(grad)
        return self._over_units(x, rank_one.changes(a, grad, a, 2 * size, noise, self._groups, keep_even=False))

    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        size = self._size_of_a_flip(x)
        if size is None:
            return self._scaled().log_ratio(x, a, states, noise, tolerance)
        parts = rank_one.log_changes(self._rows(a), self._rows(states), 2 * size, noise, self._groups)
        return self._over_units(x, parts, of_ratio=True)

    def slope_product(self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._scaled().slope_product(x, share, a, grad, noise, tolerance)

    def averaging(self, x: Tensor, a: Tensor, noise: Noise, log_odds: Tensor, tolerance: float) -> Averaging | Tensor | None:
        if self.inner.views:
            return None
        return averaging.of_rank_one(x, a, self.inner.weight, self.scale, noise, log_odds)

    def variance(self, v: Tensor) -> Tensor:
        return self.inner.variance(v) * self._over_channels(self.scale).square()

    def _changes(self, back: Signal, sums: Tensor, *, keep_even: bool) -> rank_one.Changes:
        """What flips of units and of weights need of the pre-activations; slopes are summed with ``sums`` besides."""
        a, grad, sums = (self._rows(t) for t in (back.a, back.grad, sums))
        step = 2 * self.scale.detach().to(a.dtype)
        return rank_one.changes(a, grad, sums, step, back.noise, self._groups, keep_even=keep_even)

    def _over_units(self, x: Tensor, parts: rank_one.Changes, *, of_ratio: bool = False) -> Tensor:
        """The sum over the outputs of every unit of ``x``."""
        signs = self.inner.weight.detach()
        form = self.inner.flip_form(signs, x)
        weight = form.weight.sign() if self.inner.views else signs
        units = form.units(x).to(weight.dtype)
        u = rank_one.over_units(units, parts, weight, form.geometry, holes=bool(self.inner.views), of_ratio=of_ratio)
        return self.inner.moved_back(form, x, u).to(x.dtype)

    def _over_weights(self, back: Signal, parts: rank_one.Changes, meetings: Meetings, besides: Tensor | None = None) -> Tensor:
        """The sum over examples and places of every weight, where the states are ±1."""
        signs, geometry = self.inner.weight, self.inner.geometry
        odd = parts.odd if besides is None else parts.odd + self._rows(besides)
        inputs = self._rows(self.inner.seen(back.inputs))
        if meetings.alike:
            return rank_one.over_weights_alike(odd, parts, meetings.certainty, inputs, meetings.mask, signs, geometry)
        if parts.even is None:
            raise RuntimeError("units that differ need the numbers O of every place")
        seen = self._rows(self.inner.seen(back.x))
        if meetings.certainty is None:
            certainties = inputs * seen
        else:
            certainties = seen.abs() * meetings.certainty.view(-1, *[1] * (seen.dim() - 1))
        return rank_one.over_weights(odd, parts.even, certainties, inputs, signs, geometry)

    def _meetings(self, back: Signal) -> Meetings:
        """Which units the weights meet, as far as that is seen without a second gradient."""
        x, averaged = back.x, back.inputs is not back.x
        # Few inputs: a second gradient costs little, and one unit's certainty counts for much.
        exact = back.exact or back.share is not None or self.inner.weight[0].numel() < LEAST_INPUTS
        if averaged and exact:
            return Meetings(alike=False)
        # A state that is 0 is no unit. The smallest size tells in a fraction of the time that comparisons take.
        zeros = cannot_look() or (x.numel() > 0 and not bool(x.detach().abs().amin() > 0))
        certainty = self._certainty(x, back.inputs, zeros=zeros) if averaged else None
        if zeros:
            return Meetings(False, certainty)
        geometry, padding = self.inner.geometry, self.inner.padding
        if padding is None or padding.value:
            return Meetings(True, certainty, None, all=geometry is None or geometry.padding == (0, 0))
        return Meetings(True, certainty, self.inner.seen(torch.ones_like(x[:1, :1])).to(self.inner.weight.dtype))

    def _certainty(self, x: Tensor, averages: Tensor, *, zeros: bool) -> Tensor:
        """The mean of states times their averages over the units of every example; ``zeros`` among these are none."""
        units, averages = (self._rows(t.detach()).flatten(1) for t in (x, averages))
        count = torch.linalg.vecdot(units, units).clamp(min=1) if zeros else max(1, units.shape[1])
        mean: Tensor = torch.linalg.vecdot(units, averages) / count
        return mean

    def _size_of_a_flip(self, x: Tensor) -> Tensor | None:
        """Half of what a flip of a unit of ``x`` moves the pre-activations of every output channel by; None if units differ."""
        size = self.inner.share_of_a_unit(x)
        return None if size is None else (self.scale.detach() * size).to(self.inner.weight.dtype)

    def _rows(self, t: Tensor) -> Tensor:
        """With one example in each row, and the digits of the weights, of which there are half under autocast."""
        return self.inner.rows(t).to(self.inner.weight.dtype)

    @property
    def _groups(self) -> int:
        return 1 if self.inner.geometry is None else self.inner.geometry.groups

    def _weights_at_any_inputs(self, back: Signal) -> Tensor:
        """The discrete gradient in the weights where they are multiplied with any numbers.

        The weights of one output are the states of a layer whose weights are the inputs of all examples, at all places.
        """
        signs, geometry = self.inner.weight.detach(), self.inner.geometry
        seen = self.inner.rows(self.inner.seen(back.x.detach()).to(signs.dtype))
        a, grad = (self.inner.rows(t.to(signs.dtype)) for t in (back.a, back.grad))
        groups = 1 if geometry is None else geometry.groups
        examples = max(1, NUMBERS_AT_ONCE // max(1, groups * signs[0].numel() * a[:1, :1].numel()))
        total = torch.zeros_like(signs)
        for some, a_of, grad_of in zip(seen.split(examples), a.split(examples), grad.split(examples), strict=True):
            patches = _patches(some, signs, geometry)
            of_outputs = [
                flips.flip_product(
                    signs[j].reshape(1, -1),
                    a_of[:, j].reshape(1, -1),
                    grad_of[:, j].reshape(1, -1),
                    patches[j * groups // len(signs)] * self.scale[j],
                    back.noise,
                    tolerance=back.tolerance,
                )
                for j in range(len(signs))
            ]
            total = total + torch.stack(of_outputs).view_as(signs)
        return total

    def _scaled(self) -> Affine:
        """The same map, the scale being a part of the weight."""
        return replace(self.inner, weight=per_channel(self.inner.weight, self.scale), bias=self.bias)

    def _over_channels(self, values: Tensor) -> Tensor:
        return over_channels(values, self.inner)


def _patches(seen: Tensor, signs: Tensor, geometry: ordinary.Geometry | None) -> list[Tensor]:
    """What the weights of one output see at every place of every example, [places, inputs], for every group of channels."""
    if geometry is None:
        return [seen]
    stride, padding, dilation, groups = geometry
    kernel = (signs.shape[2], signs.shape[3])
    unfolded = functional.unfold(seen, kernel, dilation, padding, stride)
    return [part.transpose(1, 2).flatten(0, 1) for part in unfolded.chunk(groups, 1)]
