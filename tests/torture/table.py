"""What a campaign found, as a table for the terminal and for the documentation."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import final

from rich.table import Table

from torture.attack import FAULTS, Attack, Fault, Outcome

COLUMNS = ("attack", "tried", "refused", "differences", "tracebacks", "crashes", "hangs", "bad messages", "core time")


@final
@dataclass(frozen=True)
class Finding:
    """Something that was found, and the attempt that found it."""

    attack: str
    number: int
    kind: Fault
    text: str


@final
@dataclass
class Row:
    """All attempts of one attack together."""

    attack: Attack
    planned: int
    done: int = 0
    tried: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def add(self, number: int, outcome: Outcome, seconds: float) -> None:
        """Count an attempt."""
        self.done += 1
        self.tried += outcome.tried
        self.refused += outcome.refused
        self.seconds += seconds * self.attack.cores
        self.findings.extend(Finding(self.attack.name, number, kind, text) for kind, text in outcome.faults)

    def count(self, kind: Fault) -> int:
        """Findings of a kind."""
        return sum(finding.kind == kind for finding in self.findings)

    def cells(self) -> list[str]:
        """What stands in the table."""
        counts = [f"{number:,}" for number in (self.tried, self.refused, *map(self.count, FAULTS))]
        return [self.attack.title + ("" if self.done == self.planned else f" ({self.done} of {self.planned})"), *counts]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The lines of the table, the last one with the sums."""
    lines = [[*row.cells(), duration(row.seconds)] for row in rows]
    numbers = [sum(row.tried for row in rows), sum(row.refused for row in rows)]
    numbers += [sum(row.count(kind) for row in rows) for kind in FAULTS]
    return [*lines, ["all", *(f"{number:,}" for number in numbers), duration(sum(row.seconds for row in rows))]]


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> duration(61.5)
    '1:02 min'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"


def rich_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="What the campaign found")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "attack" else "right")
    *lines, total = cells(rows)
    for line in lines:
        table.add_row(*line)
    table.add_section()
    table.add_row(*total)
    return table


def markdown(rows: Sequence[Row], *, seed: int, minutes: float, command: str, seconds: float, date: str, workers: int) -> str:
    """The page of the last campaign."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("flipgrad", "torch", "numpy", "pillow", "safetensors"))
    findings = [finding for row in rows for finding in row.findings]
    lines = [
        "# The last campaign",
        "",
        "`make torture` attacks the library for an hour, and writes this page if asked to (`WRITE=1`);",
        "`CONTRIBUTING.md` says how, `tests/torture/` holds one file per kind of attack. Every kill is resumed, and weights,",
        "metrics and summary are compared to the bit with those of an undisturbed run. An input is read rightly, or refused",
        "with one line.",
        "",
        f"{date}: `{command}`, seed {seed}, planned for {minutes:g} minutes, took {duration(seconds)} with {workers} workers.",
        f"Python {platform.python_version()}, {versions}, {platform.system()} {platform.machine()}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"| {' | '.join('---' if column == 'attack' else '---:' for column in COLUMNS)} |",
        *(f"| {' | '.join(line)} |" for line in cells(rows)),
        "",
        *(["Findings:", ""] if findings else ["It found nothing."]),
        *(f"- `{finding.attack}:{finding.number}` {finding.kind}: {finding.text:.300}" for finding in findings),
    ]
    return "\n".join(lines) + "\n"
