"""What the estimators share that propagate means and variances of units instead of samples."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

from flipgrad.affine import Affine
from flipgrad.contract import LayerCall, LocalEstimator, Network, Step
from flipgrad.errors import InputError
from flipgrad.estimators._draws import own_draws
from flipgrad.estimators._head import is_linear
from flipgrad.noise import Normal, Uniform, sign
from flipgrad.objectives import Objective, evaluate
from flipgrad.sampling import Draw
from flipgrad.steps import Apply, Branch


class MomentEstimator(LocalEstimator):
    """A local estimator whose states are means m of independent ±1 units; their variances are 1 - m^2.

    The outputs of a linear head are drawn from their normal approximation; where ``needs_head``, the states before any head are
    drawn from their means and differentiated straight through.
    """

    unbiased = False
    relaxed_objective = True
    second_derivatives = True

    @final
    def check_latent(self, depth: int, *, sampled: bool) -> None:
        raise InputError(
            f"{type(self).__name__} propagates means, and what a latent-variable model's costs are of means is not known to be "
            "right; use fg.PSA(), fg.ST() or an unbiased estimator such as fg.DisARM()"
        )

    @abstractmethod
    def means(self, call: LayerCall, mu: Tensor, v: Tensor) -> Tensor:
        """The means of the layer's units, whose pre-activations have the means ``mu`` and the variances ``v``."""

    @final
    def states(self, call: LayerCall) -> Tensor:
        mu = call.affine(call.x)
        if not call.binary:
            return call.noise.mean_sign(mu)
        return self.means(call, mu, call.affine.variance(1 - call.x.square()))

    @final
    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        net.check_no_stream(type(self).__name__, "its moments are those of independent units; use fg.PSA() or fg.ST()")
        self._check_padding(net.steps, binary=False)
        if self.needs_head:
            # A unit is +1 with probability (1 + m) / 2, like the sign of m less uniform noise.
            sampled = sign(states.detach() - own_draws(self, last.draw, Uniform(), states, 1)[0])
            return evaluate(objective, net.outputs(sampled + (states - states.detach())))
        if not is_linear(net.head):
            raise InputError(
                f"{type(self).__name__} knows only the means and variances of the last units and samples the outputs of a "
                f"linear head from them, the head is {type(net.head).__name__}: use torch.nn.Linear without hooks, or "
                "fg.ADF(sample='states'), or another estimator"
            )
        affine = Affine(net.head.weight, net.head.bias, views=net.tail)
        mu, v = affine(states), affine.variance(1 - states.square())
        return evaluate(objective, self.sample_normal(mu, v, last.draw))

    @final
    def sample_normal(self, mu: Tensor, v: Tensor, draw: Draw) -> Tensor:
        """A draw of N(mu, v), differentiable in both."""
        epsilon = own_draws(self, draw, Normal(), mu, 1)[0]
        # The root of 0 has no derivative; a variance of 0 (saturated units) is taken as constant, and as good as 0.
        deviation = v.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
        return torch.addcmul(mu, deviation, epsilon)

    def _check_padding(self, steps: Iterable[Step], binary: bool) -> None:
        """Refuse zeros among the units, which would count as units of mean 0; ``binary``: whether units come in."""
        for step in steps:
            if isinstance(step, Branch):
                for chain in step.chains:
                    self._check_padding(chain, binary)
            if not isinstance(step, Apply):
                binary = True
            elif binary and isinstance(step.module, nn.ConstantPad2d) and step.module.value == 0:
                raise InputError(
                    f"{type(self).__name__}: {step.module} after a binary layer makes zeros that look like units of mean 0 and "
                    "variance 1; use the padding of BinaryConv2d, or pad with -1 or 1"
                )
