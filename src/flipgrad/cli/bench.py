"""``flipgrad bench``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flipgrad import files, plots
from flipgrad.benchmarks import BENCHMARKS
from flipgrad.errors import InputError


def bench(
    name: Annotated[str, typer.Argument(help=f"Benchmark: {', '.join(BENCHMARKS)}.")],
    json_file: Annotated[str, typer.Option("--json", help="Where the numbers go; - is standard output.")] = "-",
) -> None:
    """Measure the speeds that flipgrad promises: ratios of things that take turns in one run, on all cores."""
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; choose {', '.join(BENCHMARKS)}")
    result = {"benchmark": name, **BENCHMARKS[name](), **files.provenance()}
    if json_file == "-":
        typer.echo(json.dumps(result, indent=2))
    else:
        files.write_json(Path(json_file), result)
        if name == "scaling":
            plots.scaling(Path(json_file), Path(json_file).with_suffix(""))
