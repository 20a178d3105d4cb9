"""Local expectation gradients, with common random numbers also called RAM.

Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box Variational Inference. NeurIPS 2015.
Tokui, Sato. Evaluating the Variance of Likelihood-Ratio Gradient Estimators. ICML 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._head import flipped_states
from flipgrad.estimators._paths import Path, PathEstimator

# Numbers held at once: flips of a layer times the pre-activations of the widest layer.
NUMBERS_AT_ONCE = 2**20


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

    def gradients(self, path: Path) -> list[Tensor]:
        widest = max(a.numel() for a in path.a)
        size = max(1, NUMBERS_AT_ONCE // max(1, widest))
        result = []
        for k, (a, x, noise) in enumerate(zip(path.a, path.states, path.noises, strict=True)):
            parts = torch.arange(x[:1].numel() if len(x) else 1, device=x.device).split(size)
            flipped = torch.cat([path.replayed(k, flipped_states(x, units)) for units in parts])
            difference = (path.losses.detach() - flipped).t().reshape(x.shape) * x
            result.append(noise.pdf(a.detach()) * difference)
        return result
