"""The command line of the campaign: ``python -m torture``, from the folder ``tests``."""

from __future__ import annotations

import os

# Before torch is imported: what is forked must not have threads.
os.environ["OMP_NUM_THREADS"] = "1"

import re
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from torture.attacks import ATTACKS
from torture.campaign import Campaign, expected_seconds, planned
from torture.table import Finding, Row, duration, markdown, rich_table
from torture.worker import preload

PAGE = Path(__file__).parents[2] / "docs" / "torture.md"
PARTS = sorted({attack.part for attack in ATTACKS})


def main(
    minutes: Annotated[float, typer.Option(help="About how long, on two quiet cores; 60 is the full campaign.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Same seed, same attempts.")] = 0,
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, or names of attacks, separated by commas.")] = "",
    only: Annotated[str, typer.Option(help="Repeat one attempt, ATTACK:NUMBER, as a finding names it.")] = "",
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    write: Annotated[bool, typer.Option("--write", help=f"Write {PAGE.name} of the documentation, too.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the attacks and their full numbers of attempts.")] = False,
) -> None:
    """Attack the library: kills, damaged inputs, full disks, two writers. The exit code is 1 if anything was found."""
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if terminal else 140)
    torch.set_num_threads(1)
    preload()
    # A polite kill is a Ctrl-C: it ends with the table, and ends what was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = [part for part in parts.split(",") if part]
    attack_name, _, number = only.partition(":")
    known = {*PARTS, *(attack.name for attack in ATTACKS)}
    for name in [*wanted, *filter(None, [attack_name])]:
        if name not in known:
            raise typer.BadParameter(f"no part or attack {name!r}; choose from {', '.join(sorted(known))}")
    wanted = [attack_name] if only else wanted
    rows = [Row(a, planned(a, minutes)) for a in ATTACKS if not wanted or a.part in wanted or a.name in wanted]
    if names:
        for row in rows:
            console.print(f"{row.attack.part:8} {row.attack.name:22} {row.attack.full:7,} x {row.attack.seconds:7.3f} s")
        raise typer.Exit
    if only:
        rows[0].planned = 1
    command = " ".join(["python -m torture", *sys.argv[1:]])
    console.print(
        f"Expected on {workers} quiet cores: {duration(expected_seconds(rows, workers))}; Ctrl-C stops with the table."
    )
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description:45}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("the base runs", total=1.0)

        seen: dict[str, int] = {}

        def found(finding: Finding) -> None:
            # Of many that are alike the first ones are enough to read.
            likeness = f"{finding.attack} {finding.kind} {re.sub('[0-9]+', '', finding.text)[-60:]}"
            seen[likeness] = seen.get(likeness, 0) + 1
            if seen[likeness] > 3:
                return
            repeat = f"python -m torture --seed {seed} --only {finding.attack}:{finding.number}"
            bar.console.print(f"{finding.kind.upper()} {finding.text:.1000}\n  repeat: {repeat}")

        campaign = Campaign(rows, seed, workers, found, lambda share, what: bar.update(task, completed=share, description=what))
        try:
            campaign.run([int(number)] if only else None)
        except KeyboardInterrupt:
            bar.console.print("Stopped; so far:")
    console.print(rich_table(rows))
    if write:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        page = markdown(
            rows, seed=seed, minutes=minutes, command=command, seconds=time.monotonic() - began, date=date, workers=workers
        )
        PAGE.write_text(page, encoding="utf-8")
        console.print(f"Written to {PAGE}")
    raise typer.Exit(any(row.findings for row in rows))


if __name__ == "__main__":
    typer.run(main)
