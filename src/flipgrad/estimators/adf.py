"""Assumed density filtering: the moments of all units, propagated analytically.

Shekhovtsov, Flach. Feed-forward Propagation in Probabilistic Neural Networks with Categorical and Max Layers. ICLR 2019.
Gast, Roth. Lightweight Probabilistic Deep Networks. CVPR 2018. For real weights it is PBNet of Peters, Welling.
Probabilistic Binary Neural Networks. 2018.
"""

from typing import Literal, final, get_args

from torch import Tensor

from flipgrad.contract import LayerCall
from flipgrad.errors import InputError
from flipgrad.estimators._moments import MomentEstimator

Sampled = Literal["outputs", "states"]


@final
class ADF(MomentEstimator):
    r"""Propagate every unit's mean and variance, as if units were independent and pre-activations normal.

    With :math:`V_Z` the noise's variance, and the variances :math:`1 - m^2` of ±1 units (0 of real inputs),

    .. math::
        \mu = A m + b, \quad v = A^2 (1 - m^2), \quad m' = 2F\big(\mu / \sqrt{1 + v / V_Z}\big) - 1,

    which for normal pre-activations is exact with normal noise, and with any other takes a - Z for a wider Z.

    What comes to the loss is drawn, in one of two ways:

    - "outputs": the outputs of a linear head from their normal approximation with mean :math:`W m + b` and variance
      :math:`W^2 (1 - m^2)`, reparametrised. A head that is not linear is refused.
    - "states": the states before the head, ±1 with the means m, as in the paper's appendix, "as a general solution suitable
      with different head functions". It does not say how these are differentiated; here they are as by
      :class:`flipgrad.ST`: the head's gradient in the sampled states is taken for that in their means.

    In a graph written by hand (:func:`flipgrad.use`) the head is handed the means, and nothing is drawn; "states" is refused.

    Max-pooling of independent units is a unit whose mean is known, see :mod:`flipgrad.max_pooling`.

    Biased: with "outputs" the gradient is the true one of another objective, the relaxed loss; with "states" it is an
    approximation to that of the loss expected with independent last units. One pass with two affine maps per layer.

    A zero among the means counts as a unit of variance 1. Zero padding inside ``BinaryConv2d`` is known to be no unit, a
    ``ZeroPad2d`` after a binary layer is refused. In a graph written by hand, do not pad with zeros between layers, and under
    ``torch.no_grad()`` tell layers with ``binary=True`` that they are handed means: no graph does.

    Args:
        sample: what is drawn, "outputs" or "states".

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ADF()).mean().backward()
    """

    citation = "Shekhovtsov, Flach 2019; Gast, Roth 2018"

    def __init__(self, *, sample: Sampled = "outputs") -> None:
        if sample not in get_args(Sampled):
            raise InputError(f"ADF(sample={sample!r}): choose 'outputs' or, as in the paper's appendix, 'states'")
        self.sample = sample
        self.needs_head = sample == "states"
        # The straight-through gradient is no function's.
        self.second_derivatives = not self.needs_head

    def means(self, call: LayerCall, mu: Tensor, v: Tensor) -> Tensor:
        return call.noise.mean_sign(mu / (1 + v / call.noise.variance).sqrt())
