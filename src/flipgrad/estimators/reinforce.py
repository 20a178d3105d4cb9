"""The score-function estimator.

Williams. Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning. Machine Learning, 1992.
"""

from typing import final

import torch
from torch import Tensor

from flipgrad.estimators._paths import Path, per_example
from flipgrad.estimators.baselines import BaselineEstimator


@final
class REINFORCE(BaselineEstimator):
    r"""The sampled loss less a baseline, times the derivative of the sample's log-probability.

    .. math:: \partial/\partial a^k = (f - b)\, \partial \log p(x^k \mid a^k) / \partial a^k

    Unbiased: the score has mean 0, so that a baseline b which does not depend on the sample changes the variance only. One
    pass. The variance grows with the number of units; without a baseline it also grows with the loss itself.

    Binary weights that are drawn are variables like the states: with the score of the weights, which all examples share. Their
    number makes the variance grow, too, and it does not fall with the number of examples.

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

    def weight_term(self, path: Path) -> Tensor:
        carriers = [weights.carry(weights.noise.score(weights.states, weights.a)) for weights in path.weights]
        return self.rewards(path, 0.0) * torch.stack(carriers).sum(0)
