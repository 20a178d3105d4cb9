"""``flipgrad zoo``."""

import os
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

import flipgrad.zoo
from flipgrad.errors import InputError
from flipgrad.sampling import check_seed
from flipgrad.zoo import Zoo
from flipgrad.zoo.cards import overview


def zoo(
    name: Annotated[str | None, typer.Argument(help="Show the card of this network (default: a table of all).")] = None,
    add: Annotated[
        Path | None, typer.Option(help="Measure the network of this run, and store it and its card as NAME in --folder.")
    ] = None,
    data_folder: Annotated[str | None, typer.Option(help="With --add: where the data set's files are now.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="With --add: draws per image (default: the run's --eval-samples).")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --add: of these draws.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Another folder of networks than the package's own.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all cards in Markdown.")] = False,
) -> None:
    """List the trained networks that come with flipgrad, show the card of one, or add the network of a run."""
    check_seed(seed)
    if folder is not None and not os.path.isdir(folder):
        raise InputError(f"--folder {brief(str(folder))} is no folder; make it first, or leave it out for the package's own")
    chosen = flipgrad.zoo.OURS if folder is None else Zoo(folder)
    console = Console(markup=False, highlight=False)
    if add is not None:
        # Named in full: nobody is to change an installed package by chance.
        if name is None or folder is None:
            how = "flipgrad zoo NAME --add RUN --folder src/flipgrad/zoo/networks"
            raise InputError(f"--add stores the network of a run under a name in a folder: give both, e.g. {how}")
        stored = flipgrad.zoo.add(chosen, add, name, data_folder=data_folder, samples=samples, seed=seed)
        console.print(stored.markdown(), soft_wrap=True)
        console.print(f"Stored in {folder}", soft_wrap=True)
    elif as_markdown:
        typer.echo(flipgrad.zoo.markdown(chosen))
    elif name is not None:
        console.print(chosen.card(name).markdown(), soft_wrap=True)
    else:
        head, *rows = overview([chosen.card(each) for each in chosen.names()])
        table = Table(
            *(Column(title, justify="right" if number else "left", no_wrap=True) for number, title in enumerate(head))
        )
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print('In Python: flipgrad.zoo.load("NAME"); on their data: flipgrad evaluate zoo:NAME', soft_wrap=True)
