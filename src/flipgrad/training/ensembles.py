"""What more samples buy: accuracy and loss of ensembles of several sizes, and how far their confidence can be believed."""

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import final

import torch
from torch import Generator, Tensor

from flipgrad.bounds import multi_sample_bound
from flipgrad.data import Split
from flipgrad.errors import InputError
from flipgrad.network import BinaryNetwork, probabilities
from flipgrad.objectives import CrossEntropy
from flipgrad.training.predictions import sampled_outputs
from flipgrad.training.reliability import Mean, Reliability, ReliabilityBins


@final
@dataclass(frozen=True)
class EnsembleSize:
    """How good ensembles of ``samples`` draws each are, averaged over ``ensembles`` disjoint ones and over examples.

    Attributes:
        samples: draws of all noises that are averaged for a prediction.
        ensembles: disjoint groups of so many draws.
        accuracy: of the class with the highest mean probability.
        accuracy_error: its standard error, over examples and draws alike: None of one example.
        loss: the cross-entropy of the mean probability.
        loss_error: its standard error.
    """

    samples: int
    ensembles: int
    accuracy: float
    accuracy_error: float | None
    loss: float
    loss_error: float | None


@final
@dataclass(frozen=True)
class Ensembles:
    """What :func:`measure_ensembles` found: by size, and the reliability of 1 draw, ``samples`` draws and of none."""

    sizes: list[EnsembleSize]
    reliability: list[Reliability]


def usual_sizes(samples: int) -> list[int]:
    """The sizes 1, 2, 5, 10, 20, ... up to twice ``samples``, and ``samples`` itself.

    >>> usual_sizes(10)
    [1, 2, 5, 10, 20]
    >>> usual_sizes(64)
    [1, 2, 5, 10, 20, 50, 64, 100]
    """
    decades = (10**power for power in range(len(str(2 * samples))))
    return sorted({samples, *(step * decade for decade in decades for step in (1, 2, 5) if step * decade <= 2 * samples)})


@torch.no_grad()
def measure_ensembles(
    net: BinaryNetwork,
    split: Split,
    samples: int,
    sizes: Sequence[int] | None = None,
    *,
    generator: Generator | None = None,
    batch_size: int = 128,
) -> Ensembles:
    """Predict ``split`` in eval mode by ensembles of several ``sizes``, all from the same draws.

    Every example gets as many draws as the largest size asks for. Smaller ensembles are disjoint groups of them: their numbers
    are means over these groups, and count every example once in their standard errors. So do predictions of one draw and of
    ``samples`` draws in :class:`Reliability`, where all groups are pooled.

    Args:
        net: its head gives the outputs of at least two classes.
        split: what to predict.
        samples: the size whose confidence is looked at, beside 1 and the deterministic network.
        sizes: draws per prediction; by default :func:`flipgrad.training.ensembles.usual_sizes`.
        generator: the source of randomness.
        batch_size: examples evaluated at once.

    Raises:
        InputError: if there is nothing to predict, a size is not positive, or the outputs are no class scores.
    """
    wanted = usual_sizes(max(1, samples)) if sizes is None else sorted(set(sizes))
    if not len(split):
        raise InputError("measure_ensembles: the split is empty; give at least one example")
    if samples < 1:
        raise InputError(f"measure_ensembles(samples={samples}): at least one sample is needed")
    if not wanted or wanted[0] < 1:
        raise InputError(f"numbers of samples {brief(list(sizes or ()))}: give one or more positive ones, e.g. 1,2,5,10")
    draws = max(samples, wanted[-1])
    accuracies, losses = {size: Mean() for size in wanted}, {size: Mean() for size in wanted}
    bins, fixed = {size: ReliabilityBins() for size in (1, samples)}, ReliabilityBins()
    was_training = net.training
    net.eval()
    for batch in split.batches(batch_size):
        y = batch.y.cpu()
        # [draws, B, K]
        outputs = sampled_outputs(net, batch.x, draws, generator)
        for size in wanted:
            accuracies[size].add((ensemble_probabilities(outputs, size).argmax(-1) == y).double().mean(0))
            losses[size].add(multi_sample_bound(_groups(CrossEntropy(y)(outputs), size)).mean(0))
        for size, collected in bins.items():
            collected.add(ensemble_probabilities(outputs, size), y)
        fixed.add(probabilities(net.deterministic(batch.x).double().cpu()), y)
    net.train(was_training)
    rows = [
        EnsembleSize(size, draws // size, accuracies[size].mean, accuracies[size].error, losses[size].mean, losses[size].error)
        for size in wanted
    ]
    return Ensembles(rows, [*(collected.result(size) for size, collected in bins.items()), fixed.result(None)])


def ensemble_probabilities(outputs: Tensor, size: int) -> Tensor:
    """The mean probabilities [ensembles, B, K] of disjoint ensembles of ``size`` draws each, of ``outputs`` [draws, B, K]."""
    return _groups(probabilities(outputs), size).mean(0)


def _groups(values: Tensor, size: int) -> Tensor:
    """All whole groups of ``size`` draws, [size, groups, ...], of values [draws, ...]; what is left over does not count."""
    count = len(values) // size
    return values[: count * size].view(count, size, *values.shape[1:]).transpose(0, 1)
