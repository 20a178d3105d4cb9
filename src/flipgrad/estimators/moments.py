"""Estimators that propagate means and variances of units instead of samples.

ADF, assumed density filtering: Shekhovtsov, Flach. Feed-forward Propagation in Probabilistic Neural Networks with Categorical
and Max Layers. ICLR 2019. Gast, Roth. Lightweight Probabilistic Deep Networks. CVPR 2018. For real weights it is PBNet of
Peters, Welling. Probabilistic Binary Neural Networks. 2018.
Local reparametrisation: Kingma, Salimans, Welling. Variational Dropout and the Local Reparameterization Trick. NeurIPS 2015;
for binary units as in Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, appendix, "Methods".
"""

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
from flipgrad.noise import Normal
from flipgrad.objectives import Objective, evaluate
from flipgrad.sampling import Draw
from flipgrad.steps import Apply, Branch


class MomentEstimator(LocalEstimator):
    """A local estimator whose states are means m of independent ±1 units; their variances are 1 - m^2."""

    unbiased = False
    relaxed_objective = True
    second_derivatives = True

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
        self._check_padding(net.steps, binary=False)
        if not is_linear(net.head):
            raise InputError(
                f"{type(self).__name__} knows only the means and variances of the last units and samples the outputs of a "
                f"linear head from them, the head is {type(net.head).__name__}: use torch.nn.Linear without hooks, or another "
                "estimator"
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


@final
class ADF(MomentEstimator):
    r"""Propagate every unit's mean and variance, as if units were independent and pre-activations normal.

    With :math:`V_Z` the noise's variance, and the variances :math:`1 - m^2` of ±1 units (0 of real inputs),

    .. math::
        \mu = A m + b, \quad v = A^2 (1 - m^2), \quad m' = 2F\big(\mu / \sqrt{1 + v / V_Z}\big) - 1,

    which for normal pre-activations is exact with normal noise, and with any other takes a - Z for a wider Z.

    The outputs of a linear head are drawn from their normal approximation with mean :math:`W m + b` and variance
    :math:`W^2 (1 - m^2)`, reparametrised. The paper's appendix samples the last layer's states instead, which suits any head
    but needs an estimator of its own for the gradient there; here a head that is not linear is refused. In a graph written
    by hand (:func:`flipgrad.use`) the head is handed the means, and nothing is drawn.

    Biased: the gradient is the true one of another objective, the relaxed loss. One pass with two affine maps per layer.

    A zero among the means counts as a unit of variance 1. Zero padding inside ``BinaryConv2d`` is known to be no unit, a
    ``ZeroPad2d`` after a binary layer is refused. In a graph written by hand, do not pad with zeros between layers, and under
    ``torch.no_grad()`` tell layers with ``binary=True`` that they are handed means: no graph does.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ADF()).mean().backward()
    """

    citation = "Shekhovtsov, Flach 2019; Gast, Roth 2018"

    def means(self, call: LayerCall, mu: Tensor, v: Tensor) -> Tensor:
        return call.noise.mean_sign(mu / (1 + v / call.noise.variance).sqrt())


@final
class LocalReparam(MomentEstimator):
    r"""Sample pre-activations from their normal approximation; units are their means given these.

    With the variances :math:`1 - m^2` of ±1 units (0 of real inputs),

    .. math::
        a = A m + b + \sqrt{A^2 (1 - m^2)}\; \epsilon, \quad \epsilon \sim N(0, 1), \quad m' = 2F(a) - 1.

    The outputs of a linear head are sampled in the same way, any other head is refused; see :class:`ADF` for this, for zero
    padding and for graphs written by hand, all of which is the same here. The first layer draws nothing.

    Biased: the gradient is the true, reparametrised one of another objective, the relaxed loss. One pass with two affine
    maps per layer.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.LocalReparam()).mean().backward()
    """

    citation = "Kingma, Salimans, Welling 2015; Shekhovtsov, Yanush, Flach 2020"

    def means(self, call: LayerCall, mu: Tensor, v: Tensor) -> Tensor:
        return call.noise.mean_sign(self.sample_normal(mu, v, call.draw))
