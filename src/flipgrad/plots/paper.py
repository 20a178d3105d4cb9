"""The page of a reproduction: what the paper shows beside what was found here."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flipgrad.plots.report import duration, template


@dataclass(frozen=True)
class Section:
    """A figure or table: the experiment's name, its place in the paper, and what the paper shows there."""

    name: str
    place: str
    words: str
    # The experiment's result file, empty if it was not run.
    record: Mapping[str, Any]
    # Files beside the page, with captions.
    figures: Sequence[tuple[str, str]]

    @property
    def title(self) -> str:
        """What the experiment is called, without its place in the paper."""
        title = str(self.record.get("title", self.name))
        return title.partition(": ")[2] or title

    @property
    def sheets(self) -> list[Mapping[str, Any]]:
        """Its tables; older result files have one, or none."""
        return [sheet for sheet in self.record.get("sheets", [self.record.get("sheet")]) if sheet]

    @property
    def made(self) -> str:
        """At which scale, with which seed, in which time."""
        parts = [f"{key} {self.record[key]}" for key in ("scale", "seed") if key in self.record]
        parts += [duration(self.record["seconds"])] if isinstance(self.record.get("seconds"), int | float) else []
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
    held = sum(bool(claim["holds"]) for claim in claims)
    return template("paper.html").render(sections=sections, made=len(made), held=held, claims=len(claims), versions=versions)
