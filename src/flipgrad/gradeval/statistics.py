r"""Statistics of gradient estimates against a reference, from a stream of draws.

With draws :math:`g_1, \dots, g_N` of an estimator and the reference g, lengths relative to :math:`\|g\|`:

- RMSE of the M-draw estimator: the root mean square of :math:`\|\hat g - g\|` over the N/M means :math:`\hat g` of M successive
  draws (the paper, appendix C.1; the same draws serve every M);
- cosine of :math:`\hat g` with g: its mean, and the quantiles that enclose the middle 70 % of the N/M trials;
- bias :math:`\|E g_1 - g\|` and standard deviation :math:`\sqrt{E \|g_1 - E g_1\|^2}`. The squared length of the mean error
  of N draws holds the variance of the mean besides the squared bias. Products of the mean errors of different batches of
  draws do not: their average is an unbiased estimate of the squared bias.

Confidence intervals are the jackknife's over ``BATCHES`` batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor
from torch.nn.functional import pad

# Batches of draws for bias, variance and their intervals.
BATCHES = 32
# The level of confidence intervals.
CONFIDENCE = 0.95
# The share of trials inside the interval of the cosine: the paper's.
COSINE_SHARE = 0.7
# Relative to the reference, what is left of zero after sums over many draws.
ROUNDING = 1e-12
# Groups of M draws that the largest M leaves, where there are enough draws.
GROUPS = 10


@dataclass(frozen=True)
class Accuracy:
    """How accurate an estimator is in one layer, or in the whole network; lengths are relative to the reference's.

    Attributes:
        name: of the layer.
        parameters: how many numbers its gradient has.
        samples: the numbers M of draws in an estimate.
        rmse: the root mean squared error for every M.
        cosine_mean: of the estimate with the reference, for every M.
        cosine_low: 70 % of the trials lie between it and ``cosine_high``.
        bias: the length of the estimate's mean error.
        bias_low: the lower end of its confidence interval, 0 where it reaches 0; ``bias_high`` is the upper end.
        std: the estimate's standard deviation with one draw.
        std_low: the lower end of its confidence interval; ``std_high`` is the upper end.
    """

    name: str
    parameters: int
    samples: list[int]
    rmse: list[float]
    cosine_mean: list[float]
    cosine_low: list[float]
    cosine_high: list[float]
    bias: float
    bias_low: float
    bias_high: float
    std: float
    std_low: float
    std_high: float


def sample_grid(samples: int) -> list[int]:
    """1, 2, 5, 10, 20, ... as far as ten groups of that many draws can be made.

    >>> sample_grid(1000)
    [1, 2, 5, 10, 20, 50, 100]
    """
    decades = range(len(str(samples)))
    return [m * 10**e for e in decades for m in (1, 2, 5) if m * 10**e * GROUPS <= samples] or [1]


class Tally:
    """Takes draws in any portions and keeps what the statistics need: a few vectors, and a few numbers per group.

    ``samples`` draws will come, to be compared with the ``reference`` [P], of which ``layers`` are parts. The ``grid`` holds
    the numbers M of draws in an estimate; by default those of :func:`sample_grid`.
    """

    def __init__(
        self, reference: Tensor, layers: Mapping[str, slice], samples: int, *, grid: Sequence[int] | None = None
    ) -> None:
        self.reference = reference.double().cpu()
        self.layers = layers
        self.grid = sample_grid(samples) if grid is None else list(grid)
        self._seen = 0
        self._sum = torch.zeros_like(self.reference)
        self._ends = dict.fromkeys(self.grid, self._sum)
        self._errors: dict[int, list[Tensor]] = {m: [] for m in self.grid}
        self._cosines: dict[int, list[Tensor]] = {m: [] for m in self.grid}
        batches = min(BATCHES, samples // 2)
        # The number of the last draw of every batch, and sums over every batch: of errors [P], of their squares [layers].
        self._bounds = torch.tensor([samples * k // batches for k in range(1, batches + 1)])
        self._sums = torch.zeros(batches, len(self.reference), dtype=torch.float64)
        self._squares = torch.zeros(batches, len(layers), dtype=torch.float64)

    def add(self, draws: Tensor) -> None:
        """Count in ``draws`` [n, P]."""
        errors = draws.double().cpu() - self.reference
        # Sums of errors over all draws so far: a group's is the difference of two of them.
        sums = self._sum + errors.cumsum(0)
        count = torch.arange(self._seen + 1, self._seen + len(draws) + 1)
        for m in self.grid:
            at_end = sums[count % m == 0]
            if len(at_end):
                means = torch.diff(at_end, dim=0, prepend=self._ends[m][None]) / m
                self._ends[m] = at_end[-1]
                self._errors[m].append(self._per_layer(means.square()))
                self._cosines[m].append(self._cosine(means + self.reference))
        batch = torch.searchsorted(self._bounds, count)
        self._sums.index_add_(0, batch, errors)
        self._squares.index_add_(0, batch, self._per_layer(errors.square()))
        self._sum, self._seen = sums[-1], self._seen + len(draws)

    def mean(self) -> Tensor:
        """The mean of the draws, [P]."""
        return self.reference + self._sum / self._seen

    def variances(self) -> list[float]:
        """The total variance of one draw in every layer, not relative to anything."""
        return [self._moments(i)[1][0] for i in range(len(self.layers))]

    def accuracies(self) -> list[Accuracy]:
        """The statistics of every layer."""
        lengths = self._per_layer(self.reference.square()[None])[0].sqrt()
        # [M, layers]
        rmse = torch.stack([torch.cat(self._errors[m]).mean(0).sqrt() for m in self.grid]) / lengths
        cosines = [torch.cat(self._cosines[m]) for m in self.grid]
        tail = (1 - COSINE_SHARE) / 2
        ends = [torch.quantile(c, torch.tensor([tail, 1 - tail], dtype=torch.float64), 0) for c in cosines]
        # [mean, low and high, M, layers]
        trials = torch.stack([torch.stack([c.mean(0), *end]) for c, end in zip(cosines, ends, strict=True)], 1)
        result = []
        for i, (name, part) in enumerate(self.layers.items()):
            # A square that came out negative is a zero that was missed by chance.
            roots = [math.sqrt(max(0.0, square)) / float(lengths[i]) for moment in self._moments(i) for square in moment]
            size = len(range(len(self.reference))[part])
            result.append(Accuracy(name, size, self.grid, *(column[:, i].tolist() for column in (rmse, *trials)), *roots))
        return result

    def _moments(self, i: int) -> tuple[list[float], list[float]]:
        """The squared bias and the variance of layer ``i``, each with the ends of its confidence interval."""
        sums, squares = self._sums[:, list(self.layers.values())[i]], self._squares[:, i]
        sizes = torch.diff(self._bounds, prepend=torch.zeros(1, dtype=torch.long)).double()
        total = sums.sum(0)
        own, common = sums.square().sum(1), sums @ total
        # The squared length of the sum of errors, and the counts: of all batches, and without each of them.
        length = total.square().sum() - 2 * pad(common, (1, 0)) + pad(own, (1, 0))
        count = _leave_one_out(sizes)
        squared_bias = (length - _leave_one_out(own)) / (count.square() - _leave_one_out(sizes.square()))
        variance = (_leave_one_out(squares) - length / count) / (count - 1)
        return _jackknife(squared_bias), _jackknife(variance)

    def _per_layer(self, values: Tensor) -> Tensor:
        """Sums [n, layers] of ``values`` [n, P]."""
        return torch.stack([values[:, part].sum(1) for part in self.layers.values()], 1)

    def _cosine(self, estimates: Tensor) -> Tensor:
        products = self._per_layer(estimates * self.reference)
        squares, reference = self._per_layer(estimates.square()), self._per_layer(self.reference.square()[None])
        # An estimate of zero, but for rounding, has no direction: it is as good as an orthogonal one.
        directed = squares > ROUNDING**2 * reference
        return torch.where(directed, products / torch.where(directed, squares * reference, 1).sqrt(), 0).clamp(-1, 1)


def _leave_one_out(values: Tensor) -> Tensor:
    """The sum of the batches' ``values``: of all of them, and without each."""
    return values.sum() - pad(values, (1, 0))


def _jackknife(values: Tensor) -> list[float]:
    """A statistic and the ends of its interval, from its values for all batches and without each of them."""
    value, left_out = float(values[0]), values[1:]
    batches = len(left_out)
    deviation = math.sqrt((batches - 1) * float(left_out.var(correction=0)))
    margin = float(stdtrit(batches - 1, (1 + CONFIDENCE) / 2)) * deviation
    return [value, value - margin, value + margin]
