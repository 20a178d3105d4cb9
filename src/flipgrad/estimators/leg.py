"""Local expectation gradients, with common random numbers also called RAM.

Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box Variational Inference. NeurIPS 2015.
Tokui, Sato. Evaluating the Variance of Likelihood-Ratio Gradient Estimators. ICML 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._head import flipped_states, in_chunks
from flipgrad.estimators._paths import Path, PathEstimator


@final
class LEG(PathEstimator):
    r"""Both states of every unit of every layer, each continued to the loss.

    With the other units :math:`x^k_{-i}` of the layer as on the sampled path,

    .. math:: \partial/\partial a^k_i = F'(a^k_i) \big(f(x^k_i = +1) - f(x^k_i = -1)\big),

    where f runs through the later layers with the path's own noise, the same for all flips of all layers: one of the two
    losses is the path's, and one draw of every layer's noise determines the estimate. Unbiased, since that noise is
    independent of :math:`x^k`: the formula is the derivative of the expectation over :math:`x^k_i` given all else. In the last
    layer it is PSA. One path and a tail for every unit, evaluated as one batch per layer, or several where that would hold
    more than 2^20 numbers in one layer.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.LEG()).mean().backward()
    """

    unbiased = True
    # On a batch that is repeated for each of the units.
    tails = 1
    cost = "1, and n tails per layer"
    citation = "Titsias, Lázaro-Gredilla 2015; Tokui, Sato 2017"

    @torch.no_grad()
    def gradient(self, path: Path, k: int) -> Tensor:
        x, widest = path.states[k], max(a.numel() for a in path.a)
        units = torch.arange(x.flatten(1).shape[1], device=x.device)
        flipped = in_chunks(lambda some: path.replayed(k, flipped_states(x, some)), widest, units)
        return path.noises[k].pdf(path.a[k]) * (path.losses - flipped).t().reshape(x.shape) * x
