"""A packed network as stages of C code: what each reads, computes for a pixel, and stores.

All values are images [H][W][C]. A stage loops over the pixels of its result: one function of ``functions.c`` gives a pixel's
numbers, a row [C], others change the row, and the last stores it. So only what other pixels need is ever stored. A row is of
real numbers, or of whole numbers and parts that are pending, which tell what these mean; a threshold, a table of probabilities
or a multiplication in fixed point takes the place of these parts.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np

from flipgrad.errors import InputError
from flipgrad.packed import parts
from flipgrad.packed.c_source.values import (
    LARGEST,
    Form,
    Row,
    Stage,
    Stored,
    flag_words,
    has_sign,
    image_size,
    multipliers,
    pixels,
    quantised,
    rises,
    weight_words,
)
from flipgrad.packed.parts import Array, Part, Value
from flipgrad.packed.tables import WORDS, chances, first_positive

# The arithmetic of the first layer and the head.
Numbers = Literal["float", "double", "fixed"]
# How the stream of residual blocks is stored.
Stream = Literal["int16", "int32", "real"]

# What stored numbers of each type are limited to.
STORED = {"int16": 2**15 - 1, "int32": LARGEST}
# Fixed point has room for numbers that are larger than those of the examples by this factor.
MARGIN = 1.25
MOST_FRACTION_BITS = 24
# Bits of the fraction: of numbers whose probabilities are interpolated, of PReLU's weights, and of outputs.
NOISE_BITS, PRELU_BITS, OUTPUT_BITS = 16, 16, 16
# Probabilities are interpolated between multiples of 1 / TAIL_STEPS of the noise's scale, up to TAIL_RANGE scales.
TAIL_STEPS, TAIL_RANGE = 32, 24
# Entries of a layer's table before it is trimmed.
LARGEST_TABLE = 2**27
MODES = {"zeros": 0, "reflect": 1, "replicate": 2, "circular": 3}
# The functions of activations; their numbers come after the row's length.
ACTIVATIONS = {"hardtanh": "clip", "tanh": "hyperbolic_tangent"}
ELEMENTS = {"image": "uint8_t", "input": "float", "real": "real", "fixed": "fixed", "bits": "uint32_t"}


@final
@dataclass(frozen=True)
class Function:
    """A function of ``functions.c``: its name there, its name here, and what its capital words become."""

    template: str
    name: str
    words: Mapping[str, str]


class Compiler:
    """Turns the parts of a network into stages.

    Args:
        numbers: the arithmetic of first layer and head.
        stream: how real numbers between signs are stored.
        stochastic: whether units can be drawn.
        ranges: the largest number that examples had after each part, by the part's identity.
        wide: whether whole numbers are stored in 32 bits though the stream needs 16.

    Attributes:
        stages: the stages so far.
        kept: everything that is stored.
        constants: the arrays of the code by name, with their types.
        layers: the geometries of layers by name.
        functions: what the code calls, by name.
        widest: the longest row of real, and of whole numbers.
    """

    def __init__(
        self, numbers: Numbers, stream: Stream, stochastic: bool, ranges: Mapping[int, float] | None, wide: bool = False
    ) -> None:
        self.numbers, self.stream, self.stochastic, self.ranges = numbers, stream, stochastic, ranges
        self.wide, self.needs_wide = wide or stream == "int32", False
        self.stages: list[Stage] = []
        self.kept: list[Stored] = []
        self.constants: dict[str, tuple[str, Array]] = {}
        self.layers: dict[str, tuple[int, ...]] = {}
        self.functions: dict[str, Function] = {}
        self.widest = {"row": 1, "sums": 1}
        self.signs = 0

    def network(self, program: Sequence[Part], given: Stored) -> None:
        """All stages of a network; the last one leaves its outputs in the row."""
        row = self.row(self.chain(program, given, later=False))
        if self.numbers == "fixed":
            self.to_fixed(row, OUTPUT_BITS)
        else:
            self.to_real(row)
        self.finish(row, None, [])

    def chain(self, chain: Sequence[Part], given: Stored | Row, later: bool) -> Stored | Row:
        """What a chain of parts makes of a value; ``later`` tells whether there are signs behind it."""
        for number, part in enumerate(chain):
            rest = chain[number + 1 :]
            after = later or has_sign(rest)
            if isinstance(part, parts.Reshape) and rest and _is_full(rest[0]):
                # A fully connected layer takes the image as it lies in memory; its weights are put into that order.
                given = self.stored(given, after)
                continue
            make: Callable[..., Stored | Row] = _MAKERS[type(part)]
            given = make(self, part, given, after)
            given.magnitude = self._room(part, rest)
            if isinstance(given, Row):
                given.titles.append(part.name)
        return given

    def real_here(self, drawn: bool, later: bool) -> bool:
        """Whether numbers with a sign before them, or behind them, are real ones."""
        return self.numbers != "fixed" and (self.stream == "real" or not drawn or not later)

    def _room(self, part: Part, rest: Sequence[Part]) -> float | None:
        """The largest number after a part, and after what changes it in fixed point before it is stored."""
        if self.ranges is None:
            return None
        largest = self.ranges[id(part)]
        for following in rest:
            if not isinstance(following, parts.PReLU | parts.Activation):
                break
            largest = max(largest, self.ranges[id(following)])
        return largest

    # The code's constants and functions.

    def constant(self, what: str, ctype: str, values: Array) -> str:
        """The name of a constant array of the code."""
        name = self._unused(what, self.constants)
        self.constants[name] = (ctype, values)
        return name

    def _unused(self, what: str, names: Mapping[str, Any]) -> str:
        """A name with the number of the stage, and if need be a letter."""
        name = f"{what}_{len(self.stages)}"
        return next(f"{name}{letter}" for letter in ("", *string.ascii_lowercase) if name + letter not in names)

    def layer(self, source: Value, outputs: Value, kernel: tuple[int, ...], **geometry: Any) -> str:
        """The name of a constant that holds a layer's geometry."""
        (height, width), (_, out_width) = image_size(source), image_size(outputs)
        stride, dilation = geometry.get("stride", (1, 1)), geometry.get("dilation", (1, 1))
        left, _, top, _ = geometry.get("padding", (0, 0, 0, 0))
        shape = (height, width, source.shape[0], out_width, outputs.shape[0], *kernel, *stride, top, left, *dilation)
        name = self._unused("layer", self.layers)
        self.layers[name] = (*shape, geometry.get("groups", 1), geometry.get("around", 0), geometry.get("mode", 0))
        return f"&{name}"

    def function(
        self, template: str, source: Form | None = None, *, whole: bool = False, name: str = "", noise: str = ""
    ) -> str:
        """The name of a function, made for numbers that are stored in that form, and whole or real ones in the row."""
        words = {"NUMBER": "int32_t" if whole else "real", "WEIGHT": "int16_t" if whole else "float", "NOISE": noise}
        words["STORED(row[c])"] = "(fixed)limited(row[c], LARGEST_STORED)" if whole else "row[c]"
        if source is not None:
            words |= {"ELEMENT": ELEMENTS[source], "VALUE": f"{source}_{'number' if whole else 'value'}"}
        words["PLUS"] = "plus_limited" if whole else "plus_real"
        name = name or template + (f"_{source}" if source else "") + (f"_{noise}" if noise else "")
        self.functions[name] = Function(template, name, words)
        return name

    # Rows, and what is stored.

    def row(self, given: Stored | Row) -> Row:
        """A value as rows."""
        if isinstance(given, Row):
            return given
        whole = given.form in ("bits", "fixed") or (given.form == "image" and self.numbers == "fixed")
        load = self.function("load", given.form, whole=whole)
        channels = given.value.shape[0]
        lines = [f"{load}({'sums' if whole else 'row'}, {given.address}, {channels}, i);"]
        row = Row(given.value, whole, given.drawn, [], lines, beside=[given], magnitude=given.magnitude)
        if whole:
            row.exact = given.exact
            row.bound = given.value.bound if given.exact else LARGEST
            row.pending = [parts.Factor(2.0**-given.fraction)] if given.fraction else []
        return self.wider(row)

    def wider(self, row: Row) -> Row:
        """Makes room for a row."""
        name = "sums" if row.whole else "row"
        self.widest[name] = max(self.widest[name], row.channels)
        return row

    def new(self, like: Row | Stored, value: Value, form: Form, **facts: Any) -> Stored:
        """Something more that is stored."""
        self.kept.append(
            Stored(value, form, **{"drawn": like.drawn, "magnitude": like.magnitude, **facts}, number=len(self.kept))
        )
        return self.kept[-1]

    def stored(self, given: Stored | Row, later: bool, form: Form | None = None, fraction: int | None = None) -> Stored:
        """The value in memory, in fixed point if that is the ``form`` asked for, with so many bits of the fraction."""
        if isinstance(given, Stored):
            right = given.form == form and fraction in (None, given.fraction) if form else given.form not in ("image", "input")
            if right:
                return given
        row = self.row(given)
        if form == "real" or (form is None and row.whole and row.pending and self.real_here(row.drawn, later)):
            self.to_real(row)
        elif (form == "fixed" and not row.whole) or (
            row.whole and (row.fraction is None or fraction not in (None, row.fraction))
        ):
            self.to_fixed(row, self.fraction_bits(row) if fraction is None else fraction)
        return self.keep(row)

    def keep(self, row: Row) -> Stored:
        """Ends a stage that stores its row as it is."""
        form: Form = "fixed" if row.whole else "real"
        facts = {"fraction": row.fraction, "exact": row.exact} if row.whole else {"exact": False}
        result = self.new(row, row.value, form, **facts)
        if row.whole and row.exact and row.bound > STORED["int16"]:
            self.needs_wide = True
        store = self.function("store", form, whole=row.whole)
        line = f"{store}({result.address} + {row.channels} * i, {'sums' if row.whole else 'row'}, {row.channels});"
        self.finish(row, result, [line])
        return result

    def finish(self, row: Row, result: Stored | None, lines: list[str], sign: int | None = None) -> None:
        """Ends a stage."""
        number = len(self.stages)
        for each in (*row.reads, *row.beside):
            each.read = number
        origin = (*row.reads, *row.beside)[0]
        title = f"{', '.join(row.titles) or 'stored'}: {origin.text} -> {result.text if result else 'outputs'}"
        if result is not None:
            result.written = number
            result.replaces = tuple(each for each in row.beside if each not in row.reads)
        self.stages.append(Stage(title, pixels(row.value), [*row.lines, *lines], result, sign))

    # From whole numbers to real ones, and back.

    def fraction_bits(self, row: Row, limit: int | None = None) -> int:
        """Bits of the fraction with which the largest numbers of the examples can be stored, or are within a ``limit``."""
        if row.magnitude is None:
            raise InputError(
                "fixed point needs to know how large numbers get: hand in examples=x, inputs as the network will see, or use "
                "numbers='float' and stream='real'"
            )
        limit = limit or STORED["int32" if self.stream == "int32" else "int16"]
        return min(MOST_FRACTION_BITS, math.floor(math.log2(limit / (MARGIN * max(row.magnitude, 2.0**-20)))))

    def to_real(self, row: Row) -> None:
        """Makes real numbers of the row."""
        if not row.whole:
            return
        scale, shift, others = row.linear()
        names = self.constant("scale", "real", scale), self.constant("shift", "real", shift)
        row.lines.append(f"{self.function('to_real')}(row, sums, {row.channels}, {names[0]}, {names[1]});")
        row.whole, row.exact, row.flip, row.pending = False, False, None, []
        self.wider(row)
        for part in others:
            self.apply_real(part, row)

    def to_fixed(self, row: Row, fraction: int) -> None:
        """Makes numbers of fixed point of the row."""
        unit: list[Part] = [parts.Factor(2.0**-fraction)]
        others: list[Part] = []
        if not row.whole:
            row.lines.append(f"{self.function('to_fixed')}(sums, row, {row.channels}, {self.literal(2.0**fraction)});")
        elif row.fraction != fraction:
            scale, shift, others = row.linear()
            self.rescale(row.lines, scale, shift, fraction)
        row.whole, row.exact, row.flip, row.bound, row.step, row.pending = True, False, None, LARGEST, 1, unit
        self.wider(row)
        for part in others:
            if isinstance(part, parts.PReLU | parts.Activation):
                self.apply_fixed(part, row, fraction)
            else:
                row.pending.append(part)
        if len(row.pending) > 1:
            self.to_fixed(row, fraction)

    def rescale(self, lines: list[str], scale: Array, shift: Array, fraction: int) -> None:
        """Code for scale · a + shift in fixed point, of the whole numbers of the row."""
        multiplier, offset, times = multipliers(scale * 2.0**fraction, shift * 2.0**fraction)
        names = self.constant("multiplier", "int32_t", multiplier), self.constant("offset", "int32_t", offset)
        lines.append(f"{self.function('rescale')}(sums, {len(scale)}, {names[0]}, {names[1]}, {times});")

    def apply_fixed(self, part: parts.PReLU | parts.Activation, row: Row, fraction: int) -> None:
        """Code for an activation in fixed point; what comes after linear parts must be applied to what these give."""
        n = row.channels
        if len(row.pending) > 1:
            scale, shift, _ = row.linear()
            self.rescale(row.lines, scale, shift, fraction)
            row.pending = row.pending[:1]
        if isinstance(part, parts.PReLU) or part.function == "leaky_relu":
            slopes = part.weight.astype(np.float64) if isinstance(part, parts.PReLU) else np.array(part.numbers)
            weight = np.rint(np.broadcast_to(slopes, n) * 2**PRELU_BITS).clip(-LARGEST, LARGEST).astype(np.int32)
            name = self.constant("slope", "int32_t", weight)
            row.lines.append(f"{self.function('prelu_fixed')}(sums, {n}, {name});")
        elif part.function in ("relu", "hardtanh"):
            low, high = part.numbers or (0.0, math.inf)
            ends = [round(min(max(end * 2.0**fraction, -LARGEST), LARGEST)) for end in (low, high)]
            row.lines.append(f"{self.function('clip', 'fixed', whole=True)}(sums, {n}, {ends[0]}, {ends[1]});")
        else:
            raise InputError(
                f"activation {part.function!r} has no code in fixed point: use numbers='float' and stream='real' "
                "(--numbers float --stream real), or ReLU, PReLU or Hardtanh in the network"
            )

    def apply_real(self, part: Part, row: Row) -> None:
        """Code for a part that works on each real number of the row alone."""
        n = row.channels
        if isinstance(part, parts.Affine | parts.BatchNorm):
            scale, shift = part.scale_and_shift(n)
            if not isinstance(part, parts.Affine) or part.scale is not None:
                row.lines.append(f"{self.function('multiply')}(row, {n}, {self.constant('scale', 'real', scale)});")
            if not isinstance(part, parts.Affine) or part.shift is not None:
                row.lines.append(f"{self.function('shift')}(row, {n}, {self.constant('shift', 'real', shift)});")
        elif isinstance(part, parts.Factor):
            row.lines.append(f"{self.function('scale_all')}(row, {n}, {self.literal(part.factor)});")
        elif isinstance(part, parts.PReLU):
            weight = self.constant("slope", "real", np.broadcast_to(part.weight, n))
            row.lines.append(f"{self.function('prelu')}(row, {n}, {weight});")
        elif isinstance(part, parts.Activation):
            source: Form | None = "real" if part.function == "hardtanh" else None
            name = self.function(ACTIVATIONS.get(part.function, part.function), source)
            row.lines.append(f"{name}({', '.join(['row', str(n), *map(self.literal, part.numbers)])});")

    def literal(self, number: float) -> str:
        """A real number as C has it."""
        return f"(real){float(number)!r}"

    # The parts.

    def elementwise(self, part: Part, given: Stored | Row, later: bool) -> Row:
        """A part that works on each number alone."""
        row = self.row(given)
        if row.whole:
            row.pending.append(part)
        else:
            self.apply_real(part, row)
        row.value = part.result(row.value)
        return row

    def connected(self, part: parts.Linear | parts.Convolution, given: Stored | Row, later: bool) -> Row:
        """Real weights: in real arithmetic, or in fixed point."""
        whole = not self.real_here(given.drawn, later)
        source, largest = self._input_of(given, later, whole, math.prod(part.weight.shape[1:]))
        weight, value = part.weight, Value((len(part.weight),))
        kernel = image_size(source.value)
        geometry: dict[str, Any] = {}
        if isinstance(part, parts.Convolution):
            value, kernel = part.result(source.value), weight.shape[2:]
            geometry = {name: getattr(part, name) for name in ("stride", "padding", "dilation", "groups")}
            geometry["around"] = round(part.padding_value * 2**source.fraction)
            geometry["mode"] = MODES[part.padding_mode]
            largest = max(largest, abs(geometry["around"]))
        else:
            weight = weight.reshape(len(weight), source.value.shape[0], *kernel)
        layer = self.layer(source.value, value, kernel, **geometry)
        ordered = weight.transpose(0, 2, 3, 1)
        name = f"convolve_{source.form}" + "_fixed" * whole
        call = self.function("convolve", source.form, whole=whole, name=name)
        row = Row(value, whole, given.drawn, [source], [])
        if whole:
            constant = self._fixed_weights(part, row, ordered, source, largest)
            row.lines.append(f"{call}(sums, {source.address}, {layer}, {constant}, i);")
            return self.wider(row)
        constant = self.constant("weight", "float", ordered)
        row.lines.append(f"{call}(row, {source.address}, {layer}, {constant}, i);")
        if source.fraction:
            self.apply_real(parts.Factor(2.0**-source.fraction), row)
        if part.bias is not None:
            self.apply_real(parts.Affine(None, part.bias), row)
        return self.wider(row)

    def _input_of(self, given: Stored | Row, later: bool, whole: bool, inputs: int) -> tuple[Stored, int]:
        """What a layer with real weights of so many ``inputs`` reads, and the largest number in it if these are whole ones."""
        if not whole:
            return (given if isinstance(given, Stored) else self.stored(given, later)), 0
        if isinstance(given, Stored) and given.form in ("image", "bits"):
            return given, 1 if given.form == "bits" else STORED["int16"]
        if isinstance(given, Stored) and given.form == "fixed" and not self.wide:
            return given, STORED["int16"]
        # Products have 30 bits together, which inputs and weights share.
        row, largest = self.row(given), 2 ** min(15, max(8, round((30 - math.log2(inputs)) / 2) + 1)) - 1
        self.to_fixed(row, self.fraction_bits(row, largest))
        row.lines.append(f"{self.function('clip', 'fixed', whole=True)}(sums, {row.channels}, {-largest}, {largest});")
        return self.keep(row), largest

    def _fixed_weights(
        self, part: parts.Linear | parts.Convolution, row: Row, ordered: Array, source: Stored, largest: int
    ) -> str:
        """The name of quantised weights, whose units are pending."""
        weights, fractions = quantised(ordered, largest)
        name = self.constant("weight", "int16_t", weights)
        row.pending = [parts.Affine(np.float32(2.0) ** -(fractions + source.fraction).astype(np.float32), part.bias)]
        row.bound = LARGEST

        def flip(turned: Array) -> None:
            self.constants[name] = ("int16_t", weights * turned.astype(np.int16)[:, None, None, None])

        row.flip = flip
        return name

    def sums(self, part: parts.Sums, given: Stored | Row, later: bool) -> Row:
        """Binary weights: counts of equal and of different bits."""
        source = self.stored(given, later)
        weights, bound = part.weights(), max(1, source.value.bound) * math.prod(part.filter)
        value, kernel = Value((part.outputs,), "integers", bound), image_size(source.value)
        geometry: dict[str, Any] = {}
        if weights.ndim == 2:
            weights = weights.reshape(part.outputs, source.value.shape[0], *kernel)
        else:
            value, kernel = part.result(source.value), weights.shape[2:]
            geometry = {name: getattr(part, name) for name in ("stride", "padding", "dilation", "groups")}
            geometry["around"] = int(part.padding_value)
        layer = self.layer(source.value, value, kernel, **geometry)
        name = self.constant("weight", "uint32_t", weight_words(weights, part.groups))
        call = self.function("sum_bits" if source.form == "bits" else "sum_numbers")
        row = Row(value, True, True, [source], [f"{call}(sums, {source.address}, {layer}, {name}, i);"])
        row.exact, row.bound = True, bound
        # All inputs count where no zeros are around the image: sums are even, or all are odd.
        row.step = 2 if source.form == "bits" and (part.padding_value or not any(part.padding)) else 1

        def flip(turned: Array) -> None:
            self.constants[name] = ("uint32_t", weight_words(weights * turned[:, None, None, None], part.groups))

        row.flip = flip
        return self.wider(row)

    def sign(self, part: parts.Sign, given: Stored | Row, later: bool) -> Stored:
        """States."""
        row = self.row(given)
        if self.stochastic and self.signs == 0 and not row.whole and row.reads:
            # Computed once for all draws.
            row = self.row(self.stored(row, True))
        if row.whole and not all(map(rises, row.pending)):
            if not self.real_here(row.drawn, True):
                raise InputError(
                    "a PReLU with negative weights, or SiLU, before a sign has no threshold: use stream='real' (--stream real)"
                )
            self.to_real(row)
        result = self.new(row, part.result(row.value), "bits", drawn=True, magnitude=None)
        at = f"{result.address} + {result.per_pixel} * i"
        n = row.channels
        if row.whole:
            decide, draw = self._decide_whole(part, row, at)
        else:
            decide, draw = [f"{self.function('sign_real')}({at}, row, {n});"], []
            if self.stochastic:
                name = self.function("draw_real", noise=part.noise)
                draw = [f"{name}({at}, row, {n}, {self.literal(part.noise_scale)}, draw, i);"]
        lines = decide
        if self.stochastic:
            lines = ["if (draw) {", *(f"    {line}" for line in draw), "} else {", *(f"    {line}" for line in decide), "}"]
        row.titles.append(part.name)
        self.finish(row, result, lines, self.signs)
        self.signs += 1
        return result

    def _decide_whole(self, part: parts.Sign, row: Row, at: str) -> tuple[list[str], list[str]]:
        """Code that makes states of whole numbers, without noise and with it."""
        n, ends = row.channels, np.array([[-row.bound], [row.bound]]).repeat(row.channels, 1)
        low, high = row.means(ends)
        falls = high < low
        turned = np.where(falls, -1, 1)
        least = first_positive(lambda t: row.means(t[None] * turned)[0] >= 0, row.bound, n)
        if falls.any():
            if row.flip is not None:
                row.flip(turned)
            else:
                name = self.constant("falls", "uint32_t", flag_words(falls))
                row.lines.append(f"{self.function('turn')}(sums, {n}, {name});")
            row.pending.insert(0, parts.Affine(turned.astype(np.float32), None))
        name = self.constant("least", "int32_t", least.astype(np.int32))
        decide = [f"{self.function('threshold')}({at}, sums, {n}, {name});"]
        if not self.stochastic:
            return decide, []
        return decide, self._table(part, row, at) if row.exact else self._interpolated(part, row, at)

    def _table(self, part: parts.Sign, row: Row, at: str) -> list[str]:
        """Code that draws states by a table of every channel, of which only what is neither 0 nor 1 is kept."""
        t = np.arange(-row.bound, row.bound + 1, row.step)
        if len(t) * row.channels > LARGEST_TABLE:
            raise InputError(
                f"the table of {row.channels} channels with sums up to {row.bound:,} is too large: leave --stochastic"
            )
        some = max(1, 2**22 // row.channels)
        blocks = [row.means(t[start : start + some, None].repeat(row.channels, 1)) for start in range(0, len(t), some)]
        p = np.concatenate([chances(part.noise, a, part.noise_scale) for a in blocks])
        # The first that is not 0, and the first of those that are as good as 1.
        begin, end = (p > 0).argmax(0), len(t) - (p[::-1] < WORDS - 1).argmax(0)
        begin = np.where((p > 0).any(0), begin, len(t))
        end = np.maximum(begin, np.where((p < WORDS - 1).any(0), end, 0))
        first = -row.bound + row.step * begin
        kept = np.concatenate([p[b:e, channel] for channel, (b, e) in enumerate(zip(begin, end, strict=True))])
        names = (
            self.constant("first", "int32_t", first.astype(np.int32)),
            self.constant("start", "int32_t", np.concatenate([[0], np.cumsum(end - begin)]).astype(np.int32)),
            self.constant("chance", "uint32_t", kept if len(kept) else np.zeros(1, np.uint32)),
        )
        call = self.function("draw_table")
        return [f"{call}({at}, sums, {row.channels}, {', '.join(names)}, {row.step}, draw, i);"]

    def _interpolated(self, part: parts.Sign, row: Row, at: str) -> list[str]:
        """Code that draws states of numbers in fixed point."""
        name = f"tail_{part.noise}"
        z = -np.arange(TAIL_STEPS * TAIL_RANGE + 1) / TAIL_STEPS
        self.constants[name] = ("uint32_t", chances(part.noise, z, 1.0))
        lines: list[str] = []
        scaled = replace(row, lines=lines, pending=[*row.pending, parts.Factor(1 / part.noise_scale)])
        self.to_fixed(scaled, NOISE_BITS)
        return [*lines, f"{self.function('draw_fixed')}({at}, sums, {row.channels}, {name}, {len(z)}, draw, i);"]

    def window_sum(self, part: parts.WindowSum, given: Stored | Row, later: bool) -> Row:
        """Sums over windows."""
        row = self._window(part, given, later, "window_sum")
        row.bound = row.value.bound if row.exact else LARGEST
        return row

    def max_pool(self, part: parts.MaxPool, given: Stored | Row, later: bool) -> Stored | Row:
        """The largest in windows; of states any."""
        source = self.stored(given, later)
        if source.form != "bits":
            return self._window(part, source, later, "window_max")
        result = self.new(source, part.result(source.value), "bits")
        row = Row(result.value, True, source.drawn, [source], [], [part.name])
        layer = self._pool_layer(part, source, result.value)
        line = f"{self.function('any_of_bits')}({result.address} + {result.per_pixel} * i, {source.address}, {layer}, i);"
        self.finish(row, result, [line])
        return result

    def _pool_layer(self, part: parts.WindowSum | parts.MaxPool, source: Stored, value: Value) -> str:
        top, left = part.padding
        return self.layer(source.value, value, part.kernel, stride=part.stride, padding=(left, left, top, top))

    def _window(self, part: parts.WindowSum | parts.MaxPool, given: Stored | Row, later: bool, name: str) -> Row:
        source = self.stored(given, later)
        value = part.result(source.value)
        whole = source.form != "real"
        call = self.function(name, source.form, whole=whole)
        line = f"{call}({'sums' if whole else 'row'}, {source.address}, {self._pool_layer(part, source, value)}, i);"
        row = Row(value, whole, source.drawn, [source], [line], exact=whole and source.exact)
        row.bound = source.value.bound if row.exact else LARGEST
        row.pending = [parts.Factor(2.0**-source.fraction)] if source.fraction else []
        return self.wider(row)

    # Parts that put numbers into another order.

    def moved(self, source: Stored, result: Stored, start: int, *loops: tuple[int, int, int], name: str) -> None:
        """A stage that copies; each loop has a count, and how far apart its numbers lie in the result and in the source."""
        padded = [*[(1, 0, 0)] * (5 - len(loops)), *loops]
        count, to, origin = (
            self.constant(f"{what}", "int32_t", np.array(each, np.int32))
            for what, each in zip(("count", "to", "from"), zip(*padded, strict=True), strict=True)
        )
        if source.form == "bits":
            line = f"{self.function('rearrange_bits')}({result.address}, {start}, {source.address}, {count}, {to}, {origin});"
        else:
            call = self.function("rearrange", source.form)
            line = f"{call}({result.address} + {start}, {source.address}, {count}, {to}, {origin});"
        number = len(self.stages)
        source.read, result.written = number, number if result.written < 0 else result.written
        self.stages.append(Stage(f"{name}: {source.text} -> {result.text}", 0, [line], result))

    def like(self, source: Stored, value: Value) -> Stored:
        """Something stored as another is, in another shape."""
        return self.new(source, value, source.form, fraction=source.fraction, exact=source.exact)

    def reshape(self, part: parts.Reshape, given: Stored | Row, later: bool) -> Stored | Row:
        """Another shape: through the order in which the packed network counts."""
        value = part.result(given.value)
        if isinstance(given, Row) and pixels(value) == pixels(given.value) == 1:
            given.value = value
            return given
        source = self.stored(given, later)
        if pixels(source.value) > 1:
            channels, count = source.value.shape[0], pixels(source.value)
            flat = self.like(source, replace(value, shape=(source.value.size,)))
            self.moved(source, flat, 0, (channels, count, 1), (count, 1, _stride(source)), name=part.name)
            source = flat
        if pixels(value) == 1 and len(value.shape) == 1:
            return source
        result = self.like(source, value)
        count = pixels(value)
        self.moved(source, result, 0, (value.shape[0], 1, count), (count, _stride(result), 1), name=part.name)
        return result

    def pixel_shuffle(self, part: parts.PixelShuffle, given: Stored | Row, later: bool) -> Stored:
        """Channels become pixels, or pixels channels."""
        source = self.stored(given, later)
        result = self.like(source, part.result(source.value))
        small, large = (source, result) if not part.back else (result, source)
        f, (channels, height, width) = part.factor, (large.value.shape[0], *image_size(small.value))
        s, b = _stride(small), _stride(large)
        # How far apart numbers lie in the image with fewer pixels, and in the other.
        loops = [
            (channels, f * f, 1),
            (f, f, width * f * b),
            (f, 1, b),
            (height, width * s, f * width * f * b),
            (width, s, f * b),
        ]
        turned = [(n, few, many) if part.back else (n, many, few) for n, few, many in loops]
        self.moved(source, result, 0, *turned, name=part.name)
        return result

    def channel_shuffle(self, part: parts.ChannelShuffle, given: Stored | Row, later: bool) -> Stored:
        """Channels in another order."""
        source = self.stored(given, later)
        result = self.like(source, source.value)
        each, step = source.value.shape[0] // part.groups, _stride(source)
        self.moved(
            source,
            result,
            0,
            (pixels(source.value), step, step),
            (part.groups, 1, each),
            (each, part.groups, 1),
            name=part.name,
        )
        return result

    def pad(self, part: parts.Pad, given: Stored | Row, later: bool) -> Stored:
        """A constant around it; zeros among states make whole numbers of these."""
        source = self.stored(given, later)
        if source.form == "bits" and part.value == 0:
            source = self.keep(self.row(source))
        result = self.like(source, part.result(source.value))
        (height, width), (_, wide) = image_size(source.value), image_size(result.value)
        left, _, top, _ = part.sides
        if source.form == "bits":
            text = "0xffffffffu" if part.value > 0 else "0"
        else:
            text = self.literal(part.value) if source.form == "real" else str(round(part.value * 2**source.fraction))
        line = f"{self.function('fill', source.form)}({result.address}, {result.size}, {text});"
        result.written = len(self.stages)
        source.read = result.written
        self.stages.append(Stage(f"{part.name}: {part.value:g} around {source.text}", 0, [line], result))
        a, b = _stride(result), _stride(source)
        loops = (height, wide * a, width * b), (width, a, b), (source.value.shape[0], 1, 1)
        self.moved(source, result, (top * wide + left) * a, *loops, name=part.name)
        return result

    def repeat(self, part: parts.Repeat, given: Stored | Row, later: bool) -> Stored | Row:
        """The channels, several times."""
        if isinstance(given, Stored) and given.form == "bits":
            result = self.like(given, part.result(given.value))
            channels = given.value.shape[0]
            loops = (pixels(given.value), _stride(result), _stride(given)), (part.times, channels, 0), (channels, 1, 1)
            self.moved(given, result, 0, *loops, name=part.name)
            return result
        row = self.row(given)
        if row.whole and row.fraction is None:
            if self.real_here(row.drawn, later):
                self.to_real(row)
            else:
                self.to_fixed(row, self.fraction_bits(row))
        name = self.function("repeat", "fixed" if row.whole else "real", whole=row.whole)
        row.lines.append(f"{name}({'sums' if row.whole else 'row'}, {row.channels}, {part.times});")
        row.value, row.flip = part.result(row.value), None
        return self.wider(row)

    def concat(self, part: parts.Concat, given: Stored | Row, later: bool) -> Stored:
        """Chains on one input, one result after the other."""
        source = given if isinstance(given, Stored) else self.stored(given, True)
        found = [self.stored(self.chain(branch, source, later), later) for branch in part.branches]
        forms = {each.form for each in found}
        if "real" in forms:
            found = [self.stored(each, later, "real") for each in found]
        elif "fixed" in forms:
            rounded = [each.fraction for each in found if not each.exact]
            fraction = min(rounded, default=0)
            found = [self.stored(each, later, "fixed", fraction) for each in found]
        value = part.result(given.value)
        first = found[0]
        result = self.new(first, value, first.form, fraction=first.fraction, exact=all(each.exact for each in found))
        result.drawn = any(each.drawn for each in found)
        at = 0
        for each in found:
            shape, to, origin = each.value.shape, _stride(result), _stride(each)
            if part.dim == 0:
                self.moved(each, result, at, (pixels(value), to, origin), (shape[0], 1, 1), name=part.name)
                at += shape[0]
                continue
            outer, inner = math.prod(shape[1 : part.dim]), math.prod(shape[part.dim + 1 :])
            here, there = shape[part.dim] * inner, value.shape[part.dim] * inner
            loops = (outer, there * to, here * origin), (here, to, origin), (shape[0], 1, 1)
            self.moved(each, result, at * inner * to, *loops, name=part.name)
            at += shape[part.dim]
        return result

    def add(self, part: parts.Add, given: Stored | Row, later: bool) -> Row:
        """The sum of chains on one input, which is stored in fixed point if there are signs in them."""
        value = part.result(given.value)
        signs = any(map(has_sign, part.branches))
        stream = signs and self.stream != "real" and not (isinstance(given, Stored) and given.form in ("bits", "fixed"))
        source = self.stored(given, True, "fixed" if stream else None)
        last = max((number for number, branch in enumerate(part.branches) if branch), default=0)
        others = []
        for branch in part.branches[:last]:
            found = self.chain(branch, source, later)
            others.append(found if isinstance(found, Stored) else self.stored(found, later))
        others += [source] * (len(part.branches) - last - 1)
        # The last chain that computes something stays a row, to which the others are added.
        row = self.row(self.chain(part.branches[last], source, later))
        row.drawn = row.drawn or any(each.drawn for each in others)
        row.magnitude = None if self.ranges is None else self.ranges[id(part)]
        return self._added(part, row, others, value, later)

    def _added(self, part: parts.Add, row: Row, others: list[Stored], value: Value, later: bool) -> Row:
        real = self.real_here(row.drawn, later)
        n = row.channels
        if real:
            self.to_real(row)
        else:
            self.to_fixed(row, self.fraction_bits(row))
        for each in others:
            if not real and each.form in ("real", "image", "input"):
                each = self.stored(each, later, "fixed")
            row.beside.append(each)
            if real:
                unit = self.literal(2.0**-each.fraction)
                row.lines.append(f"{self.function('add', each.form)}(row, {each.address}, {n}, i, {unit});")
            else:
                up = (row.fraction or 0) - each.fraction
                name = self.function("join", each.form, whole=True)
                row.lines.append(f"{name}(sums, {each.address}, {n}, i, {2 ** max(0, up)}, {max(0, -up)});")
        row.value = value
        return row


def _is_full(part: Part) -> bool:
    """Whether it is a fully connected layer."""
    return isinstance(part, parts.Linear) or (isinstance(part, parts.Sums) and len(part.filter) == 1)


def _stride(stored: Stored) -> int:
    """From one pixel to the next, in numbers or in bits."""
    return stored.per_pixel * (32 if stored.form == "bits" else 1)


_MAKERS: dict[type[Part], Any] = {
    parts.Linear: Compiler.connected,
    parts.Convolution: Compiler.connected,
    parts.Affine: Compiler.elementwise,
    parts.BatchNorm: Compiler.elementwise,
    parts.PReLU: Compiler.elementwise,
    parts.Activation: Compiler.elementwise,
    parts.Factor: Compiler.elementwise,
    parts.WindowSum: Compiler.window_sum,
    parts.MaxPool: Compiler.max_pool,
    parts.Sign: Compiler.sign,
    parts.Sums: Compiler.sums,
    parts.Reshape: Compiler.reshape,
    parts.PixelShuffle: Compiler.pixel_shuffle,
    parts.ChannelShuffle: Compiler.channel_shuffle,
    parts.Pad: Compiler.pad,
    parts.Repeat: Compiler.repeat,
    parts.Concat: Compiler.concat,
    parts.Add: Compiler.add,
}
