r"""Sums over flips as a few ordinary products, to a tolerance, for every noise.

The term of one weight splits into a difference, which is odd in the weight, and a curvature, which is even in it (see
:mod:`flipgrad.flips.form`). The flip product is

.. math:: u_i = \sum_j \big[E(a_j, w_{ji}) + x_i\, O(a_j, w_{ji})\big] g_j
    \approx \sum_j \Big[\sum_r e_r(a_j)\, v_r(w_{ji}) + x_i \sum_r o_r(a_j)\, q_r(w_{ji})\Big] g_j .

So it is the ordinary gradient of a layer with the weights :math:`v_r(w)`, and of another with :math:`q_r(w)`: it runs at
the speed of the device's own library. :mod:`flipgrad.flips.form` finds the functions for a layer's weights and a tolerance;
the sums use them, without looking at the data, so that they compile as one graph.

The form interpolates in the step s = 2w: a difference is :math:`\sum_r \varphi(a, s_r)\, v_r(s)` for the form's nodes
:math:`s_r`, a curvature :math:`\sum_r \psi(a, s_r)\, q_r(s)`. That serves every smooth function of a and s, so the two other
sums over flips take the same :math:`v_r` and :math:`q_r`:

- the log ratio of a unit, :math:`\sum_j [\log p(y_j | a_j - s_{ji} x_i) - \log p(y_j | a_j)]`, has the difference
  :math:`x_i\, y\, \tfrac12 [\log F(ya - s) - \log F(ya + s)]` and the curvature
  :math:`\tfrac12 [\log F(ya - s) + \log F(ya + s)] - \log F(ya)`;
- the slope product of a weight, :math:`\sum x_i c_i [p_Z(a_j) - p_Z(a_j - s_{ji} x_i)] g_j` over examples and places, has the
  difference :math:`\tfrac12 [p_Z(a + s) - p_Z(a - s)]` and the curvature
  :math:`p_Z(a) - \tfrac12 [p_Z(a + s) + p_Z(a - s)]`, the derivatives of the flip product's in a. As it is not summed over the
  outputs, the functions of the weight are multiplied by ordinary weight gradients.

The form was made for the flip product. Its errors in the other two sums are measured by :func:`errors`: for logistic and normal
noise they are about as large, in the slope product of noises with a kink in their density far larger.

Functions of the pre-activations and of the weights are computed in compiled code where the library takes the tensors, else in
tensor operations. Several functions of one tensor are further channels of it, one function after the other.

Memory formats are kept as they come: with ``channels_last`` images the places of a convolution are the examples of a fully
connected layer. On a CPU the gradient of a convolution is up to a fifth faster then.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flipgrad.flips.form import Coefficients, Form, difference_and_curvature
from flipgrad.flips.ordinary import (
    Geometry,
    as_images,
    as_rows,
    by_examples,
    input_gradient,
    narrow_input_gradient,
    narrow_pays,
    weight_gradient,
)
from flipgrad.flips.units import joined
from flipgrad.native import library
from flipgrad.native.library import call, floats
from flipgrad.noise import Noise, Parts

# Where the fused product is faster than ordinary ones: it computes 16 inputs at once, and with many examples it matters little
# that the functions of the weights need not be written to memory.
LEAST_FUSED_INPUTS, MOST_FUSED_EXAMPLES = 32, 384


def flip_product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.flip_product` by a form for these weights."""
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, a, grad, weight = (t.to(wide) for t in (x, a, grad, weight))
    if geometry is not None or not fused_product_pays(x):
        return _per_unit(x, a, grad, weight, noise, form, geometry, ratio=False).to(dtype)
    weight = weight.contiguous()

    def examples(x: Tensor, a: Tensor, grad: Tensor) -> Tensor:
        differences, curvatures = flip_functions(a, grad, noise, form, 1)
        return fused_product(x, differences.contiguous(), curvatures.contiguous(), weight, form)

    return by_examples(examples, x.contiguous(), a, grad).to(dtype)


