"""Local reparametrisation: sampled normal pre-activations, analytic units.

Kingma, Salimans, Welling. Variational Dropout and the Local Reparameterization Trick. NeurIPS 2015; for binary units as in
Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020,
appendix, "Methods".
"""

from typing import final

from torch import Tensor

from flipgrad.contract import LayerCall
from flipgrad.estimators._moments import MomentEstimator


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
