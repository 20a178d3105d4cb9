"""``flipgrad train``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flipgrad.cli._shared import evaluation_table, working
from flipgrad.errors import InputError, StorageError
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators.names import for_training
from flipgrad.plots import training_curve
from flipgrad.training import (
    Checkpoint,
    DivergenceError,
    Evaluation,
    RunFolder,
    TrainConfig,
    connect,
    load_data,
    make_net,
    read_config,
)
from flipgrad.training import train as run_training
from flipgrad.training.board import Board
from flipgrad.training.config import AUTO, CHOICES
from flipgrad.training.processes import launched_rank, started_by_torchrun

DEFAULTS = TrainConfig()
# What may be said together with --resume: none of it changes what is computed up to the epochs that were asked for.
WITH_RESUME = ("resume", "epochs", "checkpoint_minutes", "tensorboard")
# Networks so small that more threads only cost.
SMALL = ("digits", "toy")

PROBLEM, METHOD, RUN, STORE = "Problem", "Method", "Machine", "What is stored"


def train(
    ctx: typer.Context,
    data: Annotated[
        str, typer.Option(help=f"Data set: {', '.join(CHOICES['data'])} (a folder by class).", rich_help_panel=PROBLEM)
    ] = DEFAULTS.data,
    data_folder: Annotated[
        str | None, typer.Option(help="Where the files of mnist, cifar10 or images are.", rich_help_panel=PROBLEM)
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Resize a folder's images to so many pixels, squared.", rich_help_panel=PROBLEM)
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="auto (the data set's own), widths such as 200-200, or package.module:function, called with the data set.",
            rich_help_panel=PROBLEM,
        ),
    ] = DEFAULTS.model,
    width: Annotated[
        float, typer.Option(help="Factor on the channels of the CIFAR-10 network.", rich_help_panel=PROBLEM)
    ] = DEFAULTS.width,
    validation: Annotated[
        float,
        typer.Option(
            help="Share of the training images held out for the metrics of every epoch; with 0 these are on the test images.",
            rich_help_panel=PROBLEM,
        ),
    ] = DEFAULTS.validation,
    augment: Annotated[
        str,
        typer.Option(help=f"Augmentation: {', '.join(CHOICES['augment'])} (the data set's usual).", rich_help_panel=PROBLEM),
    ] = DEFAULTS.augment,
    estimator: Annotated[
        str,
        typer.Option(
            help=f"Gradient estimator: {', '.join(ESTIMATORS)}; concrete:0.1, arms:8, reinforce+running work, too.",
            rich_help_panel=METHOD,
        ),
    ] = DEFAULTS.estimator,
    objective: Annotated[
        str,
        typer.Option(help="What to minimise: the expected loss, or the multi-sample bound.", rich_help_panel=METHOD),
    ] = DEFAULTS.objective,
    samples: Annotated[int, typer.Option(help="Draws of all noises per update.", rich_help_panel=METHOD)] = DEFAULTS.samples,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", rich_help_panel=METHOD)] = DEFAULTS.epochs,
    batch_size: Annotated[
        int, typer.Option(help="Images per update, of all processes together.", rich_help_panel=METHOD)
    ] = DEFAULTS.batch_size,
    lr: Annotated[str, typer.Option(help="Learning rate, or auto to search for it.", rich_help_panel=METHOD)] = str(
        DEFAULTS.lr
    ),
    schedule: Annotated[
        str,
        typer.Option(
            help="Learning rate: constant, cosine (down to 0), step (a tenth after 1/2 and 3/4).", rich_help_panel=METHOD
        ),
    ] = DEFAULTS.schedule,
    optimizer: Annotated[
        str, typer.Option(help="sgd (with Nesterov momentum) or adam.", rich_help_panel=METHOD)
    ] = DEFAULTS.optimizer,
    momentum: Annotated[float, typer.Option(help="Of SGD.", rich_help_panel=METHOD)] = DEFAULTS.momentum,
    weight_decay: Annotated[
        float, typer.Option(help="Factor of the weights in their gradient.", rich_help_panel=METHOD)
    ] = DEFAULTS.weight_decay,
    seed: Annotated[int, typer.Option(help="Same seed, same run.", rich_help_panel=METHOD)] = DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, ...", rich_help_panel=RUN)] = DEFAULTS.device,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads (default: 1 for digits and toy, else all cores).", rich_help_panel=RUN),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float32, or bfloat16 for mixed precision.", rich_help_panel=RUN)
    ] = DEFAULTS.precision,
    eval_samples: Annotated[
        int, typer.Option(help="Draws per image for the reported numbers.", rich_help_panel=STORE)
    ] = DEFAULTS.eval_samples,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/DATA-ESTIMATOR).", rich_help_panel=STORE)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.", rich_help_panel=STORE)
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, to the bit as if it had not stopped; --epochs makes it longer.",
            rich_help_panel=STORE,
        ),
    ] = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Time between checkpoints within an epoch.", rich_help_panel=STORE)
    ] = 5.0,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write for TensorBoard, too: pip install 'flipgrad[tensorboard]'.", rich_help_panel=STORE
        ),
    ] = False,
) -> None:
    """Train a stochastic binary network; store metrics, weights, checkpoints and a picture.

    Ctrl-C saves and stops; --resume goes on. Many processes: torchrun --nproc-per-node 2 -m flipgrad train ...
    """
    if resume is not None:
        _refuse_other_options(ctx)
        config = _longer(read_config(resume), epochs if _given(ctx, "epochs") else None)
        path = resume
    else:
        config = TrainConfig(
            data=data,
            data_folder=data_folder,
            image_size=image_size,
            model=model,
            width=width,
            estimator=estimator,
            epochs=epochs,
            batch_size=batch_size,
            lr=_rate(lr),
            schedule=schedule,
            optimizer=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            augment=augment,
            validation=validation,
            samples=samples,
            eval_samples=eval_samples,
            objective=objective,
            seed=seed,
            device=device,
            threads=threads if threads is not None else _default_threads(data),
            precision=precision,
        )
        path = output or Path("runs") / f"{data}-{estimator.replace(':', '-')}"
    if not checkpoint_minutes > 0:
        raise InputError(f"checkpoint_minutes is {checkpoint_minutes}; it must be positive, e.g. 5")
    _run(config, path, overwrite=overwrite, resume=resume is not None, minutes=checkpoint_minutes, tensorboard=tensorboard)


def _run(config: TrainConfig, path: Path, *, overwrite: bool, resume: bool, minutes: float, tensorboard: bool) -> None:
    first = launched_rank() == 0
    console = Console(quiet=not first)
    torch.set_num_threads(config.threads)
    with ExitStack() as stack:
        # Mistakes are told before the processes wait for one another, and before anything is written.
        examples = load_data(config)
        net = make_net(config, examples)
        folder = None
        if first:
            folder = stack.enter_context(RunFolder.reopen(path) if resume else RunFolder(path, overwrite=overwrite))
        checkpoint = Checkpoint.read(path / RunFolder.CHECKPOINT) if resume else None
        if checkpoint is not None and (path / RunFolder.SUMMARY).is_file() and checkpoint.facts.get("epoch") == config.epochs:
            message = f"The run in {path} is finished: {config.epochs} epochs. More: --epochs N"
            console.print(message, highlight=False, soft_wrap=True)
            return
        done = 0 if checkpoint is None else int(checkpoint.facts.get("epoch", 0))
        board = stack.enter_context(closing(Board(path / "tensorboard", done))) if tensorboard and first else None
        processes = stack.enter_context(closing(connect(config.device)))
        label = for_training(config.estimator, 1)[0]
        console.print(
            f"{'Going on with' if resume else 'Training on'} {len(examples.train):,} images of {examples.name} with {label}, "
            f"{config.epochs} epochs{f', {processes.size} processes' if processes.size > 1 else ''}:",
            highlight=False,
        )
        try:
            with working(console, patient=processes.size > 1) as work:

                def report(done: int, total: int, record: Mapping[str, Any]) -> None:
                    work.at(done, total, "train", _headline(record))

                evaluation = run_training(
                    config,
                    net,
                    examples,
                    folder,
                    processes=processes,
                    checkpoint=checkpoint,
                    report=report,
                    epoch_done=board.write if board else lambda record: None,
                    stop=lambda: work.interrupted,
                    minutes=minutes,
                )
        except KeyboardInterrupt:
            _draw(folder)
            console.print(f"Interrupted. Everything is saved in {path}; go on with:", highlight=False, soft_wrap=True)
            console.print(f"  {_command(path)}", highlight=False, soft_wrap=True)
            raise
        except DivergenceError as error:
            _draw(folder)
            raise DivergenceError(f"{error}; the last good state is in {path}") from None
        except StorageError as error:
            raise StorageError(f"{error}; make room, and go on with: {_command(path)}") from None
        _finish(console, folder, evaluation)


def _finish(console: Console, folder: RunFolder | None, evaluation: Evaluation) -> None:
    if folder is None:
        return
    _draw(folder)
    console.print(evaluation_table({"Test images": evaluation}))
    console.print(f"Weights, metrics and {folder.CURVE} are in {folder.path}", highlight=False, soft_wrap=True)


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _refuse_other_options(ctx: typer.Context) -> None:
    for name in ctx.params:
        if name not in WITH_RESUME and _given(ctx, name):
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} cannot go with --resume: a run goes on as it was; leave it out, or begin a new run")


def _longer(config: TrainConfig, epochs: int | None) -> TrainConfig:
    if epochs is None or epochs == config.epochs:
        return config
    if config.schedule != "constant":
        raise InputError(f"--epochs {epochs}: the {config.schedule} schedule was made for {config.epochs}; leave it out")
    if epochs < config.epochs:
        raise InputError(f"--epochs {epochs}: the run is of {config.epochs} epochs already; give more, or leave it out")
    return replace(config, epochs=epochs)


def _rate(text: str) -> float | str:
    if text == AUTO:
        return AUTO
    try:
        return float(text)
    except ValueError:
        raise InputError(f"Invalid value for '--lr': {text!r} is not a number, and not auto") from None


def _default_threads(data: str) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if data in SMALL else max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _command(path: Path) -> str:
    """What to type to go on."""
    start = "flipgrad"
    if started_by_torchrun():
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')} -m flipgrad"
    return f"{start} train --resume {path}"


def _headline(record: Mapping[str, Any]) -> str:
    if not record:
        return ""
    return f"loss {record['train_loss']:.3f}, {record['split']} accuracy {record['accuracy_n']:.1%}"


def _draw(folder: RunFolder | None) -> None:
    if folder is None:
        return
    metrics = folder.path / folder.METRICS
    if metrics.stat().st_size:
        training_curve(metrics, folder.path / folder.CURVE)
