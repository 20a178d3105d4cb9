"""Memory: what would not fit is refused before it is tried, what did not is told from other errors, what is freed is kept."""

import ctypes
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

# What glibc's mallopt calls the bytes that may be free at the end of the heap, and the number of allocations beside the heap.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
# How much freed memory a process keeps, and which share of what the machine has at most.
KEPT, LARGEST_SHARE = 2**30, 1 / 8


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


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, up to 1 GiB, for what it allocates next.

    Every training step frees what the next one needs. The C library of Linux, glibc, gives large pieces back to the system, and
    to get them anew, page by page, took 6 % of a step of :class:`flipgrad.PSA` on the paper's network with batches of 64, and
    23 % with batches of 128 (of straight-through 2 and 20 %); the most memory that is used at once grew by 4 to 12 %. It holds
    for the whole process and all that runs in it, so that the library leaves it to the program: flipgrad's own commands call
    this, and a training of your own had best do so at its beginning.

    Returns:
        Whether it is so now; other C libraries than glibc have no such choice.

    >>> from flipgrad.training import keep_freed_memory
    >>> kept = keep_freed_memory()
    """
    most = installed()
    try:
        choose = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = KEPT if most is None else min(KEPT, int(LARGEST_SHARE * most))
    return bool(choose(TRIM_THRESHOLD, kept)) and bool(choose(MMAP_MAX, 0))
