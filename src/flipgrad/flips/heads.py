r"""Discrete derivatives of losses that add up over the outputs of a linear head, as sums over flips.

A loss :math:`f(x) = \sum_j \phi_j(b_j)` of outputs :math:`b = Wx + c` of binary states x has, with the flip
:math:`s = 2 W_{ji} x_i`,

.. math:: D_i f = \tfrac12 x_i \sum_j [\phi_j(b_j) - \phi_j(b_j - s)],

so that no tensor of all outputs at all flips is needed. A square is exact at the price of one ordinary product. Of a Bernoulli
likelihood with the targets t in [0, 1], :math:`\phi = \log(1 + e^b) - tb`, it is the log ratio of logistic noise
(:func:`flipgrad.flips.log_ratio`); or, where weights are small, as when training begins, the first orders of W:

.. math:: D_i f \approx \sum_j W_{ji} (F(b_j) - t_j) - x_i \sum_j W_{ji}^2 F'(b_j),

two ordinary products. What they leave out is, to the next orders and with :math:`w` the largest weight,

.. math:: \tfrac23 \sum_j W_{ji}^3 F''(b_j), \qquad
    \tfrac13 \sum_j W_{ji}^4 |F'''(b_j)| \le \tfrac13 w^2 \sum_j W_{ji}^2 |F'''(b_j)|;

the terms of the first have the signs of weights, and are taken to add up as their squares do. If that is within the tolerance,
relative to the root mean square of the result, the result is given; else the log ratio.
"""

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.flips import RATIO_ERROR_FACTOR, choose, log_ratio
from flipgrad.flips.choice import Choice
from flipgrad.guards import cannot_look
from flipgrad.noise import Logistic, sign

# With fewer terms the log ratio costs less than to find out whether the expansion will do.
LEAST_EXPANDED_TERMS = 2**20
# With larger weights it never does, whatever the data.
LARGEST_EXPANDED_WEIGHT = 0.25
# Examples whose derivatives tell how far it reaches.
EXAMPLES_READ = 8
LOGISTIC = Logistic()


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
    """The first orders of the weights; None if they are not within the tolerance."""
    squares = weight * weight
    largest = float(squares.amax()) if weight.numel() else 0.0
    if not largest <= LARGEST_EXPANDED_WEIGHT**2:
        return None
    p = torch.sigmoid(logits)
    slopes = torch.addcmul(p, p, p, value=-1)
    result = torch.addcmul((p - targets) @ weight, x, slopes @ squares, value=-1)
    outputs, (examples, units) = weight.shape[0], x.shape
    # The mean over units of the sum of squares; of some examples, of the second derivative of F the root mean square, and of
    # the third, F' (1 - 6F'), the mean size.
    norm = float(squares.mean()) * outputs
    some, at = slopes[:EXAMPLES_READ], p[:EXAMPLES_READ]
    bends = float(torch.addcmul(some, some, at, value=-2).square().mean()) ** 0.5
    third = float(torch.addcmul(some, some, some, value=-6).abs().mean())
    left_out = 2 / 3 * bends * largest * norm**0.5 + third * largest * norm / 3
    return result if left_out <= tolerance * float(result.norm()) / (examples * units) ** 0.5 else None


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

    >>> explain(torch.full((784, 200), 0.5)).split(":")[0]
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
    return f"expansion: two ordinary products where the data show that they are within {tolerance:g}; else {otherwise}"
