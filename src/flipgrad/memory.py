"""Memory: what would not fit is refused before it is tried, and what did not fit is told from other errors."""

import os
import sys

from flipgrad.errors import InputError

# How torch's allocators begin to say that they have no more, on the processor; and sizes that no number of 64 bits holds.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "integer multiplication overflow",
    "Storage size calculation overflowed",
)


def installed() -> int | None:
    """The bytes of this machine's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_fits(needed: int, what: str, fix: str) -> None:
    """Refuse work that needs more bytes than the machine has: it would end by a kill of the process, not by an error."""
    most = installed()
    if most is not None and needed > most:
        raise InputError(f"{what} need {needed / 2**30:,.1f} GiB, more than this machine's {most / 2**30:,.1f} GiB; {fix}")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    # Where torch was not imported, no error is one of its own.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