def log_ratio(
    x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.log_ratio` by a flip product's form for these weights."""
    return _per_unit(x, a, states, weight, noise, with_curvature(form), geometry, ratio=True)


def _per_unit(
    x: Tensor, a: Tensor, given: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None, *, ratio: bool
) -> Tensor:
    """The log ratio with the output states that are ``given``, or the flip product with the gradient in them.

    A flip product's differences are multiplied by x squared and its curvatures by x, a log ratio's the other way round.
    """
    groups, outputs = 1 if geometry is None else geometry.groups, len(weight)
    in_parts = not ratio and groups == 1 and form.narrow_rest and bool(form.leads)
    in_parts = in_parts and narrow_pays(a.numel() // max(1, a.shape[1]), weight)
    functions = log_functions if ratio else led_functions if in_parts else flip_functions
    difference_weight, curvature_weight = weight_functions(weight, form.led() if in_parts else form, groups)

    def examples(x: Tensor, a: Tensor, given: Tensor) -> Tensor:
        differences, *rest, curvatures = functions(a, given, noise, form, groups)
        odd = input_gradient(differences, difference_weight[:outputs] if rest else difference_weight, x, geometry)
        for difference in rest:
            odd += narrow_input_gradient(difference, difference_weight[outputs:], x, geometry)
        del rest
        if not form.curvature:
            return odd.mul_(x).mul_(x)
        # Its memory is good for the next result.
        del differences
        product = narrow_input_gradient if form.narrow and not ratio else input_gradient
        even = product(curvatures, curvature_weight, x, geometry)
        twice, once = (even, odd) if ratio else (odd, even)
        return joined(once, twice, x)

    return by_examples(examples, x, a, given)


def entropy_product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, form: Form, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.entropy_product` by a flip product's form for these weights."""
    form = with_curvature(form)
    groups = 1 if geometry is None else geometry.groups
    difference_weight, curvature_weight = weight_functions(weight, form, groups)
    differences, curvatures = _mixed(_entropy_parts(a, grad, form, noise), form, noise)
    odd = input_gradient(_join(differences, 1, groups), difference_weight, x, geometry)
    even = input_gradient(_join(curvatures, 1, groups), curvature_weight, x, geometry)
    return joined(even, odd, x)


def slope_product(
    x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, form: Form,
    geometry: Geometry | None = None,
) -> Tensor:  # fmt: skip
    """:func:`flipgrad.flips.slope_product` by a flip product's form for these weights."""
    form, shared = with_curvature(form), share * x
    parts = _mixed(_slope_parts(a, grad, form, noise), form, noise)
    result = torch.zeros_like(weight)
    for functions, values, units in zip(_polynomials(weight, form), parts, (shared * x, shared), strict=True):
        for function, value in zip(functions, values, strict=True):
            result += function * weight_gradient(value, weight, units, geometry)
    return result


def error(name: str, form: Form, noise: Noise) -> float:
    """The relative L2 error of a sum by a form, which is made for the flip product."""
    return form.estimated_error if name == "flip_product" else errors(form, noise)[name]


@lru_cache(maxsize=1024)
def errors(form: Form, noise: Noise) -> dict[str, float]:
    """The relative L2 errors of the terms of the log ratio, of the slope product and of entropies alone.

    For normal weights that reach the form's limit at three standard deviations, normal pre-activations of one scale, and
    states drawn with their probabilities.
    """
    form = with_curvature(form)
    t, k = (torch.linspace(low, high, n, dtype=torch.float64, device="cpu") for low, high, n in ((-4, 4, 161), (0, 3, 25)))
    t = t[:, None]
    a, weight = t * noise.scale, k / 3 * form.limit
    density = torch.exp(-(t**2) / 2) * torch.exp(-(k**2) / 2)
    one = torch.ones_like(a)
    wanted = difference_and_curvature(noise.pdf, a, 2 * weight)
    slopes = _squares(density, wanted, _slope_parts(a, one, form, noise), weight, form, noise)
    nothing = torch.zeros_like(one)
    wanted = difference_and_curvature(noise.negative_entropy, a, 2 * weight)
    entropies = _squares(density, wanted, _entropy_parts(a, nothing, form, noise), weight, form, noise)
    ratios = torch.zeros_like(slopes)
    for states in (-one, one):
        difference, curvature = difference_and_curvature(partial(noise.log_prob, states), a, 2 * weight)
        parts = noise.log_parts(a, states, form.steps, form.curvature_nodes)
        ratios += _squares(density * noise.cdf(states * a), (-difference, -curvature), parts, weight, form, noise)
    tiny = torch.finfo(torch.float64).tiny
    pairs = {"log_ratio": ratios, "slope_product": slopes, "entropy_product": entropies}.items()
    return {name: (missed / whole.clamp(min=tiny)).sqrt().item() for name, (missed, whole) in pairs}


def _squares(density: Tensor, wanted: tuple[Tensor, Tensor], parts: Parts, weight: Tensor, form: Form, noise: Noise) -> Tensor:
    """The sums of squares, weighted by a density, of what interpolation of ``parts`` misses of ``wanted``, and of this."""
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    for target, values, functions in zip(wanted, _mixed(parts, form, noise), _polynomials(weight, form), strict=True):
        found = torch.cat(values, 1) @ torch.stack(functions)
        sums += torch.stack([(density * (target - found).square()).sum(), (density * target.square()).sum()])
    return sums


def _slope_parts(a: Tensor, grad: Tensor, form: Form, noise: Noise) -> Parts:
    """The differences of the slope product's terms at the form's nodes, and the curvatures at those that have one."""
    sides = [(noise.pdf(a + step * noise.scale), noise.pdf(a - step * noise.scale)) for step in form.steps]
    middle = noise.pdf(a)
    curvatures = [(middle - (sides[node][0] + sides[node][1]) / 2) * grad for node in form.curvature_nodes]
    return [(above - below) * (grad / 2) for above, below in sides], curvatures


def _entropy_parts(a: Tensor, grad: Tensor, form: Form, noise: Noise) -> Parts:
    """The differences of the entropy product's terms at the form's nodes, and the curvatures at those that have one."""

    def function(a: Tensor) -> Tensor:
        return torch.addcmul(noise.negative_entropy(a), noise.cdf(a), grad)

    pairs = [difference_and_curvature(function, a, torch.as_tensor(step * noise.scale).to(a)) for step in form.steps]
    return [difference for difference, _ in pairs], [pairs[node][1] for node in form.curvature_nodes]


def with_curvature(form: Form) -> Form:
    """The form with a function for the curvature, if it has none: these sums are of one sign, and never negligible."""
    return form if form.curvature else replace(form, curvature=((1.0,),), curvature_nodes=(0,))


def _mixed(parts: Parts, form: Form, noise: Noise) -> Parts:
    """Values at the nodes as factors of the functions of the weights."""
    mixed = []
    for values, matrix in zip(parts, factors(form, noise.scale), strict=True):
        if len(values) == 1:
            mixed.append([values[0].mul_(matrix[0][0])])
        else:
            stacked = torch.stack(values, -1)
            mixed.append(list((stacked @ stacked.new_tensor(matrix)).unbind(-1)))
    return mixed[0], mixed[1]


@lru_cache(maxsize=1024)
def factors(form: Form, scale: float) -> tuple[Coefficients, Coefficients]:
    """For the differences and for the curvatures: the matrix that turns values at the nodes into factors of the functions."""
    matrices = []
    for rows, nodes, power in ((form.difference, range(len(form.steps)), 1), (form.curvature, form.curvature_nodes, 2)):
        w = torch.tensor([form.steps[node] * scale / 2 for node in nodes], dtype=torch.float64, device="cpu")
        values = [polynomial(row, w**power, w**2, form.limit) for row in rows]
        matrices.append(tuple(tuple(row) for row in torch.linalg.inv(torch.stack(values)).tolist()))
    return matrices[0], matrices[1]


def flip_functions(a: Tensor, grad: Tensor, noise: Noise, form: Form, groups: int) -> tuple[Tensor, ...]:
    """The functions of the pre-activations in the flip product: see :meth:`flipgrad.noise.Noise.flip_parts`."""
    if groups == 1 and noise.compiled and library.takes_alike(a, grad):
        differences, _, curvatures = _compiled_flip_functions(a, grad, noise, form, (len(form.steps), 0))
        return differences, curvatures
    parts = noise.flip_parts(a, grad, form.steps, form.curvature_nodes)
    return _join(parts[0], 1, groups), _join(parts[1], 1, groups)


def led_functions(a: Tensor, grad: Tensor, noise: Noise, form: Form, groups: int = 1) -> tuple[Tensor, ...]:
    """Those of :meth:`flipgrad.flips.form.Form.led`, for one group: the first difference, the rest of others, curvatures."""
    if noise.compiled and library.takes_alike(a, grad):
        return _compiled_flip_functions(a, grad, noise, form, (1, len(form.leads)), leads=floats(form.leads))
    (first, *others), curvatures = noise.flip_parts(a, grad, form.steps, form.curvature_nodes)
    rest = [other.sub_(first, alpha=lead) for other, lead in zip(others, form.leads, strict=True)]
    return first, _join(rest, 1, groups), _join(curvatures, 1, groups)


def _compiled_flip_functions(
    a: Tensor, grad: Tensor, noise: Noise, form: Form, differences: tuple[int, int], **fields: Any
) -> tuple[Tensor, ...]:
    """So many differences apart from so many others, and the curvatures."""
    nodes = form.curvature_nodes
    fields |= {"cosh_steps": floats(map(math.cosh, form.steps)), "curvature_nodes": (ctypes.c_int64 * len(nodes))(*nodes)}
    return _compiled_functions("features", a, grad, noise, form, (*differences, len(nodes)), **fields)


def log_functions(a: Tensor, states: Tensor, noise: Noise, form: Form, groups: int) -> tuple[Tensor, ...]:
    """Those in the log ratio: :meth:`flipgrad.noise.Noise.log_parts`, as factors of the functions of the weights."""
    if groups == 1 and noise.compiled and library.takes_alike(a, states):
        difference_matrix, curvature_matrix = (floats(chain.from_iterable(rows)) for rows in factors(form, noise.scale))
        return _compiled_functions(
            "log_features",
            *(a, states, noise, form, (len(form.steps), len(form.curvature_nodes))),
            half_steps=floats(step / 2 for step in form.steps),
            half_tanhs=floats(math.tanh(step / 2) for step in form.steps),
            heights=floats(math.sinh(form.steps[node] / 2) ** 2 for node in form.curvature_nodes),
            difference_matrix=difference_matrix,
            curvature_matrix=curvature_matrix,
        )
    differences, curvatures = _mixed(noise.log_parts(a, states, form.steps, form.curvature_nodes), form, noise)
    return _join(differences, 1, groups), _join(curvatures, 1, groups)


def _compiled_functions(
    function: str, a: Tensor, given: Tensor, noise: Noise, form: Form, results: tuple[int, ...], **fields: Any
) -> tuple[Tensor, ...]:
    """Functions of ``a`` [B, C, ...] and of what is ``given`` with it, by a compiled ``function``.

    Each of the ``results`` has the functions at so many nodes, [B, nodes C, ...].
    """
    rows, given = as_rows(a), as_rows(given)
    found = [rows.new_empty(rows.shape[0], nodes * rows.shape[1], *rows.shape[2:]) for nodes in results]
    sizes = {"images": len(rows), "block": rows[0].numel() if len(rows) else 0}
    sizes |= {"differences": len(form.steps), "curvatures": len(form.curvature_nodes)}
    call(function, torch.float32, rows, given, *found, **sizes, scale=noise.scale, **fields)
    return tuple(as_images(result, a) for result in found)


def weight_functions(weight: Tensor, form: Form, groups: int) -> tuple[Tensor, Tensor]:
    """The functions of the weights [out, ...] for the differences and, if there are any, for the curvatures."""
    weight = weight.contiguous()
    if groups == 1 and library.takes(weight):
        out, odd_powers = weight.new_empty(form.rank, *weight.shape), len(form.difference)
        fields = {"count": weight.numel(), "functions": form.rank, "odd_powers": odd_powers}
        call("weights", torch.float32, weight, out, **fields, **_coefficients(form))
        return out[:odd_powers].flatten(0, 1), out[odd_powers:].flatten(0, 1)
    differences, curvatures = _polynomials(weight, form)
    return _join(differences, 0, groups), _join(curvatures, 0, groups)


def _polynomials(weight: Tensor, form: Form) -> Parts:
    square = weight * weight
    differences = [polynomial(row, weight, square, form.limit) for row in form.difference]
    return differences, [polynomial(row, square, square, form.limit) for row in form.curvature]


def polynomial(coefficients: Sequence[float], leading: Tensor, square: Tensor, limit: float) -> Tensor:
    """``leading``, the weight or its square, times a polynomial in 2 (w / limit)^2 - 1, by Horner's scheme."""
    *lower, c = coefficients
    if not lower:
        return leading * c
    centred = (square * (2 / limit**2)).sub_(1)
    value = (centred * c).add_(lower.pop())
    for c in reversed(lower):
        value.mul_(centred).add_(c)
    return value.mul_(leading)


def fused_product_pays(x: Tensor) -> bool:
    """Whether :func:`fused_product` is faster than ordinary products, for states ``x`` [B, in]."""
    examples, inputs = x.shape
    fits = inputs >= LEAST_FUSED_INPUTS and examples <= MOST_FUSED_EXAMPLES and x.dtype == torch.float32
    return fits and library.usable(x) and library.has_fast_products()


def fused_product(x: Tensor, differences: Tensor, curvatures: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The flip product x (x ``differences`` v + ``curvatures`` q), with v and q of :func:`weight_functions`.

    The tensors are contiguous float32: ``x`` [B, in], ``weight`` [out, in] and the two of :func:`flip_functions`. The result
    does not depend on the number of threads.
    """
    u, (outputs, inputs) = torch.empty_like(x), weight.shape
    sizes = {"batch": len(x), "inputs": inputs, "outputs": outputs}
    ranks = {"differences": len(form.difference), "curvatures": len(form.curvature)}
    call("product", torch.float32, differences, curvatures, weight, x, u, **sizes, **ranks, **_coefficients(form))
    return u


def _coefficients(form: Form) -> dict[str, Any]:
    """The polynomials of a form as compiled code takes them: one after the other, filled with zeros to one length."""
    rows = form.difference + form.curvature
    terms = max(map(len, rows))
    padded = (number for row in rows for number in (*row, *[0.0] * (terms - len(row))))
    return {"terms": terms, "coefficients": floats(padded), "limit": form.limit}


def _join(tensors: list[Tensor], dim: int, groups: int) -> Tensor:
    """The tensors' channels, which are at ``dim``, one tensor after the other within each group."""
    if len(tensors) <= 1:
        return tensors[0] if tensors else torch.empty(0)
    if groups == 1:
        return torch.cat(tensors, dim)
    return torch.stack([t.unflatten(dim, (groups, -1)) for t in tensors], dim + 1).flatten(dim, dim + 2)
