"""The path sample-analytic estimator.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, algorithm 1 and, for the enhanced head, appendix B.3.
"""

from typing import final

from flipgrad.estimators._sample_analytic import HeadRule, InputRule, SampleAnalytic


@final
class PSA(SampleAnalytic):
    r"""Backpropagation with discrete derivatives in the binary states.

    With :math:`D_i h(x) = (h(x_i{=}{+}1) - h(x_i{=}{-}1))/2` and the conditional means :math:`m = 2F(a) - 1`,

    .. math::
        u^L_i = D_i f(x^L), \quad u^{k-1}_i = \sum_j D_i m_j(x^{k-1})\, u^k_j, \quad
        \hat g_{\theta^k} = \sum_j u^k_j\, \partial m_j / \partial \theta^k,

    which is the paper's algorithm with its signs cancelled; it needs no auxiliary variables and one backward pass.

    That takes the sampled state for the input of a weight, and the sampled loss for the head's gradient. By default both are
    averaged besides, which the paper does not do: lower losses in the same epochs and stable at larger rates
    (``docs/results/beyond.md``), for 1.2 to 1.4 times the cost of a step. The paper's is
    ``PSA(inputs="sampled", head="sampled")``.

    Through max-pooling, whose windows do not overlap, :math:`D_i` is exact too: a unit that decides its window is the pooled
    unit, any other changes nothing.

    Binary weights are one more set of binary units: PSA takes discrete derivatives in them, too, all of them exact and as cheap
    as ordinary ones.

    Biased in general, by the linearisation of a product of probabilities. Unbiased with one hidden layer. With "sampled" and
    "rao-blackwell" inputs also with one unit in every layer but the first, and for the last layer's own parameters in every
    network. (The paper says "but the last", which needs besides that the loss adds up over that layer's units: their joint
    probability is a product too.)

    Args:
        inputs: what the gradient of a weight takes for its binary input. "sampled" is the paper's: the sampled state.
            "rao-blackwell" is the conditional expectation of the estimate given all other units, so the same mean and, for
            every weight of a fully connected layer, never a larger variance (a convolution's weight adds up such terms of
            many places). "posterior" takes the state's mean given the next layer's states, nearly as good in wide layers and
            a third of the cost; "mean" its mean given the layer before, which costs nothing and has the least variance, but
            so much bias that long trainings end at a higher loss. The two with a posterior need units that go to one layer
            only. "auto" is "posterior" in every layer where :class:`flipgrad.Sequential` knows that they do and where it pays:
            where the share of the variance that averages take away, which is little once units are decided, is worth what they
            add to the layer's time. That is told by shapes, weights and the units' probabilities, at every step anew
            (:mod:`flipgrad.flips.averaging`; :func:`flipgrad.flips.explain` says what was chosen). Elsewhere it is "sampled",
            also in graphs written by hand. In compiled graphs it takes the same choice, and the time of averages. Of binary
            weights, "posterior" with ``exact=True`` is the conditional expectation itself; without, it is within 1 to 3 % of
            one draw's gradient.
        head: the gradient in the head's own parameters. "sampled" is that of the sampled loss; "enhanced" averages it over
            flips of the last layer's units with the paper's weight 1/n; "rao-blackwell" averages that of each weight of a
            linear head over its own unit's two states (and is "sampled" for other heads, and for Bernoulli likelihoods). All
            have the same mean; the latter two have no larger variance than the first. The second needs the last binary layer
            right before the head. "auto" is "rao-blackwell", but "sampled" for objectives of which that needs more than 2**15
            outputs at flips (examples times units times outputs): it differentiates them all, which takes 60 times a step of ST
            with 200 units and 784 outputs.
        flip_head: whether the loss is compared at every flip of the last layer's units. Behind a linear head that is a few
            products with its weight for cross-entropies and objectives that add up over the outputs, however many these are
            (:mod:`flipgrad.flips.heads`). Another objective is evaluated at units times outputs numbers for each example, some
            at a time: 7 to 20 steps of ST with 200 units and 784 outputs. Another head is evaluated on all flipped states, as
            often as there are units. False linearises the head instead, as ST does, and
            averages its own gradient only where that needs no such evaluation.
        tolerance: the relative error that is allowed in every layer's flip product; large layers then cost two or three
            ordinary products (:func:`flipgrad.flips.explain` tells). It is far below the noise of one draw.
        exact: never approximate.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.PSA()).mean().backward()
    """

    unbiased = False
    unbiased_in = "one hidden layer"
    citation = "Shekhovtsov, Yanush, Flach 2020"
    flips = True

    def __init__(
        self,
        *,
        inputs: InputRule = "auto",
        head: HeadRule = "auto",
        flip_head: bool = True,
        tolerance: float = 1e-3,
        exact: bool = False,
    ) -> None:
        super().__init__(inputs, head, flip_head, tolerance, exact)
