"""A person's own function, named on the command line as ``package.module:function``."""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections.abc import Callable
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.network import Sequential


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
    if not (module and colon and attribute) or module.startswith("."):
        raise InputError(f"--model {brief(name)}: give package.module:function")
    # As python -m does: modules beside the work at hand are found.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    # What a person's module does when it is imported, and so how it fails, is not known.
    except (Exception, SystemExit) as error:
        raise InputError(f"--model {brief(name)}: {_told(error, module)}") from error
    if not callable(function):
        raise InputError(f"--model {brief(name)} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def call_own(name: str, *arguments: object) -> Any:
    """What the function that ``name`` names returns for ``arguments``.

    Raises:
        InputError: if it cannot be imported, or raises: with its error in one line, and where that was raised.

    >>> call_own("math:sqrt", "four")
    Traceback (most recent call last):
    flipgrad.errors.InputError: --model 'math:sqrt': TypeError: must be real number, not str
    """
    function = own_function(name)
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise InputError(f"--model {brief(name)}: {_told(error, name.partition(':')[0])}") from error


def check_runs(name: str, net: Sequential, x: Tensor, outputs: int | None = None) -> None:
    """Refuse a person's network that cannot be evaluated on inputs ``x`` [B, ...]; it is left as it is.

    Args:
        name: of the function that made it.
        net: the network.
        x: some inputs.
        outputs: how many it must have for each of them; by default any number.
    """
    try:
        with torch.no_grad():
            result = copy.deepcopy(net).eval()(x)
    except (Exception, SystemExit) as error:
        told = _told(error, name.partition(":")[0])
        raise InputError(f"--model {brief(name)} returned a network that fails on inputs {list(x.shape)}: {told}") from error
    if outputs is not None and result.shape[-1] != outputs:
        raise InputError(f"--model {brief(name)} returned a network of {result.shape[-1]} outputs for {outputs} classes")


def _told(error: BaseException, module: str) -> str:
    """An error in one line, with the last place in the person's own module that it came through."""
    words = " ".join(str(error).split()) or "no message"
    file = getattr(sys.modules.get(module), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return f"{kind}{words:.300}" + (f" (line {lines[-1]} of {file})" if lines else "")
