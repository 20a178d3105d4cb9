"""Result files of a gradient evaluation: read and checked, so that a figure is right or not drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots._fields import get, mapping, numbers
from flipgrad.plots.style import ordered

REWRITE = "run the evaluation again to rewrite it"
# A relative error below this is the rounding of float32: it is drawn as none.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows: a layer ("layer 1", "head", "all") of a result file, under a title."""

    result: Path
    layer: str
    title: str


@dataclass(frozen=True)
class Interval:
    """A measured value with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """One estimator in one layer; errors are relative to the length of the gradient, curves go over ``samples``."""

    unbiased: bool
    samples: list[float]
    rmse: list[float]
    cosine_mean: list[float]
    cosine_low: list[float]
    cosine_high: list[float]
    bias: Interval
    std: Interval


@dataclass(frozen=True)
class Reference:
    """A reference that is itself estimated: from which draws, and its relative error in this layer."""

    estimator: str
    draws: int
    error: float


@dataclass(frozen=True)
class LayerResult:
    """One layer of a result file; an exact ``reference`` is None."""

    estimators: dict[str, Measurement]
    reference: Reference | None


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


def layers(path: Path) -> list[str]:
    """The layers in a result file, as :class:`Panel` calls them: those of its first estimator."""
    try:
        first = next(iter(mapping(_record(path), "estimators", "the file").values()), None)
        return [str(get(layer, "name", "a layer")) for layer in get(first, "layers", "the first estimator")]
    except InputError as error:
        raise InputError(f"{path}: {error}; {REWRITE}") from error


def read(path: Path, layer: str) -> LayerResult:
    """Read one layer of a result file, or raise an `InputError` that names the file and what to do."""
    record = _record(path)
    try:
        estimators = {
            str(name): _measurement(entry, name, layer) for name, entry in mapping(record, "estimators", "the file").items()
        }
        if not estimators:
            raise InputError("estimators: expected at least one, got none")
        return LayerResult(estimators, _reference(mapping(record, "reference", "the file"), layer))
    except _UnknownLayerError as error:
        raise InputError(f"{path}: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}; {REWRITE}") from error


def _record(path: Path) -> dict[str, Any]:
    return read_json(path, missing="run the evaluation that writes it, or correct the path", broken=REWRITE)


class _UnknownLayerError(InputError):
    """The file is sound, the question is not."""


def _measurement(entry: Any, name: str, layer: str) -> Measurement:
    where = f"estimator {name!r}, {layer!r}"
    if not isinstance(get(entry, "unbiased", where), bool):
        raise InputError(f"{where}: 'unbiased' must be true or false, got {entry['unbiased']!r}")
    values = _layer(get(entry, "layers", where), layer, f"estimator {name!r}")
    samples = numbers(values, "samples", where, low=1)
    if not samples or any(after <= before for before, after in pairwise(samples)):
        raise InputError(f"{where}: 'samples' must be increasing and not empty, got {samples}")
    curves = {
        "rmse": numbers(values, "rmse", where, low=0),
        **{key: numbers(values, key, where, low=-1, high=1) for key in ("cosine_mean", "cosine_low", "cosine_high")},
    }
    for key, curve in curves.items():
        if len(curve) != len(samples):
            raise InputError(f"{where}: {key!r} must have {len(samples)} entries, one per entry of 'samples', got {len(curve)}")
    return Measurement(
        entry["unbiased"], samples, bias=_interval(values, "bias", where), std=_interval(values, "std", where), **curves
    )


def _reference(entry: Mapping[str, Any], layer: str) -> Reference | None:
    kind = get(entry, "kind", "reference")
    if kind == "exact":
        return None
    if kind != "draws":
        raise InputError(f"reference: 'kind' must be 'exact' or 'draws', got {kind!r}")
    values = _layer(get(entry, "layers", "reference"), layer, "reference")
    (draws,) = numbers({"draws": [get(entry, "draws", "reference")]}, "draws", "reference", low=1)
    (error,) = numbers({"error": [get(values, "error", "reference")]}, "error", "reference", low=0)
    return Reference(str(get(entry, "estimator", "reference")), int(draws), error)


def _interval(values: Mapping[str, Any], key: str, where: str) -> Interval:
    value, low, high = (
        numbers({name: [get(values, name, where)]}, name, where, low=0)[0] for name in (key, f"{key}_low", f"{key}_high")
    )
    if low > high:
        raise InputError(f"{where}: '{key}_low' must not exceed '{key}_high', got {low} and {high}")
    return Interval(value, low, high)


def _layer(layers: Any, layer: str, where: str) -> Mapping[str, Any]:
    if not isinstance(layers, list) or not all(isinstance(item, dict) and "name" in item for item in layers):
        raise InputError(f"{where}: 'layers' must be a list of objects with a 'name'")
    for item in layers:
        if item["name"] == layer:
            return dict(item)
    raise _UnknownLayerError(
        f"{where} has no layer {layer!r}; choose one of {', '.join(repr(item['name']) for item in layers)}"
    )
