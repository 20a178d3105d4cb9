"""Result files as frozen dataclasses: type hints say what a file must hold, and one function reads or refuses it.

A field is called as in the file; what no field is called by is ignored. A field with a default may be missing or null, and a
value that may be None is None where the file has null, NaN or an infinity. What several fields must have in common is checked
by ``__post_init__``, which raises an `InputError`. Nothing in a file is ever executed.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from reprlib import repr as brief
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.files import read_json

RERUN = "run the experiment that writes it"
REWRITE = "run the experiment again to rewrite it"

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have; ``above`` itself is not one of them."""

    low: float = -inf
    high: float = inf
    above: float = -inf

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and number > self.above

    def __str__(self) -> str:
        if self.above > -inf:
            return f"above {self.above}"
        return f"of at least {self.low}" if self.high == inf else f"from {self.low} to {self.high}"


NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, 1)]
Natural = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
# Arrays of two and of three dimensions.
Matrix = Annotated[NDArray[np.float64], 2]
Cube = Annotated[NDArray[np.float64], 3]


class _MisfitError(Exception):
    """A value is not what a hint says; ``place`` grows from the value outwards."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def load(path: Path, kind: type[T], *, missing: str = RERUN, broken: str = REWRITE) -> T:
    """Read a JSON file that holds a dataclass.

    Raises:
        InputError: if there is no such file or it is wrong: which file, where, what was expected, what came, and what to do,
            which is ``missing`` or ``broken``.
    """
    return build(kind, read_json(path, missing=missing, broken=broken), where=str(path), fix=broken)


def load_field(path: Path, name: str, kind: type[T], **advice: str) -> T:
    """Read one field of a JSON file, of any type that a field of a dataclass may have; errors are those of :func:`load`."""
    return getattr(load(path, make_dataclass("File", [(name, kind)]), **advice), name)  # type: ignore[no-any-return]


def build(kind: type[T], value: object, *, where: str, fix: str) -> T:
    """What type hints describe, from the values that JSON gave.

    >>> build(Range, {"low": 1, "high": 2, "unknown": 3}, where="range.json", fix="write it again")
    Range(low=1.0, high=2.0, above=-inf)
    >>> build(Range, {"low": "1"}, where="range.json", fix="write it again")
    Traceback (most recent call last):
    flipgrad.errors.InputError: range.json: low: must be a finite number, got '1'; write it again
    """
    try:
        return _convert(kind, value)  # type: ignore[no-any-return]
    except _MisfitError as error:
        place = f"{error.place.removeprefix('.')}: " if error.place else ""
        raise InputError(f"{where}: {place}{error}; {fix}") from None


def _convert(hint: Any, value: Any, place: str = "") -> Any:
    """The value that a hint describes; ``place`` is where it stands in what holds it."""
    try:
        return _CONVERTERS.get(get_origin(hint), _plain)(hint, value)
    except _MisfitError as error:
        raise _MisfitError(str(error), place + error.place) from None


def _union(hint: Any, value: Any) -> Any:
    (kind,) = (argument for argument in get_args(hint) if argument is not NoneType)
    missing = value is None or (isinstance(value, float) and not isfinite(value))
    return None if missing else _convert(kind, value)


def _annotated(hint: Any, value: Any) -> Any:
    kind, limits = get_args(hint)
    if not isinstance(limits, Range):
        return _array(value, limits)
    number = _convert(kind, value)
    _require(number in limits, f"{_WORDS[kind]} {limits}", value)
    return number


def _literal(hint: Any, value: Any) -> Any:
    _require(value in get_args(hint), " or ".join(map(repr, get_args(hint))), value)
    return value


def _list(hint: Any, value: Any) -> list[Any]:
    _require(isinstance(value, list), "a list", value)
    return [_convert(get_args(hint)[0], item, f"[{index}]") for index, item in enumerate(value)]


def _dict(hint: Any, value: Any) -> dict[str, Any]:
    _require(isinstance(value, dict), "an object", value)
    return {name: _convert(get_args(hint)[1], item, f".{name}") for name, item in value.items()}


def _plain(hint: Any, value: Any) -> Any:
    """A dataclass, or a value without parts."""
    if is_dataclass(hint):
        return _dataclass(hint, value)
    if hint is Any:
        return value
    fits = isinstance(value, hint)
    if hint in (int, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        fits = fits and (hint is float or value == int(value))
    _require(fits, _WORDS[hint], value)
    return hint(value)


def _dataclass(kind: Any, value: Any) -> Any:
    _require(isinstance(value, dict), "an object", value)
    hints, found = _hints(kind, include_extras=True), {}
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in value:
            raise _MisfitError(f"has no {field.name!r}")
        if required or value.get(field.name) is not None:
            found[field.name] = _convert(hints[field.name], value[field.name], f".{field.name}")
    try:
        return kind(**found)
    except InputError as error:
        raise _MisfitError(str(error)) from None


def _array(value: Any, dimensions: int) -> NDArray[np.float64]:
    words = f"must be nested lists {dimensions * '[n]'} of finite numbers"
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise _MisfitError(words) from None
    if array.ndim != dimensions or not array.size or not np.isfinite(array).all():
        raise _MisfitError(f"{words}, got the shape {list(array.shape)}")
    return array


def _require(fits: bool, words: str, value: Any) -> None:
    if not fits:
        raise _MisfitError(f"must be {words}, got {brief(value)}")


_LARGEST = float(np.finfo(np.float64).max)
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}
_CONVERTERS = {UnionType: _union, Union: _union, Annotated: _annotated, Literal: _literal, list: _list, dict: _dict}
_hints = lru_cache(get_type_hints)
