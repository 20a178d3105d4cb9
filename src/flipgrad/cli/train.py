"""``flipgrad train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flipgrad.cli._shared import working
from flipgrad.data import digits
from flipgrad.estimators import ESTIMATORS
from flipgrad.plots import training_curve
from flipgrad.training import Evaluation, RunFolder, TrainConfig, digits_net
from flipgrad.training import train as run_training

DEFAULTS = TrainConfig()


def train(
    estimator: Annotated[str, typer.Option(help=f"Gradient estimator: {', '.join(ESTIMATORS)}.")] = DEFAULTS.estimator,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(help="Images per update.")] = DEFAULTS.batch_size,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = DEFAULTS.lr,
    schedule: Annotated[str, typer.Option(help="Learning rate: constant, or cosine (down to 0).")] = DEFAULTS.schedule,
    momentum: Annotated[float, typer.Option(help="Nesterov momentum.")] = DEFAULTS.momentum,
    shift: Annotated[int, typer.Option(help="Move training images by up to so many pixels.")] = DEFAULTS.shift,
    samples: Annotated[int, typer.Option(help="Draws per image for the reported numbers.")] = DEFAULTS.samples,
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, ...")] = DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="CPU threads; this net is too small to gain from more.")] = DEFAULTS.threads,
    output: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/digits-ESTIMATOR).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.")] = False,
) -> None:
    """Train a small convolutional SBN on handwritten digits; store metrics, weights and a picture."""
    config = TrainConfig(estimator, epochs, batch_size, lr, schedule, momentum, shift, samples, seed, device, threads)
    folder = RunFolder(output or Path("runs") / f"digits-{estimator}", overwrite=overwrite)
    torch.set_num_threads(threads)
    data = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = digits_net(data.classes)
    console = Console()
    console.print(f"Training on {len(data.train)} images of {data.name} with {estimator.upper()}, {epochs} epochs:")
    updates = epochs * -(-len(data.train) // batch_size)
    try:
        with working(console) as work:

            def report(done: int, record: dict[str, float]) -> None:
                work.at(done, updates, "train", _headline(record))

            evaluation = run_training(config, net, data, folder, report)
    except KeyboardInterrupt:
        _draw(folder)
        console.print(f"Interrupted. Weights and metrics of the whole epochs are in {folder.path}")
        raise
    _draw(folder)
    console.print(_summary(evaluation))
    console.print(f"Weights, metrics and {folder.CURVE} are in {folder.path}", highlight=False)


def _headline(record: dict[str, float]) -> str:
    if not record:
        return ""
    return f"loss {record['train_loss']:.3f}, test accuracy {record['accuracy_n']:.1%}"


def _summary(evaluation: Evaluation) -> Table:
    table = Table(title="Test images")
    table.add_column("")
    table.add_column("1 sample", justify="right")
    table.add_column(f"{evaluation.samples} samples", justify="right")
    table.add_column("deterministic", justify="right")
    table.add_row(
        "accuracy",
        f"{evaluation.accuracy_1:.2%}",
        f"{evaluation.accuracy_n:.2%}",
        f"{evaluation.accuracy_deterministic:.2%}",
    )
    table.add_row(
        "cross-entropy", f"{evaluation.expected_loss:.4f} (expected)", f"{evaluation.marginal_loss:.4f} (marginal)", ""
    )
    return table


def _draw(folder: RunFolder) -> None:
    metrics = folder.path / folder.METRICS
    if metrics.stat().st_size:
        training_curve(metrics, folder.path / folder.CURVE)
