"""``flipgrad train``."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console

from flipgrad import files, plots, training
from flipgrad.cli._shared import evaluation_table, working
from flipgrad.data import SOURCES, DataSet
from flipgrad.errors import InputError, StorageError
from flipgrad.estimators.names import for_training
from flipgrad.machine import cores, launched_rank, started_by_torchrun
from flipgrad.network import layers_with_binary_weights
from flipgrad.training import Processes, RunFolder, TrainConfig, elbo, recipes
from flipgrad.training.board import board
from flipgrad.training.config import AUTO, PROBLEM, STORED
from flipgrad.training.recipes import RECIPES
from flipgrad.training.run import is_whole, resume_command
from flipgrad.training.search import Trial

# What may be said together with --resume: none of it changes what is computed up to the epochs that were asked for.
WITH_RESUME = ("resume", "epochs", "checkpoint_minutes", "tensorboard", "data_folder", "model", "estimator")
# Options whose type and default are not those of the configuration's field: a rate may be "auto", and threads are counted.
OTHERWISE: dict[str, tuple[Any, Any]] = {"lr": (str, str(TrainConfig.lr)), "threads": (int | None, None)}

_stored = partial(typer.Option, rich_help_panel=STORED)


def _with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of the configuration, in place of its ``**options``."""
    types = get_type_hints(TrainConfig)
    generated = []
    for field in fields(TrainConfig):
        kind, default = OTHERWISE.get(field.name, (types[field.name], field.default))
        option = typer.Option(help=field.metadata["text"], rich_help_panel=field.metadata["panel"])
        generated.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]))
    context, *own, _ = signature(command, eval_str=True).parameters.values()
    command.__signature__ = Signature([context, *generated, *own])  # type: ignore[attr-defined]
    return command


@_with_config_options
def train(
    ctx: typer.Context,
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Options that were found together: {', '.join(RECIPES)}; whatever is given besides counts.",
            rich_help_panel=PROBLEM,
        ),
    ] = None,
    output: Annotated[Path | None, _stored(help="Folder of the run (default: runs/DATA-ESTIMATOR).")] = None,
    overwrite: Annotated[bool, _stored("--overwrite", help="Replace an earlier run in that folder.")] = False,
    resume: Annotated[
        Path | None,
        _stored(
            help="Go on with the run in this folder, to the bit as if it had not stopped; --epochs makes it longer, --model "
            "and --estimator repeat code of your own, --data-folder tells where the files were moved."
        ),
    ] = None,
    checkpoint_minutes: Annotated[float, _stored(help="Time between checkpoints within an epoch.")] = 5.0,
    tensorboard: Annotated[
        bool, _stored("--tensorboard", help="Write for TensorBoard, too: pip install 'flipgrad\\[tensorboard]'.")
    ] = False,
    **options: Any,
) -> None:
    """Train a stochastic binary network; store metrics, weights, checkpoints and a picture.

    Ctrl-C saves and stops; --resume goes on. Many processes: torchrun --nproc-per-node 2 -m flipgrad train ...
    """
    if resume is not None:
        config, path = _stored_config(ctx, resume), resume
    else:
        if recipe is not None:
            given = {name: value for name, value in _given(ctx).items() if name in options}
            options |= recipes.recipe(recipe, given)
        if options["objective"] == "elbo":
            options |= {name: value for name, value in elbo.DEFAULTS.items() if name not in _given(ctx)}
        threads = _default_threads(options["data"]) if options["threads"] is None else options["threads"]
        config = TrainConfig(**{**options, "lr": _rate(str(options["lr"])), "threads": threads})
        kind = "-elbo" if config.objective == "elbo" else ""
        path = output or Path("runs") / f"{config.data}{kind}-{config.estimator.replace(':', '-')}"
    if not checkpoint_minutes > 0:
        raise InputError(f"checkpoint_minutes is {checkpoint_minutes}; it must be positive, e.g. 5")
    if config.objective == "elbo":
        if tensorboard or started_by_torchrun():
            raise InputError("the objective elbo is trained by one process, and without --tensorboard")
        _run_elbo(config, path, overwrite=overwrite, resume=resume is not None, minutes=checkpoint_minutes)
        return
    _run(config, path, overwrite=overwrite, resume=resume is not None, minutes=checkpoint_minutes, tensorboard=tensorboard)


