"""``flipgrad estimators``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flipgrad.estimators import facts


def estimators(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """List the gradient estimators and their facts."""
    if as_markdown:
        typer.echo(facts.markdown())
        return
    table = Table(title="Gradient estimators of a network with L binary layers")
    for column in facts.COLUMNS:
        table.add_column(column, no_wrap=column in ("name", "passes"))
    for row in facts.rows():
        table.add_row(*row)
    Console().print(table)
