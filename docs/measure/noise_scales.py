"""Trains the digits network with noises of several scales, with and without norms, and writes what came of it.

``python docs/measure/noise_scales.py docs/measure/noise_scales.json`` goes on where it was stopped; the table of the page "How
large should the noise be?" is made from that file.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from flipgrad import files, training

EPOCHS = 12
SCALES = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
NORMS = ("none", "batch")
ESTIMATORS = ("psa", "st")
RATES = (0.05, 0.15)
SEEDS = (0, 1, 2)
KEPT = ("objective", "expected_loss", "accuracy_1", "accuracy_n", "accuracy_deterministic")


def trained(scale: float, norm: str, estimator: str, rate: float, seed: int) -> dict[str, Any]:
    """The numbers of the last epoch, on a tenth of the training images that was held out, of one training."""
    config = training.TrainConfig(
        noise=f"logistic:{scale}", norm=norm, estimator=estimator, lr=rate, seed=seed, epochs=EPOCHS, schedule="cosine"
    )
    data = training.load_data(config)
    records: list[dict[str, Any]] = []
    try:
        training.train(config, training.make_net(config, data), data, epoch_done=lambda record: records.append(dict(record)))
    except training.DivergenceError:
        return {"diverged": True}
    return {name: records[-1][name] for name in KEPT}


def main(output: Path) -> None:
    """All trainings that ``output`` does not have yet."""
    torch.set_num_threads(1)
    done = json.loads(output.read_text())["runs"] if output.exists() else []
    known = {tuple(run[name] for name in ("seed", "estimator", "rate", "norm", "scale")) for run in done}
    for estimator, seed, rate, norm, scale in product(ESTIMATORS, SEEDS, RATES, NORMS, SCALES):
        if (seed, estimator, rate, norm, scale) not in known:
            setting = {"seed": seed, "estimator": estimator, "rate": rate, "norm": norm, "scale": scale}
            done.append(setting | trained(scale, norm, estimator, rate, seed))
            facts = {"epochs": EPOCHS, "schedule": "cosine", "data": "digits", "torch": torch.__version__}
            files.write(output, (json.dumps({**facts, "runs": done}, indent=0) + "\n").encode())


def table(output: Path) -> str:
    """The accuracies with 10 samples and the expected losses, means over seeds, in Markdown."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in json.loads(output.read_text())["runs"]:
        found.setdefault((run["estimator"], run["norm"], run["rate"], run["scale"]), []).append(run)
    lines = ["| | " + " | ".join(f"scale {scale:g}" for scale in SCALES) + " |", "| --- " * (1 + len(SCALES)) + "|"]
    for estimator, norm, rate in product(ESTIMATORS, NORMS, RATES):
        cells = []
        for scale in SCALES:
            runs = found[estimator, norm, rate, scale]
            accuracy, loss = (mean(run[name] for run in runs) for name in ("accuracy_n", "expected_loss"))
            cells.append(f"{accuracy:.1%}, {loss:.2f}")
        name = {"psa": "PSA", "st": "ST"}[estimator]
        lines.append(f"| {name}, {'BatchNorm' if norm == 'batch' else 'no norm'}, rate {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
