"""The page of a reproduction: what the paper shows beside what was found here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flipgrad.plots.report import duration, template


@dataclass(frozen=True)
class Section:
    """One figure or table.

    Attributes:
        name: of the experiment.
        place: in the paper.
        words: what the paper shows there.
        record: the experiment's result file, empty if it was not run.
        figures: files beside the page, with captions.
    """

    name: str
    place: str
    words: str
    record: Mapping[str, Any]
    figures: Sequence[tuple[str, str]]

    @property
    def title(self) -> str:
        """What the experiment is called, without its place in the paper."""
        return str(self.record.get("title", self.name)).partition(": ")[2] or str(self.record.get("title", self.name))

    @property
    def sheets(self) -> list[Mapping[str, Any]]:
        """Its tables; older result files have one, or none."""
        return [sheet for sheet in self.record.get("sheets", [self.record.get("sheet")]) if sheet]

    @property
    def made(self) -> str:
        """At which scale, in which time, by which command."""
        record = self.record
        parts = [f"scale {record['scale']}"] if "scale" in record else []
        parts += [f"seed {record['seed']}"] if "seed" in record else []
        parts += [duration(record["seconds"])] if isinstance(record.get("seconds"), int | float) else []
        return ", ".join(parts)

    @property
    def command(self) -> str:
        """How to make it."""
        return shlex.join(["flipgrad", "reproduce", self.name, "--scale", str(self.record.get("scale", "small"))])


def page(sections: Sequence[Section]) -> str:
    """The page. Every string is escaped; figures are files beside it."""
    claims = [claim for section in sections for claim in section.record.get("claims", [])]
    made = [section for section in sections if section.record]
    versions: Mapping[str, Any] = next((section.record["versions"] for section in made if "versions" in section.record), {})
    return template("paper.html").render(
        sections=sections,
        made=len(made),
        held=sum(bool(claim["holds"]) for claim in claims),
        claims=len(claims),
        versions=versions,
    )
