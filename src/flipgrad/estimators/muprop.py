"""MuProp: a linear baseline around the mean-field network.

Gu, Levine, Sutskever, Mnih. MuProp: Unbiased Backpropagation for Stochastic Neural Networks. ICLR 2016.
"""

from typing import Any, final

import torch
from torch import Tensor

from flipgrad.contract import LayerCall
from flipgrad.estimators._paths import Path, per_example
from flipgrad.estimators.baselines import BaselineEstimator
from flipgrad.guards import check_not_checkpointed
from flipgrad.objectives import evaluate


@final
class MuProp(BaselineEstimator):
    r"""The score-function estimator of what the loss's linearisation leaves, plus the linearisation's own gradient.

    One deterministic pass from the input replaces every state by its mean, :math:`\bar x^k = m(a(\bar x^{k-1}))`, and ends in
    the loss :math:`\bar f`; backpropagation gives its slopes :math:`\bar f'_k` in every :math:`\bar x^k`. With the sampled
    path's states :math:`x^k` and pre-activations :math:`a^k`,

    .. math:: \partial/\partial a^k = \big(f - b - \langle \bar f'_k, x^k - \bar x^k \rangle\big)\,
        \partial \log p(x^k \mid a^k) / \partial a^k + \bar f'_k\, m'(a^k), \quad b = \bar f.

    Unbiased: the slopes depend on the input only, and :math:`E[x^k\, \partial \log p / \partial a^k] = m'(a^k)` given the
    layer before, so what is subtracted in the first term is added in the second. Two passes, the sampled and the mean-field
    one, and the latter's backpropagation. Binary weights, which all examples share, are refused.

    Args:
        baseline: takes the place of the constant :math:`b = \bar f`; it guesses the expected loss, as in
            :class:`~flipgrad.REINFORCE`.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.MuProp()).mean().backward()
    """

    unbiased = True
    units_only = "its linear baseline has a slope in every weight of its own for each example"
    citation = "Gu, Levine, Sutskever, Mnih 2016"

    def passes(self, depth: int) -> int:
        return 2

    def gradients(self, path: Path) -> list[Tensor]:
        means, slopes, mean_field = _mean_field(path)
        rewards = self.rewards(path, otherwise=mean_field)
        result = []
        for k, (a, x, noise) in enumerate(zip(path.a, path.states, path.noises, strict=True)):
            linear = (slopes[k] * (x - means[k])).flatten(1).sum(1)
            residual = per_example(rewards - linear, a) * noise.score(x, a.detach())
            result.append(residual + slopes[k] * 2 * noise.pdf(a.detach()))
        return result


@torch.no_grad()
def _mean_field(path: Path) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor]:
    """The mean-field states of every layer, the mean-field loss's slopes in them, and the loss [B]."""

    def loss(*offsets: Tensor) -> tuple[Tensor, list[Tensor]]:
        remaining, means = iter(offsets), []

        def visit(call: LayerCall) -> Tensor:
            means.append(call.noise.mean_sign(call.affine(call.x)) + next(remaining))
            return means[-1]

        states = path.net.run(path.inputs, visit, path.batch.draw)
        return evaluate(path.batch.objective, path.net.outputs(states)), means

    # Slopes in the means are slopes in an offset of them.
    check_not_checkpointed()
    transform: Any = torch.func.vjp(loss, *[torch.zeros_like(a) for a in path.a], has_aux=True)
    losses, pullback, means = transform
    return means, pullback(torch.ones_like(losses)), losses
