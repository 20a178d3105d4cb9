"""Local expectation gradients, with common random numbers also called RAM, and their one-coordinate version.

Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box Variational Inference. NeurIPS 2015.
Tokui, Sato. Evaluating the Variance of Likelihood-Ratio Gradient Estimators. ICML 2017.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._head import flipped_states, in_chunks
from flipgrad.estimators._paths import Path, PathEstimator, per_example


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


@final
class BitFlip(PathEstimator):
    r"""The difference that one random unit of every layer makes.

    For every example and layer of n units, with i uniform among them and the states x of the other units as sampled,

    .. math:: \partial/\partial a_i = n F'(a_i) \big(f(x_{i=+1}) - f(x_{i=-1})\big), \quad
        \partial/\partial a_j = 0 \text{ for } j \ne i.

    Both values of f continue with the noise of the path in the later layers, so one of the two is the path's own loss.
    Unbiased: given the other units, F'(a_i) times the difference is the derivative of the expectation over unit i, and i is
    drawn independently. It is :class:`LEG` with one random term of the sum over units, times their number, and its variance
    grows with n. One path, and one tail for every layer.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.BitFlip()).mean().backward()
    """

    unbiased = True
    tails = 1
    citation = "Titsias, Lázaro-Gredilla 2015, one coordinate"

    @torch.no_grad()
    def gradient(self, path: Path, k: int) -> Tensor:
        a, x = path.a[k], path.states[k]
        n = a.flatten(1).shape[1]
        # Double precision, so that every unit of a large layer can be met.
        u = path.uniform(a.new_empty(len(a), 1, dtype=torch.float64))
        chosen = (torch.arange(n, device=x.device) == (u * n).long().clamp(max=n - 1)).to(x.dtype).view_as(x)
        change = path.losses - path.replayed(k, (x * (1 - 2 * chosen))[None])[0]
        return n * chosen * path.noises[k].pdf(a) * x * per_example(change, a)
