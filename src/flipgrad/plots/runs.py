"""The result files of a training run, read and checked: what is missing is None or empty, what is wrong is an error.

Only ``config.json`` and ``metrics.jsonl`` must be there. An entry may lack any number, and a number that is null, NaN or
infinite (a run that diverged) counts as missing: the rest can be shown all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.files import read_json, read_json_lines
from flipgrad.plots._fields import brief, get, is_finite, is_number, mapping, numbers

CONFIG, METRICS, SUMMARY, EVALUATION = "config.json", "metrics.jsonl", "summary.json", "evaluation.json"

NO_RUN = "give the folder of a run of flipgrad train"
REWRITE = "delete it, and flipgrad train --resume with this folder writes it again"
REEVALUATE = "run flipgrad evaluate again to rewrite it"


@dataclass(frozen=True)
class Scores:
    """How good a network is on a set of examples; see :class:`flipgrad.training.Evaluation`."""

    samples: int | None = None
    accuracy_1: float | None = None
    accuracy_n: float | None = None
    accuracy_deterministic: float | None = None
    expected_loss: float | None = None
    marginal_loss: float | None = None


@dataclass(frozen=True)
class Epoch:
    """One line of the metrics.

    Attributes:
        number: of the epoch.
        scores: after it.
        objective: what the method minimised, averaged over the epoch.
        lr: the learning rate.
        seconds: of training.
        images_per_second: of training.
        gradient_norm: by layer.
        saturated: by layer, the share of units whose state is almost certain.
    """

    number: int
    scores: Scores = Scores()
    objective: float | None = None
    lr: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    gradient_norm: dict[str, float] = field(default_factory=dict)
    saturated: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """A prediction: mean ``probabilities`` [K], those of the ``members`` [S, K], of an ``image`` [C, H, W] or a ``point``."""

    index: int
    label: int
    probabilities: list[float]
    members: NDArray[np.float64]
    image: NDArray[np.float64] | None
    point: list[float] | None
    chosen: str | None


@dataclass(frozen=True)
class Disagreement:
    """Numbers of predictions by the share of members, between ``edges``, that disagree with the ensemble."""

    edges: list[float]
    correct: list[int]
    wrong: list[int]


@dataclass(frozen=True)
class Evaluated:
    """What ``flipgrad evaluate`` found out."""

    samples: int | None
    splits: dict[str, Scores]
    classes: list[str]
    examples: list[Example]
    disagreement: Disagreement | None


@dataclass(frozen=True)
class Run:
    """Everything that the files of a run say."""

    config: Mapping[str, Any]
    command: list[str]
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    epochs: list[Epoch]
    summary: Scores | None
    evaluation: Evaluated | None


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        InputError: if a file is missing or broken: which one, where, and what to do.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder; {NO_RUN}")
    path = folder / CONFIG
    record = read_json(path, missing=NO_RUN, broken=REWRITE)
    with _fixing(str(path), REWRITE):
        config = mapping(record, "config", "the file")
        command = record.get("command") or []
        versions, machine = _optional(record, "versions"), _optional(record, "machine")
        if not isinstance(command, list):
            raise InputError(f"the file: 'command' must be a list of words, got {brief(command)}")
    return Run(
        config=config,
        command=[str(word) for word in command],
        versions=versions,
        machine=machine,
        epochs=read_metrics(folder / METRICS),
        summary=_read_summary(folder / SUMMARY),
        evaluation=_read_evaluation(folder / EVALUATION),
    )


def read_metrics(path: Path) -> list[Epoch]:
    """The epochs of a ``metrics.jsonl``, in order; of an epoch that was done twice, the later line.

    A last line that does not end was being written when the run was stopped, and is left out.

    Raises:
        InputError: if the file is missing or a line is broken.
    """
    fix = "remove the line, or train again"
    epochs: dict[int, Epoch] = {}
    for number, record in enumerate(read_json_lines(path, missing=NO_RUN, broken=fix), 1):
        with _fixing(f"{path}, line {number}", fix):
            epoch = _epoch(record)
        epochs[epoch.number] = epoch
    return [epochs[number] for number in sorted(epochs)]


@contextmanager
def _fixing(where: str, advice: str) -> Iterator[None]:
    """Inside this, an `InputError` is completed by the place and by what to do."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}; {advice}") from error


def _epoch(record: Mapping[str, Any]) -> Epoch:
    return Epoch(
        number=_whole(record, "epoch", "the record"),
        scores=_scores(record),
        objective=_number(record, "objective"),
        lr=_number(record, "lr"),
        seconds=_number(record, "seconds"),
        images_per_second=_number(record, "images_per_second"),
        gradient_norm=_by_layer(record, "gradient_norm"),
        saturated=_by_layer(record, "saturated"),
    )


