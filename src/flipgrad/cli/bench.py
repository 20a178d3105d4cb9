"""``flipgrad bench``."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flipgrad import files, plots
from flipgrad.benchmarks import BENCHMARKS
from flipgrad.errors import InputError
from flipgrad.plots.report import duration


def bench(
    name: Annotated[str, typer.Argument(help=f"Benchmark: {', '.join(BENCHMARKS)}.")],
    json_file: Annotated[str, typer.Option("--json", help="Where the numbers go; - is standard output.")] = "-",
) -> None:
    """Measure the speeds that flipgrad promises: ratios of things that take turns in one run, on all cores."""
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; choose {', '.join(BENCHMARKS)}")
    # On standard error, as standard output may be where the numbers go.
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        bar.add_task(f"bench {name}", total=None)
        result = {"benchmark": name, **BENCHMARKS[name](), **files.provenance()}
    if console.is_terminal:
        console.print(f"bench {name} took {duration(time.perf_counter() - started)}")
    if json_file == "-":
        typer.echo(json.dumps(result, indent=2))
    else:
        files.write_json(Path(json_file), result)
        if name == "scaling":
            plots.scaling(Path(json_file), Path(json_file).with_suffix(""))
