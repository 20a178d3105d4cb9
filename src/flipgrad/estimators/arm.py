"""Augment-REINFORCE-merge.

Yin, Zhou. ARM: Augment-REINFORCE-Merge Gradient for Stochastic Binary Networks. ICLR 2019, algorithm 2.
"""

from typing import final

from flipgrad.estimators._paths import PathEstimator, Products, Variables, logit_slope
from flipgrad.noise import sign


@final
class ARM(PathEstimator):
    r"""Two antithetic continuations of the path at every layer.

    With u uniform and :math:`\varphi` the logits of the probabilities :math:`p = F(a)` of a layer,

    .. math:: \partial/\partial\varphi = \big(f(x_1) - f(x_2)\big)(u - \tfrac12), \quad
        x_1 = 2 \cdot 1[u > 1 - p] - 1, \quad x_2 = 2 \cdot 1[u < p] - 1,

    where f(x) continues with newly sampled later layers. For a noise other than logistic the gradient in a follows by the
    chain rule. Unbiased. One path and two tails for every layer.

    Binary weights that are drawn are one more set of variables, with the latent weights for a and two tails more; the
    antithetic weights are those of the whole batch.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ARM()).mean().backward()
    """

    unbiased = True
    tails = 2
    citation = "Yin, Zhou 2019"

    def products(self, variables: Variables) -> Products:
        a, z, noise = variables.a, variables.z, variables.noise
        # u < p is z < F^{-1}(p) = a: the path's own state. u > 1 - p is z > -a by symmetry.
        difference = variables.tail(sign(z + a)) - variables.tail(sign(a - z))
        yield difference, (noise.cdf(z) - 0.5) * logit_slope(noise, a)
