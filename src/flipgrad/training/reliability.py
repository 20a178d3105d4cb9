"""Statistics of predictions: whether their confidence can be believed, and means over examples with standard errors."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

# Bins of equal width, as in the reference below.
BINS = 15


@final
@dataclass(frozen=True)
class Reliability:
    """Predictions in bins by their confidence, the probability of the class that they name.

    Guo, Pleiss, Sun, Weinberger. On Calibration of Modern Neural Networks. ICML 2017.

    Attributes:
        samples: how many draws of all noises a prediction is averaged over; None for the deterministic network.
        edges: of the bins; every bin has its lower edge, the last one both.
        count: predictions in every bin.
        confidence: their mean confidence; None in a bin without predictions.
        accuracy: the share of them that are right.
        error: the expected calibration error, the mean over all predictions of the distance between the accuracy and the mean
            confidence of their bin. It is 0 for a network that is right as often as it says, in the limit of many examples;
            with few it is larger, as the accuracy of a small bin is a matter of chance.
    """

    samples: int | None
    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]
    error: float


@final
class ReliabilityBins:
    """Collects predictions for a :class:`Reliability`, a batch at a time."""

    def __init__(self, bins: int = BINS) -> None:
        # Rows: predictions, the sum of their confidences, how many are right.
        self._sums = torch.zeros(3, bins, dtype=torch.float64)

    def add(self, probabilities: Tensor, labels: Tensor) -> None:
        """Predicted probabilities [..., B, K], and the true classes [B]."""
        confidence, predicted = probabilities.double().max(-1)
        bins = self._sums.shape[1]
        place = (confidence * bins).long().clamp(0, bins - 1).flatten()
        rows = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()])
        self._sums.index_add_(1, place, rows.flatten(1))

    def result(self, samples: int | None) -> Reliability:
        """What was collected, of predictions by so many ``samples``."""
        count, confidence, right = self._sums
        gaps = (right - confidence).abs()
        return Reliability(
            samples,
            [edge / len(count) for edge in range(len(count) + 1)],
            [int(number) for number in count],
            _shares(confidence, count),
            _shares(right, count),
            float(gaps.sum() / count.sum()),
        )


@final
class Mean:
    """The mean of numbers that come a batch at a time, and its standard error if they are independent."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        """More numbers [B]."""
        values = values.double()
        self._count += values.numel()
        self._sum += float(values.sum())
        self._squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        """The mean so far."""
        return self._sum / self._count

    @property
    def error(self) -> float | None:
        """Its standard error; one number alone has none."""
        if self._count < 2:
            return None
        variance = max(0.0, self._squares / self._count - self.mean**2)
        return float((variance / (self._count - 1)) ** 0.5)


def _shares(sums: Tensor, count: Tensor) -> list[float | None]:
    return [float(total / number) if number else None for total, number in zip(sums, count, strict=True)]