def _run(config: TrainConfig, path: Path, *, overwrite: bool, resume: bool, minutes: float, tensorboard: bool) -> None:
    first = launched_rank() == 0
    # A path may have brackets in it, which are no markup.
    console = Console(quiet=not first, markup=False, highlight=False)
    torch.set_num_threads(config.threads)
    epochs = f"{config.epochs} epoch{'s' * (config.epochs > 1)}"
    with ExitStack() as stack:
        # Mistakes are told before the processes wait for one another, and before anything is written.
        label = for_training(config.estimator, 1)[0]
        data = training.load_data(config)
        net = training.make_net(config, data)
        folder = None
        if first:
            folder = stack.enter_context(RunFolder.reopen(path) if resume else RunFolder(path, overwrite=overwrite))
        searching = config.lr == AUTO
        checkpoint = training.read_checkpoint(path) if resume and not searching else None
        done = 0 if checkpoint is None else int(checkpoint.facts.get("epoch", 0))
        if done == config.epochs and is_whole(path):
            console.print(f"The run in {path} is finished: {epochs}. More: --epochs N", soft_wrap=True)
            # A full disk or a kill may have come between the last numbers and the pictures.
            if folder is not None and not all((path / name).is_file() for name in (folder.CURVE, folder.REPORT)):
                _draw(folder)
            return
        write = stack.enter_context(board(path / "tensorboard", done)) if tensorboard and first else lambda record: None
        processes = stack.enter_context(closing(training.connect(config.device)))
        stack.enter_context(_explained(path, folder, console, config))
        if searching:
            config = _search(config, data, folder, console, processes, training.read_trials(path, data) if resume else [])
        many = f", {processes.size} processes" if processes.size > 1 else ""
        binary = ", binary weights" if layers_with_binary_weights(net) else ""
        what = f"{len(data.train):,} images of {data.name} with {label}{binary}, {epochs}{many}"
        console.print(f"{'Going on with' if checkpoint else 'Training on'} {what}:")
        if not config.validation:
            console.print("Every epoch is measured on the test images, as --validation is 0: choose nothing by its numbers.")
        with working(console, patient=processes.size > 1) as work:
            evaluation = training.train(
                config,
                net,
                data,
                folder,
                processes=processes,
                checkpoint=checkpoint,
                report=lambda done, total, record: work.at(done, total, "train", _headline(record)),
                epoch_done=write,
                stop=lambda: work.interrupted,
                minutes=minutes,
            )
        _draw(folder)
        if folder is not None:
            console.print(evaluation_table({"Test images": evaluation}))
            console.print(f"Weights, metrics, {folder.CURVE} and {folder.REPORT} are in {path}", soft_wrap=True)


def _run_elbo(config: TrainConfig, path: Path, *, overwrite: bool, resume: bool, minutes: float) -> None:
    console = Console(markup=False, highlight=False)
    torch.set_num_threads(config.threads)
    label = for_training(config.estimator, 1)[0]
    data = training.elbo_data(config)
    model = training.make_model(config, data)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.reopen(path) if resume else RunFolder(path, overwrite=overwrite))
        stack.enter_context(_explained(path, folder, console, config))
        run = training.ElboRun(config, model, data, folder, training.read_checkpoint(path) if resume else None)
        depth = len(model.binary_layers)
        what = (
            f"{depth} latent layer{'s' * (depth > 1)} of {len(model.prior)} units, {len(data.train):,} images of {config.data}"
        )
        console.print(f"{'Going on with' if resume else 'Training'} a model of {what} with {label}, {config.epochs} epochs:")
        with working(console) as work:

            def report(done: int, total: int, record: Mapping[str, Any]) -> None:
                note = f"ELBO {record['elbo']:.2f}, {record['split']} bound {record['bound']:.2f}" if record else ""
                work.at(done, total, "train", note)

            summary = run.run(report, lambda: work.interrupted, minutes)
        _draw(folder)
        console.print(
            f"Test images: log p(x) is at least {summary['bound']:.2f} on average ({summary['samples']} samples)\n"
            f"Weights, metrics, {folder.CURVE} and {folder.REPORT} are in {path}",
            soft_wrap=True,
        )


