"""The concrete relaxation (Gumbel-softmax) of binary units.

Maddison, Mnih, Teh. The Concrete Distribution: A Continuous Relaxation of Discrete Random Variables. ICLR 2017.
Jang, Gu, Poole. Categorical Reparameterization with Gumbel-Softmax. ICLR 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator, WeightCall
from flipgrad.estimators._draws import positive
from flipgrad.sampling import for_weights


@final
class Concrete(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by a smooth function of the same noise and differentiate that network.

    .. math:: y = 2\,\sigma((a - Z) / t) - 1 = \tanh((a - Z) / 2t)

    With logistic noise :math:`(y + 1) / 2` has the binary concrete distribution; with any other noise it is the same
    relaxation of the sign, which it approaches as t goes to 0.

    Max-pooling is relaxed to the function that is linear in every unit, see :mod:`flipgrad.max_pooling`.

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

    def weights(self, call: WeightCall) -> Tensor:
        z = for_weights(call.draw)(call.drawn_from("Concrete"), call.latent)
        return torch.tanh((call.latent - z) / (2 * self.t))
