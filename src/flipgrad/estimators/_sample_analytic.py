r"""PSA and ST: sampled states forward; backward, the gradient of their means in every layer's parameters and input.

The gradient of a weight from unit i to unit j is :math:`h_j(a_j)\, x_i` with :math:`h_j(a) = 2F'(a)\, u_j`, where the signal
:math:`u_j` comes from later layers and does not depend on :math:`x_i`. The sampled :math:`x_i` can be averaged over its two
states given all others: with the prior probability :math:`p_i` of the sampled state and

.. math:: \log r_i = \sum_j [\log p(y_j | a_j - 2A_{ji}x_i) - \log p(y_j | a_j)]

its posterior given the layer's states y is :math:`q_i = p_i / (p_i + (1 - p_i)\, r_i)`. Then

- "sampled" takes :math:`x_i`, as the paper does, and "mean" the prior's mean: :math:`h_j(a_j)\, m_i`;
- "rao-blackwell" is :math:`x_i [q_i h_j(a_j) - (1 - q_i)\, h_j(a_j - 2A_{ji}x_i)]`: the conditional expectation;
- "posterior" leaves out the change of h: :math:`h_j(a_j)\, x_i (2q_i - 1)`, one ordinary weight gradient;
- "auto" is "posterior" where the posterior is known and averaging pays (:mod:`flipgrad.flips.averaging`), else "sampled".

:class:`flipgrad.PSA` tells what each is worth. The posterior is known where a unit goes to one layer only: then nothing but
that layer's states tells of it. :class:`flipgrad.Sequential` knows where units go. In a graph written by hand that is seen
only on the way back, too late for another rule: there "auto" is "sampled", and with "posterior" and "rao-blackwell" a unit
that goes elsewhere too is an error.
"""

from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from flipgrad.affine import AffineMap, Signal
from flipgrad.contract import CostHead, LayerCall, LocalEstimator, Network, Prior, WeightCall
from flipgrad.errors import InputError
from flipgrad.estimators._head import HeadGradient, head_losses, is_linear, stream_losses
from flipgrad.flips.averaging import Averaging
from flipgrad.flips.choice import decided
from flipgrad.flips.ordinary import ordered_as
from flipgrad.flips.units import posterior_means
from flipgrad.guards import applied, cannot_look, capturing, give_away, once, own
from flipgrad.jets import Jets
from flipgrad.noise import Noise
from flipgrad.norms import SignMap
from flipgrad.objectives import LinearHeadObjective, Objective
from flipgrad.residual import Residual, order_for

# A log ratio is given this many times the tolerance of a flip product: of an error in it, a posterior mean keeps less than a
# half, most of which averages out over units and examples (:mod:`flipgrad.flips.one_product` has measurements).
POSTERIOR_TOLERANCE_FACTOR, LARGEST_POSTERIOR_TOLERANCE = 15, 0.015

InputRule = Literal["auto", "sampled", "mean", "posterior", "rao-blackwell"]
HeadRule = Literal["auto", "sampled", "enhanced", "rao-blackwell"]

# Outputs at all flips of a batch up to which an averaged gradient of the head may evaluate and differentiate an objective.
# It takes 20 to 25 ns for each (one core of a server from 2023), so that more would cost more than an ordinary layer.
MOST_AVERAGED_OUTPUTS = 2**15


