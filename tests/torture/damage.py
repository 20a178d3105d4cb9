"""Damage to bytes and to JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Change = Callable[[bytes, Random], bytes]


def damaged(content: bytes, random: Random) -> bytes:
    """The bytes as a failing disk, a cut-off transfer or a careless hand leaves them; never the same."""
    changed = content
    while changed == content:
        changed = random.choice(CHANGES)(content, random)
    return changed


def noise(random: Random, most: int = 2000) -> bytes:
    """Random bytes that have nothing to do with any file."""
    return random.randbytes(int(most ** random.random()))


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, random: Random) -> bytes:
    start, end = _range(content, random)
    return content[:start] + random.choice([random.randbytes(end - start), bytes(end - start)]) + content[end:]


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _lose(content: bytes, random: Random) -> bytes:
    start, end = _range(content, random)
    return content[:start] + content[end:]


def _splice(content: bytes, random: Random) -> bytes:
    """A part of it once more, somewhere else."""
    start, end = _range(content, random)
    place = random.randrange(len(content) + 1)
    return content[:place] + content[start:end] + content[place:]


def _swap(content: bytes, random: Random) -> bytes:
    a, b, c, d = sorted(random.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _append(content: bytes, random: Random) -> bytes:
    return content + noise(random)


def _range(content: bytes, random: Random) -> tuple[int, int]:
    """Places between which something happens; short ones mostly."""
    start = random.randrange(len(content) + 1)
    return start, min(len(content), start + int(random.choice([4, 64, 4096]) * random.random()) + 1)


CHANGES: tuple[Change, ...] = (_flip, _flip, _overwrite, _cut, _lose, _splice, _swap, _append, lambda c, r: noise(r))

# Numbers at and beyond the ends of every range that a field may have, and text that is not a word.
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, 1e-300, 1e-9, 1e9, 1e300, -1e300, float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", " ", "auto", "none", "0", "-1", "1e9", "nan", "x" * 5000, "\0", "a\nb", "ünï©ode ☃", "\ud800", "../..", "/dev/null"),
    *("%s%n", "{0}", "[bold]", "a:b", "os:getcwd", ".x:y", ":", "a.b.c:d", "1-1", "0-0", "8--8", "-", "--help", "1" * 400),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": None}, [1, 2], ["a"], {"a": {"b": []}}, "deep")


def hostile(random: Random) -> Any:
    """A value of any kind that JSON knows, and of some that it does not (NaN)."""
    # A copy of its own: what is put into it must not be there next time, nor may it come to hold itself.
    value = copy.deepcopy(random.choice(random.choice([NUMBERS, NUMBERS, TEXTS, OTHERS])))
    if value == "deep":
        for _ in range(random.choice([50, 400])):
            value = [value]
    return value


def hostile_json(value: Any, random: Random) -> Any:
    """JSON like ``value`` in which something was replaced, taken out or put in."""
    changed = json.loads(json.dumps(value))
    for _ in range(random.choice([1, 1, 2, 4])):
        place = random.choice(list(_places(changed))) if isinstance(changed, dict | list) and changed else None
        if place is None:
            return hostile(random)
        inside, key = place
        action = random.random()
        if action < 0.75:
            inside[key] = hostile(random)
        elif action < 0.85:
            del inside[key]
        elif isinstance(inside, dict):
            inside[random.choice(TEXTS)] = hostile(random)
        else:
            inside.insert(random.randrange(len(inside) + 1), hostile(random))
        if not changed:
            break
    return changed


def _places(value: Any) -> Sequence[tuple[Any, Any]]:
    """Every container within a value with every key of it; it may be nested deeply."""
    found, pending = [], [value]
    while pending:
        inside = pending.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else []
        found.extend((inside, key) for key in keys)
        pending.extend(inside[key] for key in keys)
    return found


def json_bytes(value: Any, random: Random) -> bytes:
    """A JSON file with that value; rarely one that only looks like it, or is nested or long beyond reason."""
    style = random.random()
    if style < 0.02:
        return b"[" * 100_000 + b"]" * 100_000
    if style < 0.04:
        return b'{"config": {"seed": ' + b"9" * 10_000 + b"}}"
    text = json.dumps(value, indent=random.choice([None, 2]), ensure_ascii=random.random() < 0.9)
    return text.encode("utf-8", errors="surrogatepass")
