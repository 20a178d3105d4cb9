r"""Sums over flips where every weight of an output is one number up to its sign, :math:`A_{ji} = \gamma_j W_{ji}`, W = ±1.

A function of :math:`t = W_{ji} x_i = \pm 1` is affine in t, so a flip's term has rank one exactly, for every noise and scale:

.. math:: F(a_j) - F(a_j - 2\gamma_j t) = E_j t + O_j,

with E and O from :meth:`flipgrad.noise.Noise.change`. Times the gradients :math:`g_j` in the output states, the sum over the
outputs of a unit, and that over the examples of a weight, are

.. math:: u_i = \sum_j W_{ji} E_j g_j + x_i \sum_j O_j g_j, \qquad v_{ji} = \sum x_i E_j g_j + W_{ji} \sum O_j g_j :

an ordinary gradient each, and a sum that does not tell the units of a place, or the inputs of a weight, apart. The log ratio
is the same of other numbers. No tolerance is needed. A zero in the place of a unit or of a weight is none, and adds nothing.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flipgrad.flips.ordinary import Geometry, as_images, as_rows, has_channels_last, input_gradient, weight_gradient
from flipgrad.flips.units import joined, spread
from flipgrad.guards import cannot_look
from flipgrad.native import library
from flipgrad.noise import Noise


@final
@dataclass(frozen=True)
class Changes:
    """What flips of rank one need of a layer's pre-activations [B, out] or [B, out, H', W'].

    Attributes:
        odd: the numbers E, shaped like the pre-activations.
        spread: the sums of the numbers O over the output channels of every group, [B, groups, ...].
        even: the numbers O themselves, where they are kept.
        by_example: their sums over the places, [B, out]; those of a log ratio are not needed.
        slopes: the sums of the ordinary gradient in the pre-activations over examples and places, [out], likewise.
        scaled: the sums of that times other numbers.
    """

    odd: Tensor
    spread: Tensor
    even: Tensor | None = None
    by_example: Tensor | None = None
    slopes: Tensor | None = None
    scaled: Tensor | None = None


def changes(
    a: Tensor, grad: Tensor, sums: Tensor, step: Tensor, noise: Noise, groups: int = 1, *, keep_even: bool = True
) -> Changes:
    """E and O of the cdf over the ``step`` [out] of every channel, times ``grad``, and sums of the slopes times ``sums``.

    All tensors but the step are shaped like the pre-activations ``a``.
    """
    if groups == 1 and _rows_are_compiled(noise, step, a, grad, sums):
        return _compiled_flip_rows(a, grad, sums, step, noise, keep_even=keep_even)
    if _images_are_compiled(noise, step, a, grad, sums):
        a, grad, sums = (t.contiguous() for t in (a, grad, sums))
        return _compiled(a, grad, sums, step, noise, groups, keep_even=keep_even)
    slopes = 2 * noise.pdf(a) * grad
    odd, even = (part.mul_(grad) for part in noise.change(a, _over_places(step, a)))
    places, others = list(range(2, a.dim())), [dim for dim in range(a.dim()) if dim != 1]
    by_example = even.sum(places) if places else even
    return Changes(odd, _by_group(even, groups), even, by_example, slopes.sum(others), (slopes * sums).sum(others))


def log_changes(a: Tensor, states: Tensor, step: Tensor, noise: Noise, groups: int = 1) -> Changes:
    """Those of log p(y | a) of ``states`` y: see :meth:`flipgrad.noise.Noise.log_change`."""
    if groups == 1 and _rows_are_compiled(noise, step, a, states):
        parts = _compiled_rows(as_rows(a), as_rows(states), step, noise)
        if parts is not None:
            return Changes(as_images(parts.odd, a), as_images(parts.spread, a))
    if _images_are_compiled(noise, step, a, states):
        return _compiled(a.contiguous(), states.contiguous(), None, step, noise, groups)
    if a.dim() == 2 and noise.compiled and not cannot_look() and library.takes(step) and library.usable(a, states):
        # The examples are the places of one image: they lie next to each other.
        rows, given = (t.t().contiguous()[None, :, :, None] for t in (a, states))
        if library.takes(rows, given):
            parts = _compiled(rows, given, None, step, noise, 1)
            return Changes(parts.odd[0, :, :, 0].t(), parts.spread[0, :, :, 0].t())
    odd, even = noise.log_change(a, states, _over_places(step, a))
    return Changes(odd, _by_group(even, groups))


def _images_are_compiled(noise: Noise, step: Tensor, *tensors: Tensor) -> bool:
    """Whether passes over pre-activations [B, out, H', W'] are compiled."""
    known = tensors[0].dim() == 4 and noise.compiled and not cannot_look()
    return known and library.takes_alike(*tensors) and library.takes(step)


def _rows_are_compiled(noise: Noise, step: Tensor, *tensors: Tensor) -> bool:
    """Whether passes are compiled over pre-activations whose channels lie next to each other, of one place or of several."""
    first = tensors[0]
    in_rows = first.dim() == 2 or has_channels_last(first)
    known = in_rows and noise.compiled and not cannot_look()
    return known and library.takes_alike(*tensors) and library.takes(step)


def _compiled_flip_rows(a: Tensor, grad: Tensor, sums: Tensor, step: Tensor, noise: Noise, *, keep_even: bool) -> Changes:
    """:func:`changes` of logistic noise in one pass over memory, for one group."""
    images, channels, *place = a.shape
    odd, spread = torch.empty_like(a), a.new_empty(images, 1, *place)
    even, rows = torch.empty_like(a) if keep_even else None, a.new_empty(images, 3, channels)
    sizes = {"images": images, "channels": channels, "groups": 1, "block": math.prod(place)}
    tensors = a, grad, sums, step, odd, odd if even is None else even, spread, rows
    library.call("flip_rows", torch.float32, *tensors, **sizes, keep_even=keep_even, scale=noise.scale)
    _, slopes, scaled = rows.sum(0)
    return Changes(odd, spread, even, rows[:, 0], slopes, scaled)


def _compiled(
    a: Tensor, given: Tensor, sums: Tensor | None, step: Tensor, noise: Noise, groups: int, *, keep_even: bool = False
) -> Changes:
    """The same of logistic noise in one pass over memory; without ``sums``, of a log ratio."""
    images, channels, *place = a.shape
    odd, spread = torch.empty_like(a), a.new_empty(images, groups, *place)
    even, rows = torch.empty_like(a) if keep_even else odd, a.new_empty(images, channels, 3)
    sizes = {"images": images, "channels": channels, "groups": groups, "block": place[0] * place[1]}
    options = {"of_logs": sums is None, "keep_even": keep_even, "scale": noise.scale}
    tensors = a, given, a if sums is None else sums, step, odd, even, spread, rows
    library.call("rank_one", torch.float32, *tensors, **sizes, **options)
    if sums is None:
        return Changes(odd, spread)
    _, slopes, scaled = rows.sum(0).unbind(-1)
    return Changes(odd, spread, even if keep_even else None, rows[..., 0], slopes, scaled)


def _compiled_rows(a: Tensor, states: Tensor, step: Tensor, noise: Noise) -> Changes | None:
    """Those of a log ratio of logistic noise for pre-activations [B, out]; None where a step is too large."""
    odd, spread = torch.empty_like(a), a.new_empty(len(a), 1)
    sizes = {"images": len(a), "channels": a.shape[1], "groups": 1, "block": 1, "of_logs": True, "keep_even": False}
    status = library.call("log_rows", torch.float32, a, states, step, odd, spread, scale=noise.scale, **sizes)
    return None if status else Changes(odd, spread)


def _over_places(step: Tensor, a: Tensor) -> Tensor:
    return step if a.dim() == 2 else step[:, None, None]


def _by_group(even: Tensor, groups: int) -> Tensor:
    """The sums over the output channels of every group, [B, groups, ...]."""
    summed: Tensor = even.unflatten(1, (groups, -1)).sum(2)
    return summed


def over_units(
    x: Tensor, parts: Changes, signs: Tensor, geometry: Geometry | None, *, holes: bool, of_ratio: bool = False
) -> Tensor:
    r"""The sums :math:`x_i [x_i \sum_j W_{ji} E_j + \sum_j |W_{ji}| O_j]` of all units.

    Args:
        x: states [B, in], or [B, C, H, W] of a convolution.
        parts: the numbers E and O.
        signs: the weights, ±1, or 0 where a unit has none.
        geometry: of the convolution.
        holes: whether there are zeros among the ``signs``. They are then at the same inputs, or places of the kernel, in all
            output channels.
        of_ratio: whether the sums are of a log ratio: then they are times :math:`x_i` once more.

    Returns:
        The sums, shaped like ``x``.
    """
    odd = input_gradient(parts.odd, signs, x, geometry)
    # Of all the output channels of a group, one weight is as good as another.
    if geometry is None:
        even = parts.spread * signs[:1].abs() if holes else parts.spread.expand_as(odd)
        return joined(odd, even.contiguous(), x) if of_ratio else joined(even, odd, x)
    groups = geometry.groups
    kernel = signs[0, :1].abs() if holes else torch.ones_like(signs[0, :1])
    share = odd.new_ones(groups, x.shape[1] // groups)
    return spread(parts.spread, kernel.repeat(groups, 1, 1), share, odd, x, geometry, of_ratio=of_ratio)


def over_weights(
    odd: Tensor, even: Tensor, certainties: Tensor, inputs: Tensor, signs: Tensor, geometry: Geometry | None
) -> Tensor:
    r"""The sums :math:`\sum \bar x_i E_j + W_{ji} \sum c_i O_j` over examples and places, one per weight.

    Args:
        odd: the numbers E, shaped like pre-activations [B, out] or [B, out, H', W'].
        even: the numbers O.
        certainties: :math:`c = x \bar x`, shaped like ``inputs``; 1 for sampled states, 0 where there are none.
        inputs: what a weight takes for the states x that it is multiplied with, :math:`\bar x`: these states themselves, or an
            average of each; [B, in] or [B, C, H, W], constant padding included.
        signs: the weights, ±1.
        geometry: of the convolution.

    Returns:
        The sums, shaped like ``signs``.
    """
    return torch.addcmul(
        weight_gradient(odd, signs, inputs, geometry), signs, weight_gradient(even, signs, certainties, geometry)
    )


def over_weights_alike(
    odd: Tensor,
    parts: Changes,
    certainty: Tensor | None,
    inputs: Tensor,
    mask: Tensor | None,
    signs: Tensor,
    geometry: Geometry | None,
) -> Tensor:
    """The same with one ``certainty`` [B] of all units of an example, or 1.

    ``mask`` [1, 1, H, W] is 0 where the input of a convolution has no unit, in all examples and channels, and else 1. Without
    one, and without zero padding, every weight meets as many units as there are outputs.
    """
    first = weight_gradient(odd, signs, inputs, geometry)
    if geometry is None or (mask is None and geometry.padding == (0, 0)):
        total = parts.by_example
        if total is None:
            raise RuntimeError("the sums by examples are of a flip product")
        summed = total.sum(0) if certainty is None else certainty @ total
        return torch.addcmul(first, signs, summed.view(-1, *[1] * (signs.dim() - 1)))
    if parts.even is None:
        raise RuntimeError("with padding the numbers O are needed at every place")
    even = parts.even if certainty is None else parts.even * certainty[:, None, None, None]
    if mask is None:
        mask = inputs.new_ones(1, 1, *inputs.shape[2:])
    counted = weight_gradient(even.sum(0, keepdim=True), signs[:, :1], mask.expand(-1, geometry.groups, -1, -1), geometry)
    return torch.addcmul(first, signs, counted)
