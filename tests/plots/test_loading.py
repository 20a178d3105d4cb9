"""One function reads every result file: what it accepts, and how it says what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from run_files import put

from flipgrad.errors import InputError
from flipgrad.plots.loading import Count, Matrix, Positive, Share, build, load


@dataclass(frozen=True)
class Part:
    number: float | None = None
    share: Share = 0.5

    def __post_init__(self) -> None:
        if self.number == self.share:
            raise InputError("'number' must differ from 'share'")


@dataclass(frozen=True)
class Whole:
    name: str
    parts: dict[str, list[Part]] = field(default_factory=dict)
    count: Count | None = None
    size: Positive = 1.0
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    table: Matrix | None = None
    more: dict[str, Any] = field(default_factory=dict)


def test_a_file_becomes_a_dataclass(tmp_path):
    value = {"name": "n", "parts": {"x": [{"number": 1}, {}]}, "count": 3.0, "flag": True, "kind": "b", "unknown": 1}
    put(tmp_path / "w.json", {**value, "table": [[1, 2]], "more": {"deep": [None]}, "size": None})
    found = load(tmp_path / "w.json", Whole)
    assert found.parts == {"x": [Part(1.0), Part()]}
    assert (found.name, found.count, found.flag, found.kind, found.size) == ("n", 3, True, "b", 1.0)
    assert isinstance(found.count, int)
    assert isinstance(found.parts["x"][0].number, float)
    np.testing.assert_array_equal(found.table, [[1.0, 2.0]])
    assert found.more == {"deep": [None]}


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf])
def test_a_number_that_may_be_missing_is_none_where_it_is_not_finite(number):
    assert build(Part, {"number": number}, where="f", fix="") == Part(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name: must be text, got 1"),
        ({"name": None}, "name: must be text, got None"),
        ({"parts": []}, "parts: must be an object, got []"),
        ({"parts": {"x": {}}}, "parts.x: must be a list, got {}"),
        ({"parts": {"x": [{}, 1]}}, "parts.x[1]: must be an object, got 1"),
        ({"parts": {"x": [{"number": True}]}}, "parts.x[0].number: must be a finite number, got True"),
        ({"parts": {"x": [{"number": 10**400}]}}, "parts.x[0].number: must be a finite number, got 1000"),
        ({"parts": {"x": [{"share": 1.5}]}}, "parts.x[0].share: must be a finite number from 0 to 1, got 1.5"),
        ({"parts": {"x": [{"number": 0.5}]}}, "parts.x[0]: 'number' must differ from 'share'"),
        ({"count": 0}, "count: must be a whole number of at least 1, got 0"),
        ({"count": 1.5}, "count: must be a whole number, got 1.5"),
        ({"size": 0}, "size: must be a finite number above 0, got 0"),
        ({"size": math.inf}, "size: must be a finite number, got inf"),
        ({"flag": 1}, "flag: must be true or false, got 1"),
        ({"kind": "c"}, "kind: must be 'a' or 'b', got 'c'"),
        ({"kind": ["a"]}, "kind: must be 'a' or 'b', got ['a']"),
        ({"table": [[1], [2, 3]]}, "table: must be nested lists [n][n] of finite numbers"),
        ({"table": [1]}, "table: must be nested lists [n][n] of finite numbers, got the shape [1]"),
        ({"table": [[math.nan]]}, "table: must be nested lists [n][n] of finite numbers"),
        ({"more": 1}, "more: must be an object, got 1"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_place_and_fix(change, message):
    with pytest.raises(InputError) as error:
        build(Whole, {"name": "n", **change}, where="w.json", fix="write it again")
    text = str(error.value)
    assert text.startswith(f"w.json: {message}")
    assert text.endswith("; write it again")
    assert len(text) < 200


@pytest.mark.parametrize("value", [None, 1, "text", [], [{}]])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(InputError, match=r"^w\.json: must be an object, got "):
        build(Whole, value, where="w.json", fix="write it again")


def test_what_must_be_there_is_named():
    with pytest.raises(InputError, match=r"^w\.json: has no 'name'; write it again$"):
        build(Whole, {}, where="w.json", fix="write it again")


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_deep_nesting_is_one_clear_error(tmp_path, depth):
    (tmp_path / "w.json").write_text('{"name": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(InputError) as error:
        load(tmp_path / "w.json", Whole)
    assert "\n" not in str(error.value)
