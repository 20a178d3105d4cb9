r"""The log ratio and the slope product as a few ordinary products, with the weight functions of a flip product's plan.

The flip product's separable form (:mod:`flipgrad.flips.separable`) interpolates in the step s = 2w: a function that is odd in
s is :math:`\sum_r \varphi(a, s_r)\, v_r(s)` for the plan's nodes :math:`s_r`, one that is even in it
:math:`\sum_r \psi(a, s_r)\, q_r(s)`. That serves every smooth function of a and s, so the two other sums over flips take the
same :math:`v_r` and :math:`q_r`:

- the log ratio of a unit, :math:`\sum_j [\log p(y_j | a_j - s_{ji} x_i) - \log p(y_j | a_j)]`, has the odd part
  :math:`x_i\, y\, \tfrac12 [\log F(ya - s) - \log F(ya + s)]` and the even one
  :math:`\tfrac12 [\log F(ya - s) + \log F(ya + s)] - \log F(ya)`;
- the slope product of a weight, :math:`\sum x_i c_i [p_Z(a_j) - p_Z(a_j - s_{ji} x_i)] g_j` over examples and places, has the
  odd part :math:`\tfrac12 [p_Z(a + s) - p_Z(a - s)]` and the even one :math:`p_Z(a) - \tfrac12 [p_Z(a + s) + p_Z(a - s)]`, the
  derivatives of the flip product's in a. As it is not summed over the outputs, the functions of the weight are multiplied by
  ordinary weight gradients.

The plan was made for the flip product. What it makes of the other two is measured by :func:`errors`: for logistic and normal
noise about as much, the slope product of noises with a kink in their density far more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flipgrad.flips import native
from flipgrad.flips.ordinary import Geometry, input_gradient, weight_gradient
from flipgrad.flips.separable import Function, Plan, by_examples, combine, join, kernels, polynomial
from flipgrad.noise import Logistic, Noise


def ratio(
    x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, plan: Plan, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.log_ratio` by a flip product's plan for these weights."""
    plan, groups = _with_even_part(plan), 1 if geometry is None else geometry.groups
    of_odd, of_even = kernels(weight, plan, groups)

    def examples(x: Tensor, a: Tensor, states: Tensor) -> Tensor:
        odd, even = _ratio_features(a, states, plan, noise, groups)
        u = input_gradient(odd, of_odd, x, geometry)
        # Its memory is good for the next result.
        del odd
        v = input_gradient(even, of_even, x, geometry)
        # x (x v + u), as a zero is no unit.
        return combine(v, u, x)

    return by_examples(examples, x, a, states)


def slope(
    x: Tensor,
    share: Tensor,
    a: Tensor,
    grad: Tensor,
    weight: Tensor,
    noise: Noise,
    plan: Plan,
    geometry: Geometry | None = None,
) -> Tensor:
    """:func:`flipgrad.flips.slope_product` by a flip product's plan for these weights."""
    plan = _with_even_part(plan)
    odd_factors, even_factors = _inverse(plan, noise.scale)
    odd, even = _slope_features(a, grad, plan, noise)
    square = weight * weight
    shared = share * x
    result = torch.zeros_like(weight)
    for functions, leading, values, units in (
        (plan.even, weight, _mixed(odd, odd_factors), shared * x),
        (plan.odd, square, _mixed(even, even_factors), shared),
    ):
        for function, value in zip(functions, values, strict=True):
            result += polynomial(function, leading, square, plan.limit) * weight_gradient(value, weight, units, geometry)
    return result


