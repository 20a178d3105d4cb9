"""The straight-through estimator with the derivative of the clamped identity.

Hubara, Courbariaux, Soudry, El-Yaniv, Bengio. Binarized Neural Networks. NeurIPS 2016.
"""

from typing import final

from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator, WeightCall


@final
class HardST(LocalEstimator):
    r"""Sample forward; differentiate :math:`\mathrm{clamp}(a, -1, 1)` backward, whatever the noise is.

    .. math:: \hat g_a = g_x \cdot [\,|a| \le 1\,]

    The clamp does not know the noise or its scale, as in the paper's comparison. Biased, much more than :class:`ST`, whose
    derivative :math:`2F'(a)` is that of the sampling model: the two agree for ``Uniform(1.0)`` noise only. One pass.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.HardST()).mean().backward()
    """

    unbiased = False
    unbiased_in = "uniform noise of scale 1 that never saturates, head linear over a flip"
    citation = "Hubara, Courbariaux, Soudry, El-Yaniv, Bengio 2016"

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        clamped = a.clamp(-1, 1)
        return call.sample(a) + (clamped - clamped.detach())

    def weights(self, call: WeightCall) -> Tensor:
        limit = 1.0 if call.clip is None else min(1.0, call.clip)
        clamped = call.latent.clamp(-limit, limit)
        return call.sample() + (clamped - clamped.detach())
