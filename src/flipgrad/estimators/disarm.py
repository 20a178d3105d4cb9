"""DisARM, also known as U2G: ARM with its uniform variable integrated out.

Dong, Mnih, Tucker. DisARM: An Antithetic Gradient Estimator for Binary Latent Variables. NeurIPS 2020.
Yin, Ho, Yan, Qian, Zhou. Probabilistic Best Subset Selection via Gradient-Based Optimization. arXiv:2006.06448, 2020.
"""

from typing import final

from flipgrad.estimators._paths import PathEstimator, Products, Variables, logit_slope
from flipgrad.noise import sign


@final
class DisARM(PathEstimator):
    r"""Two antithetic continuations of the path at every layer, weighted by what is known from their states alone.

    With u uniform, :math:`\varphi` the logits of the probabilities :math:`p = F(a)` of a layer, and the antithetic states
    :math:`x_1 = 2 \cdot 1[u > 1 - p] - 1` and :math:`x_2 = 2 \cdot 1[u < p] - 1`,

    .. math:: \partial/\partial\varphi_i = \tfrac12 \big(f(x_1) - f(x_2)\big)\, \tfrac12 (x_1 - x_2)_i\, \max(p_i, 1 - p_i),

    the conditional mean of :class:`~flipgrad.ARM` given the two states: units that agree in both get no gradient. Here f
    continues with independently sampled later layers, for :math:`x_2` those of the path itself. For a noise other than
    logistic the gradient in a follows by the chain rule. Unbiased, with a variance never above ARM's. One path, and one more
    tail for every layer.

    Binary weights that are drawn are one more set of variables, with the latent weights for a and one tail more; the antithetic
    weights are those of the whole batch.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.DisARM()).mean().backward()
    """

    unbiased = True
    tails = 1
    citation = "Dong, Mnih, Tucker 2020"

    def products(self, variables: Variables) -> Products:
        a, noise = variables.a, variables.noise
        # u < p is z < a: the path's own state. u > 1 - p is z > -a by symmetry.
        antithetic = sign(variables.z + a)
        difference = (variables.tail(antithetic) - variables.path.losses.detach()) / 2
        yield difference, (antithetic - variables.states) / 2 * noise.cdf(a.abs()) * logit_slope(noise, a)
