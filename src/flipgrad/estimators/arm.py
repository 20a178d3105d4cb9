"""Antithetic states: augment-REINFORCE-merge, and what followed it.

ARM: Yin, Zhou. ARM: Augment-REINFORCE-Merge Gradient for Stochastic Binary Networks. ICLR 2019, algorithm 2.
DisARM, also known as U2G: Dong, Mnih, Tucker. DisARM: An Antithetic Gradient Estimator for Binary Latent Variables. NeurIPS
2020; and Yin, Ho, Yan, Qian, Zhou. Probabilistic Best Subset Selection via Gradient-Based Optimization. arXiv:2006.06448, 2020.
ARMS: Dimitriev, Zhou. ARMS: Antithetic-REINFORCE-Multi-Sample Gradient for Binary Variables. ICML 2021; the Dirichlet copula.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, PathEstimator, logit_slope, per_example
from flipgrad.noise import sign


@final
class ARM(PathEstimator):
    r"""Two antithetic continuations of the path at every layer.

    With u uniform and :math:`\varphi` the logits of the probabilities :math:`p = F(a)` of a layer,

    .. math:: \partial/\partial\varphi = \big(f(x_1) - f(x_2)\big)(u - \tfrac12), \quad
        x_1 = 2 \cdot 1[u > 1 - p] - 1, \quad x_2 = 2 \cdot 1[u < p] - 1,

    where f(x) continues with newly sampled later layers. For a noise other than logistic the gradient in a follows by the
    chain rule. Unbiased. One path and two tails for every layer.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ARM()).mean().backward()
    """

    unbiased = True
    tails = 2
    citation = "Yin, Zhou 2019"

    def gradient(self, path: Path, k: int) -> Tensor:
        a, z, noise = path.a[k].detach(), path.z[k], path.noises[k]
        # u < p is z < F^{-1}(p) = a: the path's own state. u > 1 - p is z > -a by symmetry.
        difference = path.tail(k, sign(z + a)) - path.tail(k, sign(a - z))
        return per_example(difference, a) * (noise.cdf(z) - 0.5) * logit_slope(noise, a)


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

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.DisARM()).mean().backward()
    """

    unbiased = True
    tails = 1
    citation = "Dong, Mnih, Tucker 2020"

    def gradient(self, path: Path, k: int) -> Tensor:
        a, noise = path.a[k].detach(), path.noises[k]
        # As in ARM: u < p is the path's own state.
        antithetic = sign(path.z[k] + a)
        difference = per_example(path.tail(k, antithetic) - path.losses.detach(), a) / 2
        weight = (antithetic - path.states[k]) / 2 * noise.cdf(a.abs())
        return difference * weight * logit_slope(noise, a)


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

    def gradient(self, path: Path, k: int) -> Tensor:
        a, noise = path.a[k].detach(), path.noises[k]
        # The rarer state is the sign opposite to a: its probability is F(-|a|).
        q = noise.cdf(-a.abs())
        exponential = torch.stack([-path.uniform(a).log() for _ in range(self.samples)])
        u = (1 - exponential / exponential.sum(0)) ** (self.samples - 1)
        common = torch.where(a < 0, -1.0, 1.0).to(a.dtype)
        states = torch.where(u < q, -common, common)
        f = torch.stack([path.tail(k, x) for x in states])
        advantage = (f - f.mean(0)) / (self.samples - 1)
        total = torch.stack([per_example(w, a) * noise.score(x, a) for w, x in zip(advantage, states, strict=True)]).sum(0)
        return total / (1 - correlation(q, self.samples))


def correlation(q: Tensor, samples: int) -> Tensor:
    """The correlation of two of the antithetic states of a unit whose rarer state has probability ``q`` <= 1/2."""
    # Divided by q, so that nothing is lost or undefined as q vanishes.
    together = (2 - q ** (-1 / (samples - 1))).clamp(min=0) ** (samples - 1)
    return (together - q) / (1 - q)
