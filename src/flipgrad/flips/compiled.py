r"""The flip product and the log ratio of logistic noise in compiled code (:mod:`flipgrad.native`): exact, on the processor.

With :math:`T = \tanh w`, :math:`m = \tanh(a/2)` and :math:`C = g (1 - m^2) / 2` the flip product of the sigmoid is

.. math:: u_i = \sum_j \frac{C_j T_{ji}}{1 - x_i m_j T_{ji}}

where nothing overflows and only the denominator can cancel; ``csrc/flip_kernels.inc`` has the details. Float32 results have a
relative error (in the norm) below 1e-5, float64 ones below 1e-12, and neither depends on the number of threads, which is
``torch.get_num_threads()``. Half precision is computed in float32.

The log ratio of the probabilities of output states y is the logarithm of a product, for weights of any size
(``csrc/ratio_kernels.inc``):

.. math:: \log r_i = -\log \prod_j \big[F(b_j) + F(-b_j)\, e^{2 x_i y_j w_{ji}}\big], \quad b = y a

In float32 its error is about 3e-7 times the root of the number of terms, or 1e-6 of the sum of the terms' absolute values
where that is more. An output state that is 0 adds nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from flipgrad.flips import vectorized
from flipgrad.flips._arguments import by_convolution, check_logistic, memory_format
from flipgrad.flips.ordinary import Geometry
from flipgrad.native.flips import sum_over_flips
from flipgrad.native.library import check_tensors
from flipgrad.noise import Noise


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.flip_product` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    The result has the memory format of ``x``.
    """
    return _sum("flip", noise, geometry, x=x, a=a, grad=grad, weight=weight)


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    The result has the memory format of ``x``.
    """
    return _sum("ratio", noise, geometry, x=x, a=a, states=states, weight=weight)


def _sum(function: Literal["flip", "ratio"], noise: Noise, geometry: Geometry | None, **tensors: Tensor) -> Tensor:
    check_logistic("native", noise)
    check_tensors(**tensors)
    return by_convolution(partial(_convolution, function, noise), geometry, **tensors)


def _convolution(
    function: Literal["flip", "ratio"], noise: Noise, geometry: Geometry, x: Tensor, a: Tensor, given: Tensor, weight: Tensor
) -> Tensor:
    pairs, tensors = (geometry.stride, geometry.padding, geometry.dilation), (x, a, given, weight)
    u = sum_over_flips(function, tensors, noise.scale, pairs, geometry.groups, memory_format(x))
    # Only flip products have weights that are too large.
    return vectorized.flip_product(x, a, given, weight, noise, geometry) if u is None else u
