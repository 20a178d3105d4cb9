"""The Gumbel-Rao estimator: Rao-Blackwellised straight-through Gumbel-softmax.

Paulus, Maddison, Krause. Rao-Blackwellizing the Straight-Through Gumbel-Softmax Gradient Estimator. ICLR 2021.
"""

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
