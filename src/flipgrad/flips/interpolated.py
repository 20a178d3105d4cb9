r"""The log ratio and the slope product as a few ordinary products, with the weight functions of a flip product's form.

The flip product's separable form (:mod:`flipgrad.flips.separable`) interpolates in the step s = 2w: a difference, which is odd
in s, is :math:`\sum_r \varphi(a, s_r)\, v_r(s)` for the form's nodes :math:`s_r`, a curvature, which is even in it,
:math:`\sum_r \psi(a, s_r)\, q_r(s)`. That serves every smooth function of a and s, so the two other sums over flips take the
same :math:`v_r` and :math:`q_r`:

- the log ratio of a unit, :math:`\sum_j [\log p(y_j | a_j - s_{ji} x_i) - \log p(y_j | a_j)]`, has the difference
  :math:`x_i\, y\, \tfrac12 [\log F(ya - s) - \log F(ya + s)]` and the curvature
  :math:`\tfrac12 [\log F(ya - s) + \log F(ya + s)] - \log F(ya)`;
- the slope product of a weight, :math:`\sum x_i c_i [p_Z(a_j) - p_Z(a_j - s_{ji} x_i)] g_j` over examples and places, has the
  difference :math:`\tfrac12 [p_Z(a + s) - p_Z(a - s)]` and the curvature
  :math:`p_Z(a) - \tfrac12 [p_Z(a + s) + p_Z(a - s)]`, the derivatives of the flip product's in a. As it is not summed over the
  outputs, the functions of the weight are multiplied by ordinary weight gradients.

The form was made for the flip product. Its errors in the other two sums are measured by :func:`errors`: for logistic and normal
noise they are about as large, in the slope product of noises with a kink in their density far larger.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flipgrad.flips import passes
from flipgrad.flips.form import Form, Function
from flipgrad.flips.ordinary import Geometry, input_gradient, weight_gradient
from flipgrad.flips.passes import mixed, polynomial
from flipgrad.flips.separable import by_examples, combine
from flipgrad.noise import Noise

Matrix = tuple[tuple[float, ...], ...]
Parts = tuple[list[Tensor], list[Tensor]]


def ratio(
    x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.log_ratio` by a flip product's form for these weights."""
    form, groups = _with_curvature(form), 1 if geometry is None else geometry.groups
    difference_weight, curvature_weight = passes.weight_functions(weight, *form.coefficients, form.limit, groups)
    matrices = _factors(form, noise.scale)

    def examples(x: Tensor, a: Tensor, states: Tensor) -> Tensor:
        functions = passes.log_functions(a, states, form.steps, form.curvature_nodes, matrices, noise, groups)
        differences, curvatures = functions
        u = input_gradient(differences, difference_weight, x, geometry)
        # Its memory is good for the next result.
        del differences, functions
        return combine(input_gradient(curvatures, curvature_weight, x, geometry), u, x)

    return by_examples(examples, x, a, states)


def slope(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    form: Form,
    geometry: Geometry | None = None,
) -> Tensor:
    """:func:`flipgrad.flips.slope_product` by a flip product's form for these weights."""
    form = _with_curvature(form)
    matrices = _factors(form, noise.scale)
    differences, curvatures = _slope_parts(a, grad, form, noise)
    square = weight * weight
    shared = share * x
    result = torch.zeros_like(weight)
    for functions, leading, values, units in (
        (form.difference, weight, mixed(differences, matrices[0]), shared * x),
        (form.curvature, square, mixed(curvatures, matrices[1]), shared),
    ):
        for function, value in zip(functions, values, strict=True):
            of_weight = polynomial(function.coefficients, leading, square, form.limit)
            result += of_weight * weight_gradient(value, weight, units, geometry)
    return result


