"""The result files of a training run, read and checked: what is missing is None or empty, what is wrong is an error.

Only ``config.json`` and ``metrics.jsonl`` must be there. An entry may lack any number, and a number that is null, NaN or
infinite (a run that diverged) counts as missing: the rest can be shown all the same.
"""

from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flipgrad.errors import InputError
from flipgrad.files import read_json_lines
from flipgrad.plots.loading import Count, Cube, Matrix, Natural, NotNegative, Share, build, load

NO_RUN = "give the folder of a run of flipgrad train"
REWRITE = "delete it, and flipgrad train --resume with this folder writes it again"
REEVALUATE = "run flipgrad evaluate again to rewrite it"
RETRAIN = "remove the line, or train again"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a network is on a set of examples; see :class:`flipgrad.training.Evaluation`."""

    samples: int | None = None
    accuracy_1: float | None = None
    accuracy_n: float | None = None
    accuracy_deterministic: float | None = None
    expected_loss: float | None = None
    marginal_loss: float | None = None

    @property
    def known(self) -> bool:
        """Whether any of them was measured."""
        return any(getattr(self, name) is not None for name in Scores.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Epoch(Scores):
    """One line of the metrics: the scores after an epoch, and how it went."""

    epoch: int
    # The examples of the scores: validation or, if none were held out, test.
    split: str | None = None
    # What the method minimised, averaged over the epoch.
    objective: float | None = None
    lr: float | None = None
    # Of training.
    seconds: float | None = None
    images_per_second: float | None = None
    # By layer; saturated are units whose state is almost certain.
    gradient_norm: dict[str, float | None] = field(default_factory=dict)
    saturated: dict[str, float | None] = field(default_factory=dict)
    # Shares of binary weights: with another sign than an epoch before, and undecided between both.
    changed_signs: dict[str, float | None] = field(default_factory=dict)
    undecided: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """A prediction: mean ``probabilities`` [K], those of the ``members`` [S, K], of an ``image`` [C, H, W] or a ``point``."""

    index: int
    label: int
    probabilities: list[Share]
    members: Matrix | None = None
    image: Cube | None = None
    point: list[float] | None = None
    chosen: str | None = None

    def __post_init__(self) -> None:
        classes = len(self.probabilities)
        if classes < 2:
            raise InputError(f"'probabilities' must hold one of every class, got {classes}")
        if not 0 <= self.label < classes:
            raise InputError(f"'label' must be a class from 0 to {classes - 1}, got {self.label}")
        if self.members is not None and self.members.shape[1] != classes:
            raise InputError(f"'members' must hold {classes} probabilities each, got {self.members.shape[1]}")


def check_edges(edges: list[float], **columns: Sized) -> None:
    """Refuse bins whose ``edges`` do not increase, or columns without a number between every two of them."""
    if len(edges) < 2 or edges != sorted(set(edges)):
        raise InputError(f"'edges' must be two or more increasing numbers, got {edges[:9]}")
    for key, numbers in columns.items():
        if len(numbers) != len(edges) - 1:
            raise InputError(f"{key!r} must have {len(edges) - 1} counts, one between edges, got {len(numbers)}")


@dataclass(frozen=True)
class Disagreement:
    """Numbers of predictions by the share of members, between ``edges``, that disagree with the ensemble."""

    edges: list[Share]
    correct: list[Natural]
    wrong: list[Natural]

    def __post_init__(self) -> None:
        check_edges(self.edges, correct=self.correct, wrong=self.wrong)


@dataclass(frozen=True)
class Reliability:
    """Predictions in bins by their confidence; see :class:`flipgrad.training.Reliability`."""

    edges: list[Share]
    count: list[Natural]
    confidence: list[Share | None]
    accuracy: list[Share | None]
    error: Share
    # None: the deterministic network.
    samples: Count | None = None

    def __post_init__(self) -> None:
        check_edges(self.edges, count=self.count, confidence=self.confidence, accuracy=self.accuracy)
        for key, means in (("confidence", self.confidence), ("accuracy", self.accuracy)):
            if any(count and mean is None for count, mean in zip(self.count, means, strict=True)):
                raise InputError(f"{key!r} must have a number in every bin that has predictions")


@dataclass(frozen=True)
class EnsembleSize:
    """Accuracy and loss of predictions by so many ``samples``, with standard errors."""

    samples: Count
    accuracy: Share
    loss: NotNegative
    accuracy_error: NotNegative | None = None
    loss_error: NotNegative | None = None


@dataclass(frozen=True)
class Ensembles:
    """What more samples buy, and how far confidence can be believed."""

    sizes: list[EnsembleSize] = field(default_factory=list)
    reliability: list[Reliability] = field(default_factory=list)

    def __post_init__(self) -> None:
        samples = [size.samples for size in self.sizes]
        if samples != sorted(set(samples)):
            raise InputError(f"'sizes' must be in the order of their samples, got {samples[:9]}")


@dataclass(frozen=True)
class Evaluated:
    """What ``flipgrad evaluate`` found out."""

    samples: int | None = None
    splits: dict[str, Scores] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    disagreement: Disagreement | None = None
    ensembles: Ensembles | None = None
    # Numbers of test examples by their class and the ensemble's.
    confusion: list[list[Natural]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(len(row) != len(self.confusion) for row in self.confusion):
            raise InputError("'confusion' must have as many columns as rows, one for every class")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run was started, on what."""

    config: dict[str, Any]
    command: list[str] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFiles(Settings):
    """Everything that the files of a run say."""

    epochs: list[Epoch]
    summary: Scores | None
    evaluation: Evaluated | None


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run; an `InputError` says which file is missing or broken, where, and what to do."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder; {NO_RUN}")
    summary, evaluation = folder / "summary.json", folder / "evaluation.json"
    return RunFiles(
        **vars(load(folder / "config.json", Settings, missing=NO_RUN, broken=REWRITE)),
        epochs=read_metrics(folder / "metrics.jsonl"),
        summary=load(summary, Scores, missing=NO_RUN, broken=REWRITE) if summary.exists() else None,
        evaluation=load(evaluation, Evaluated, missing=NO_RUN, broken=REEVALUATE) if evaluation.exists() else None,
    )


def read_metrics(path: Path) -> list[Epoch]:
    """The epochs of a ``metrics.jsonl``, in order; of an epoch that was done twice, the later line.

    A last line that does not end was being written when the run was stopped, and is left out.
    """
    records = read_json_lines(path, missing=NO_RUN, broken=RETRAIN)
    lines = [build(Epoch, record, where=f"{path}, line {n}", fix=RETRAIN) for n, record in enumerate(records, 1)]
    epochs = {line.epoch: line for line in lines}
    return [epochs[number] for number in sorted(epochs)]
