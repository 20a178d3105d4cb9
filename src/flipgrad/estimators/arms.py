"""Antithetic REINFORCE with many samples.

Dimitriev, Zhou. ARMS: Antithetic-REINFORCE-Multi-Sample Gradient for Binary Variables. ICML 2021; the Dirichlet copula.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators._paths import PathEstimator, Products, Variables


@final
class ARMS(PathEstimator):
    r"""REINFORCE with a leave-one-out baseline over n antithetic states of every layer, corrected for their correlation.

    With states :math:`x_1, \dots, x_n` of a layer, each distributed as it should be but negatively correlated, and
    :math:`\rho` the correlation of a unit's states in any two of them,

    .. math:: \partial/\partial a = \frac{1}{1 - \rho} \cdot \frac{1}{n-1} \sum_{i=1}^n \big(f(x_i) - \bar f\big)
        \frac{\partial}{\partial a} \log p(x_i \mid a),

    where f(x) continues with newly sampled later layers. The states come from a Dirichlet copula: d is uniform on the simplex
    of n numbers, so :math:`u_i = (1 - d_i)^{n-1}` is uniform in (0, 1), and in :math:`x_i` a unit takes the rarer of its two
    states, of probability q, where :math:`u_i < q`. From :math:`P(d_i > s, d_j > s) = (1 - 2s)_+^{n-1}`, two of them take it
    together with probability :math:`(2 q^{1/(n-1)} - 1)_+^{n-1}`, and so

    .. math:: \rho = \frac{(2 - q^{-1/(n-1)})_+^{n-1} - q}{1 - q} \le 0.

    Unbiased: E of the sum is Cov(f(x_1), score_1) - Cov(f(x_1), score_2), and the second is :math:`\rho` times the first, as
    the mean of f given one unit is linear in that unit. With n = 2 it is DisARM. One path and n tails for every layer.

    Binary weights that are drawn are one more set of variables, with the latent weights for a and n tails more; the antithetic
    weights are those of the whole batch.

    Args:
        samples: n, at least 2.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ARMS(3)).mean().backward()
    """

    unbiased = True
    citation = "Dimitriev, Zhou 2021"

    def __init__(self, samples: int = 4) -> None:
        if samples < 2:
            raise InputError(f"ARMS(samples={samples}): at least two antithetic samples are needed, e.g. 4")
        self.samples = self.tails = samples

    def products(self, variables: Variables) -> Products:
        a, noise = variables.a, variables.noise
        # The rarer state is the sign opposite to a: its probability is F(-|a|).
        q = noise.cdf(-a.abs())
        exponential = torch.stack([-variables.uniform(a).log() for _ in range(self.samples)])
        u = (1 - exponential / exponential.sum(0)) ** (self.samples - 1)
        common = torch.where(a < 0, -1.0, 1.0).to(a.dtype)
        states = torch.where(u < q, -common, common)
        f = torch.stack([variables.tail(x) for x in states])
        advantage = (f - f.mean(0)) / (self.samples - 1)
        correction = 1 / (1 - correlation(q, self.samples))
        for numbers, x in zip(advantage, states, strict=True):
            yield numbers, noise.score(x, a) * correction


def correlation(q: Tensor, samples: int) -> Tensor:
    """The correlation of two of the antithetic states of a unit whose rarer state has probability ``q`` <= 1/2."""
    # Divided by q, so that nothing is lost or undefined as q vanishes.
    together = (2 - q ** (-1 / (samples - 1))).clamp(min=0) ** (samples - 1)
    return (together - q) / (1 - q)
