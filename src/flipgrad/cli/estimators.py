"""``flipgrad estimators``."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from flipgrad.estimators import facts


def estimators(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """List the gradient estimators and their facts."""
    if as_markdown:
        typer.echo(facts.markdown())
        return
    columns = [Column(name, no_wrap=name in ("name", "passes")) for name in facts.COLUMNS]
    table = Table(*columns, title="Gradient estimators of a network with L binary layers")
    for row in facts.rows():
        table.add_row(*row)
    Console().print(table)
