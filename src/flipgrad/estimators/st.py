"""The straight-through estimator of a stochastic binary network.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, algorithm 2.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from flipgrad.estimators._base import LinearHeadEstimator
from flipgrad.layers import LayerCall


@final
class ST(LinearHeadEstimator):
    r"""Sample forward; differentiate the conditional mean :math:`m(a) = 2F(a) - 1` backward.

    Biased: it is PSA with F and the head linearised over every flip, so it is exact where both are linear. One pass.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ST()).mean().backward()
    """

    unbiased = False
    unbiased_in = "F and head linear over a flip"
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def passes(self, depth: int) -> int:
        return 1

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        m = call.noise.mean_sign(a)
        # m - m is exactly 0, so the states stay exactly ±1.
        return call.sample(a) + (m - m.detach())
