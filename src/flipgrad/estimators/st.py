"""The straight-through estimator of a stochastic binary network.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, algorithm 2.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from flipgrad.contract import LayerCall, LocalEstimator, Network
from flipgrad.estimators._head import HeadGradient, check_head, head_losses
from flipgrad.estimators._inputs import InputRule, allowed_error, check_inputs, path_states
from flipgrad.objectives import Objective


@final
class ST(LocalEstimator):
    r"""Sample forward; differentiate the conditional mean :math:`m(a) = 2F(a) - 1` backward.

    Biased: it is PSA with F and the head linearised over every flip, so it is exact where both are linear. One pass.

    Args:
        inputs: what the gradient of a weight takes for its binary input: "sampled" (the paper's), "mean", "posterior",
            "rao-blackwell" or "auto", see :class:`flipgrad.PSA`; the same derivation holds.
        head: the gradient in the head's own parameters, "sampled", "enhanced" or "rao-blackwell", likewise. The latter two
            evaluate the loss at every flip of the last layer's units.
        tolerance: the relative error that is allowed in sums over flips, which "posterior" and "rao-blackwell" inputs need.
        exact: never approximate.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.ST()).mean().backward()
    """

    unbiased = False
    unbiased_in = "F and head linear over a flip"
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def __init__(
        self,
        *,
        inputs: InputRule = "sampled",
        head: HeadGradient = "sampled",
        tolerance: float = 1e-3,
        exact: bool = False,
    ) -> None:
        check_inputs("ST", inputs)
        check_head("ST", head)
        self.inputs: InputRule = inputs
        self.head_gradient: HeadGradient = head
        self.tolerance = allowed_error("ST", tolerance, exact)

    def passes(self, depth: int) -> int:
        return 1

    def states(self, call: LayerCall) -> Tensor:
        return path_states(call, self.inputs, self.tolerance, flips=False)

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        return head_losses(net, last, states, objective, self.head_gradient, flip=False)
