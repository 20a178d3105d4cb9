"""``flipgrad train``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flipgrad import plots
from flipgrad.cli._shared import evaluation_table, working
from flipgrad.data import DataSet
from flipgrad.errors import InputError, StorageError
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators.names import for_training
from flipgrad.network import Sequential
from flipgrad.noise import NOISES
from flipgrad.training import (
    MODELS,
    Checkpoint,
    DivergenceError,
    Evaluation,
    Processes,
    RunFolder,
    TrainConfig,
    automatic_rate,
    connect,
    load_data,
    make_net,
    read_checkpoint,
    read_config,
    read_trials,
)
from flipgrad.training import train as run_training
from flipgrad.training.board import Board
from flipgrad.training.config import AUTO, CHOICES
from flipgrad.training.processes import launched_rank, started_by_torchrun
from flipgrad.training.run import is_whole, resume_command
from flipgrad.training.search import Trial

DEFAULTS = TrainConfig()
# What may be said together with --resume: none of it changes what is computed up to the epochs that were asked for.
WITH_RESUME = ("resume", "epochs", "checkpoint_minutes", "tensorboard", "data_folder", "model")
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
            help=f"auto (the data set's own), {', '.join(MODELS)}, widths such as 200-200, or package.module:function, "
            "called with the data set.",
            rich_help_panel=PROBLEM,
        ),
    ] = DEFAULTS.model,
    width: Annotated[
        float, typer.Option(help="Factor on the channels or units of our networks.", rich_help_panel=PROBLEM)
    ] = DEFAULTS.width,
    norm: Annotated[
        str,
        typer.Option(
            help="Before every sign: none, batch (BatchNorm), affine (a learned scale and shift).", rich_help_panel=PROBLEM
        ),
    ] = DEFAULTS.norm,
    noise: Annotated[
        str, typer.Option(help=f"Of all units: {', '.join(NOISES)}; with a scale, logistic:0.5.", rich_help_panel=PROBLEM)
    ] = DEFAULTS.noise,
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
            help=f"Gradient estimator: {', '.join(ESTIMATORS)}; psa:sampled (the paper's), arms:8, reinforce+running too.",
            rich_help_panel=METHOD,
        ),
    ] = DEFAULTS.estimator,
    objective: Annotated[
        str,
        typer.Option(help="What to minimise: the expected loss, or the multi-sample bound.", rich_help_panel=METHOD),
    ] = DEFAULTS.objective,
    samples: Annotated[int, typer.Option(help="Draws of all noises per update.", rich_help_panel=METHOD)] = DEFAULTS.samples,
    draws: Annotated[
        str,
        typer.Option(help="independent, or antithetic: pairs with opposite noise, less variance.", rich_help_panel=METHOD),
    ] = DEFAULTS.draws,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", rich_help_panel=METHOD)] = DEFAULTS.epochs,
    batch_size: Annotated[
        int, typer.Option(help="Images per update, of all processes together.", rich_help_panel=METHOD)
    ] = DEFAULTS.batch_size,
    lr: Annotated[str, typer.Option(help="Learning rate, or auto to search for it.", rich_help_panel=METHOD)] = str(
        DEFAULTS.lr
    ),
    search_trials: Annotated[
        int, typer.Option(help="Rates that --lr auto tries.", rich_help_panel=METHOD)
    ] = DEFAULTS.search_trials,
    search_epochs: Annotated[int, typer.Option(help="Epochs of each.", rich_help_panel=METHOD)] = DEFAULTS.search_epochs,
    search_images: Annotated[
        int | None, typer.Option(help="Training images of each (default: all).", rich_help_panel=METHOD)
    ] = None,
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
    eval_train: Annotated[
        int, typer.Option(help="Report the numbers on so many training images, too.", rich_help_panel=STORE)
    ] = DEFAULTS.eval_train,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/DATA-ESTIMATOR).", rich_help_panel=STORE)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.", rich_help_panel=STORE)
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, to the bit as if it had not stopped; --epochs makes it longer, --model "
            "repeats a package.module:function, --data-folder tells where the files were moved.",
            rich_help_panel=STORE,
        ),
    ] = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Time between checkpoints within an epoch.", rich_help_panel=STORE)
    ] = 5.0,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write for TensorBoard, too: pip install 'flipgrad\\[tensorboard]'.", rich_help_panel=STORE
        ),
    ] = False,
) -> None:
    """Train a stochastic binary network; store metrics, weights, checkpoints and a picture.

    Ctrl-C saves and stops; --resume goes on. Many processes: torchrun --nproc-per-node 2 -m flipgrad train ...
    """
    if resume is not None:
        _refuse_other_options(ctx)
        stored = read_config(resume, data_folder=data_folder, model=model if _given(ctx, "model") else None, repair=True)
        config = _longer(stored, epochs if _given(ctx, "epochs") else None)
        path = resume
    else:
        config = TrainConfig(
            data=data,
            data_folder=data_folder,
            image_size=image_size,
            model=model,
            width=width,
            norm=norm,
            noise=noise,
            estimator=estimator,
            epochs=epochs,
            batch_size=batch_size,
            lr=_rate(lr),
            search_trials=search_trials,
            search_epochs=search_epochs,
            search_images=search_images,
            schedule=schedule,
            optimizer=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            augment=augment,
            validation=validation,
            samples=samples,
            draws=draws,
            eval_samples=eval_samples,
            eval_train=eval_train,
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


@dataclass(frozen=True)
class _Command:
    """What the command works with."""

    path: Path
    folder: RunFolder | None
    console: Console
    processes: Processes


def _run(config: TrainConfig, path: Path, *, overwrite: bool, resume: bool, minutes: float, tensorboard: bool) -> None:
    first = launched_rank() == 0
    # A path may have brackets in it, which are no markup.
    console = Console(quiet=not first, markup=False, highlight=False)
    torch.set_num_threads(config.threads)
    with ExitStack() as stack:
        # Mistakes are told before the processes wait for one another, and before anything is written.
        data = load_data(config)
        net = make_net(config, data)
        folder = None
        if first:
            folder = stack.enter_context(RunFolder.reopen(path) if resume else RunFolder(path, overwrite=overwrite))
        searching = config.lr == AUTO
        checkpoint = read_checkpoint(path) if resume and not searching else None
        done = 0 if checkpoint is None else int(checkpoint.facts.get("epoch", 0))
        if done == config.epochs and is_whole(path):
            message = f"The run in {path} is finished: {_epochs(config)}. More: --epochs N"
            console.print(message, soft_wrap=True)
            # A full disk or a kill may have come between the last numbers and the pictures.
            if folder is not None and not all((path / name).is_file() for name in (folder.CURVE, folder.REPORT)):
                _draw(folder)
            return
        board = stack.enter_context(closing(Board(path / "tensorboard", done))) if tensorboard and first else None
        command = _Command(path, folder, console, stack.enter_context(closing(connect(config.device))))
        with _explained(command, config):
            if searching:
                config = _search(config, data, command, read_trials(path, data) if resume else [])
            epoch_done = board.write if board else lambda record: None
            evaluation = _train(config, net, data, command, checkpoint, epoch_done, minutes)
            _draw(folder)
        if folder is not None:
            console.print(evaluation_table({"Test images": evaluation}))
            files = f"Weights, metrics, {folder.CURVE} and {folder.REPORT} are in {path}"
            console.print(files, soft_wrap=True)


def _search(config: TrainConfig, data: DataSet, command: _Command, done: list[Trial]) -> TrainConfig:
    """The configuration with the best learning rate."""
    folder = command.folder
    if folder is not None:
        # With "auto" in it: an interrupted search goes on with --resume.
        folder.write_config(config, processes=command.processes.size)
    command.console.print(f"Searching for the learning rate, {config.search_trials} trials:")
    with working(command.console, patient=command.processes.size > 1) as work:

        def report(updates: int, total: int, trials: Sequence[Trial]) -> None:
            best = min(trials, key=lambda trial: trial.objective, default=None)
            work.at(updates, total, "search", f"best {best.rate:.2g}" if best else "")

        result = automatic_rate(
            config,
            lambda: make_net(config, data),
            data,
            processes=command.processes,
            done=done,
            report=report,
            trial_done=lambda trials: folder.write_trials(trials, data) if folder else None,
            stop=lambda: work.interrupted,
        )
    command.console.print(f"The best of {len(result.trials)} rates is {result.rate:.3g}")
    return replace(config, lr=result.rate)


def _train(
    config: TrainConfig,
    net: Sequential,
    data: DataSet,
    command: _Command,
    checkpoint: Checkpoint | None,
    epoch_done: Callable[[Mapping[str, Any]], None],
    minutes: float,
) -> Evaluation:
    processes = command.processes
    label = for_training(config.estimator, 1)[0]
    command.console.print(
        f"{'Going on with' if checkpoint else 'Training on'} {len(data.train):,} images of {data.name} with {label}, "
        f"{_epochs(config)}{f', {processes.size} processes' if processes.size > 1 else ''}:"
    )
    with working(command.console, patient=processes.size > 1) as work:
        return run_training(
            config,
            net,
            data,
            command.folder,
            processes=processes,
            checkpoint=checkpoint,
            report=lambda done, total, record: work.at(done, total, "train", _headline(record)),
            epoch_done=epoch_done,
            stop=lambda: work.interrupted,
            minutes=minutes,
        )


@contextmanager
def _explained(command: _Command, config: TrainConfig) -> Iterator[None]:
    """Whatever ends the work early: say what is kept, and how to go on."""
    path, console = command.path, command.console
    try:
        yield
    except KeyboardInterrupt:
        _draw(command.folder)
        console.print(f"Interrupted. Everything is saved in {path}; go on with:", soft_wrap=True)
        console.print(f"  {_go_on(path, config)}", soft_wrap=True)
        raise
    except DivergenceError as error:
        _draw(command.folder)
        raise DivergenceError(f"{error}; the last good state is in {path}") from None
    except StorageError as error:
        begun = (path / RunFolder.CONFIG).is_file()
        how = f"go on with: {_go_on(path, config)}" if begun else "give the same command with --overwrite"
        raise StorageError(f"{error}; make room, and {how}") from None


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


def _go_on(path: Path, config: TrainConfig) -> str:
    """What to type to go on."""
    many = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')} -m " if started_by_torchrun() else ""
    return many + resume_command(path, config)


def _epochs(config: TrainConfig) -> str:
    return f"{config.epochs} epoch{'s' * (config.epochs > 1)}"


def _headline(record: Mapping[str, Any]) -> str:
    if not record:
        return ""
    return f"loss {record['objective']:.3f}, {record['split']} accuracy {record['accuracy_n']:.1%}"


def _draw(folder: RunFolder | None) -> None:
    if folder is not None and (folder.path / folder.METRICS).stat().st_size:
        plots.training_curve(folder.path / folder.METRICS, folder.path / folder.CURVE)
        plots.report(folder.path)
