"""Result files of a gradient evaluation: read and checked, so that a figure is right or not drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from flipgrad.errors import InputError
from flipgrad.plots.loading import Count, Natural, NotNegative, Range, load
from flipgrad.plots.style import ordered, plain

# A relative error below this is the rounding of float32: it is drawn as none.
ROUNDING = 1e-6

Cosine = Annotated[float, Range("from -1 to 1", -1, 1)]


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows: a layer ("layer 1", "head", "all") of a result file, under a title."""

    result: Path
    layer: str
    title: str


@dataclass(frozen=True)
class Measurement:
    """One estimator in the layer ``name``; errors are relative to the length of the gradient, curves go over ``samples``."""

    name: str
    samples: list[Count]
    rmse: list[NotNegative]
    cosine_mean: list[Cosine]
    cosine_low: list[Cosine]
    cosine_high: list[Cosine]
    bias: NotNegative
    bias_low: NotNegative
    bias_high: NotNegative
    std: NotNegative
    std_low: NotNegative
    std_high: NotNegative
    # Told by the estimator, not by each of its layers.
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not self.samples or any(after <= before for before, after in pairwise(self.samples)):
            raise InputError(f"'samples' must be increasing and not empty, got {self.samples}")
        for key in ("rmse", "cosine_mean", "cosine_low", "cosine_high"):
            if (count := len(getattr(self, key))) != len(self.samples):
                raise InputError(f"{key!r} must have {len(self.samples)} entries, one per entry of 'samples', got {count}")
        for key, low, high in (("bias", self.bias_low, self.bias_high), ("std", self.std_low, self.std_high)):
            if low > high:
                raise InputError(f"'{key}_low' must not exceed '{key}_high', got {low} and {high}")


@dataclass(frozen=True)
class Estimator:
    """What the file says of one estimator."""

    unbiased: bool
    layers: list[Measurement]


@dataclass(frozen=True)
class LayerError:
    """The relative error of a reference in the layer ``name``."""

    name: str
    error: NotNegative


@dataclass(frozen=True)
class Reference:
    """What estimators were compared with: the exact gradient, or the mean of ``draws`` of an estimator and its ``error``."""

    kind: Literal["exact", "draws"]
    estimator: str = ""
    draws: Natural = 0
    layers: list[LayerError] = field(default_factory=list)
    # Of the layer that is drawn.
    error: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "draws" and not self.draws:
            raise InputError("'draws' must be at least 1, got 0")

    @property
    def source(self) -> str:
        """Where one that is not exact comes from."""
        return f"{self.estimator}, {plain(self.draws)} draws"


@dataclass(frozen=True)
class ResultFile:
    """A whole result file."""

    estimators: dict[str, Estimator]
    reference: Reference

    def __post_init__(self) -> None:
        if not self.estimators:
            raise InputError("'estimators' must hold at least one, got none")


@dataclass(frozen=True)
class LayerResult:
    """One layer of a result file; an exact ``reference`` is None."""

    estimators: dict[str, Measurement]
    reference: Reference | None


def layers(path: Path) -> list[str]:
    """The layers in a result file, as :class:`Panel` calls them: those of its first estimator."""
    first = next(iter(_load(path).estimators.values()))
    return [layer.name for layer in first.layers]


def read_all(panels: Sequence[Panel], estimators: Sequence[str] | None = None) -> list[LayerResult]:
    """Read what the panels show, of the given estimators or of all; each must be in one of the files."""
    if not panels:
        raise InputError("panels: expected at least one, got none")
    results = [read(panel.result, panel.layer) for panel in panels]
    known = {name for result in results for name in result.estimators}
    chosen = known if estimators is None else set(estimators)
    if not chosen or not chosen <= known:
        files = ", ".join(dict.fromkeys(str(panel.result) for panel in panels))
        strange = ", ".join(sorted(chosen - known)) or "an empty list"
        raise InputError(f"estimators: {strange} is not in {files}; choose from {', '.join(ordered(known))}")
    return [
        replace(r, estimators={name: r.estimators[name] for name in ordered(r.estimators) if name in chosen}) for r in results
    ]


def read(path: Path, layer: str) -> LayerResult:
    """Read one layer of a result file, or raise an `InputError` that names the file and what to do."""
    file = _load(path)
    estimators = {
        name: replace(_named(layer, estimator.layers, f"{path}: estimator {name!r}"), unbiased=estimator.unbiased)
        for name, estimator in file.estimators.items()
    }
    if file.reference.kind == "exact":
        return LayerResult(estimators, None)
    error = _named(layer, file.reference.layers, f"{path}: the reference").error
    return LayerResult(estimators, replace(file.reference, error=error))


def _load(path: Path) -> ResultFile:
    missing, broken = "run the evaluation that writes it, or correct the path", "run the evaluation again to rewrite it"
    return load(path, ResultFile, missing=missing, broken=broken)


Layer = TypeVar("Layer", Measurement, LayerError)


def _named(name: str, layers: Sequence[Layer], where: str) -> Layer:
    for layer in layers:
        if layer.name == name:
            return layer
    raise InputError(f"{where} has no layer {name!r}; choose one of {', '.join(repr(layer.name) for layer in layers)}")
