"""The folder of a run as training and evaluation would write it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from flipgrad import files

LAYERS = ("0: BinaryConv2d", "1: BinaryConv2d", "head")


def config() -> dict:
    return {
        "config": {"estimator": "psa", "data": "digits", "epochs": 4, "lr": 0.1, "seed": 7, "net": {"widths": [5, 5]}},
        "command": ["train", "--data", "my digits"],
        "versions": {"flipgrad": "0.1", "torch": "2.13"},
        "machine": {"system": "Linux", "cores": 2},
    }


def scores(better: float = 0.0, samples: int = 10) -> dict:
    return {
        "samples": samples,
        "accuracy_1": 0.90123 + better,
        "accuracy_n": 0.94166 + better,
        "accuracy_deterministic": 0.93333 + better,
        "expected_loss": 0.31117 - better,
        "marginal_loss": 0.18321 - better,
    }


def epoch(number: int) -> dict:
    # The third is the best of four.
    return {
        "epoch": number,
        "objective": 2.0 / number,
        **scores(-0.01 * abs(number - 3)),
        "lr": 0.1 / number,
        "seconds": 1.5,
        "images_per_second": 1000.0 + number,
        "gradient_norm": {name: (i + 1) / number for i, name in enumerate(LAYERS)},
        "saturated": dict.fromkeys(LAYERS[:2], 0.1 * number),
        "changed_signs": {LAYERS[1]: 0.2 / number},
        "undecided": {LAYERS[1]: 0.05 * number},
    }


def example(index: int = 0, label: int = 1, **changes: object) -> dict:
    members = [[0.1, 0.8, 0.1], [0.3, 0.5, 0.2], [0.6, 0.3, 0.1], [0.2, 0.6, 0.2]]
    return {
        "index": index,
        "label": label,
        "chosen": "random",
        "image": [[[-1.0, 1.0], [0.0, 0.5]]],
        "point": None,
        "probabilities": [math.fsum(column) / 4 for column in zip(*members, strict=True)],
        "members": members,
        **changes,
    }


def reliability(samples: int | None, error: float) -> dict:
    return {
        "samples": samples,
        "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
        "count": [0, 10, 30, 60],
        "confidence": [None, 0.4, 0.6, 0.9],
        "accuracy": [None, 0.4, 0.5, 0.9 - error],
        "error": error,
    }


def ensembles() -> dict:
    sizes = [
        {"samples": 1, "ensembles": 8, "accuracy": 0.92, "accuracy_error": 0.01, "loss": 0.29, "loss_error": 0.02},
        {"samples": 4, "ensembles": 2, "accuracy": 0.96, "accuracy_error": 0.008, "loss": 0.18, "loss_error": 0.015},
        {"samples": 8, "ensembles": 1, "accuracy": 0.965, "accuracy_error": 0.008, "loss": 0.16, "loss_error": 0.014},
    ]
    return {"sizes": sizes, "reliability": [reliability(1, 0.12), reliability(4, 0.031), reliability(None, 0.2)]}


def evaluation() -> dict:
    return {
        "samples": 4,
        "splits": {"validation": scores(0.01, 4), "test": scores(0.02, 4)},
        "classes": ["zero", "one", "two"],
        "examples": [example(3), example(5, label=0), example(8, chosen="uncertain")],
        "disagreement": {"edges": [0.0, 0.25, 0.5, 0.75, 1.0], "correct": [80, 8, 2, 0], "wrong": [1, 3, 4, 2]},
        "ensembles": ensembles(),
        "confusion": [[30, 2, 0], [1, 29, 3], [0, 4, 31]],
    }


def write_run(folder: Path, *, evaluated: bool = True, epochs: int = 4) -> Path:
    """A run with everything in it; what a test does not want, it takes away."""
    folder.mkdir(exist_ok=True)
    put(folder / "config.json", config())
    put_lines(folder / "metrics.jsonl", map(epoch, range(1, epochs + 1)))
    put(folder / "summary.json", epoch(epochs) if epochs else {})
    if evaluated:
        put(folder / "evaluation.json", evaluation())
    return folder


EVIL = """"'></title></style></svg><script>document.title='evil'</script><img src=x onerror=alert(1)>{{ 7 * 7 }}${x}$"""


def write_evil_run(folder: Path) -> Path:
    """A run whose every string tries to be more than that."""
    write_run(folder)
    changed = config()
    changed["config"] = {"estimator": EVIL, "data": EVIL, "model": EVIL, EVIL: [EVIL, {EVIL: EVIL}]}
    changed["command"], changed["versions"], changed["machine"] = [EVIL], {EVIL: EVIL}, {EVIL: EVIL}
    put(folder / "config.json", changed)
    records = [epoch(number) | {"gradient_norm": {EVIL: 1.0}, "saturated": {EVIL: 0.5, "_": 0.1}} for number in (1, 2)]
    put_lines(folder / "metrics.jsonl", records)
    found = evaluation() | {"classes": [EVIL] * 3, "splits": {EVIL: scores()}}
    found["examples"] = [example(chosen=EVIL), example(label=0, image=None, point=[1.0, 2.0])]
    put(folder / "evaluation.json", found)
    return folder


def put(path: Path, content: dict) -> None:
    path.write_text(json.dumps(files.with_checksum(content)), encoding="utf-8")


def put_lines(path: Path, records: Iterable[dict]) -> None:
    path.write_text("".join(files.json_line(record) + "\n" for record in records))