@lru_cache(maxsize=1024)
def errors(form: Form, noise: Noise) -> tuple[float, float]:
    """The relative L2 errors of the terms of the log ratio and of the slope product.

    For normal weights that reach the form's limit at three standard deviations, normal pre-activations of one scale, and
    states drawn with their probabilities.
    """
    form = _with_curvature(form)
    t, k = (torch.linspace(low, high, n, dtype=torch.float64, device="cpu") for low, high, n in ((-4, 4, 161), (0, 3, 25)))
    t = t[:, None]
    a, weight = t * noise.scale, k / 3 * form.limit
    density = torch.exp(-(t**2) / 2) * torch.exp(-(k**2) / 2)
    above, below = a + 2 * weight, a - 2 * weight
    missed = whole = 0.0
    for state in (-1.0, 1.0):
        states = torch.full_like(a, state)
        upper, lower, middle = (noise.log_prob(states, values) for values in (above, below, a))
        wanted = (lower - upper) / 2, (lower + upper) / 2 - middle
        found = _interpolated(noise.log_parts(a, states, form.steps, form.curvature_nodes), weight, form, noise)
        part = _squares(density * noise.cdf(state * a), wanted, found)
        missed, whole = missed + part[0], whole + part[1]
    upper, lower, middle = (noise.pdf(values) for values in (above, below, a))
    wanted = (upper - lower) / 2, middle - (upper + lower) / 2
    slopes = _squares(density, wanted, _interpolated(_slope_parts(a, torch.ones_like(a), form, noise), weight, form, noise))
    tiny = torch.finfo(torch.float64).tiny
    return (missed / max(whole, tiny)) ** 0.5, (slopes[0] / max(slopes[1], tiny)) ** 0.5


def _interpolated(parts: Parts, weight: Tensor, form: Form, noise: Noise) -> tuple[Tensor, Tensor]:
    """The differences and the curvatures [pre-activations, weights] from ``parts``, their values at the form's nodes."""
    square = weight * weight
    found = []
    for values, matrix, rows, leading in zip(
        parts, _factors(form, noise.scale), form.coefficients, (weight, square), strict=True
    ):
        functions = torch.stack([polynomial(row, leading, square, form.limit) for row in rows])
        found.append(torch.cat(mixed(values, matrix), 1) @ functions)
    return found[0], found[1]


def _squares(weights: Tensor, wanted: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """The weighted sums of squares of what is missed, and of what is wanted."""
    missed = sum(float((weights * (w - f).square()).sum()) for w, f in zip(wanted, found, strict=True))
    return missed, sum(float((weights * w.square()).sum()) for w in wanted)


def _slope_parts(a: Tensor, grad: Tensor, form: Form, noise: Noise) -> Parts:
    """The differences of the slope product's terms at the form's nodes, and the curvatures at those that have one."""
    sides = [(noise.pdf(a + step * noise.scale), noise.pdf(a - step * noise.scale)) for step in form.steps]
    middle = noise.pdf(a)
    curvatures = [(middle - (sides[node][0] + sides[node][1]) / 2) * grad for node in form.curvature_nodes]
    return [(above - below) * (grad / 2) for above, below in sides], curvatures


def _with_curvature(form: Form) -> Form:
    """The form with a function for the curvature, if it has none: these sums are of one sign, and never negligible."""
    if form.curvature:
        return form
    return replace(form, curvature=(Function(0, (1.0,)),))


@lru_cache(maxsize=1024)
def _factors(form: Form, scale: float) -> tuple[Matrix, Matrix]:
    """For the differences and for the curvatures: the matrix that turns values at the nodes into factors of the functions."""
    matrices = []
    for functions, power in ((form.difference, 1), (form.curvature, 2)):
        nodes = torch.tensor([form.steps[f.node] * scale / 2 for f in functions], dtype=torch.float64, device="cpu")
        values = [polynomial(f.coefficients, nodes**power, nodes**2, form.limit) for f in functions]
        matrices.append(tuple(tuple(row) for row in torch.linalg.inv(torch.stack(values)).tolist()))
    return matrices[0], matrices[1]