def _scores(record: Mapping[str, Any]) -> Scores:
    samples = _number(record, "samples")
    names = ("accuracy_1", "accuracy_n", "accuracy_deterministic", "expected_loss", "marginal_loss")
    return Scores(None if samples is None else int(samples), *(_number(record, name) for name in names))


def _read_summary(path: Path) -> Scores | None:
    if not path.exists():
        return None
    record = read_json(path, missing=NO_RUN, broken=REWRITE)
    with _fixing(str(path), REWRITE):
        return _scores(record)


def _read_evaluation(path: Path) -> Evaluated | None:
    if not path.exists():
        return None
    record = read_json(path, missing=NO_RUN, broken=REEVALUATE)
    with _fixing(str(path), REEVALUATE):
        samples = _number(record, "samples")
        classes = record.get("classes") or []
        examples = record.get("examples") or []
        if not isinstance(classes, list) or not isinstance(examples, list):
            raise InputError("'classes' and 'examples' must be lists")
        splits = {name: _scores(_object(value, f"split {name!r}")) for name, value in _optional(record, "splits").items()}
        disagreement = record.get("disagreement")
        return Evaluated(
            samples=None if samples is None else int(samples),
            splits=splits,
            classes=[str(name) for name in classes],
            examples=[_example(example, f"example {number}") for number, example in enumerate(examples, 1)],
            disagreement=None if disagreement is None else _disagreement(_object(disagreement, "disagreement")),
        )


def _example(record: Any, where: str) -> Example:
    record = _object(record, where)
    probabilities = numbers(record, "probabilities", where, low=0, high=1)
    members = record.get("members") or []
    point, image, chosen = record.get("point"), record.get("image"), record.get("chosen")
    label = _whole(record, "label", where)
    if len(probabilities) < 2:
        raise InputError(f"{where}: 'probabilities' must hold one of every class, got {len(probabilities)}")
    if not 0 <= label < len(probabilities):
        raise InputError(f"{where}: 'label' must be a class from 0 to {len(probabilities) - 1}, got {label}")
    return Example(
        index=_whole(record, "index", where),
        label=label,
        probabilities=probabilities,
        members=_array(members, where, "members", (None, len(probabilities))) if members else np.empty((0, len(probabilities))),
        image=None if image is None else _array(image, where, "image", (None, None, None)),
        point=None if point is None else numbers({"point": point}, "point", where, low=float("-inf")),
        chosen=None if chosen is None else str(chosen),
    )


def _array(values: Any, where: str, key: str, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """Nested lists of finite numbers as an array of the given shape; None stands for any size."""
    wanted = f"{where}: {key!r} must be nested lists [{']['.join(str(size or 'n') for size in shape)}] of finite numbers"
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(wanted) from error
    fits = array.ndim == len(shape) and all(size in (None, actual) for size, actual in zip(shape, array.shape, strict=True))
    if not fits or not array.size or not np.isfinite(array).all():
        raise InputError(f"{wanted}, got the shape {list(array.shape)}")
    return array


def _disagreement(record: Mapping[str, Any]) -> Disagreement:
    edges = numbers(record, "edges", "disagreement", low=0, high=1)
    correct, wrong = ([int(count) for count in numbers(record, key, "disagreement", low=0)] for key in ("correct", "wrong"))
    if len(edges) < 2 or edges != sorted(set(edges)):
        raise InputError(f"disagreement: 'edges' must be two or more increasing numbers, got {brief(edges)}")
    for key, counts in (("correct", correct), ("wrong", wrong)):
        if len(counts) != len(edges) - 1:
            raise InputError(f"disagreement: {key!r} must have {len(edges) - 1} counts, one between edges, got {len(counts)}")
    return Disagreement(edges, correct, wrong)


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if not is_number(value):
        raise InputError(f"{key!r} must be a number, got {brief(value)}")
    return float(value) if is_finite(value) else None


def _whole(record: Mapping[str, Any], key: str, where: str) -> int:
    value = get(record, key, where)
    if not is_finite(value) or value != int(value):
        raise InputError(f"{where}: {key!r} must be a whole number, got {brief(value)}")
    return int(value)


def _by_layer(record: Mapping[str, Any], key: str) -> dict[str, float]:
    values = _optional(record, key)
    found = {str(name): _number(values, name) for name in values}
    return {name: value for name, value in found.items() if value is not None}


def _optional(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {} if record.get(key) is None else mapping(record, key, "the record")


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be an object, got {brief(value)}")
    return value
