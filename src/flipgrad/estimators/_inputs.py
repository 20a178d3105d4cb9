r"""What the gradient of a weight takes for its binary input.

The gradient of a weight from unit i to unit j is :math:`h_j(a_j)\, x_i` with :math:`h_j(a) = 2F'(a)\, u_j`, where the signal
:math:`u_j` comes from later layers and does not depend on :math:`x_i`. The sampled :math:`x_i` can be averaged over its two
states given all others: with the prior probability :math:`p_i` of the sampled state and

.. math:: \log r_i = \sum_j [\log p(y_j | a_j - 2A_{ji}x_i) - \log p(y_j | a_j)]

its posterior given the layer's states y is :math:`q_i = p_i / (p_i + (1 - p_i)\, r_i)`. Then

- "rao-blackwell" is :math:`x_i [q_i h_j(a_j) - (1 - q_i)\, h_j(a_j - 2A_{ji}x_i)]`: the conditional expectation, so the same
  mean as with sampled inputs and never a larger variance (a weight that several units share, in a convolution, adds up
  such terms: then the variance is smaller as a rule, not always);
- "posterior" leaves out the change of h: :math:`h_j(a_j)\, x_i (2q_i - 1)`, one ordinary weight gradient;
- "mean" takes the prior's mean: :math:`h_j(a_j)\, m_i`, which costs nothing, has the least variance and more bias;
- "sampled" takes :math:`x_i`, as the paper does;
- "auto" is "posterior" where the posterior is known, and "sampled" elsewhere.

The posterior is known where a unit goes to one layer only: then nothing but that layer's states tells of it.
:class:`flipgrad.Sequential` knows where units go. In a graph written by hand that is seen only on the way back, too late for
another rule: there "auto" is "sampled", and with "posterior" and "rao-blackwell" a unit that goes elsewhere too is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from flipgrad import flips
from flipgrad.affine import Affine, LinearMap
from flipgrad.errors import InputError
from flipgrad.guards import once
from flipgrad.layers import LayerCall
from flipgrad.noise import Noise
from flipgrad.priors import Prior

InputRule = Literal["auto", "sampled", "mean", "posterior", "rao-blackwell"]

# The weight's place among the tensors of functions that are evaluated for many draws.
WEIGHT = 3

# Differentiable states from the pre-activations, which carry the parameters' gradients, and the sampled states.
Attach = Callable[[Tensor, Tensor], Tensor]


def check_inputs(estimator: str, inputs: str) -> None:
    """Refuse what is no rule, on behalf of an ``estimator``."""
    if inputs not in get_args(InputRule):
        raise InputError(f"{estimator}(inputs={inputs!r}): choose {', '.join(map(repr, get_args(InputRule)))}")


def allowed_error(estimator: str, tolerance: float, exact: bool) -> float:
    """The tolerance of sums over flips, 0 if they are to be exact."""
    if not 0 < tolerance < 1:
        message = "give a relative error between 0 and 1, e.g. 1e-3, or exact=True"
        raise InputError(f"{estimator}(tolerance={tolerance}): {message}")
    return 0.0 if exact else tolerance


def averages(call: LayerCall, inputs: InputRule) -> bool:
    """Whether a layer's weights take other inputs than its sampled states by a rule: else the estimate is the ordinary one."""
    if not call.binary or inputs == "sampled":
        return False
    return inputs != "auto" or (call.prior is not None and call.prior.watch is None)


def states(call: LayerCall, inputs: InputRule, tolerance: float, attach: Attach, *, flips: bool) -> Tensor:
    """A layer's sampled states, with gradients in its parameters by a rule.

    Args:
        call: the layer's evaluation.
        inputs: the rule, which :func:`averages` this layer's inputs.
        tolerance: the relative L2 error that is allowed in sums over flips.
        attach: gives the states their gradient in the pre-activations, and in the input what these lack.
        flips: whether ``attach`` flips the input; else the pre-activations carry the ordinary derivative in it.
    """
    with torch.no_grad():
        a = call.affine(call.x)
    sampled = call.sample(a)
    if not torch.is_grad_enabled():
        return sampled
    if call.prior is None:
        raise InputError(
            f"inputs={inputs!r} needs the probabilities with which the input of {type(call.layer).__name__} was drawn, but it "
            "is not known which layer drew it: keep the states in autograd's graph (no detach, no torch.no_grad), or use "
            "inputs='sampled'"
        )
    if inputs != "mean" and call.prior.watch is not None:
        call.x = call.prior.watch()
    log_odds, x = call.prior.log_odds(), call.x.detach()
    if inputs == "mean":
        return attach(call.affine.at_inputs(call.x, a, _mean, (log_odds,), flips=flips), sampled)
    posterior = _Posterior(call.prior, call.affine, call.noise, tolerance, strict=inputs != "auto")
    weight = call.affine.parameter
    # Another tensor than a itself, which torch.compile wants to see in one place only.
    tensors = (x, log_odds, a.detach(), sampled, weight.detach())
    result = attach(call.affine.at_inputs(call.x, a, posterior.mean, tensors, flips=flips), sampled)
    if inputs != "rao-blackwell":
        return result
    corrected: Tensor = _OwnInput.apply(result, weight, *tensors, posterior)  # type: ignore[no-untyped-call]
    return corrected


