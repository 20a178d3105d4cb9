"""Leave-one-out REINFORCE with double control variates.

Titsias, Shi. Double Control Variates for Gradient Estimation in Discrete Latent Variable Models. AISTATS 2022.
"""

import math
from typing import final

import torch
from torch import Tensor, nn

from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, per_example, straight_through, value_and_slope
from flipgrad.estimators._tuned import TunedEstimator
from flipgrad.noise import sign


@final
class DoubleCV(TunedEstimator):
    r"""Leave-one-out REINFORCE with K states of every layer, and a first-order Taylor term in the loss and in the baseline.

    With independent states :math:`x_1, \dots, x_K` of a layer with mean m(a),

    .. math:: \partial/\partial a = \frac1K \sum_k \Big(f(x_k) + b_k - \frac{1}{K-1} \sum_{j \ne k} \big(f(x_j) + b_j\big)\Big)
        \frac{\partial}{\partial a} \log p(x_k \mid a) - \alpha \frac{\partial m}{\partial a} \frac1K \sum_k \nabla f(x_k),

    .. math:: b_k = \alpha \, \Big(\frac{1}{K-1} \sum_{j \ne k} \nabla f(x_j)\Big) \cdot (x_k - m).

    Unbiased: the gradients in :math:`b_k` do not depend on :math:`x_k`, so :math:`E[b_k\, \partial \log p(x_k)]` is what the
    last term takes off, and the other :math:`b_j` have mean zero given :math:`x_k`. The paper has one layer. In a deep net f
    continues with the path's noise in the later layers, the same for all K states, and :math:`\nabla f` is the
    straight-through gradient of that continuation: the argument holds for each fixed noise, and for any function in place of
    :math:`\nabla f`, so this is unbiased as well. The head must be differentiable and treat the examples separately. One path
    and K differentiated tails for every layer.

    :math:`\alpha` is a parameter, trained as those of :class:`flipgrad.REBAR`. At -1 the variance of a linear loss is
    removed wholly, at 0 this is leave-one-out REINFORCE.

    Args:
        samples: K, at least 2.
        alpha: at the start.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.DoubleCV()).mean().backward()
    """

    citation = "Titsias, Shi 2022"

    def __init__(self, samples: int = 2, alpha: float = -1.0) -> None:
        super().__init__()
        if samples < 2:
            raise InputError(f"DoubleCV(samples={samples}): leaving one out needs at least two samples")
        if not math.isfinite(alpha):
            raise InputError(f"DoubleCV(alpha={alpha}): alpha must be finite, e.g. -1.0")
        self.samples = self.tails = samples
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def gradient(self, path: Path, k: int) -> Tensor:
        a, noise, others = path.a[k].detach(), path.noises[k], self.samples - 1
        new = [sign(a - path.batch.draw(noise, a)) for _ in range(others)]
        states = torch.stack([path.states[k], *new])

        def loss(x: Tensor) -> Tensor:
            return path.continued_with_noise(k, x, straight_through)

        taylor = zip(*[value_and_slope(loss, x) for x in states], strict=True)
        f, slopes = (torch.stack(parts).detach() for parts in taylor)
        left_out = (slopes.sum(0) - slopes) / others
        b = self.alpha * (left_out * (states - noise.mean_sign(a))).flatten(2).sum(2)
        total = f + b
        advantage = total - (total.sum(0) - total) / others
        terms = [per_example(w, a) * noise.score(x, a) for w, x in zip(advantage, states, strict=True)]
        return torch.stack(terms).mean(0) - self.alpha * 2 * noise.pdf(a) * slopes.mean(0)
