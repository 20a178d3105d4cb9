"""Assumed density filtering: the moments of all units, propagated analytically.

Shekhovtsov, Flach. Feed-forward Propagation in Probabilistic Neural Networks with Categorical and Max Layers. ICLR 2019.
Gast, Roth. Lightweight Probabilistic Deep Networks. CVPR 2018. For real weights it is PBNet of Peters, Welling.
Probabilistic Binary Neural Networks. 2018.
"""

from typing import final

from torch import Tensor

from flipgrad.contract import LayerCall
from flipgrad.estimators._moments import MomentEstimator


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

    Max-pooling of independent units is a unit whose mean is known, see :mod:`flipgrad.max_pooling`.

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
