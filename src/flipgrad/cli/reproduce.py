"""``flipgrad reproduce``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flipgrad.cli._shared import rough, working
from flipgrad.errors import InputError
from flipgrad.machine import cores
from flipgrad.plots.report import duration
from flipgrad.reproduce import EXPERIMENTS, SCALES, DaskRunner, Experiment, LocalRunner, Workshop, keep, write_report
from flipgrad.reproduce.experiments import PROBE, cost, done, probe
from flipgrad.sampling import check_seed

RESULTS = Path("results")
# Names that are no experiments: all of them, and the page of what is there.
ALL, REPORT = "all", "report"


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Figures: {', '.join(EXPERIMENTS)}; all; or report, the page of what is there.")
    ] = None,
    scale: Annotated[str, typer.Option(help=f"How much work: {', '.join(SCALES)} (the paper's counts).")] = "small",
    show: Annotated[bool, typer.Option("--list", help="List the figures, and what they cost on this machine.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for results (default: results/SCALE).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results of other settings there.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="CIFAR-10's files (default: $FLIPGRAD_DATA/cifar10; MNIST's: $FLIPGRAD_DATA/mnist); smoke needs none."
        ),
    ] = None,
    augment: Annotated[
        str | None, typer.Option(help="For cifar: none,affine,flip-crop or some of them (default: the scale's).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that train at the same time (default: as many as there are cores for).")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each; numbers depend on it in their last digits.")] = 1,
    dask: Annotated[str | None, typer.Option(help="Train on the Dask cluster with this scheduler, tcp://HOST:PORT.")] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="For cifar and vae: train no more; figures and text of what is finished.")
    ] = False,
    kept: Annotated[
        Path | None, typer.Option(help="For cifar and vae: take over what is finished in this folder, which --keep wrote.")
    ] = None,
    keep_in: Annotated[
        Path | None, typer.Option("--keep", help="Copy the small result files and the page to this folder.")
    ] = None,
) -> None:
    """Reproduce the paper's figures and tables: JSON, PNG and PDF each, and which of its claims the numbers support.

    What is already in the output folder is not computed again, so an interrupted command goes on where it was.
    """
    console = Console(markup=False, highlight=False)
    if show or not names:
        console.print(_list(output, workers))
        return
    wanted = _wanted(names, scale, in_parts=finished or kept is not None)
    runner = _runner(workers, threads, dask)
    check_seed(seed)
    folder = output or RESULTS / scale
    if wanted:
        augmentations = [name.strip() for name in augment.split(",")] if augment else None
        options = {"overwrite": overwrite, "runner": runner, "images": data, "augmentations": augmentations}
        options |= {"finished": finished, "kept": kept}
        _make(wanted, console, folder, scale, seed, options)
    if ALL in names or REPORT in names:
        console.print(f"The page is {write_report(folder)}", soft_wrap=True)
    if keep_in is not None:
        console.print(f"What is worth keeping is in {keep(folder, keep_in).parent}", soft_wrap=True)


def _wanted(names: list[str], scale: str, *, in_parts: bool) -> list[str]:
    """The experiments that are asked for, each once; names and scales that there are not are refused."""
    unknown = [name for name in names if name not in (*EXPERIMENTS, ALL, REPORT)]
    if unknown:
        raise InputError(f"no figure {unknown[0]!r}; choose {', '.join(EXPERIMENTS)}, or all, or report")
    wanted = [name for name in dict.fromkeys(names) if name != REPORT]
    if ALL in names:
        wanted = [name for name, experiment in EXPERIMENTS.items() if scale in experiment.efforts() or scale not in SCALES]
    for name in wanted if scale in SCALES else ():
        EXPERIMENTS[name].check(scale, in_parts=in_parts)
    return wanted


def _runner(workers: int | None, threads: int, dask: str | None) -> LocalRunner | DaskRunner:
    if not dask:
        return LocalRunner(workers, threads)
    if workers or threads != 1:
        raise InputError(
            "--workers and --threads are for processes of this machine; a cluster has its own: leave them out with --dask"
        )
    return DaskRunner(dask)


def _make(names: list[str], console: Console, folder: Path, scale: str, seed: int, options: Mapping[str, Any]) -> None:
    try:
        with working(console) as work:
            shop = Workshop(folder, scale, seed, work.advance, **options)
            for name in names:
                console.print(EXPERIMENTS[name].reproduce(shop), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was done is in {folder}; the same command goes on from there.", soft_wrap=True)
        raise
    console.print(f"Figures (PNG, PDF), numbers (JSON) and texts are in {folder}", soft_wrap=True)


def _list(output: Path | None, workers: int | None) -> Table:
    speed = probe() / PROBE
    table = Table("name", "figure", *SCALES, caption="Time on this machine: measured, or ≈ estimated from recorded times")
    for experiment in EXPERIMENTS.values():
        times = [_time(experiment, scale, output or RESULTS / scale, speed, workers) for scale in SCALES]
        table.add_row(experiment.name, experiment.title, *times)
    return table


def _time(experiment: Experiment, scale: str, folder: Path, speed: float, workers: int | None) -> str:
    """What an experiment costs at a scale, and what of it is left where some of its parts are done."""
    if scale not in experiment.efforts():
        return "–"
    found = done(experiment, scale, folder)
    if found is not None and found[2] > 0:
        parts, total, left = found
        estimate = speed * experiment.efforts()[scale][0] / min(workers or cores(), total)
        return f"≈ {rough(left * estimate)} left of ≈ {rough(estimate)}, {parts} of {total} done"
    seconds, measured = cost(experiment, scale, folder, speed, workers)
    return duration(seconds) if measured else f"≈ {rough(seconds)}"
