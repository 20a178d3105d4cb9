"""How good a network is: its accuracies and losses on a set of examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from flipgrad.bounds import multi_sample_bound
from flipgrad.data import Split
from flipgrad.network import Sequential, probabilities
from flipgrad.objectives import CrossEntropy


@dataclass(frozen=True)
class Evaluation:
    """Accuracies (in [0, 1]) and losses, averaged over examples.

    Attributes:
        samples: draws of all noises per example.
        accuracy_1: of the class predicted from one draw, averaged over the draws.
        accuracy_n: of the class predicted by the mean probability of all draws.
        accuracy_deterministic: of the net with every noise replaced by its median.
        expected_loss: the mean cross-entropy of one draw.
        marginal_loss: the cross-entropy of the mean probability of all draws.
    """

    samples: int
    accuracy_1: float
    accuracy_n: float
    accuracy_deterministic: float
    expected_loss: float
    marginal_loss: float


@torch.no_grad()
def evaluate(
    net: Sequential, data: Split, samples: int, *, generator: Generator | None = None, batch_size: int = 512
) -> Evaluation:
    """Evaluate ``net``, in eval mode, on ``data`` with ``samples`` draws per example."""
    was_training = net.training
    net.eval()
    totals = torch.zeros(5, dtype=torch.float64)
    for batch in data.batches(batch_size):
        # [samples, B, K]
        outputs = torch.stack([net(batch.x, generator=generator) for _ in range(samples)])
        losses = CrossEntropy(batch.y)(outputs)
        single = (outputs.argmax(-1) == batch.y).double().mean(0)
        ensemble = probabilities(outputs).mean(0).argmax(-1) == batch.y
        deterministic = net.deterministic(batch.x).argmax(-1) == batch.y
        columns = (single, ensemble, deterministic, losses.mean(0), multi_sample_bound(losses))
        totals += torch.stack([column.double().sum().cpu() for column in columns])
    net.train(was_training)
    return Evaluation(samples, *(totals / len(data)).tolist())
