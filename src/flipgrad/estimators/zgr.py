"""The zero-temperature Gumbel-Rao estimator, ReinMax at temperature 1, and what lies between it and straight-through.

Shekhovtsov. Cold Analysis of Rao-Blackwellized Straight-Through Gumbel-Softmax Gradient Estimator. ICML 2023.
Liu, Dong, Liu, Yu, Gao. Bridging Discrete and Backpropagation: Straight-Through and Beyond. NeurIPS 2023.
"""

import math
from typing import final

import torch
from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator, WeightCall
from flipgrad.errors import InputError
from flipgrad.noise import Noise


@final
class ZGR(LocalEstimator):
    r"""Straight-through with the sample's gradient weighted by its rarity.

    .. math::
        \hat g_a = w(x)\, 2F'(a)\, g_x, \quad w(x) = (1 - \lambda) + \frac{\lambda}{2\,p(x)}, \quad p(x) = F(x a)

    With :math:`\lambda = 0` it is :class:`ST`, with :math:`\lambda = 1` ZGR. The mean of w is 1 for every
    :math:`\lambda`, that of w x is :math:`(1 - \lambda) m`, and that of its square :math:`1 + \lambda^2 m^2 / (1 - m^2)`:
    ZGR averages the slopes at both states evenly, which is exact for functions quadratic in the unit, at the price of a
    variance that grows as units saturate.

    Biased in general: slopes stand for differences, and deeper layers are not quadratic in a unit. With
    :math:`\lambda = 1` unbiased in one hidden layer with a loss quadratic in every unit. One pass.

    Args:
        lam: the weight :math:`\lambda` in [0, 1]; 1 if neither it nor ``tau`` is given.
        tau: instead of ``lam``, a weight for every unit that trades squared bias, counted :math:`2\tau` times, against
            variance: :math:`\lambda = 2\tau (1 - m^2) / (1 + 2\tau (1 - m^2))` minimises
            :math:`\lambda^2 m^2 / (1 - m^2) + 2\tau (1 - \lambda)^2 m^2`. Saturated units are left to ST.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ZGR()).mean().backward()
    """

    unbiased = False
    unbiased_in = "one hidden layer and a loss quadratic in every unit"
    citation = "Shekhovtsov 2023; Liu, Dong, Liu, Yu, Gao 2023"

    def __init__(self, lam: float | None = None, *, tau: float | None = None) -> None:
        if lam is not None and tau is not None:
            raise InputError(f"ZGR(lam={lam}, tau={tau}): give only one of them")
        if lam is not None and not 0 <= lam <= 1:
            raise InputError(f"ZGR(lam={lam}): lam must be in [0, 1]; 0 is ST, 1 is ZGR")
        if tau is not None and not (math.isfinite(tau) and tau > 0):
            raise InputError(f"ZGR(tau={tau}): tau must be positive and finite, e.g. 1.0")
        self.lam = 1.0 if lam is None else lam
        self.tau = tau

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        return self._differentiable(call.sample(a), a, call.noise)

    def weights(self, call: WeightCall) -> Tensor:
        return self._differentiable(call.sample(), call.latent, call.drawn_from("ZGR"))

    def _differentiable(self, x: Tensor, a: Tensor, noise: Noise) -> Tensor:
        """The sampled states ``x`` of units with these pre-activations, or weights, with the estimator's gradient."""
        mean = noise.mean_sign(a)
        m = mean.detach()
        lam: Tensor | float = self.lam
        if self.tau is not None:
            favour = 2 * self.tau * (1 - m.square())
            lam = favour / (1 + favour)
        # A state of probability 0 is drawn only by rounding; F' is 0 there too and must not meet an infinite weight.
        p = noise.cdf(x * a.detach()).clamp(min=torch.finfo(a.dtype).tiny)
        return x + ((1 - lam) + lam / (2 * p)) * (mean - m)