def _mean(log_odds: Tensor) -> Tensor:
    """The mean of a state; torch computes a sigmoid three times as fast as tanh."""
    return torch.sigmoid(log_odds).mul_(2).sub_(1)


@final
@dataclass(frozen=True)
class _Posterior:
    """The probability of units' sampled states given all others."""

    prior: Prior
    affine: Affine
    noise: Noise
    tolerance: float
    strict: bool

    def log_odds(self, x: Tensor, prior: Tensor, a: Tensor, states: Tensor, weight: Tensor) -> Tensor:
        """log q / (1 - q) of the sampled states, from those ``prior`` of +1."""
        if self.prior.shared:
            raise InputError(
                "the posterior of a unit is known only where its states go to one layer, and here several layers (or the head) "
                "were given them; use inputs='mean' or 'sampled'"
            )
        ratio: Tensor = _LogRatio.apply(x, a, states, weight, self)  # type: ignore[no-untyped-call]
        return torch.addcmul(ratio, x, prior, value=-1).neg_()

    def mean(self, x: Tensor, *others: Tensor) -> Tensor:
        """The posterior mean of the states; where it is not known, and need not be, the states."""
        if self.prior.shared and not self.strict:
            return x
        return _mean(self.log_odds(x, *others)).mul_(x)


@final
class _LogRatio(torch.autograd.Function):
    """The log ratio, without a gradient; draws are one large batch where they share the weight."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, posterior: _Posterior) -> Tensor:
        return posterior.affine.log_ratio(x, a, states, weight, posterior.noise, posterior.tolerance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        *tensors, posterior = inputs
        return over_draws(_LogRatio.apply, info.batch_size, in_dims, tensors, posterior.affine, posterior)


@final
class _OwnInput(torch.autograd.Function):
    """States as they are; backward, to the weight how its gradient changes with its own input besides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        result: Tensor,
        weight: Tensor,
        x: Tensor,
        log_odds: Tensor,
        a: Tensor,
        states: Tensor,
        kept: Tensor,
        posterior: _Posterior,
    ) -> Tensor:
        return result.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, *tensors, ctx.posterior = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return grad, *[None] * 7
        x, log_odds, a, states, weight = ctx.saved_tensors
        share = torch.sigmoid(-ctx.posterior.log_odds(x, log_odds, a, states, weight))
        change: Tensor = _SlopeProduct.apply(x, share, a, 2 * grad, weight, ctx.posterior)  # type: ignore[no-untyped-call]
        return grad, change, *[None] * 6


@final
class _SlopeProduct(torch.autograd.Function):
    """The slope product, without a gradient; draws of a fully connected layer are groups of a convolution of one place."""

    @staticmethod
    def forward(x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, posterior: _Posterior) -> Tensor:
        return posterior.affine.slope_product(x, share, a, grad, weight, posterior.noise, posterior.tolerance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        *tensors, posterior = inputs
        draws = leading(info.batch_size, in_dims, tensors)
        *units, weight = draws
        if not isinstance(posterior.affine, LinearMap) or units[0].dim() != 3:
            apply: Any = _SlopeProduct.apply
            return torch.stack([apply(*draw, posterior) for draw in zip(*draws, strict=True)]), 0
        x, share, a, grad = (t.transpose(0, 1).flatten(1)[..., None, None] for t in units)
        kernels = weight.flatten(0, 1)[..., None, None]
        geometry, tolerance = flips.Geometry(groups=info.batch_size), posterior.tolerance
        product = flips.slope_product(x, share, a, grad, kernels, posterior.noise, geometry, tolerance=tolerance)
        return product.view_as(weight), 0


def over_draws(
    apply: Any, draws: int, in_dims: tuple[int | None, ...], tensors: list[Tensor], affine: Affine, *others: Any
) -> tuple[Tensor, int]:
    """What ``apply`` gives for many draws: one large batch where they share the weight, else one after the other.

    Args:
        apply: takes ``tensors``, of which the fourth is the weight and any may be None, and ``others``.
        draws: how many.
        in_dims: the dimension of the draws in every tensor, None where they share it.
        tensors: of all draws.
        affine: the layer's map.
        others: what is no tensor.
    """
    every = leading(draws, in_dims, tensors)
    weight = every[WEIGHT]
    if not bool((weight == weight[:1]).all()):
        each = ([None if t is None else t[draw] for t in every] for draw in range(draws))
        return torch.stack([apply(*one, *others) for one in each]), 0
    # It takes any dimensions in front.
    as_they_are = isinstance(affine, LinearMap)
    batch = [t if t is None or as_they_are else t.flatten(0, 1) for t in every]
    batch[WEIGHT] = weight[0]
    result: Tensor = apply(*batch, *others)
    return result if as_they_are else result.unflatten(0, (draws, -1)), 0


def leading(draws: int, in_dims: tuple[int | None, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of all draws, these in the first dimension; what the draws share is expanded."""
    pairs = zip(tensors, in_dims, strict=False)
    return [t if t is None else t.expand(draws, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in pairs]