class SampleAnalytic(LocalEstimator):
    """What PSA and ST share; ``flips`` is whether the gradient in a binary input is the discrete one, or the ordinary one."""

    flips: ClassVar[bool]

    def __init__(self, inputs: InputRule, head: HeadRule, flip_head: bool, tolerance: float, exact: bool) -> None:
        name = type(self).__name__
        for option, value, known in (("inputs", inputs, get_args(InputRule)), ("head", head, get_args(HeadRule))):
            if value not in known:
                raise InputError(f"{name}({option}={value!r}): choose {', '.join(map(repr, known))}")
        if not 0 < tolerance < 1:
            message = "give a relative error between 0 and 1, e.g. 1e-3, or exact=True"
            raise InputError(f"{name}(tolerance={tolerance}): {message}")
        self.inputs: InputRule = inputs
        self.head_gradient: HeadRule = head
        self.flip_head = flip_head
        self.tolerance = 0.0 if exact else tolerance
        # Not told by the tolerance: in compiled graphs nothing may depend on the value of a number.
        self.exact = exact
        self._given_tolerance = tolerance

    def argument(self, name: str) -> Any:
        other = {"head": self.head_gradient, "tolerance": self._given_tolerance}
        return other[name] if name in other else super().argument(name)

    @final
    def check_latent(self, depth: int, *, sampled: bool) -> None:
        name = type(self).__name__
        if depth > 1 and self.inputs not in ("auto", "sampled"):
            raise InputError(
                f"{name}(inputs={self.inputs!r}): in a model of several latent layers the signal of a layer "
                "depends on its own input, and no average over that is known; use inputs='sampled' or 'auto'"
            )
        if depth > 1 and sampled and self.flips:
            raise InputError(
                f"{name} takes the entropies of several latent layers in closed form, and of sampled ones its bias is large: "
                "make the model with entropy='analytic'"
            )

    @final
    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        if isinstance(net.head, CostHead):
            calls, tolerance = (*last.earlier, last), self.tolerance
            return net.head.losses(states, calls, objective, self._of_decoder, flips=self.flips, tolerance=tolerance)
        if net.ends_in_stream:
            self._check_stream_head()
            return stream_losses(net, last, states, objective, self.tolerance, flip=self.flip_head)
        # Where PSA is to evaluate no flips, an averaged head would; ST has one only if it is asked for. Under torch.vmap the
        # averages that are known without flips are made by evaluating these: an estimate is the same there.
        evaluates = self.flip_head or not self.flips or (isinstance(objective, LinearHeadObjective) and cannot_look())
        gradient, flip, tolerance = self._head_gradient(net, states, objective), self.flip_head, self.tolerance
        return head_losses(net, last, states, objective, gradient, flip=flip, tolerance=tolerance, evaluates_flips=evaluates)

    def _head_gradient(self, net: Network, states: Tensor, objective: Objective) -> HeadGradient:
        """How the gradient in the head's parameters is made; an "auto" one averages where that costs little."""
        if self.head_gradient != "auto":
            return self.head_gradient
        known = isinstance(objective, LinearHeadObjective)
        if known or (is_linear(net.head) and states.numel() * net.head.out_features <= MOST_AVERAGED_OUTPUTS):
            return "rao-blackwell"
        return "sampled"

    def _of_decoder(self, net: Network, call: LayerCall, states: Tensor, objective: Objective, tolerance: float) -> Tensor:
        """The losses of what generates the data, behind the flattened ``states`` of the layer of a ``call``."""
        known = call.distribution is not None and call.distribution.a.shape == states.shape
        gradient = self._head_gradient(net, states, objective) if known else "sampled"
        return head_losses(net, call, states, objective, gradient, flip=self.flip_head, tolerance=tolerance)

    @final
    def states(self, call: LayerCall) -> Tensor:
        if isinstance(call.affine, SignMap):
            return self._of_real(call, call.affine)
        with torch.no_grad():
            a = call.affine(call.x)
        sampled = call.sample(a)
        if not torch.is_grad_enabled():
            return sampled
        averaged = share = None
        prior = self._prior(call)
        if prior is not None and self.inputs == "mean":
            with torch.no_grad():
                averaged = torch.sigmoid(prior.log_odds()).mul_(2).sub_(1)
            prior = None
        elif prior is not None:
            if prior.watch is not None:
                call.x = prior.watch()
            with torch.no_grad():
                log_odds = prior.log_odds()
            pays = self.inputs != "auto" or self._pays(call, a, log_odds)
            if pays is False:
                prior = None
            else:
                averaged, share = self._posterior(call, prior, a, sampled, log_odds)
                # In a captured graph both are there, and it is known only then which.
                averaged = torch.where(pays, averaged, call.x.detach()) if isinstance(pays, Tensor) else averaged
        states: Tensor = applied(
            _PathStates, call.x, a, sampled, averaged, share, call.affine, call.noise, self.tolerance, self.exact, self.flips,
            call.binary, prior, *call.affine.tensors,
        )  # fmt: skip
        return states

    def _of_real(self, call: LayerCall, affine: SignMap) -> Tensor:
        """The states that are drawn from real numbers, of a residual stream for instance.

        The ordinary derivative there is the norm's own; the higher ones go with the stream.
        """
        a = affine(call.x)
        sampled = call.sample(a)
        if not torch.is_grad_enabled():
            return sampled
        jets = Jets()
        if self.flips and call.jets is not None:
            jets = call.jets.scaled(affine.scale, affine.channel_dim)
            call.order = self._order(call)
        orders = tuple(jets.carriers)
        states: Tensor = applied(_StreamStates, a, sampled, call.noise, orders, *jets.carriers.values())
        return states

    def _order(self, call: LayerCall) -> int:
        """The order of discrete derivatives along the stream that the layer's states are added to."""
        if not isinstance(call.layer, Residual):
            return 1
        name = type(self).__name__
        if self.exact:
            raise InputError(
                f"{name}(exact=True): discrete derivatives along a residual stream are those of a polynomial of order 2 or 3; "
                "leave out exact=True, a smaller tolerance (the default is 1e-3) takes the order 3"
            )
        if self.inputs not in ("auto", "sampled"):
            raise InputError(
                f"{name}(inputs={self.inputs!r}): a unit of a residual block acts on all later layers, and its posterior is "
                "not known; use inputs='sampled' or 'auto'"
            )
        if call.layer.prelu is not None:
            # Behind that nothing of higher order is known.
            return 1
        return 3 if capturing() else order_for(call.layer.branch, call.noise, self.tolerance)

    @final
    def weights(self, call: WeightCall) -> Tensor:
        """The weights sampled forward; backward, the gradient in their means, or straight to latent weights that are not drawn.

        With discrete derivatives that is what PSA is for units; without a noise there is no mean, and what is known of a weight
        is how the loss changes with its flip.
        """
        if call.noise is not None:
            mean = call.noise.mean_sign(call.latent)
        else:
            mean = call.latent if call.clip is None else call.latent.clamp(-call.clip, call.clip)
        return call.sample() + (mean - mean.detach())

    def _check_stream_head(self) -> None:
        if self.head_gradient == "enhanced":
            raise InputError(
                f"{type(self).__name__}(head='enhanced') needs a binary layer before the head, and here a residual stream "
                "comes to it; use head='sampled'"
            )

    def _prior(self, call: LayerCall) -> Prior | None:
        """What the layer's binary inputs are averaged by; None where its weights take the sampled states."""
        if not call.binary or self.inputs == "sampled":
            return None
        if self.inputs == "auto":
            alone = call.prior is not None and call.prior.watch is None and not call.prior.shared
            return call.prior if alone else None
        if call.prior is None:
            raise InputError(
                f"inputs={self.inputs!r} needs the probabilities with which the input of {type(call.layer).__name__} was "
                "drawn, but it is not known which layer drew it: keep the states in autograd's graph (no detach, no "
                "torch.no_grad), or use inputs='sampled'"
            )
        return call.prior

    def _pays(self, call: LayerCall, a: Tensor, log_odds: Tensor) -> bool | Tensor:
        """Whether inputs are to be averaged, as far as that is known; :func:`flipgrad.flips.explain` can tell afterwards."""
        with torch.no_grad():
            decision = call.affine.averaging(call.x, a, call.noise, log_odds, self.tolerance)
        if not isinstance(decision, Averaging):
            return True if decision is None else decision
        decided[call.layer] = decision
        return decision.pays

    def _posterior(
        self, call: LayerCall, prior: Prior, a: Tensor, states: Tensor, log_odds: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The mean of every input unit given the layer's ``states`` and, if needed, the share of the state not sampled."""
        prior.check_alone()
        # Not as a decorator, which torch.compile does not see through where the estimator is made inside what it compiles.
        with torch.no_grad():
            x = call.x.detach()
            tolerance = max(self.tolerance, min(POSTERIOR_TOLERANCE_FACTOR * self.tolerance, LARGEST_POSTERIOR_TOLERANCE))
            ratio = call.affine.log_ratio(x, a, states, call.noise, tolerance)
            share = None
            if self.inputs == "rao-blackwell":
                share = torch.sigmoid(torch.addcmul(ratio, x, log_odds, value=-1))
            return posterior_means(x, log_odds, ratio), share


@final
class _PathStates(torch.autograd.Function):
    """Sampled states; backward, the gradients of their means by the affine map, at the inputs that are given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, a: Tensor, states: Tensor, averaged: Tensor | None, share: Tensor | None, affine: AffineMap, noise: Noise,
        tolerance: float, exact: bool, flips: bool, binary: bool, prior: Prior | None, *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return own(states)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, a, states, averaged, share, ctx.affine, ctx.noise, ctx.tolerance, ctx.exact, *rest = inputs
        give_away(ctx, states)
        ctx.flips, ctx.binary, ctx.prior, *tensors = rest
        ctx.save_for_backward(x, a, averaged, share, *tensors)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, averaged, share, *tensors = ctx.saved_tensors
        if ctx.prior is not None:
            # Who else was given the states is known only now.
            ctx.prior.check_alone()
        affine = ctx.affine.with_tensors(tensors)
        inputs = x if averaged is None else averaged
        back = Signal(x, inputs, a, ordered_as(grad, a), ctx.noise, share, ctx.binary, ctx.flips, ctx.tolerance, ctx.exact)
        needs_x, needs_parameters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[12:])
        grad_x, *grads = affine.gradients(back, of_x=needs_x, of_parameters=needs_parameters)
        return grad_x, *[None] * 11, *grads


@final
class _StreamStates(torch.autograd.Function):
    """States drawn from real numbers; backward, the derivative of their means, and higher ones to carriers of the stream."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, states: Tensor, noise: Noise, orders: tuple[int, ...], *carriers: Tensor) -> Tensor:
        return own(states)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, states, ctx.noise, ctx.orders, *_ = inputs
        give_away(ctx, states)
        ctx.save_for_backward(a)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a,) = ctx.saved_tensors
        slopes = ctx.noise.derivatives(a, max(ctx.orders, default=1))
        twice = 2 * grad
        first, *higher = (slopes[order - 1] * twice for order in (1, *ctx.orders))
        return first, None, None, None, *higher
