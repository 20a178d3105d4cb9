"""Result files as frozen dataclasses: type hints say what a file must hold, and one function reads or refuses it.

A field is called as in the file; what no field is called by is ignored. A field with a default may be missing or null, and a
value that may be None is None where the file has null, NaN or an infinity. What several fields must have in common is checked
by ``__post_init__``, which raises an `InputError`. Nothing in a file is ever executed.
"""

from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from functools import lru_cache
from math import inf, isfinite, ulp
from pathlib import Path
from reprlib import repr as brief
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from flipgrad.errors import InputError
from flipgrad.files import read_json

REWRITE = "run the experiment again to rewrite it"

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, and the words for them in an error."""

    words: str
    low: float
    high: float = inf


NotNegative = Annotated[float, Range("of at least 0", 0)]
Positive = Annotated[float, Range("above 0", ulp(0.0))]
Share = Annotated[float, Range("from 0 to 1", 0, 1)]
Natural = Annotated[int, Range("of at least 0", 0)]
Count = Annotated[int, Range("of at least 1", 1)]
# Arrays of two and of three dimensions.
Matrix = Annotated[NDArray[np.float64], 2]
Cube = Annotated[NDArray[np.float64], 3]

_LARGEST = float(np.finfo(np.float64).max)
_NUMBERS = {int: "a whole number", float: "a finite number"}
_WORDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", **_NUMBERS}
_hints = lru_cache(get_type_hints)


def load(path: Path, kind: type[T], *, missing: str = "run the experiment that writes it", broken: str = REWRITE) -> T:
    """Read a JSON file that holds a dataclass.

    An `InputError` says which file is not there or wrong, where, what was expected, what came, and what to do, which is
    ``missing`` or ``broken``.
    """
    return build(kind, read_json(path, missing=missing, broken=broken), where=str(path), fix=broken)


def load_field(path: Path, name: str, kind: type[T], **advice: str) -> T:
    """Read one field of a JSON file, of any type that a field of a dataclass may have; errors are those of :func:`load`."""
    return getattr(load(path, make_dataclass("File", [(name, kind)]), **advice), name)  # type: ignore[no-any-return]


def build(kind: type[T], value: object, *, where: str, fix: str) -> T:
    """What type hints describe, from the values that JSON gave.

    >>> build(Range, {"words": "of at least 1", "low": 1, "unknown": 3}, where="range.json", fix="write it again")
    Range(words='of at least 1', low=1.0, high=inf)
    >>> build(Range, {"words": "of at least 1", "low": "1"}, where="range.json", fix="write it again")
    Traceback (most recent call last):
    flipgrad.errors.InputError: range.json: low: must be a finite number, got '1'; write it again
    """
    try:
        return _convert(kind, value, "")  # type: ignore[no-any-return]
    except InputError as error:
        raise InputError(f"{where}: {error}; {fix}") from None


def _convert(hint: Any, value: Any, place: str) -> Any:
    """The value that a hint describes; ``place`` is where it stands in the file."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return value
    if kind in (Union, UnionType):
        missing = value is None or (isinstance(value, float) and not isfinite(value))
        return None if missing else _convert(arguments[0], value, place)
    if kind is Literal:
        _require(value in arguments, " or ".join(map(repr, arguments)), value, place)
        return value
    if kind is Annotated:
        return _annotated(arguments[0], arguments[1], value, place)
    base = dict if is_dataclass(kind) else kind
    _require(_is_number(value, base) if base in _NUMBERS else isinstance(value, base), _WORDS[base], value, place)
    if base is not kind:
        return _dataclass(kind, value, place)
    if kind is list:
        return [_convert(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        return {name: _convert(arguments[1], item, f"{place}.{name}") for name, item in value.items()}
    return kind(value)


def _is_number(value: Any, kind: type) -> bool:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return finite and (kind is float or value == int(value))


def _annotated(kind: Any, limits: Range | int, value: Any, place: str) -> Any:
    """A number within a range, or an array of a number of dimensions."""
    if isinstance(limits, Range):
        number = _convert(kind, value, place)
        _require(limits.low <= number <= limits.high, f"{_WORDS[kind]} {limits.words}", value, place)
        return number
    words = f"must be nested lists {limits * '[n]'} of finite numbers"
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise _misfit(words, place) from None
    if array.ndim != limits or not array.size or not np.isfinite(array).all():
        raise _misfit(f"{words}, got the shape {list(array.shape)}", place)
    return array


def _dataclass(kind: Any, value: dict[str, Any], place: str) -> Any:
    hints, found = _hints(kind, include_extras=True), {}
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in value:
            raise _misfit(f"has no {field.name!r}", place)
        if required or value.get(field.name) is not None:
            found[field.name] = _convert(hints[field.name], value[field.name], f"{place}.{field.name}")
    try:
        return kind(**found)
    except InputError as error:
        raise _misfit(str(error), place) from None


def _require(fits: bool, words: str, value: Any, place: str) -> None:
    if not fits:
        raise _misfit(f"must be {words}, got {brief(value)}", place)


def _misfit(words: str, place: str) -> InputError:
    return InputError(f"{place.removeprefix('.')}: {words}" if place else words)
