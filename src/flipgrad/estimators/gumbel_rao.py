"""The Gumbel-Rao estimator: Rao-Blackwellised straight-through Gumbel-softmax.

Paulus, Maddison, Krause. Rao-Blackwellizing the Straight-Through Gumbel-Softmax Gradient Estimator. ICLR 2021.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators._base import LinearHeadEstimator
from flipgrad.estimators._draws import check_temperature, own_draws
from flipgrad.layers import LayerCall
from flipgrad.noise import Noise


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


def conditional(noise: Noise, a: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """Noise given that sign(a - Z) = x, made of unconditional noise ``z`` [K, *a.shape].

    By symmetry x Z is noise below x a, and its cdf there is that of Z divided by F(x a): with u = F(z) uniform, it is
    the inverse cdf of u F(x a). Above one half that is taken from the other tail, so that neither is rounded to 0 or 1.
    """
    tiny = torch.finfo(a.dtype).tiny
    u, p = noise.cdf(z), noise.cdf(x * a)
    lower = u * p
    upper = noise.cdf(-z) + u * noise.cdf(-x * a)
    half = 0.5
    quantile = torch.where(lower < half, noise.icdf(lower.clamp(tiny, half)), -noise.icdf(upper.clamp(tiny, half)))
    # Rounding must not leave the half-line.
    return x * torch.minimum(quantile, x * a)
