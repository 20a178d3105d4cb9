"""Local expectation gradients, with common random numbers also called RAM.

Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box Variational Inference. NeurIPS 2015.
Tokui, Sato. Evaluating the Variance of Likelihood-Ratio Gradient Estimators. ICML 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._head import flipped_states, in_chunks
from flipgrad.estimators._paths import Path, PathEstimator, Variables


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

    Binary weights that are drawn are flipped one by one too, each for the whole batch, with the latent weights for a: a tail
    for every weight.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.LEG()).mean().backward()
    """

    unbiased = True
    # On a batch that is repeated for each of the units.
    tails = 1
    cost = "1, and n tails per layer"
    citation = "Titsias, Lázaro-Gredilla 2015; Tokui, Sato 2017"

    def gradient(self, path: Path, k: int) -> Tensor:
        units = path.units(k)
        changes = _changes(units, max(a.numel() for a in path.a))
        return units.noise.pdf(units.a) * changes.t().reshape(units.a.shape) * units.states

    def weight_term(self, path: Path) -> Tensor:
        terms = []
        for weights in path.weights:
            slopes = (weights.parameter - weights.a) * weights.noise.pdf(weights.a) * weights.states
            terms.append(slopes.flatten() @ _changes(weights, weights.a.numel()))
        return torch.stack(terms).sum(0)


@torch.no_grad()
def _changes(variables: Variables, numbers: int) -> Tensor:
    """The path's losses less those with each of the variables flipped, [variables, B]; one flip holds this many ``numbers``."""
    x = variables.states
    every = torch.arange(x.flatten(1).shape[1], device=x.device)
    flipped = in_chunks(lambda some: variables.replayed(flipped_states(x, some)), numbers, every)
    return variables.path.losses - flipped
