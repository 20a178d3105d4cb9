"""Result files as a gradient evaluation would write them: rmse(M)² = bias² + std²/M."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from flipgrad import files
from flipgrad.plots import Panel

SAMPLES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
# Whether unbiased, standard deviation of one sample, bias; both relative. The order is not that of prominence.
ESTIMATORS = {
    "REINFORCE": (True, 8.7, 0.0),
    "ARM": (True, 3.05, 0.0),
    "ST": (False, 0.11, 0.14),
    "Tanh": (False, 0.0, 0.32),
    "Concrete 1": (False, 0.1, 0.56),
    "Concrete 0.1": (False, 5.9, 0.01),
    "PSA": (False, 0.088, 0.035),
    "HardST": (False, 0.3, 0.86),
    "ADF": (False, 0.08, 0.29),
    "LocalReparam": (False, 0.23, 0.28),
    "ZGR": (False, 0.18, 0.09),
    "GumbelRao": (False, 0.57, 0.4),
    "REINFORCE + mean": (True, 4.1, 0.0),
    "MuProp": (True, 6.2, 0.0),
    "MuProp + mean": (True, 3.9, 0.0),
    "LEG": (True, 0.8, 0.0),
    "REBAR": (True, 2.2, 0.0),
    "RELAX": (True, 2.0, 0.0),
    "DisARM": (True, 2.3, 0.0),
    "ARMS": (True, 1.9, 0.0),
    "BitFlip": (True, 2.6, 0.0),
    "DoubleCV": (True, 1.5, 0.0),
    "Exact": (True, 0.0, 0.0),
    "Mine": (False, 0.15, 0.12),
}
TEN = list(ESTIMATORS)[:10]


def layer(name: str, std: float, bias: float, lowest: float) -> dict:
    """One layer of one estimator; its lowest cosine is at least ``lowest``."""
    rmse = [sqrt(bias**2 + std**2 / samples) for samples in SAMPLES]
    cosine = [1 / sqrt(1 + error**2) for error in rmse]
    resolution = std / 50
    found = bias > resolution
    return {
        "name": name,
        "samples": SAMPLES,
        "rmse": rmse,
        "cosine_mean": cosine,
        "cosine_low": [max(value - std / (1 + std), lowest) for value in cosine],
        "cosine_high": [(1 + value) / 2 for value in cosine],
        "bias": bias if found else resolution / 2,
        "bias_low": bias - resolution if found else 0.0,
        "bias_high": bias + resolution,
        "std": std,
        "std_low": 0.98 * std,
        "std_high": 1.02 * std,
    }


def result(reference: float | None = None, *, scale: float = 1.0, lowest: float = 0.01) -> dict:
    """A whole result; ``reference`` is the relative error of one that is itself estimated."""
    names = ("layer 1", "layer 2", "all")
    about = {"kind": "exact"}
    if reference is not None:
        layers = [{"name": name, "error": reference} for name in names]
        about = {"kind": "draws", "estimator": "DisARM", "draws": 1_000_000, "layers": layers}
    estimators = {
        key: {
            "samples_per_second": 1e4,
            "unbiased": unbiased,
            "layers": [layer(name, scale * std * (1 + index), bias, lowest) for index, name in enumerate(names)],
        }
        for key, (unbiased, std, bias) in ESTIMATORS.items()
    }
    return {"estimators": estimators, "reference": about, "seed": 0, "samples": 10_000}


def write(path: Path, content: dict) -> Path:
    """Write a result file."""
    path.write_text(json.dumps(files.with_checksum(content)), encoding="utf-8")
    return path


def panels(folder: Path, content: dict, layers: Sequence[str] = ("layer 1", "layer 2", "all")) -> list[Panel]:
    """Panels of the layers of one result file, written here."""
    path = write(folder / "result.json", content)
    return [Panel(path, layer, layer.title()) for layer in layers]
