"""The straight-through estimator of a stochastic binary network.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, algorithm 2.
"""

from typing import final

from flipgrad.estimators._sample_analytic import HeadRule, InputRule, SampleAnalytic


@final
class ST(SampleAnalytic):
    r"""Sample forward; differentiate the conditional mean :math:`m(a) = 2F(a) - 1` backward.

    Biased: it is PSA with F and the head linearised over every flip, so it is exact where both are linear. One pass.
    Max-pooling of states, which is no function of real numbers that could be linearised, keeps its discrete derivative.

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
    flips = False

    def __init__(
        self, *, inputs: InputRule = "sampled", head: HeadRule = "sampled", tolerance: float = 1e-3, exact: bool = False
    ) -> None:
        super().__init__(inputs, head, False, tolerance, exact)
