"""Score-function estimators: of the loss less a baseline, and of what a linear baseline leaves of it.

REINFORCE: Williams. Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning. Machine
Learning, 1992.
MuProp: Gu, Levine, Sutskever, Mnih. MuProp: Unbiased Backpropagation for Stochastic Neural Networks. ICLR 2016.
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from flipgrad.contract import LayerCall
from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, PathEstimator, per_example
from flipgrad.estimators.baselines import Baseline
from flipgrad.guards import check_not_checkpointed
from flipgrad.objectives import evaluate


class BaselineEstimator(nn.Module, PathEstimator):
    """An estimator with an optional baseline, which is a module of it."""

    def __init__(self, baseline: Baseline | None = None) -> None:
        super().__init__()
        if not (baseline is None or isinstance(baseline, Baseline)):
            raise InputError(
                f"{type(self).__name__}(baseline={baseline!r}): give a baseline, such as fg.ConstantBaseline(...), "
                "fg.RunningBaseline(...) or fg.LearnedBaseline(...), or None"
            )
        self.baseline = baseline

    @torch.no_grad()
    def rewards(self, path: Path, otherwise: Tensor | float) -> Tensor:
        """The sampled losses [B] less the baseline's guesses; without a baseline, less what is given ``otherwise``."""
        guesses = otherwise if self.baseline is None else self.baseline(path.batch).to(path.losses.dtype)
        return path.losses - guesses

    @final
    def extra(self, path: Path) -> Tensor | None:
        return None if self.baseline is None else self.baseline.learn(path.batch, path.losses.detach())


@final
class REINFORCE(BaselineEstimator):
    r"""The sampled loss less a baseline, times the derivative of the sample's log-probability.

    .. math:: \partial/\partial a^k = (f - b)\, \partial \log p(x^k \mid a^k) / \partial a^k

    Unbiased: the score has mean 0, so that a baseline b which does not depend on the sample changes the variance only. One
    pass. The variance grows with the number of units; without a baseline it also grows with the loss itself.

    Args:
        baseline: :class:`~flipgrad.ConstantBaseline`, :class:`~flipgrad.RunningBaseline` (needs ``net(..., index=...)``) or
            :class:`~flipgrad.LearnedBaseline` (its parameters need an optimiser); None for b = 0.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> net(x, objective, estimator=fg.REINFORCE(fg.ConstantBaseline(0.7))).mean().backward()
    """

    unbiased = True
    citation = "Williams 1992"

    def gradients(self, path: Path) -> list[Tensor]:
        rewards = self.rewards(path, 0.0)
        return [
            per_example(rewards, a) * noise.score(states, a.detach())
            for a, states, noise in zip(path.a, path.states, path.noises, strict=True)
        ]


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
    one, and the latter's backpropagation.

    Args:
        baseline: takes the place of the constant :math:`b = \bar f`; it guesses the expected loss, as in
            :class:`~flipgrad.REINFORCE`.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.MuProp()).mean().backward()
    """

    unbiased = True
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
