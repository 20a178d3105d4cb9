"""Finds and loads the compiled library; needs no torch.

A module that calls functions of the library asks for these by name, and gets a library of its own to declare them in:

>>> library, reason = load(["flipgrad_has_avx2"])
>>> library is not None or "pip install" in reason
True
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

LIBRARY = Path(__file__).parent.parent / "_native.so"

# 1: only the instructions that every processor of this architecture has, to test and to compare; 2, in tests: at most AVX2.
PORTABLE = int(os.environ.get("FLIPGRAD_PORTABLE", "") not in ("", "0"))


def load(functions: Iterable[str]) -> tuple[ctypes.CDLL | None, str]:
    """The library and an empty string; or, if it is missing or lacks one of these ``functions``, None and why."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY} does not exist: install the package where there is a C++ compiler (pip install .)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name in functions:
            getattr(library, name)
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY} cannot be loaded ({error}): install the package anew (pip install .)"
    return library, ""
