"""The exact gradient, as an estimator without variance.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, section 2.1.
"""

from typing import final

from torch import Tensor

from flipgrad import exact
from flipgrad.contract import Batch, Estimator, Network


@final
class Exact(Estimator):
    r"""The expected loss itself, by transfer matrices (:func:`flipgrad.exact.expected_loss`), for small networks.

    .. math:: E_Z[f] = P^1 P^2 \cdots P^L f

    Unbiased and without variance: nothing is sampled, and the value is the expected loss. Instead of passes it costs products
    with matrices of :math:`2^n \times 2^n` entries; a network over the budget is refused with what would fit.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.Exact()).mean().backward()
    """

    unbiased = True
    second_derivatives = True
    cost = "L matrices of 4^n"
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def passes(self, depth: int) -> int:
        return 0

    def losses(self, net: Network, batch: Batch) -> Tensor:
        return exact.expected_loss(net, batch.x, batch.objective)
