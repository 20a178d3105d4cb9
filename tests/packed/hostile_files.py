"""Files of packed networks that were damaged, or written by somebody who means harm."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from packed_nets import randomise
from torch import nn

import flipgrad as fg
from flipgrad import files
from flipgrad.packed import Facts, pack

# What may stand in the place of a number, a word, a list, ...
VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 255, 1024, 2**20, 2**20 + 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, -(10**400)),
    *(0.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"), True, False, None),
    *("", "3", "linear", "sums", "states", "zeros", "circular", "a\nb", "\x1b[2J", "\ud800", "x" * 5000),
    *([], [0], [1], [1, 1], [2**20] * 2, [2**20] * 3, [1] * 4, [2**20] * 4, [2**20, 0, 0, 0], [0] * 5000, [[]], [[], []]),
    *({}, {"part": "sign"}, {"part": None}, [{"part": "repeat", "times": 2**20}] * 3, [{"part": "pixel_shuffle"}]),
]


def network() -> tuple[fg.Sequential, torch.Tensor]:
    """A small network with most kinds of parts."""
    net = fg.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        fg.ResidualConv2d(4, 8, stride=2, weights="binary", norm=fg.ScaleShift(4), prelu=True),
        nn.MaxPool2d(2, 1),
        fg.Sign(),
        fg.Concat(nn.Identity(), fg.BinaryConv2d(8, 4, 1, weights="binary")),
        nn.ChannelShuffle(2),
        nn.ConstantPad2d(1, 1.0),
        nn.AvgPool2d(2, 1),
        fg.BinaryConv2d(12, 6, 2, weights="binary", groups=2),
        nn.MaxPool2d(2),
        nn.PixelUnshuffle(1),
        nn.Flatten(),
        fg.BinaryLinear(6, 8, weights="binary", noise=fg.Normal()),
        head=nn.Linear(8, 3),
    )
    randomise(net, 0)
    return net.eval(), torch.randn(1, 2, 6, 6)


def file_content() -> bytes:
    """The file of that network."""
    facts = Facts(("cat", "dog", "fish"), 1 / 255, 0.0, {"test": 0.5}, "pets", "1.0")
    return pack(*network(), facts).to_bytes()[0]


def split(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The entries of the arrays, the description, and the data."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    told = json.loads(header.pop("__metadata__")["flipgrad"])
    return header, told["facts"], content[8 + length :]


def joined(entries: Any, facts: Any, data: bytes) -> bytes:
    """A file with right checksums."""
    told = files.with_checksum({"kind": "packed 1", "facts": facts, "arrays": f"{zlib.crc32(data):08x}"})
    header = json.dumps({"__metadata__": {"flipgrad": json.dumps(told)}, **entries}).encode()
    return len(header).to_bytes(8, "little") + header + data


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bits flipped, the end cut off, bytes put in or left out."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 3, 20])):
        place = chance.randrange(len(changed)) if chance.random() < 0.6 else chance.randrange(min(len(changed), 2000))
        kind = chance.choice(["flip", "flip", "cut", "put in", "leave out", "copy"])
        size = chance.choice([1, 1, 8, 100])
        if kind == "flip":
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del changed[max(1, place) :]
        elif kind == "put in":
            changed[place:place] = chance.randbytes(size)
        elif kind == "leave out" and len(changed) > 2 * size:
            del changed[place : place + size]
        else:
            changed[place : place + size] = content[:size]
    return bytes(changed)


def damaged_with_right_checksums(content: bytes, chance: random.Random) -> bytes:
    """Damaged data, or a damaged description, whose checksums are right."""
    entries, facts, data = split(content)
    if chance.random() < 0.3:
        return joined(entries, facts, damaged(data, chance))
    text = json.dumps([entries, facts])
    for _ in range(40):
        try:
            entries, facts = json.loads(damaged(text.encode(), chance).decode())
            return joined(entries, facts, data)
        except (ValueError, TypeError):
            continue
    return joined({}, facts, data)


def hostile(content: bytes, chance: random.Random) -> bytes:
    """Other values in the description, of the network or of the arrays; right checksums."""
    entries, facts, data = split(content)
    tree = {"entries": entries, "facts": facts}
    root = "facts" if chance.random() < 0.85 else "entries"
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        holder, key = chance.choice(list(places(tree[root])) or [(tree, root)])
        change(holder, key, chance, tree)
    return joined(tree["entries"] if isinstance(tree["entries"], dict) else {}, tree["facts"], data)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All places in it: what holds them, and their key."""
    found: list[tuple[Any, Any]] = []
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 100)) if isinstance(tree, list) else []
    for key in keys:
        found.append((tree, key))
        found += places(tree[key])
    return found


def change(holder: Any, key: Any, chance: random.Random, tree: Any) -> None:
    """One change at one place."""
    kind = chance.choice(["value", "value", "value", "leave out", "more", "swap", "nest", "repeat"])
    if kind == "value":
        holder[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "leave out":
        del holder[key]
    elif kind == "more" and isinstance(holder, dict):
        holder[chance.choice(["part", "extra", "numbers", "\ud800"])] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "swap":
        other, place = chance.choice(places(tree))
        value = copy.deepcopy(other[place])
        if len(json.dumps(value)) < 20_000:
            holder[key] = value
    elif kind == "nest":
        for _ in range(chance.choice([1, 12, 60])):
            holder[key] = [holder[key]] if chance.random() < 0.5 else [{"part": "add", "branches": [holder[key], []]}]
    elif isinstance(holder, list) and len(holder) < 1000:
        holder[key:key] = [holder[key]] * chance.choice([1, 30])


Attack = Callable[[bytes, random.Random], bytes]