def _search(
    config: TrainConfig, data: DataSet, folder: RunFolder | None, console: Console, processes: Processes, done: list[Trial]
) -> TrainConfig:
    """The configuration with the best learning rate."""
    if folder is not None:
        # With "auto" in it: an interrupted search goes on with --resume.
        folder.write_config(config, processes=processes.size)
    console.print(f"Searching for the learning rate, {config.search_trials} trials:")
    with working(console, patient=processes.size > 1) as work:

        def report(updates: int, total: int, trials: Sequence[Trial]) -> None:
            best = min(trials, key=lambda trial: trial.objective, default=None)
            work.at(updates, total, "search", f"best {best.rate:.2g}" if best else "")

        result = training.automatic_rate(
            config,
            lambda: training.make_net(config, data),
            data,
            processes=processes,
            done=done,
            report=report,
            trial_done=lambda trials: folder.write_trials(trials, data) if folder else None,
            stop=lambda: work.interrupted,
        )
    console.print(f"The best of {len(result.trials)} rates is {result.rate:.3g}")
    return replace(config, lr=result.rate)


@contextmanager
def _explained(path: Path, folder: RunFolder | None, console: Console, config: TrainConfig) -> Iterator[None]:
    """Whatever ends the work early: say what is kept, and how to go on."""
    many = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')} -m " if started_by_torchrun() else ""
    go_on = many + resume_command(path, config)
    try:
        yield
    except KeyboardInterrupt:
        _draw(folder)
        console.print(f"Interrupted. Everything is saved in {path}; go on with:\n  {go_on}", soft_wrap=True)
        raise
    except training.DivergenceError as error:
        _draw(folder)
        raise training.DivergenceError(f"{error}; the last good state is in {path}") from None
    except StorageError as error:
        begun = (path / RunFolder.CONFIG).is_file()
        how = f"go on with: {go_on}" if begun else "give the same command with --overwrite"
        raise StorageError(f"{error}; make room, and {how}") from None


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The options that the command line has, and not by default."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name: ctx.params[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def _stored_config(ctx: typer.Context, path: Path) -> TrainConfig:
    """The configuration of a run that goes on, with what the command line may change."""
    given = _given(ctx)
    for name in given:
        if name not in WITH_RESUME:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} cannot go with --resume: a run goes on as it was; leave it out, or begin a new run")
    repeated = {name: given.get(name) for name in ("data_folder", "model", "estimator")}
    config = training.read_config(path, **repeated, repair=True)
    epochs = given.get("epochs", config.epochs)
    if epochs != config.epochs and (config.rate_schedule != "constant" or config.warmup):
        part = f"{config.rate_schedule} schedule" if config.rate_schedule != "constant" else "warm-up"
        raise InputError(f"--epochs {epochs}: the {part} was made for {config.epochs}; leave it out")
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
    """One for a small data set, where more only cost; else this process' share of the cores."""
    large = data in SOURCES and SOURCES[data].needs_folder
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if large else 1


def _headline(record: Mapping[str, Any]) -> str:
    if not record:
        return ""
    return f"loss {record['objective']:.3f}, {record['split']} accuracy {record['accuracy_n']:.1%}"


def _draw(folder: RunFolder | None) -> None:
    if folder is None or not (folder.path / folder.METRICS).stat().st_size:
        return
    config = files.read_json(folder.path / folder.CONFIG, missing="", broken="").get("config", {})
    if config.get("objective") == "elbo":
        plots.elbo_report(folder.path)
    else:
        plots.training_curve(folder.path / folder.METRICS, folder.path / folder.CURVE)
        plots.report(folder.path)
