"""``flipgrad reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flipgrad.cli._shared import working
from flipgrad.errors import InputError
from flipgrad.reproduce import EXPERIMENTS, SCALES, Workshop


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help=f"Figures: {', '.join(EXPERIMENTS)}, or all.")] = None,
    scale: Annotated[str, typer.Option(help=f"How much work: {', '.join(SCALES)} (the paper's counts).")] = "small",
    show: Annotated[bool, typer.Option("--list", help="List the figures.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for results (default: results/SCALE).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results of other settings there.")] = False,
) -> None:
    """Reproduce the paper's figures: JSON, PNG and PDF each, and which of its claims the numbers support.

    What is already in the output folder is not computed again, so an interrupted command goes on where it was.
    """
    console = Console()
    if show or not names:
        table = Table("name", "figure")
        for experiment in EXPERIMENTS.values():
            table.add_row(experiment.name, experiment.title)
        console.print(table)
        return
    unknown = [name for name in names if name not in (*EXPERIMENTS, "all")]
    if unknown:
        raise InputError(f"no figure {unknown[0]!r}; choose {', '.join(EXPERIMENTS)}, or all")
    folder = output or Path("results") / scale
    try:
        with working(console) as work:
            shop = Workshop(folder, scale, seed, work.advance, overwrite=overwrite)
            for name in EXPERIMENTS if "all" in names else dict.fromkeys(names):
                console.print(EXPERIMENTS[name].reproduce(shop), highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was measured is in {folder}; the same command goes on from there.")
        raise
    console.print(f"Figures (PNG, PDF), numbers (JSON) and texts are in {folder}", highlight=False)
