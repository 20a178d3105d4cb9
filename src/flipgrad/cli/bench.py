"""``flipgrad bench``."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

from flipgrad import files, plots
from flipgrad.benchmarks import BENCHMARKS, SECONDS
from flipgrad.cli._shared import rough
from flipgrad.errors import InputError
from flipgrad.plots.report import duration
from flipgrad.reproduce.experiments import PROBE, probe

NAMES = ", ".join(f"{name} ({rough(SECONDS[name])})" for name in BENCHMARKS)


class _TimeBar(BarColumn):
    """A bar of the time that passed, out of what is expected: nothing that is measured has to report to it."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        bar.completed = min(task.elapsed or 0.0, task.total or 0.0)
        return bar


def bench(
    name: Annotated[str, typer.Argument(help=f"Benchmark, with about its time on two quiet cores: {NAMES}.")],
    json_file: Annotated[str, typer.Option("--json", help="Where the numbers go; - is standard output.")] = "-",
) -> None:
    """Measure the speeds that flipgrad promises: ratios of things that take turns in one run, on all cores."""
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; choose {', '.join(BENCHMARKS)}")
    # On standard error, as standard output may be where the numbers go.
    console = Console(stderr=True, highlight=False)
    seconds = SECONDS[name] * probe() / PROBE if console.is_terminal else None
    if seconds is not None:
        console.print(f"bench {name}: about {rough(seconds)} on this machine, if nothing else runs on it")
    columns = (TextColumn("{task.description}"), _TimeBar(), TimeElapsedColumn())
    # Drawn seldom, as drawing takes time from what is measured.
    options: dict[str, Any] = {"disable": seconds is None, "transient": True, "refresh_per_second": 1}
    started = time.perf_counter()
    with Progress(*columns, console=console, **options) as bar:
        bar.add_task(f"bench {name}", total=seconds)
        result = {"benchmark": name, **BENCHMARKS[name](), **files.provenance()}
    if seconds is not None:
        console.print(f"bench {name} took {duration(time.perf_counter() - started)}")
    if json_file == "-":
        typer.echo(json.dumps(result, indent=2))
    else:
        files.write_json(Path(json_file), result)
        if name == "scaling":
            plots.scaling(Path(json_file), Path(json_file).with_suffix(""))
