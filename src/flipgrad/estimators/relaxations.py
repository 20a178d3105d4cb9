"""Relaxations of a stochastic binary network: smooth functions in place of the signs.

Tanh, the network of means: a baseline in Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic
Binary Networks. NeurIPS 2020. The idea is the mean-field network of Peterson, Anderson. A Mean Field Theory Learning
Algorithm for Neural Networks. Complex Systems 1, 1987.
Concrete, or Gumbel-softmax: Maddison, Mnih, Teh. The Concrete Distribution: A Continuous Relaxation of Discrete Random
Variables. ICLR 2017. Jang, Gu, Poole. Categorical Reparameterization with Gumbel-Softmax. ICLR 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator
from flipgrad.estimators._draws import positive


@final
class Tanh(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by its mean :math:`m(a) = 2F(a) - 1` and differentiate that network.

    For logistic noise :math:`m(a) = \tanh(a / 2)`, hence the name; other noises have their own mean. Nothing is drawn.

    Biased: the gradient is the true one of another objective, the loss of the network of means. It is that of the expected
    loss where the means and the objective are linear. One pass.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.Tanh()).mean().backward()
    """

    unbiased = False
    unbiased_in = "F and objective linear"
    relaxed_objective = True
    second_derivatives = True
    citation = "Peterson, Anderson 1987"

    def states(self, call: LayerCall) -> Tensor:
        return call.noise.mean_sign(call.affine(call.x))


@final
class Concrete(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by a smooth function of the same noise and differentiate that network.

    .. math:: y = 2\,\sigma((a - Z) / t) - 1 = \tanh((a - Z) / 2t)

    With logistic noise :math:`(y + 1) / 2` has the binary concrete distribution; with any other noise it is the same
    relaxation of the sign, which it approaches as t goes to 0.

    Biased: the gradient is the true, reparametrised one of another objective, the expected loss of the relaxed network. The
    bias shrinks with t, and the variance grows without bound. One pass.

    Args:
        t: the temperature, positive. It does not depend on the noise's scale.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.Concrete(0.5)).mean().backward()
    """

    unbiased = False
    relaxed_objective = True
    second_derivatives = True
    citation = "Maddison, Mnih, Teh 2017; Jang, Gu, Poole 2017"

    def __init__(self, t: float = 1.0) -> None:
        self.t = positive(self, "t", t, "temperature")

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        return torch.tanh((a - call.draw(call.noise, a)) / (2 * self.t))
