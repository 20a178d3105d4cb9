"""What an attack is, and what one attempt of it may find."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, final

# A wrong result or a damage that went unnoticed; an exception that nobody caught; a process that died of a signal; one that
# did not end; a refusal that is not one clear line, or whose advice does not work.
Fault = Literal["difference", "traceback", "crash", "hang", "message"]
FAULTS: tuple[Fault, ...] = ("difference", "traceback", "crash", "hang", "message")


@final
class FaultError(Exception):
    """Raised by an attempt that found something."""

    def __init__(self, kind: Fault, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


@final
@dataclass
class Outcome:
    """What became of one attempt, or of many.

    Attributes:
        tried: inputs given, or kills done.
        refused: those of them that were refused with one line.
        faults: what was found, each with its text.
    """

    tried: int = 1
    refused: int = 0
    faults: list[tuple[Fault, str]] = field(default_factory=list)


ACCEPTED, REFUSED = Outcome(), Outcome(refused=1)


class Attack(ABC):
    """One kind of attack. Its attempts are numbered; each depends on the campaign's seed and its number alone.

    Attributes:
        part: what the attack belongs to; parts can be run alone.
        name: in the table, and to repeat an attempt: no spaces.
        title: in the table, for a person.
        full: attempts of a full campaign.
        seconds: of one attempt on one quiet core, measured; only the estimate of the campaign's time depends on it.
        limit: seconds after which an attempt counts as one that hangs.
        cores: that an attempt keeps busy.
    """

    part: str
    name: str
    title: str
    full: int
    seconds: float
    limit: float = 60.0
    cores: int = 1

    def setup(self, shared: Path) -> None:
        """Make what all attempts need in the folder ``shared``; once, in a process of its own."""
        shared.mkdir(exist_ok=True)

    def prepare(self, shared: Path, scratch: Path) -> None:
        """Make ready in a new process; ``scratch`` is an empty folder of this process alone."""
        self.shared, self.scratch = shared, scratch

    @abstractmethod
    def attempt(self, number: int, random: Random) -> Outcome:
        """Try once.

        Raises:
            FaultError: if something was found; any other exception is a traceback that was found.
        """


def source(seed: int, attack: str, number: int) -> Random:
    """The random numbers of one attempt, the same on every machine."""
    return Random(f"{seed}/{attack}/{number}")
