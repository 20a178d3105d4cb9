"""The Gumbel-Rao estimator: Rao-Blackwellised straight-through Gumbel-softmax.

Paulus, Maddison, Krause. Rao-Blackwellizing the Straight-Through Gumbel-Softmax Gradient Estimator. ICLR 2021.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators._base import LinearHeadEstimator
from flipgrad.estimators._draws import check_temperature, conditional, own_draws
from flipgrad.layers import LayerCall


@final
class GumbelRao(LinearHeadEstimator):
    r"""Sample forward; backward, the derivative of the concrete relaxation averaged over noise that leads to this sample.

    .. math::
        \hat g_a = g_x \cdot \frac1K \sum_{k=1}^K \frac{\partial}{\partial a} \tanh\Big(\frac{a - Z_k}{2t}\Big), \quad
        Z_k \sim p(Z \mid \mathrm{sign}(a - Z) = x),

    where :math:`Z_k` is not differentiated. With K = 1 it has the distribution of straight-through Gumbel-softmax; its mean
    is the same for every K, its variance falls with K. With t going to 0 and K to infinity it is :class:`ZGR`.

    Biased: slopes of the head and of the relaxation stand for differences. One pass; the K draws cost no evaluation of the
    network.

    Args:
        samples: the number K of conditional draws.
        t: the temperature of the relaxation, positive. It does not depend on the noise's scale.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.GumbelRao()).mean().backward()
    """

    unbiased = False
    cost = "1, with K + 1 noises per unit"
    citation = "Paulus, Maddison, Krause 2021"

    def __init__(self, samples: int = 10, t: float = 1.0) -> None:
        if not isinstance(samples, int) or samples < 1:
            raise InputError(f"GumbelRao(samples={samples}): the number of conditional draws must be a whole number above 0")
        self.samples = samples
        self.t = check_temperature(self, t)

    def passes(self, depth: int) -> int:
        return 1

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        x = call.sample(a)
        # [K, *a.shape]
        z = conditional(call.noise, a.detach(), x, own_draws(self, call.draw, call.noise, a, self.samples))
        relaxed = torch.tanh((a - z) / (2 * self.t)).mean(0)
        return x + (relaxed - relaxed.detach())
