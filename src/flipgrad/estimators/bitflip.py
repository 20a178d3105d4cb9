"""One flipped unit per layer.

The one-coordinate version of local expectation gradients: Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box
Variational Inference. NeurIPS 2015; and Tokui, Sato. Evaluating the Variance of Likelihood-Ratio Gradient Estimators. ICML
2017. Instead of the sum over all units of a layer it takes one of them at random, times their number.
"""

from typing import final

import torch

from flipgrad.estimators._paths import PathEstimator, Products, Variables


@final
class BitFlip(PathEstimator):
    r"""The difference that one random unit of every layer makes.

    For every example and layer of n units, with i uniform among them and the states x of the other units as sampled,

    .. math:: \partial/\partial a_i = n F'(a_i) \big(f(x_{i=+1}) - f(x_{i=-1})\big), \quad
        \partial/\partial a_j = 0 \text{ for } j \ne i.

    Both values of f continue with the noise of the path in the later layers, so one of the two is the path's own loss.
    Unbiased: given the other units, F'(a_i) times the difference is the derivative of the expectation over unit i, and i is
    drawn independently. Its variance grows with n. One path, and one tail for every layer.

    Of binary weights that are drawn, one of every layer is flipped, the same for all examples, with one tail more.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.BitFlip()).mean().backward()
    """

    unbiased = True
    tails = 1
    citation = "Titsias, Lázaro-Gredilla 2015, one coordinate"

    def products(self, variables: Variables) -> Products:
        a, x = variables.a, variables.states
        n = a.flatten(1).shape[1]
        # Double precision, so that every unit of a large layer can be met.
        u = variables.uniform(a.new_empty(len(a), 1, dtype=torch.float64))
        chosen = (torch.arange(n, device=x.device) == (u * n).long().clamp(max=n - 1)).to(x.dtype).view_as(x)
        change = variables.path.losses.detach() - variables.replayed((x * (1 - 2 * chosen))[None])[0]
        yield change, n * chosen * variables.noise.pdf(a) * x
