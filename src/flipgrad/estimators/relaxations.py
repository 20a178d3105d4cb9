"""Relaxations of a stochastic binary network, smooth functions in place of the signs, and straight-through with their slopes.

Tanh, the network of means: a baseline in Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic
Binary Networks. NeurIPS 2020. The idea is the mean-field network of Peterson, Anderson. A Mean Field Theory Learning
Algorithm for Neural Networks. Complex Systems 1, 1987.
Concrete, or Gumbel-softmax: Maddison, Mnih, Teh. The Concrete Distribution: A Continuous Relaxation of Discrete Random
Variables. ICLR 2017. Jang, Gu, Poole. Categorical Reparameterization with Gumbel-Softmax. ICLR 2017.
Gumbel-Rao: Paulus, Maddison, Krause. Rao-Blackwellizing the Straight-Through Gumbel-Softmax Gradient Estimator. ICLR 2021.
ZGR, the limit, which is ReinMax at temperature 1, and what lies between it and straight-through: Shekhovtsov. Cold Analysis of
Rao-Blackwellized Straight-Through Gumbel-Softmax Gradient Estimator. ICML 2023. Liu, Dong, Liu, Yu, Gao. Bridging Discrete and
Backpropagation: Straight-Through and Beyond. NeurIPS 2023.
"""

import math
from typing import final

import torch
from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator
from flipgrad.errors import InputError
from flipgrad.estimators._draws import conditional, own_draws, positive
from flipgrad.native import sampling as compiled
from flipgrad.noise import Logistic
from flipgrad.sampling import compiled_draws


@final
class Tanh(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by its mean :math:`m(a) = 2F(a) - 1` and differentiate that network.

    For logistic noise :math:`m(a) = \tanh(a / 2)`, hence the name; other noises have their own mean. Nothing is drawn.

    Biased: the gradient is the true one of another objective, the loss of the network of means. It is that of the expected
    loss where the means and the objective are linear. One pass.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.Tanh()).mean().backward()
    """

    unbiased = False
    unbiased_in = "F and objective linear"
    relaxed_objective = True
    second_derivatives = True
    citation = "Peterson, Anderson 1987"

    def states(self, call: LayerCall) -> Tensor:
        return call.noise.mean_sign(call.affine(call.x))


@final
class Concrete(LocalEstimator):
    r"""Replace every :math:`\mathrm{sign}(a - Z)` by a smooth function of the same noise and differentiate that network.

    .. math:: y = 2\,\sigma((a - Z) / t) - 1 = \tanh((a - Z) / 2t)

    With logistic noise :math:`(y + 1) / 2` has the binary concrete distribution; with any other noise it is the same
    relaxation of the sign, which it approaches as t goes to 0.

    Biased: the gradient is the true, reparametrised one of another objective, the expected loss of the relaxed network. The
    bias shrinks with t, and the variance grows without bound. One pass.

    Args:
        t: the temperature, positive. It does not depend on the noise's scale.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.Concrete(0.5)).mean().backward()
    """

    unbiased = False
    relaxed_objective = True
    second_derivatives = True
    citation = "Maddison, Mnih, Teh 2017; Jang, Gu, Poole 2017"

    def __init__(self, t: float = 1.0) -> None:
        self.t = positive(self, "t", t, "temperature")

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        return torch.tanh((a - call.draw(call.noise, a)) / (2 * self.t))


@final
class GumbelRao(LocalEstimator):
    r"""Sample forward; backward, the derivative of the concrete relaxation averaged over noise that leads to this sample.

    .. math::
        \hat g_a = g_x \cdot \frac1K \sum_{k=1}^K \frac{\partial}{\partial a} \tanh\Big(\frac{a - Z_k}{2t}\Big), \quad
        Z_k \sim p(Z \mid \mathrm{sign}(a - Z) = x),

    where :math:`Z_k` is not differentiated. With K = 1 it has the distribution of straight-through Gumbel-softmax; its mean
    is the same for every K, its variance falls with K. With t going to 0 and K to infinity it is :class:`ZGR`.

    Biased: slopes of the head and of the relaxation stand for differences. One pass; the K draws cost no evaluation of the
    network, and with logistic noise in float32 on the processor compiled code makes them, without memory for them.

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
        self.t = positive(self, "t", t, "temperature")

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        x = call.sample(a)
        return torch.addcmul(x, self._slope(call, a.detach(), x), a - a.detach())

    def _slope(self, call: LayerCall, a: Tensor, x: Tensor) -> Tensor:
        """The mean slope: in compiled code that holds one noise at a time, where there is such code, else all at once."""
        if isinstance(call.noise, Logistic) and a.dtype != torch.float64:
            numbers = compiled_draws(call.draw, a, self.samples)
            if numbers is not None:
                return compiled.mean_slopes(a, x, call.noise.scale, self.t, self.samples, *numbers)
        # [K, *a.shape]
        z = conditional(call.noise, a, x, own_draws(self, call.draw, call.noise, a, self.samples))
        # The relaxation is 2F - 1 of logistic noise with the temperature as its scale.
        return 2 * Logistic(self.t).pdf(a - z).mean(0)


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
        x, m = call.sample(a), call.noise.mean_sign(a)
        return x + self._weight(x, a.detach(), m.detach(), call) * (m - m.detach())

    def _weight(self, x: Tensor, a: Tensor, m: Tensor, call: LayerCall) -> Tensor:
        lam: Tensor | float = self.lam
        if self.tau is not None:
            favour = 2 * self.tau * (1 - m.square())
            lam = favour / (1 + favour)
        # A state of probability 0 is drawn only by rounding; F' is 0 there too and must not meet an infinite weight.
        p = call.noise.cdf(x * a).clamp(min=torch.finfo(a.dtype).tiny)
        return (1 - lam) + lam / (2 * p)
