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

import math

import torch
from torch import Tensor

from flipgrad.flips import vectorized
from flipgrad.flips._arguments import check_layer, memory_format
from flipgrad.flips.ordinary import Geometry
from flipgrad.native.library import WEIGHTS_TOO_LARGE, call, check_tensors, computed_in
from flipgrad.noise import Noise


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.flip_product` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    The result has the memory format of ``x``.
    """
    return _sum("flip", noise, geometry, x=x, a=a, grad=grad, weight=weight)


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio`, like :func:`flip_product`."""
    return _sum("ratio", noise, geometry, x=x, a=a, states=states, weight=weight)


def _sum(function: str, noise: Noise, geometry: Geometry | None, **tensors: Tensor) -> Tensor:
    check_tensors(**tensors)
    check_layer("native", noise, geometry, **tensors)
    x, a, given, weight = tensors.values()
    dtype = computed_in(x.dtype)
    u = torch.empty(x.shape, dtype=dtype, memory_format=memory_format(x))
    if u.numel() == 0:
        return u.to(x.dtype)
    memory = [*(t.detach() if t.dtype == dtype else t.detach().to(dtype) for t in (x, a, given, weight)), u]
    # A fully connected layer is a convolution of one place.
    places = () if geometry else (0, 0)
    strides = [(*t.stride(), *places) for t in memory]
    height, width, out_height, out_width, *kernel = (*x.shape[2:], *a.shape[2:], *weight.shape[2:]) if geometry else (1,) * 6
    stride, padding, dilation, groups = geometry or Geometry()
    status = call(
        function, dtype, *memory,
        batch=x.shape[0], groups=groups, in_channels=weight.shape[1], out_channels=weight.shape[0] // groups,
        height=height, width=width, out_height=out_height, out_width=out_width, kernel=tuple(kernel),
        stride=stride, padding=padding, dilation=dilation,
        x_strides=strides[0], a_strides=strides[1], grad_strides=strides[2], weight_strides=strides[3], u_strides=strides[4],
        largest_weight=largest(memory[3]), scale=noise.scale,
    )  # fmt: skip
    # Only flip products have weights that are too large.
    return vectorized.flip_product(x, a, given, weight, noise, geometry) if status == WEIGHTS_TOO_LARGE else u.to(x.dtype)


def largest(weight: Tensor) -> float:
    """The largest absolute value; infinite where one is NaN, which says nothing about the others."""
    if weight.numel() == 0:
        return 0.0
    low, high = (t.item() for t in torch.aminmax(weight))
    return math.inf if math.isnan(low) else max(-low, high)
