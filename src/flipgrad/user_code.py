"""A user's own function, named on the command line as ``package.module:function``."""

import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from reprlib import repr as brief
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flipgrad.errors import InputError

NetT = TypeVar("NetT", bound=nn.Module)


def is_user_function(name: str) -> bool:
    """Whether a name is that of a user's own function, and not one of ours."""
    return ":" in name


def call_user_function(name: str, *arguments: object, option: str = "--model") -> Any:
    """What the function that ``name``, given for an ``option``, names returns for ``arguments``.

    Its module is imported, also from the working directory. So a name must come from the user: never from a file, unless the
    user has named it, too.

    Raises:
        InputError: if it cannot be imported, or raises: with its error in one line, and where that was raised.

    >>> call_user_function("math:sqrt", 4)
    2.0
    >>> call_user_function("math:sqrt", "four")
    Traceback (most recent call last):
    flipgrad.errors.InputError: --model 'math:sqrt': TypeError: must be real number, not str
    """
    what = f"{option} {brief(name)}"
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        raise InputError(f"{what}: give package.module:function")
    # As python -m does: modules of the working directory are found.
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _errors_in_one_line(what, module):
        function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise InputError(f"{what} is a {type(function).__name__}, expected a function")
    with _errors_in_one_line(what, module):
        return function(*arguments)


def check_runs(
    name: str, made: nn.Module, x: Tensor, wrap: Callable[[nn.Module, Tensor], NetT], outputs: int | None = None
) -> NetT:
    """The network that ``wrap`` makes of what a user's function ``name`` ``made``, for inputs ``x`` [B, ...].

    Refused is what fails on these, or has other than ``outputs``.
    """
    what = f"--model {brief(name)} returned a network that fails on inputs {list(x.shape)}"
    with _errors_in_one_line(what, name.partition(":")[0]), torch.no_grad():
        net = wrap(made, x)
        result = copy.deepcopy(net).eval()(x)
    if outputs is not None and result.shape[-1] != outputs:
        raise InputError(f"--model {brief(name)} returned a network of {result.shape[-1]} outputs for {outputs} classes")
    return net


@contextmanager
def _errors_in_one_line(what: str, module: str) -> Iterator[None]:
    """Any error becomes an InputError of one line, with the last place in the user's ``module`` that it came through."""
    try:
        yield
    # How a user's code fails is not known.
    except (Exception, SystemExit) as error:
        file = getattr(sys.modules.get(module), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f" (line {lines[-1]} of {file})" if lines else ""
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        message = " ".join(str(error).split()) or "no message"
        raise InputError(f"{what}: {kind}{message:.300}{place}") from error
