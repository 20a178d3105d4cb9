"""Checked access to what was read from a JSON file; every `InputError` says where and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from reprlib import repr as brief
from typing import Any

from flipgrad.errors import InputError

__all__ = ["brief", "get", "is_finite", "is_number", "mapping", "numbers"]


def get(entry: Any, key: str, where: str) -> Any:
    """The value of a key that must be there."""
    if not isinstance(entry, dict) or key not in entry:
        raise InputError(f"{where}: has no {key!r}")
    return entry[key]


def mapping(entry: Any, key: str, where: str) -> Mapping[str, Any]:
    """The object of a key that must be there."""
    value = get(entry, key, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key!r} must be an object, got {brief(value)}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a number, maybe NaN or infinite; JSON's true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, within what a float holds."""
    try:
        return is_number(value) and isfinite(value)
    except OverflowError:
        return False


def numbers(values: Mapping[str, Any], key: str, where: str, *, low: float, high: float = float("inf")) -> list[float]:
    """The list of finite numbers of a key."""
    found = get(values, key, where)
    if not isinstance(found, list):
        raise InputError(f"{where}: {key!r} must be a list of numbers, got {brief(found)}")
    for number in found:
        if not (is_finite(number) and low <= number <= high):
            raise InputError(f"{where}: {key!r} must hold finite numbers{_limits(low, high)}, got {brief(number)}")
    return [float(number) for number in found]


def _limits(low: float, high: float) -> str:
    if low == float("-inf"):
        return ""
    return f" of at least {low}" if high == float("inf") else f" from {low} to {high}"
