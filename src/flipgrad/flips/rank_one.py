r"""Sums over flips where every weight of an output is one number up to its sign, :math:`A_{ji} = \gamma_j W_{ji}`, W = ±1.

A function of :math:`t = W_{ji} x_i = \pm 1` is affine in t, so a flip's term has rank one exactly, for every noise and scale:

.. math:: F(a_j) - F(a_j - 2\gamma_j t) = E_j t + O_j,

with E and O from :meth:`flipgrad.noise.Noise.change`. Times the gradients :math:`g_j` in the output states, the sum over the
outputs of a unit, and that over the examples of a weight, are

.. math:: u_i = \sum_j W_{ji} E_j g_j + x_i \sum_j O_j g_j, \qquad v_{ji} = \sum x_i E_j g_j + W_{ji} \sum O_j g_j :

an ordinary gradient each, and a sum that does not tell the units of a place, or the inputs of a weight, apart. The log ratio
is the same of other numbers. No tolerance is needed. A zero in the place of a unit or of a weight is none, and adds nothing.
"""

import torch
from torch import Tensor

from flipgrad.flips.ordinary import Geometry, input_gradient, weight_gradient


def over_units(x: Tensor, odd: Tensor, even: Tensor, signs: Tensor, geometry: Geometry | None, *, holes: bool) -> Tensor:
    r"""The sums :math:`\sum_j W_{ji} E_j + x_i \sum_j |W_{ji}| O_j` of all units, and 0 where there is none.

    Args:
        x: states [B, in], or [B, C, H, W] of a convolution.
        odd: the numbers E, shaped like pre-activations [B, out] or [B, out, H', W'].
        even: the numbers O, likewise.
        signs: the weights, ±1, or 0 where a unit has none.
        geometry: of the convolution.
        holes: whether there are zeros among the ``signs``. They are then at the same inputs, or places of the kernel, in all
            output channels.

    Returns:
        The sums, shaped like ``x``.
    """
    # Of all the output channels of a group, one weight is as good as another.
    if geometry is None:
        spread = even.sum(1, keepdim=True)
        if holes:
            spread = spread * signs[:1].abs()
    else:
        groups = geometry.groups
        summed = even.unflatten(1, (groups, -1)).sum(2)
        kernel = signs[:1, :1].abs() if holes else torch.ones_like(signs[:1, :1])
        shared = input_gradient(summed, kernel.expand(groups, -1, -1, -1), x[:, :groups], geometry)
        spread = shared.repeat_interleave(x.shape[1] // groups, 1) if groups > 1 else shared
    return torch.addcmul(spread, x, input_gradient(odd, signs, x, geometry)).mul_(x)


def over_weights(
    seen: Tensor, inputs: Tensor, odd: Tensor, even: Tensor, signs: Tensor, geometry: Geometry | None, *, alike: bool
) -> Tensor:
    r"""The sums :math:`\sum \bar x_i E_j + W_{ji} \sum x_i \bar x_i O_j` over examples and places, one per weight.

    Args:
        seen: the states x that the weights are multiplied with, [B, in] or [B, C, H, W], constant padding included.
        inputs: what a weight takes for them, :math:`\bar x`: these states themselves, or an average of each.
        odd: the numbers E, as for :func:`over_units`, like ``even``, ``signs`` (which has no zeros) and ``geometry``.
        even: the numbers O.
        alike: whether ``inputs`` is ``seen``, and all examples and channels have their zeros, if any, at the same places.

    Returns:
        The sums, shaped like ``signs``.
    """
    first = weight_gradient(odd, signs, inputs, geometry)
    if not alike:
        return torch.addcmul(first, signs, weight_gradient(even, signs, seen * inputs, geometry))
    even = even.sum(0, keepdim=True)
    mask = seen[:1].abs() if geometry is None else seen[:1, : geometry.groups].abs()
    if geometry is None:
        return torch.addcmul(first, signs, even.t() * mask)
    return torch.addcmul(first, signs, weight_gradient(even, signs[:, :1], mask, geometry))
