"""``flipgrad estimators``."""

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from flipgrad.estimators import facts

# Characters that the table with its sources needs; narrower terminals are shown it without.
WITH_SOURCES = 120


def estimators(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """List the gradient estimators and their facts."""
    if as_markdown:
        typer.echo(facts.markdown())
        return
    console = Console(highlight=False)
    sources = console.width >= WITH_SOURCES
    names = [name for name in facts.COLUMNS if sources or name != "source"]
    heads = names if sources else [name.replace(" ", "\n") for name in names]
    columns = [
        Column(head, no_wrap=name not in ("source", "relaxed objective", "own graphs"))
        for head, name in zip(heads, names, strict=True)
    ]
    title = "Gradient estimators of a network with L binary layers"
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    notes = []
    for name, unbiased, *others, source in facts.rows():
        answer, _, where = unbiased.partition("; ")
        if where:
            notes.append(f"* {name}: unbiased with {where}")
        table.add_row(name, f"{answer} *" if where else answer, *others, *([source] if sources else []))
    if not sources:
        notes.append("Sources: flipgrad estimators --markdown, or a wider terminal.")
    console.print(table, "\n".join(notes))
