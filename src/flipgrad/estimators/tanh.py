"""The deterministic relaxation of a stochastic binary network by its units' means.

A baseline in Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020. The idea is the mean-field network of Peterson, Anderson. A Mean Field Theory Learning
Algorithm for Neural Networks. Complex Systems 1, 1987.
"""

from typing import final

from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator, WeightCall


@final
class Tanh(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by its mean :math:`m(a) = 2F(a) - 1` and differentiate that network.

    For logistic noise :math:`m(a) = \tanh(a / 2)`, hence the name; other noises have their own mean. Nothing is drawn.
    Max-pooling of independent units is replaced by its mean, see :mod:`flipgrad.max_pooling`.

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

    def weights(self, call: WeightCall) -> Tensor:
        return call.drawn_from("Tanh").mean_sign(call.latent)
