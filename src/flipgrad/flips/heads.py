r"""Discrete derivatives of losses of a linear head's outputs: of those that add up as sums over flips, and of cross-entropies.

A loss :math:`f(x) = \sum_j \phi_j(b_j)` of outputs :math:`b = Wx + c` of binary states x has, with the flip
:math:`s = 2 W_{ji} x_i`,

.. math:: D_i f = \tfrac12 x_i \sum_j [\phi_j(b_j) - \phi_j(b_j - s)],

so that no tensor of all outputs at all flips is needed. A square is exact at the price of one ordinary product. Of a Bernoulli
likelihood with the targets t in [0, 1], :math:`\phi = \log(1 + e^b) - tb`, it is the log ratio of logistic noise
(:func:`flipgrad.flips.log_ratio`); or, where weights are small, as when training begins, the first orders of W:

.. math:: D_i f \approx \sum_j \Big[W_{ji} (F(b_j) - t_j) + \tfrac23 W_{ji}^3 F''(b_j)\Big]
    - x_i \sum_j \Big[W_{ji}^2 F'(b_j) + \tfrac13 W_{ji}^4 F'''(b_j)\Big],

two ordinary products, or four. What is left out, to the next orders, is known from moments of the weights and of
the derivatives: terms of odd orders have the signs of weights, and are taken to add up as their squares do. If that is within
the tolerance, relative to the root mean square of the result, the result is given; else the log ratio.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.flips import RATIO_ERROR_FACTOR, choose, log_ratio
from flipgrad.flips.choice import Choice
from flipgrad.flips.form import Form
from flipgrad.flips.separable import fused_product, fused_product_pays
from flipgrad.guards import applied, cannot_look, once
from flipgrad.native import library
from flipgrad.noise import Logistic, sign

# With fewer terms the log ratio costs less than to find out whether the expansion will do.
LEAST_EXPANDED_TERMS = 2**20
# With larger weights it never does, whatever the data.
LARGEST_EXPANDED_WEIGHT = 0.5
# Examples whose derivatives tell how far it reaches.
EXAMPLES_READ = 8
# Derivatives at the data make a bound about 2.3 times smaller. They are not asked where it is this many times what is allowed.
MOST_LOOKED_AT = 4
# The error is taken to be this much larger than what is left out: derivatives and weights are not independent.
MARGIN = 1.5
LOGISTIC = Logistic()
# The orders of the weights in compiled products: the first two, w and -w^2, and the next, 2/3 w^3 and -1/3 w^4.
FIRST_ORDERS = Form(0.0, 0.0, math.sqrt(2), (), ((1.0,),), ((-1.0,),), ())
NEXT_ORDERS = Form(0.0, 0.0, math.sqrt(2), (), ((2 / 3, 2 / 3),), ((-1 / 3, -1 / 3),), ())
# Weights up to which flips of a cross-entropy are computed from a softmax, and up to which in float32: with larger ones
# exponentials lose digits.
LARGEST_SOFTMAX_WEIGHT, LARGEST_FLOAT_WEIGHT = 8.0, 2.0


def bernoulli(x: Tensor, logits: Tensor, targets: Tensor, weight: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """The discrete derivative [B, n] of the negative log-likelihood of ``targets`` in the states ``x``.

    Args:
        x: states [B, n].
        logits: of every target, [B, K]: those of a linear map of ``x``.
        targets: [B, K], from 0 to 1.
        weight: of that map, [K, n].
        tolerance: the relative L2 error that is allowed; 0 is exact.
    """
    x, logits, targets, weight = (t.detach() for t in (x, logits, targets, weight))
    may_expand = tolerance > 0 and len(x) * weight.numel() >= LEAST_EXPANDED_TERMS and not cannot_look()
    expanded = _expanded(x, logits, targets, weight, tolerance) if may_expand else None
    if expanded is not None:
        return expanded
    states = sign(targets - 0.5)
    ratio = log_ratio(x, logits, states, weight, LOGISTIC, tolerance=tolerance / RATIO_ERROR_FACTOR)
    # log p(t | b) = log F(yb) + (t - [y = 1]) b, and the second term is linear in the states.
    result = ratio.mul_(x).div_(2)
    rest = targets - (states + 1) / 2
    if cannot_look() or bool(rest.any()):
        result = result - rest @ weight
    return result


def _expanded(x: Tensor, logits: Tensor, targets: Tensor, weight: Tensor, tolerance: float) -> Tensor | None:
    """The first orders of the weights, two or four; None if they are not within the tolerance."""
    fused = fused_product_pays(x) and library.takes(x, logits, targets, weight)
    powers, largest, moments = _powers(weight, wanted=not fused)
    if not largest <= LARGEST_EXPANDED_WEIGHT**2:
        return None
    p = torch.sigmoid(logits)
    factors = p.new_empty(2, *p.shape)
    errors, slopes = torch.sub(p, targets, out=factors[0]), torch.addcmul(p, p, p, value=-1, out=factors[1])
    # The result is about as large as its first order; where that is far too small, no product is begun.
    expected = float(errors.norm()) * (moments.second / max(1, errors.numel())) ** 0.5
    known = moments.beyond_fourth(largest) > 2 * tolerance * expected
    moments = moments.at(p, slopes) if known else moments
    if moments.beyond_fourth(largest) > 2 * tolerance * expected:
        return None
    if powers is None:
        result = fused_product(x, errors, slopes, weight, FIRST_ORDERS)
    else:
        # Both products at once: each is too small for many threads.
        first, second = torch.bmm(factors, powers)
        result = torch.addcmul(first, x, second, value=-1)
    allowed = tolerance / MARGIN * float(result.norm()) / max(1, result.numel()) ** 0.5
    near = allowed < moments.beyond_second() <= MOST_LOOKED_AT * allowed
    if not known and (near or moments.beyond_fourth(largest) > allowed):
        moments = moments.at(p, slopes)
    if moments.beyond_second() <= allowed:
        return result
    if moments.beyond_fourth(largest) > allowed:
        return None
    bends = torch.addcmul(slopes, slopes, p, value=-2)
    thirds = torch.addcmul(slopes, slopes, slopes, value=-6)
    if powers is None:
        return result.add_(fused_product(x, bends, thirds, weight, NEXT_ORDERS))
    squares = powers[1]
    result.add_(bends @ (weight * squares), alpha=2 / 3)
    return result.addcmul_(x, thirds @ (squares * squares), value=-1 / 3)


def _powers(weight: Tensor, *, wanted: bool = True) -> tuple[Tensor | None, float, _Moments]:
    """A ``weight`` [K, n] and its square, [2, K, n]; the largest of the squares, which is NaN if one is; and their moments.

    The first may be left out where it is not ``wanted``.
    """
    units = max(1, weight.shape[1])
    if library.takes(weight):
        powers = weight.new_empty(2, *weight.shape) if wanted else None
        fourths = weight.new_empty(weight.shape[1])
        sums = torch.empty(3, dtype=torch.float64)
        sizes = {"outputs": len(weight), "inputs": weight.shape[1], "powers": wanted}
        # What is not wanted is not written.
        library.call("squares", torch.float32, weight, fourths, sums, fourths if powers is None else powers, **sizes)
        largest, second, sixth = sums.tolist()
        largest = math.nan if math.isnan(second) else largest
    else:
        squares = weight * weight
        powers, by_output = torch.stack([weight, squares]), squares * squares
        fourths = by_output.sum(0)
        largest = float(squares.amax()) if weight.numel() else 0.0
        second, sixth = float(squares.sum()), float((squares * by_output).sum())
    return powers, largest, _Moments(second / units, float(fourths.norm()) / units**0.5, sixth / units)


class _Moments(NamedTuple):
    """Of the weights of a unit, on average, and of derivatives of F: those at some examples, else the largest there are.

    Attributes:
        second: the sum of squares.
        fourth: the sum of fourth powers, of which it is the root mean square over units.
        sixth: the sum of sixth powers.
        slope: the mean of F'.
        bend: the root mean square of the second derivative.
        third: the mean size of the third derivative, F' (1 - 6F').
    """

    second: float
    fourth: float
    sixth: float
    slope: float = 1 / 4
    bend: float = 3**-0.5 / 6
    third: float = 1 / 8

    def at(self, p: Tensor, slopes: Tensor) -> _Moments:
        """With the derivatives where the outputs have these F and F', [B, K]; of some examples."""
        p, q = p[:EXAMPLES_READ], slopes[:EXAMPLES_READ]
        bend = float(torch.addcmul(q, q, p, value=-2).square().mean()) ** 0.5
        third = float(torch.addcmul(q, q, q, value=-6).abs().mean())
        return self._replace(slope=float(q.mean()), bend=bend, third=third)

    def beyond_second(self) -> float:
        """What the third and the fourth order come to: they have independent signs, of weights and of states."""
        return math.hypot(2 / 3 * self.bend * self.sixth**0.5, self.third * self.fourth / 3)

    def beyond_fourth(self, largest: float) -> float:
        """What the fifth and the sixth order come to at most, with this ``largest`` square of a weight.

        The fourth derivative of F is at most twice the second, and the fifth at most the first.
        """
        return math.hypot(4 / 15 * self.bend * largest * self.sixth**0.5, 2 / 45 * self.slope * self.sixth)


