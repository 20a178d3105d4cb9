"""A person's own function, named on the command line as ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from flipgrad.errors import InputError


def is_own(model: str) -> bool:
    """Whether the name of a network is that of a person's own function, and not one of ours."""
    return ":" in model


def own_function(name: str) -> Callable[..., Any]:
    """The function that ``name`` names; its module is imported, also from the working directory.

    So a name must come from the person at hand: never from a file, unless that person has named it, too.

    >>> own_function("math:sqrt")(4)
    2.0
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InputError(f"--model {name!r}: give package.module:function")
    # As python -m does: modules beside the work at hand are found.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"--model {name!r}: {error}") from None
    if not callable(function):
        raise InputError(f"--model {name!r} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]
