r"""The flip product as a few ordinary transposed convolutions or matrix products, to a tolerance, for every noise.

The term of one weight splits into a difference, which is odd in the weight, and a curvature, which is even in it (see
``_basis``):

.. math:: u_i = \sum_j \big[E(a_j, w_{ji}) + x_i\, O(a_j, w_{ji})\big] g_j
    \approx \sum_j \Big[\sum_r e_r(a_j)\, v_r(w_{ji}) + x_i \sum_r o_r(a_j)\, q_r(w_{ji})\Big] g_j .

So it is the ordinary gradient of a layer with the weights :math:`v_r(w)`, and of another with :math:`q_r(w)`: it runs at
the speed of the device's own library. :mod:`flipgrad.flips.form` finds the functions for a layer's weights and a tolerance;
:func:`product` uses them, without looking at the data, so that it compiles as one graph.

Memory formats are kept as they come. On a CPU the gradient of a convolution is up to a fifth faster with ``channels_last``
tensors, about what it would cost to convert them here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flipgrad.flips import passes
from flipgrad.flips.form import Form
from flipgrad.flips.ordinary import Geometry, input_gradient
from flipgrad.native import separable as compiled
from flipgrad.noise import Noise

# Pre-activations that are worked on at once on a CPU: with more, the memory allocator returns the temporary tensors to the
# system every time, and to fault the pages in anew costs more than the arithmetic.
ACTIVATIONS_AT_ONCE = 2**21


def product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.flip_product` by a form for these weights."""
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, a, grad, weight = (t.to(wide) for t in (x, a, grad, weight))
    groups = 1 if geometry is None else geometry.groups
    fused = geometry is None and passes.fused_product_pays(x)
    if fused:
        x, weight = x.contiguous(), weight.contiguous()
    else:
        difference_weight, curvature_weight = passes.weight_functions(weight, *form.coefficients, form.limit, groups)

    def examples(x: Tensor, a: Tensor, grad: Tensor) -> Tensor:
        differences, curvatures = passes.flip_functions(a, grad, form.steps, form.curvature_nodes, noise, groups)
        if fused:
            functions = differences.contiguous(), curvatures.contiguous()
            return compiled.product(x, *functions, weight, *form.coefficients, form.limit)
        u = input_gradient(differences, difference_weight, x, geometry)
        # Times x twice, not once: a zero is no unit.
        if not form.curvature:
            return u.mul_(x).mul_(x)
        # Its memory is good for the next result.
        del differences
        return combine(u, input_gradient(curvatures, curvature_weight, x, geometry), x)

    return by_examples(examples, x, a, grad).to(dtype)


def combine(twice: Tensor, once: Tensor, x: Tensor) -> Tensor:
    """``twice`` times x squared, plus ``once`` times x, in the memory of ``twice``; a zero of x is no unit and gets 0."""
    return torch.addcmul(once, twice, x, out=twice).mul_(x)


def by_examples(function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, a: Tensor, other: Tensor) -> Tensor:
    """The result of a function of states, pre-activations and the like, some examples at a time if that is faster."""
    if x.device.type != "cpu" or a.numel() <= ACTIVATIONS_AT_ONCE or torch.compiler.is_compiling():
        return function(x, a, other)
    size = math.ceil(len(x) / math.ceil(a.numel() / ACTIVATIONS_AT_ONCE))
    return torch.cat([function(*some) for some in zip(*(t.split(size) for t in (x, a, other)), strict=True)])