class SoftmaxFlips:
    r"""Flips of a cross-entropy :math:`f = \log \sum_k e^{b_k} - \sum_k t_k b_k` with targets t that sum to 1. Exact.

    With :math:`p = \mathrm{softmax}(b)` a flip of unit i multiplies the sum of exponentials by
    :math:`S_i = \sum_k p_k e^{-2x_i W_{ki}}`: for the units +1, and for the units -1, that is an ordinary product of p with a
    function of the weights. So

    .. math:: D_i f = -\tfrac12 x_i \log S_i - (tW)_i, \qquad d_k(x_{\downarrow i}) = p_k e^{-2x_iW_{ki}} / S_i - t_k .

    Made by :meth:`of`; what it keeps is compiled in one pass where that can be.

    Args:
        x: states [B, n], without zeros.
        targets: t, [B, K].
        p: the softmax of the outputs b, [B, K].
        grown: what the exponentials of -2W and 2W are above 1, so that small weights keep their digits, [2, K, n].
        excess: what S is above 1, [B, n].
        derivative: D f, [B, n].
    """

    def __init__(self, x: Tensor, targets: Tensor, p: Tensor, grown: Tensor, excess: Tensor, derivative: Tensor) -> None:
        self.x, self.targets, self.p, self.grown, self.excess = x, targets, p, grown, excess
        # The discrete derivative in the states, [B, n].
        self.derivative = derivative

    @staticmethod
    def of(x: Tensor, outputs: Tensor, targets: Tensor, weight: Tensor) -> SoftmaxFlips | None:
        """In a dtype that is wide enough for the weights, or None if none is, or if there are zeros among the states.

        Args:
            x: states [B, n].
            outputs: b, [B, K].
            targets: t, [B, K].
            weight: W, [K, n], at most :data:`LARGEST_SOFTMAX_WEIGHT`.
        """
        x, outputs, targets, weight = (t.detach() for t in (x, outputs, targets, weight))
        if cannot_look() or not weight.numel() or not len(x):
            return None
        # States of small layers come in another order; weights in another one are computed by tensors.
        x = x.contiguous()
        if library.takes(x, outputs, targets, weight):
            found = torch.empty_like(outputs), weight.new_empty(2, *weight.shape), torch.empty_like(x), torch.empty_like(x)
            # Refused are the weights and states that are looked at below.
            if library.call("softmax", torch.float32, x, outputs, targets, weight, *found, **_sizes(x, outputs)) == 0:
                return SoftmaxFlips(x, targets, *found)
        low, high = (float(t) for t in torch.aminmax(weight))
        largest = max(-low, high)
        if not largest <= LARGEST_SOFTMAX_WEIGHT or not bool(x.abs().amin() > 0):
            return None
        wide = torch.float64 if largest > LARGEST_FLOAT_WEIGHT else outputs.dtype
        x, outputs, targets, weight = (t.to(wide) for t in (x, outputs, targets, weight))
        p, grown = outputs.softmax(-1), torch.expm1(torch.stack([-2 * weight, 2 * weight]))
        excess = torch.where(x > 0, p @ grown[0], p @ grown[1])
        derivative = torch.addcmul(-(targets @ weight), torch.log1p(excess), x, value=-0.5)
        return SoftmaxFlips(x, targets, p, grown, excess, derivative)

    def averaged(self, opposite: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        r"""A term [B] of value 0: the gradient in the head's parameters, averaged as in :func:`averaged_quadratic`.

        In ``weight`` it is :math:`x_i [(1 - \pi_i) d_k(x) - \pi_i d_k(x_{\downarrow i})]`.
        """
        term: Tensor = applied(_Averaged, weight, bias, self, opposite)
        return term

    def gradients(self, opposite: Tensor, grad: Tensor, *, of_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Those of :meth:`averaged` in weight and bias, for the gradients ``grad`` [B] in the losses."""
        x, opposite, grad = self.x, opposite.to(self.x.dtype), grad.to(self.x.dtype)
        known = x, opposite.contiguous(), self.excess, self.grown, self.p, self.targets, grad.contiguous()
        if library.takes(*known) and not cannot_look():
            found = torch.empty_like(self.grown[0]), self.p.new_empty(self.p.shape[1])
            library.call("softmax_gradient", torch.float32, *known, *found, **_sizes(x, self.p))
            return found[0], found[1] if of_bias else None
        grad, positive = grad[:, None], x > 0
        share = opposite / (1 + self.excess)
        up = torch.where(positive, share, 0.0)
        moved = x * opposite
        kept = x - moved
        # Of the sample, of flips from +1 and from -1, and the targets of either.
        of_sample, plus, minus = ((self.p * grad).t() @ torch.cat([kept, up, share - up], 1)).tensor_split(3, 1)
        of_targets = (self.targets * grad).t() @ (kept - moved)
        down = self.grown[0]
        in_weight = of_sample.sub(of_targets).sub_(plus).sub_(plus * down).add_(minus).addcmul_(minus, self.grown[1])
        if not of_bias:
            return in_weight, None
        ones = (up @ down.t() + (share - up) @ self.grown[1].t() + share.sum(1, keepdim=True)) / max(1, x.shape[1])
        slopes = self.p * (1 - opposite.mean(1, keepdim=True) + ones) - self.targets
        return in_weight, (slopes * grad).sum(0)


def _sizes(x: Tensor, p: Tensor) -> dict[str, int]:
    return {"batch": len(x), "units": x.shape[1], "outputs": p.shape[1]}


@final
class _Averaged(torch.autograd.Function):
    """Zeros [B]; backward, the averaged gradient of a cross-entropy in the head's parameters, in a few products."""

    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, flips: SoftmaxFlips, opposite: Tensor) -> Tensor:
        return flips.p.new_zeros(len(flips.p))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.weight, ctx.bias = (None if t is None else t.dtype for t in inputs[:2])
        ctx.flips, ctx.opposite = inputs[2:]

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_weight, of_bias, *_ = ctx.needs_input_grad
        in_weight, in_bias = ctx.flips.gradients(ctx.opposite, grad, of_bias=of_bias)
        return in_weight.to(ctx.weight) if of_weight else None, None if in_bias is None else in_bias.to(ctx.bias), None, None


def quadratic(x: Tensor, residuals: Tensor, weight: Tensor) -> Tensor:
    """The discrete derivative [B, n] of half the sum of squares of ``residuals`` [B, K], whose map has this ``weight``.

    Exact. Of weighted squares, ``residuals`` and ``weight`` are those divided by the outputs' scales.
    """
    x, residuals, weight = (t.detach() for t in (x, residuals, weight))
    return residuals @ weight - x * weight.square().sum(0)


def averaged_quadratic(
    x: Tensor, residuals: Tensor, precision: Tensor, opposite: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    r"""A term [B] of value 0: the gradient of half the sum of ``precision`` [K] times squares, averaged over states.

    That in the ``weight`` [K, n] from unit i is averaged over the states of this unit, whose ``opposite`` one has the
    probability :math:`\pi_i`: the derivatives :math:`d_k = c_k r_k` are linear in the outputs, so with the precision c

    .. math:: x_i [(1 - \pi_i) d_k(x) - \pi_i d_k(x_{\downarrow i})] = (1 - 2\pi_i) x_i d_k + 2 \pi_i c_k W_{ki}.

    That in the ``bias`` is the mean over the units of :math:`(1 - \pi_i) d_k(x) + \pi_i d_k(x_{\downarrow i})`.
    """
    slopes = residuals.detach() * precision
    carrier = (functional.linear(x * (1 - 2 * opposite), weight) * slopes).sum(1) + opposite @ (precision @ weight.square())
    if bias is not None:
        moved = functional.linear(x * opposite, weight.detach()) * (2 / max(1, x.shape[1])) * precision
        carrier = carrier + ((slopes - moved) * bias).sum(1)
    return carrier - carrier.detach()


def explain(weight: Tensor, *, examples: int = 50, tolerance: float = 1e-3) -> str:
    """How flips of a linear head with this ``weight`` [K, n] and a Bernoulli likelihood are computed, and why.

    >>> explain(torch.full((784, 200), 0.6)).split(":")[0]
    'native'
    """
    if weight.dim() != 2:
        raise InputError(f"explain takes the weight [K, n] of a linear head, got shape {list(weight.shape)}")
    choice: Choice = choose(weight.detach(), LOGISTIC, examples, tolerance / RATIO_ERROR_FACTOR)
    otherwise = f"{choice.kernel}: {choice.reason}"
    largest = float(weight.detach().abs().amax()) if weight.numel() else 0.0
    if not tolerance:
        return otherwise
    if examples * weight.numel() < LEAST_EXPANDED_TERMS:
        return f"{otherwise}; too small for an expansion to pay"
    if not largest <= LARGEST_EXPANDED_WEIGHT:
        return f"{otherwise}; weights up to {largest:.2g} are too large for an expansion in them"
    return f"expansion: two or four ordinary products where the data show that they are within {tolerance:g}; else {otherwise}"
