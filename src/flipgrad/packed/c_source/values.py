"""What C code computes with: images that are stored, rows of one pixel, stages; and weights as the code has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from flipgrad.packed import parts, plain
from flipgrad.packed.parts import Array, Part, Value, walk

# "image" and "input" are what the network is given: bytes, or floats.
Form = Literal["image", "input", "real", "fixed", "bits"]

# What numbers of a row are limited to.
LARGEST = 2**30 - 1
LINEAR = (parts.Affine, parts.BatchNorm, parts.Factor)


@final
@dataclass(eq=False)
class Stored:
    """An image that is kept: [H][W][C] numbers, or [H][W][words] of bits.

    Attributes:
        value: what it is of one example.
        form: how it is kept.
        fraction: bits of the fraction, of fixed point.
        exact: whether whole numbers are not rounded ones.
        drawn: whether a sign was before it.
        magnitude: the largest of its numbers that the examples had, if that is known.
        number: its place among all that is kept.
        written, read: the first stage that writes it, the last that reads it.
        replaces: what may lie in the same memory: every pixel of it is read before the same one of this is written.
        offset: its place in the memory of its form.
    """

    value: Value
    form: Form
    fraction: int = 0
    exact: bool = True
    drawn: bool = False
    magnitude: float | None = None
    number: int = -1
    written: int = -1
    read: int = -1
    replaces: tuple[Stored, ...] = ()
    offset: int = 0

    @property
    def address(self) -> str:
        """Where it is, as the code has it until memory is shared out."""
        return "input" if self.form in ("image", "input") else f"${self.number}$"

    @property
    def per_pixel(self) -> int:
        """Numbers or words of one pixel."""
        channels = self.value.shape[0]
        return -(-channels // 32) if self.form == "bits" else channels

    @property
    def size(self) -> int:
        """Numbers or words of it."""
        return self.per_pixel * pixels(self.value)

    @property
    def text(self) -> str:
        """Its shape and what it holds, for a comment."""
        height, width = image_size(self.value)
        kinds = {"image": "bytes", "input": "floats", "real": "real numbers", "bits": "states", "fixed": "whole numbers"}
        kind = kinds[self.form] if self.exact or self.form != "fixed" else f"multiples of 2^{-self.fraction}"
        return f"[{height}][{width}][{self.value.shape[0]}] {kind}"


@final
@dataclass(eq=False)
class Row:
    """One pixel's numbers, as they are computed.

    Attributes:
        value: the image that all pixels make.
        whole: whether they are whole numbers, which mean what ``pending`` makes of them.
        drawn: whether a sign was before it.
        reads: images of which other pixels are read, too.
        lines: the code so far.
        titles: the parts so far, for the comment.
        beside: images of which the same pixel is read.
        magnitude: the largest of the numbers that the examples had, if that is known.
        bound: the largest magnitude that whole numbers can have.
        exact: whether whole numbers are not rounded ones.
        step: 2 if whole numbers are even or odd as ``bound`` is.
        pending: the parts that give whole numbers their meaning.
        flip: changes the sign of the weights of some channels.
    """

    value: Value
    whole: bool
    drawn: bool
    reads: list[Stored]
    lines: list[str]
    titles: list[str] = field(default_factory=list)
    beside: list[Stored] = field(default_factory=list)
    magnitude: float | None = None
    bound: int = LARGEST
    exact: bool = False
    step: int = 1
    pending: list[Part] = field(default_factory=list)
    flip: Callable[[Array], None] | None = None

    @property
    def channels(self) -> int:
        """Numbers of the row."""
        return self.value.shape[0]

    @property
    def fraction(self) -> int | None:
        """Bits of the fraction, if whole numbers are numbers of fixed point with nothing else pending."""
        if self.exact or not self.pending:
            return None if self.pending else 0
        first = self.pending[0]
        if len(self.pending) > 1 or not isinstance(first, parts.Factor) or math.frexp(first.factor)[0] != 0.5:
            return None
        return 1 - math.frexp(first.factor)[1]

    def means(self, t: Array) -> Array:
        """What whole numbers [T, channels] mean, computed as the packed network does."""
        return plain.run(self.pending, t.astype(np.float64), plain.Evaluation())

    def linear(self) -> tuple[Array, Array, list[Part]]:
        """The scale and the shift of every channel that the first of the pending parts amount to, and those after these."""
        scale, shift = np.ones(self.channels), np.zeros(self.channels)
        for number, part in enumerate(self.pending):
            if not isinstance(part, LINEAR):
                return scale, shift, self.pending[number:]
            if isinstance(part, parts.Factor):
                scale, shift = scale * part.factor, shift * part.factor
            else:
                by, to = part.scale_and_shift(self.channels)
                scale, shift = scale * by, shift * by + to
        return scale, shift, []


@final
@dataclass(eq=False)
class Stage:
    """A loop over pixels, or lines that stand alone if ``pixels`` is 0.

    Attributes:
        title: what it computes.
        pixels: of its result.
        lines: the code for one pixel ``i``.
        result: what it stores.
        sign: the number of the sign in it, if there is one.
    """

    title: str
    pixels: int
    lines: list[str]
    result: Stored | None = None
    sign: int | None = None


def image_size(value: Value) -> tuple[int, int]:
    """Height and width of a value, of which the first dimension is channels: [n] is one pixel."""
    rest = value.shape[1:] or (1,)
    return math.prod(rest[:-1]), rest[-1]


def pixels(value: Value) -> int:
    """How many pixels it has."""
    return math.prod(value.shape[1:])


def has_sign(chain: Sequence[Part]) -> bool:
    """Whether there is a sign in it."""
    return any(isinstance(part, parts.Sign) for part in walk(chain))


def rises(part: Part) -> bool:
    """Whether a part that works on each number alone never turns its direction within a channel."""
    if isinstance(part, parts.PReLU):
        return bool((part.weight >= 0).all())
    if isinstance(part, parts.Activation):
        return part.function != "silu" and (part.function not in ("leaky_relu", "elu") or part.numbers[0] >= 0)
    return isinstance(part, LINEAR)


def weight_words(weights: Array, groups: int) -> Array:
    """Weights ±1 [outputs, C / groups, rows, columns] as words: for every output and place those of its group's channels."""
    outputs, channels, rows, columns = weights.shape
    found = []
    for group in range(groups):
        first = group * channels
        words = (first + channels - 1) // 32 - first // 32 + 1
        bits = np.zeros((outputs // groups, rows, columns, words * 32), np.uint8)
        mine = weights[group * (outputs // groups) : (group + 1) * (outputs // groups)]
        bits[..., first % 32 : first % 32 + channels] = mine.transpose(0, 2, 3, 1) > 0
        found.append(np.packbits(bits, -1, bitorder="little").reshape(-1).view("<u4"))
    return np.concatenate(found).astype(np.uint32)


def flag_words(flags: Array) -> Array:
    """Flags [n] as words, the first in the lowest bit."""
    padded = np.zeros(-(-len(flags) // 32) * 32, np.uint8)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def quantised(weights: Array, largest_input: int) -> tuple[Array, Array]:
    """Weights [outputs, ...] as int16, and bits of the fraction of every output: no sum of products is beyond ``LARGEST``."""
    flat = np.abs(weights.astype(np.float64)).reshape(len(weights), -1)
    fractions = np.zeros(len(weights), np.int64)
    for output, row in enumerate(flat):
        if row.any():
            fraction = math.floor(min(math.log2(32767 / row.max()), math.log2(LARGEST / (row.sum() * largest_input)), 60))
            # Rounded ones may add up to more.
            while np.rint(row * 2.0**fraction).sum() * largest_input > LARGEST:
                fraction -= 1
            fractions[output] = fraction
    whole = np.rint(weights * 2.0 ** fractions.reshape(-1, *[1] * (weights.ndim - 1)))
    return whole.astype(np.int16), fractions


def multipliers(scale: Array, shift: Array) -> tuple[Array, Array, int]:
    """Whole numbers m, c and a count s: scale · a + shift is close to (m a + c) / 2^s."""
    largest = float(max(np.abs(scale).max(), np.abs(shift).max(), 2.0**-30))
    times = min(24, math.floor(math.log2((2**31 - 1) / largest)))
    limits = -(2**31) + 1, 2**31 - 1
    # Numbers beyond that are beyond all limits, anyway.
    factor = 2.0 ** max(0, times)
    return (
        np.clip(np.rint(scale * factor), *limits).astype(np.int32),
        np.clip(np.rint(shift * factor), *limits).astype(np.int32),
        max(0, times),
    )
