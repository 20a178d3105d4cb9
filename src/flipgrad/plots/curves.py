"""The curves of a training run."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flipgrad.plots.style import BLUE, GREEN, ORANGE


def training_curve(metrics: Path, output: Path) -> None:
    """Draw losses and accuracies over epochs from a run's ``metrics`` (JSON lines) as a PNG."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    epochs = [record["epoch"] for record in records]
    samples, split = records[-1]["samples"], records[-1].get("split", "test")
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    for key, label, colour in (
        ("train_loss", "training, the method's own", BLUE),
        ("expected_loss", f"{split}, expected", ORANGE),
        ("marginal_loss", f"{split}, marginal ({samples} samples)", GREEN),
    ):
        losses.plot(epochs, [record[key] for record in records], color=colour, label=label, **_markers(epochs))
    losses.set(ylabel="cross-entropy", yscale="log")
    for key, label, colour in (
        ("accuracy_1", "1 sample", ORANGE),
        ("accuracy_n", f"{samples} samples", GREEN),
        ("accuracy_deterministic", "deterministic", BLUE),
    ):
        accuracies.plot(epochs, [record[key] for record in records], color=colour, label=label, **_markers(epochs))
    accuracies.set(ylabel=f"{split} accuracy")
    accuracies.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (losses, accuracies):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(output)


def _markers(epochs: list[int]) -> dict[str, str]:
    """A line through one point is invisible; few points deserve to be seen."""
    return {"marker": "o"} if len(epochs) < 3 else {}