@lru_cache(maxsize=1024)
def errors(plan: Plan, noise: Noise) -> tuple[float, float]:
    """The relative L2 errors of the terms of the log ratio and of the slope product.

    For normal weights that reach the plan's limit at three standard deviations, normal pre-activations of one scale, and
    states drawn with their probabilities.
    """
    plan = _with_even_part(plan)
    t, k = (torch.linspace(low, high, n, dtype=torch.float64, device="cpu") for low, high, n in ((-4, 4, 161), (0, 3, 25)))
    t = t[:, None]
    a, weight = t * noise.scale, k / 3 * plan.limit
    density, share = torch.exp(-(t**2) / 2), torch.exp(-(k**2) / 2)
    square = weight * weight
    of_odd = torch.stack([polynomial(f, weight, square, plan.limit) for f in plan.even])
    of_even = torch.stack([polynomial(f, square, square, plan.limit) for f in plan.odd])
    odd_factors, even_factors = _inverse(plan, noise.scale)
    above, below = a + 2 * weight, a - 2 * weight

    def parts(features: tuple[list[Tensor], list[Tensor]]) -> tuple[Tensor, Tensor]:
        odd, even = _mixed(features[0], odd_factors), _mixed(features[1], even_factors)
        return torch.cat(odd, 1) @ of_odd, torch.cat(even, 1) @ of_even

    def relative(weights: Tensor, wanted: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> tuple[float, float]:
        missed = sum(float((weights * (w - f).square()).sum()) for w, f in zip(wanted, found, strict=True))
        return missed, sum(float((weights * w.square()).sum()) for w in wanted)

    missed = whole = 0.0
    for state in (-1.0, 1.0):
        states = torch.full_like(a, state)
        upper, lower, middle = (noise.log_prob(states, values) for values in (above, below, a))
        wanted = ((lower - upper) / 2, (lower + upper) / 2 - middle)
        part = relative(density * share * noise.cdf(state * a), wanted, parts(_log_features(a, states, plan, noise)))
        missed, whole = missed + part[0], whole + part[1]
    wanted = (
        (noise.pdf(above) - noise.pdf(below)) / 2,
        noise.pdf(a) - (noise.pdf(above) + noise.pdf(below)) / 2,
    )
    slopes = relative(density * share, wanted, parts(_slope_features(a, torch.ones_like(a), plan, noise)))
    tiny = torch.finfo(torch.float64).tiny
    return (missed / max(whole, tiny)) ** 0.5, (slopes[0] / max(slopes[1], tiny)) ** 0.5


def _slope_features(a: Tensor, grad: Tensor, plan: Plan, noise: Noise) -> tuple[list[Tensor], list[Tensor]]:
    """The odd part of the slope product's terms at the plan's nodes, and the even part at those of its even functions."""
    sides = [(noise.pdf(a + step * noise.scale), noise.pdf(a - step * noise.scale)) for step in plan.steps]
    middle = noise.pdf(a)
    even = [(middle - (sides[f.node][0] + sides[f.node][1]) / 2) * grad for f in plan.odd]
    return [(above - below) * (grad / 2) for above, below in sides], even


def _ratio_features(a: Tensor, states: Tensor, plan: Plan, noise: Noise, groups: int) -> tuple[Tensor, Tensor]:
    """The factors of the odd and of the even functions in the log ratio, as further output channels."""
    odd_factors, even_factors = _inverse(plan, noise.scale)
    plain = groups == 1 and a.is_contiguous() and states.is_contiguous() and a.dtype == states.dtype == torch.float32
    if plain and isinstance(noise, Logistic) and native.usable(a):
        odd_nodes, even_nodes = ([plan.steps[f.node] for f in functions] for functions in (plan.even, plan.odd))
        nodes = (odd_nodes, odd_factors), (even_nodes, even_factors)
        return native.logistic_log_features(a, states, noise.scale, *nodes)
    odd, even = _log_features(a, states, plan, noise)
    return join(_mixed(odd, odd_factors), 1, groups), join(_mixed(even, even_factors), 1, groups)


def _log_features(a: Tensor, states: Tensor, plan: Plan, noise: Noise) -> tuple[list[Tensor], list[Tensor]]:
    """The odd part of the log ratio's terms at the plan's nodes, and the even part at those of its even functions."""
    t = a * states
    if isinstance(noise, Logistic):
        return _logistic_log_features(t / noise.scale, states, plan)
    middle = noise.log_cdf(t)
    sides = [(noise.log_cdf(t + step * noise.scale), noise.log_cdf(t - step * noise.scale)) for step in plan.steps]
    odd = [(below - above).mul_(states).div_(2) for above, below in sides]
    return odd, [(sides[f.node][0] + sides[f.node][1]).div_(2).sub_(middle) for f in plan.odd]


def _logistic_log_features(t: Tensor, states: Tensor, plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """The closed form: the odd part is atanh(m tanh(s/2)) - s/2, the even one -log(1 + (1 - m^2)(cosh s - 1)/2) / 2."""
    m = torch.tanh(t / 2)
    steps = torch.tensor(plan.steps, dtype=torch.float64, device="cpu")
    odd = [torch.atanh(m * h).sub_(s / 2).mul_(states) for h, s in zip((steps / 2).tanh().tolist(), plan.steps, strict=True)]
    spread = (m * m).neg_().add_(1)
    heights = (2 * (steps / 2).sinh().square()).tolist()
    return odd, [torch.log1p(spread * (heights[f.node] / 2)).div_(-2) for f in plan.odd]


def _with_even_part(plan: Plan) -> Plan:
    """The plan with a function that is even in the weight, if it has none: these sums are of one sign, and never negligible."""
    if plan.odd:
        return plan
    return replace(plan, odd=(Function(0, (1.0,)),))


@lru_cache(maxsize=1024)
def _inverse(plan: Plan, scale: float) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """For the odd and for the even functions: what turns values at the nodes into their factors."""
    matrices = []
    for functions, power in ((plan.even, 1), (plan.odd, 2)):
        nodes = torch.tensor([plan.steps[f.node] * scale / 2 for f in functions], dtype=torch.float64, device="cpu")
        values = [polynomial(f, nodes**power, nodes**2, plan.limit) for f in functions]
        matrices.append(tuple(tuple(row) for row in torch.linalg.inv(torch.stack(values)).tolist()))
    return matrices[0], matrices[1]


def _mixed(values: list[Tensor], matrix: tuple[tuple[float, ...], ...]) -> list[Tensor]:
    """The factor of every function, from the values at its nodes."""
    if len(values) == 1:
        return [values[0].mul_(matrix[0][0])]
    stacked = torch.stack(values, -1)
    return list((stacked @ stacked.new_tensor(matrix)).unbind(-1))
