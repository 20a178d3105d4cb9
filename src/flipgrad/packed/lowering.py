"""Turns a packed network into the steps that the compiled engine takes; see csrc/packed.h.

States are held in bits as long as that is possible: zero padding and sums over windows are folded into the windows of the sums
that follow, flattening into the order of their weights. Where it is not, they become real numbers, and sums those of real
weights. Sums, the affine function behind them and its sign are one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from flipgrad.packed import layout, parts, tables
from flipgrad.packed.layout import Axis, Filters, Meetings, Windows, per_channel, words_of
from flipgrad.packed.parts import Array, Part, Shape, Value

# The steps of csrc/packed.h, by their numbers.
KINDS = (
    "input",
    "sums",
    "convolution",
    "any",
    "maximum",
    "average",
    "affine",
    "prelu",
    "relu",
    "sign",
    "probability",
    "draw",
    "gather",
    "gather_bits",
    "insert",
    "insert_bits",
    "add",
    "to_real",
    "output",
    "places",
    "places_bits",
    "scatter",
    "scatter_bits",
    "activation",
)
THRESHOLD, DRAWN, REAL = 0, 1, 2
FUNCTIONS = ("hardtanh", "tanh", "sigmoid", "silu", "elu", "softplus")
# Bytes that the table of a layer may have; larger ones are computed as real numbers.
LARGEST_TABLE = 2**26
# Sums are 32-bit integers, and so are twice their numbers.
LARGEST_SUM = 2**29
# Rows or columns of an image.
LONGEST_SIDE = 2**14
# What the compiled approximation of a logistic probability may be wrong by, three times over: see `drawn` in
# csrc/packed_kernels.inc.
MARGIN = 2.0**-12


class NoStepsError(Exception):
    """Why the compiled engine has no steps for a network."""


@final
@dataclass
class Step:
    """A step of the compiled engine: values are told by their numbers, other fields are those of PackedStep."""

    kind: str
    source: int = -1
    second: int = -1
    target: int = -1
    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Whether it depends on the sample."""
        return self.kind == "draw" or self.numbers.get("result") == DRAWN


@final
@dataclass(frozen=True, eq=False)
class Held:
    """A value that the steps so far have computed.

    Attributes:
        number: which of the values that steps write.
        shape: what it is for one example; channels are first here, and last in memory.
        form: states in bits, or real numbers.
        stored: the shape that it has in memory: of a flattened value [n], or of a view, the image [C, H, W].
        axes: if it is a view of an image, by sums over windows and zeros around: the rows and columns that each is a sum of.
    """

    number: int
    shape: Shape
    form: Literal["bits", "reals"]
    stored: Shape
    axes: tuple[Axis, Axis] | None = None

    def viewed(self, rows: Axis, columns: Axis) -> Held:
        """The same memory seen otherwise."""
        return replace(self, shape=(self.shape[0], len(rows), len(columns)), axes=(rows, columns))

    @property
    def rows_and_columns(self) -> tuple[Axis, Axis]:
        """The view's, or those of the image itself."""
        return self.axes or (layout.plain_axis(self.stored[1]), layout.plain_axis(self.stored[2]))


@final
@dataclass(frozen=True)
class Program:
    """Steps, the bytes of every value for one item, and the shape of what comes out."""

    steps: list[Step]
    value_bytes: list[int]
    outputs: Shape


def program(chain: Sequence[Part], inputs: Shape, *, stochastic: bool, cache: dict[Any, Any]) -> Program:
    """The steps of a network, deterministic or drawn; both share what is in the ``cache``.

    Raises:
        NoStepsError: with what the engine lacks.
    """
    if any(side > LONGEST_SIDE for value in _values(chain, Value(inputs)) for side in value.shape[1:]):
        raise NoStepsError(f"it has images of more than {LONGEST_SIDE:,} rows or columns")
    lowering = _Lowering(stochastic, cache)
    first = lowering.new("input", -1, inputs, "reals")
    value, held = lowering.chain(chain, Value(inputs), first)
    held = lowering.reals(held)
    lowering.steps.append(Step("output", held.number, numbers=_sizes(held.shape)))
    return Program(lowering.steps, lowering.value_bytes, value.shape)


def _values(chain: Sequence[Part], value: Value) -> Iterator[Value]:
    """All values on the way through a chain and the chains in it."""
    yield value
    for part in chain:
        for inner in part.chains():
            yield from _values(inner, value)
        value = part.result(value)
        yield value


def _sizes(shape: Shape) -> dict[str, int]:
    return {"positions": math.prod(shape[1:]), "in_channels": shape[0], "out_channels": shape[0]}


def _bytes(shape: Shape, form: str) -> int:
    each = {"bits": 4 * words_of(shape[0]), "reals": 8 * shape[0], "words": 4 * shape[0]}[form]
    return each * math.prod(shape[1:])


@final
class _Lowering:
    """One pass over a network."""

    def __init__(self, stochastic: bool, cache: dict[Any, Any]) -> None:
        self.stochastic, self.cache = stochastic, cache
        self.steps: list[Step] = []
        self.value_bytes: list[int] = []
        self.signs = 0

    def chain(self, chain: Sequence[Part], value: Value, held: Held) -> tuple[Value, Held]:
        """The steps of a chain."""
        at = 0
        while at < len(chain):
            taken = self.layer(chain[at:], value, held)
            count, held = taken or (1, self.part(chain[at], value, held))
            for part in chain[at : at + count]:
                value = part.result(value)
            at += count
        return value, held

    def new(self, kind: str, source: int, shape: Shape, form: str, *, second: int = -1, **fields: Any) -> Held:
        """A step that writes a new value."""
        self.value_bytes.append(_bytes(shape, form))
        held = Held(len(self.value_bytes) - 1, shape, "bits" if form == "bits" else "reals", shape)
        self.step(kind, source, held, second=second, **fields)
        return held

    def step(self, kind: str, source: int, target: Held, *, second: int = -1, **fields: Any) -> None:
        """A step that writes to a value."""
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        numbers = {name: value for name, value in fields.items() if name not in arrays and value is not None}
        self.steps.append(Step(kind, source, second, target.number, _sizes(target.stored) | numbers, arrays))

    def layer(self, chain: Sequence[Part], value: Value, held: Held) -> tuple[int, Held] | None:
        """Sums by weights with what follows them in one step: how many parts these are. None if no such part comes first."""
        first, *rest = chain
        if isinstance(first, parts.Sums) and held.form == "bits":
            return self.bit_layer(first, rest, value, held)
        if not isinstance(first, parts.Sums | parts.Linear | parts.Convolution):
            return None
        bias = None
        if isinstance(first, parts.Sums):
            weights = first.weights().astype(np.float64)
        else:
            weights, bias = first.weight.astype(np.float64), first.bias
        outputs = len(weights)
        affine = _affine(rest[0], outputs) if rest else None
        scale, shift = affine or (np.ones(outputs), np.zeros(outputs))
        taken = 1 + (affine is not None)
        signed = len(rest) >= taken and isinstance(rest[taken - 1], parts.Sign) and not self.stochastic
        fields: dict[str, Any] = {"bias": per_channel(np.zeros(outputs) if bias is None else bias, np.float64)}
        fields |= {"scale": per_channel(scale, np.float64), "shift": per_channel(shift, np.float64)}
        held = self.reals(held) if held.form == "bits" or held.axes is not None else held
        image, kernel, geometry = self.geometry(first, weights, held)
        filters = self.once(first, "real", lambda: layout.real_filters(kernel.reshape(*kernel.shape[:2], -1), geometry.groups))
        found = self.windows(image, kernel, geometry, filters, image.stored[0])
        shape = first.result(value).shape
        result = THRESHOLD if signed else REAL
        self.signs += signed
        made = self.new(
            "convolution",
            image.number,
            shape,
            "bits" if signed else "reals",
            result=result,
            **_filter(filters, found),
            **fields,
        )
        return taken + signed, made

    def bit_layer(self, sums: parts.Sums, rest: Sequence[Part], value: Value, held: Held) -> tuple[int, Held] | None:
        """Sums of states in bits."""
        integers = sums.result(value)
        if sums.padding_value and any(sums.padding) and held.axes is not None:
            held = self.reals(held)
        if integers.bound > LARGEST_SUM:
            held = self.reals(held)
        if held.form == "reals":
            return self.layer([sums, *rest], value, held)
        taken, factor = 1, 1.0
        if rest and isinstance(rest[0], parts.Factor):
            taken, factor = 2, rest[0].factor
        affine = _affine(rest[taken - 1], sums.outputs) if len(rest) >= taken else None
        taken += affine is not None
        scale, shift = affine or (np.ones(sums.outputs), np.zeros(sums.outputs))
        sign = rest[taken - 1] if len(rest) >= taken else None
        weights = sums.weights()
        falls = np.zeros(sums.outputs, bool)
        tabled = not self.stochastic or 4 * sums.outputs * (2 * integers.bound + 1) <= LARGEST_TABLE
        signed = isinstance(sign, parts.Sign) and tabled
        if signed:
            limits, falls = tables.thresholds(scale, shift, integers.bound, factor)
            weights = np.where(falls.reshape(-1, *[1] * (weights.ndim - 1)), -weights, weights)
        image, kernel, geometry = self.geometry(sums, weights, held)
        key = f"bits {held.stored} {signed}"
        filters = self.once(sums, key, lambda: layout.bit_filters(kernel.reshape(*kernel.shape[:2], -1), geometry.groups))
        found = self.windows(image, kernel, geometry, filters, words_of(image.stored[0]))
        fields: dict[str, Any] = {**_filter(filters, found), "inputs": integers.bound}
        if not signed:
            fields |= {
                "result": REAL,
                "scale": per_channel(scale * factor, np.float64),
                "shift": per_channel(shift, np.float64),
            }
        elif self.stochastic and isinstance(sign, parts.Sign):
            fields |= self.table(sums, sign, (scale, shift, factor, falls), integers.bound, found)
        else:
            fields |= {"result": THRESHOLD, "thresholds": per_channel(limits, np.int32, np.iinfo(np.int32).max)}
        self.signs += signed
        made = self.new("sums", image.number, integers.shape, "bits" if signed else "reals", **fields)
        return taken + signed, made

    def table(
        self, sums: parts.Sums, sign: parts.Sign, unit: tuple[Array, Array, float, Array], bound: int, found: Windows
    ) -> dict[str, Any]:
        """What a stochastic unit is decided by: the probability of +1 for every sum, and an approximation of it."""
        scale, shift, factor, falls = unit

        def make() -> Array:
            every = tables.table(sign.noise, sign.noise_scale, scale, shift, bound, factor)
            return np.where(falls[:, None], every[:, ::-1], every)

        table = self.once(sums, f"table {sign.noise} {sign.noise_scale}", make)
        even = bool(((bound - found.list_inputs) % 2 == 0).all())
        fields: dict[str, Any] = {"result": DRAWN, "sign": self.signs, "table_shift": int(even)}
        shown = np.ascontiguousarray(table[:, ::2] if even else table)
        fields |= {"table": shown, "table_stride": shown.shape[1]}
        if sign.noise == "logistic":
            fields |= _logistic(
                table, np.where(falls, -scale, scale) * factor / sign.noise_scale, shift / sign.noise_scale, bound
            )
        return fields

    def geometry(
        self, part: parts.Sums | parts.Linear | parts.Convolution, weights: Array, held: Held
    ) -> tuple[Held, Array, parts.Sums | parts.Convolution]:
        """A layer as a convolution: its image, its weights [outputs, C, rows, columns], and its stride and so on."""
        if weights.ndim == 2:
            over = (*held.stored, 1, 1)[:3]
            weights = weights.reshape(len(weights), *over)
            return replace(held, shape=over, stored=over), weights, parts.Convolution(weights)
        if isinstance(part, parts.Linear):
            raise RuntimeError("weights of two dimensions are those of a fully connected layer")
        mode = getattr(part, "padding_mode", "zeros")
        if any(part.padding) and (mode != "zeros" or part.padding_value):
            held = self.padded(held, part.padding, part.padding_value, mode)
            part = replace(part, padding=(0, 0, 0, 0))
        return held, weights, part

    def windows(
        self, image: Held, weights: Array, part: parts.Sums | parts.Convolution, filters: Filters, elements: int
    ) -> Windows:
        """The windows of a convolution of an image with so many elements in a place."""
        left, right, top, bottom = part.padding
        axes = image.rows_and_columns
        met: list[Meetings] = []
        for axis, pads, number in zip(axes, ((top, bottom), (left, right)), (0, 1), strict=True):
            wide = layout.padded_axis(axis, *pads)
            met.append(layout.meetings(wide, weights.shape[2 + number], part.stride[number], part.dilation[number]))
        size = (image.stored[2], weights.shape[3], elements)
        return _checked(layout.windows(*met, size=size, width=filters.width, inputs=weights.shape[1]))

    def once(self, part: Part, what: str, make: Callable[[], Any]) -> Any:
        """What is made of a part once for all programs of a network."""
        # The part is kept with it: nothing else gets its identity.
        if (id(part), what) not in self.cache:
            self.cache[id(part), what] = (part, make())
        return self.cache[id(part), what][1]

    def part(self, part: Part, value: Value, held: Held) -> Held:
        """The steps of one part that is no layer."""
        if isinstance(part, parts.Reshape):
            return self.reshaped(held, part.shape)
        if isinstance(part, parts.WindowSum | parts.MaxPool):
            return self.pooled(part, value, held)
        if isinstance(part, parts.Pad):
            return self.padded(held, part.sides, part.value, "zeros")
        if isinstance(part, parts.Concat):
            return self.concat(part, value, held)
        if isinstance(part, parts.Add):
            first, *others = (self.reals(self.chain(chain, value, held)[1]) for chain in part.branches)
            for other in others:
                first = self.new("add", first.number, first.shape, "reals", second=other.number)
            return first
        moved = _moved(part, held.shape)
        if moved is not None:
            return self.copied(held, moved)
        held = self.reals(held)
        if isinstance(part, parts.Sign):
            return self.sign(part, held)
        fields = _elementwise(part, held.shape[0])
        return self.new(fields.pop("kind"), held.number, held.shape, "reals", **fields)

    def sign(self, part: parts.Sign, held: Held) -> Held:
        """The sign of real numbers."""
        self.signs += 1
        if not self.stochastic:
            return self.new("sign", held.number, held.shape, "bits")
        noise = parts.NOISES.index(part.noise)
        chances = self.new("probability", held.number, held.shape, "words", function=noise, factor=part.noise_scale)
        return self.new("draw", chances.number, held.shape, "bits", sign=self.signs - 1)

    def reshaped(self, held: Held, shape: Shape) -> Held:
        """Flattened images stay as they are in memory; other reshaping moves numbers."""
        held = self.without_axes(held)
        if shape == held.stored or (len(shape) == 1 and len(held.stored) == 3):
            return replace(held, shape=shape)
        return self.copied(held, np.arange(math.prod(shape)).reshape(shape))

    def pooled(self, part: parts.WindowSum | parts.MaxPool, value: Value, held: Held) -> Held:
        """Pooling. Sums of states are only remembered: the layer behind adds them up."""
        if isinstance(part, parts.WindowSum) and held.form == "bits":
            geometry = zip(held.rows_and_columns, part.kernel, part.stride, part.padding, strict=True)
            rows, columns = (layout.summed_axis(*each) for each in geometry)
            return held.viewed(rows, columns)
        held = self.without_axes(held)
        shape = part.result(value).shape
        met = [_pool_meetings(part, axis, held.shape[1 + axis], shape[1 + axis]) for axis in (0, 1)]
        kind = "average" if isinstance(part, parts.WindowSum) else "any" if held.form == "bits" else "maximum"
        return self.pool(kind, held, shape, met)

    def pool(self, kind: str, held: Held, shape: Shape, met: Sequence[Meetings]) -> Held:
        """A step over windows of all channels."""
        elements = words_of(shape[0]) if held.form == "bits" else shape[0]
        # The kernel does not matter, but columns that are not side by side keep runs from growing together.
        apart = [[[(2 * k, i) for k, i in row] for row in axis] for axis in met]
        found = _checked(layout.windows(*apart, size=(held.stored[2], 0, elements), width=elements, inputs=1))
        return self.new(kind, held.number, shape, held.form, factor=1.0, **vars(found))

    def padded(self, held: Held, sides: parts.Sides, value: float, mode: str) -> Held:
        """Padding. Zeros around states are only remembered."""
        left, right, top, bottom = sides
        if held.form == "bits" and mode == "zeros" and value == 0:
            rows, columns = held.rows_and_columns
            return held.viewed(layout.padded_axis(rows, top, bottom), layout.padded_axis(columns, left, right))
        held = self.without_axes(held)
        source = np.arange(math.prod(held.shape)).reshape(held.shape)
        widths = ((0, 0), (top, bottom), (left, right))
        if mode == "zeros":
            return self.copied(held, np.pad(source, widths, constant_values=-1), value)
        return self.copied(held, np.pad(source, widths, {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]))  # type: ignore[call-overload]

    def concat(self, part: parts.Concat, value: Value, held: Held) -> Held:
        """The results of chains, one after the other."""
        found = [self.unfolded(self.without_axes(self.chain(chain, value, held)[1])) for chain in part.branches]
        if len({each.form for each in found}) > 1:
            found = [self.reals(each) for each in found]
        form, shape = found[0].form, part.result(value).shape
        self.value_bytes.append(_bytes(shape, form))
        whole = Held(len(self.value_bytes) - 1, shape, form, shape)
        bits = "_bits" if form == "bits" else ""
        first = 0
        for each in found:
            sizes = {"positions": math.prod(each.shape[1:]), "in_channels": each.shape[0]}
            if part.dim == 0:
                self.step(f"insert{bits}", each.number, whole, first=first, **sizes)
            else:
                places = np.arange(math.prod(shape[1:])).reshape(shape[1:])
                taken = places.take(range(first, first + each.shape[part.dim]), part.dim - 1)
                self.step(f"scatter{bits}", each.number, whole, index=taken.reshape(-1).astype(np.int32), **sizes)
            first += each.shape[part.dim]
        return whole

    def copied(self, held: Held, source: NDArray[np.int64], outside: float = 0.0) -> Held:
        """Numbers moved: ``source`` has, for every number that comes out, which one of the shape it is; -1: ``outside``."""
        held = self.without_axes(held)
        channels, bits = held.stored[0], "_bits" if held.form == "bits" else ""
        shape = source.shape
        source = source.reshape(len(source), -1).T
        channel, place = source // math.prod(held.stored[1:]), source % math.prod(held.stored[1:])
        inside = source >= 0
        fields: dict[str, Any] = {"factor": float(outside)}
        # Whole places move, or all on their own.
        same = inside.all(1) | ~inside.any(1)
        aligned = (channel == np.arange(shape[0])) & (place == place[:, :1]) | ~inside
        if channels == shape[0] and bool(same.all() and aligned.all()):
            kind, index = f"places{bits}", np.where(inside, place, -1)[:, 0]
        else:
            stride = words_of(channels) * layout.WORD if bits else channels
            kind, index = f"gather{bits}", np.where(inside, place * stride + channel, -1)
        return self.new(kind, held.number, shape, held.form, index=index.reshape(-1).astype(np.int32), **fields)

    def unfolded(self, held: Held) -> Held:
        """[n] in the order of its numbers."""
        if held.stored == held.shape:
            return held
        return self.copied(held, np.arange(math.prod(held.shape)).reshape(held.shape))

    def without_axes(self, held: Held) -> Held:
        """Sums over windows and zeros around are added up and put there."""
        return held if held.axes is None else self.reals(held)

    def reals(self, held: Held) -> Held:
        """Real numbers, in the order of memory that their shape says."""
        if held.form == "bits":
            made = self.new("to_real", held.number, held.stored, "reals")
            held = replace(held, number=made.number, form="reals")
        if held.axes is not None:
            met: list[Meetings] = [[list(enumerate(row)) for row in axis] for axis in held.axes]
            return self.pool("average", held, held.shape, met)
        return self.unfolded(held)


def _checked(found: Windows | None) -> Windows:
    if found is None:
        raise NoStepsError(f"the windows of a layer have more than {layout.MOST_RUNS:,} pieces, as large padding makes them")
    return found


def _filter(filters: Filters, found: Windows) -> dict[str, Any]:
    fields = {"weights": filters.weights, "lows": filters.lows, "filter": filters.weights.shape[1], **vars(found)}
    return fields if filters.masks is None else {**fields, "masks": filters.masks}


def _affine(part: Part, channels: int) -> tuple[Array, Array] | None:
    """The scale and the shift of every channel, if the part is that."""
    return part.scale_and_shift(channels) if isinstance(part, parts.Affine | parts.BatchNorm) else None


def _elementwise(part: Part, channels: int) -> dict[str, Any]:
    """The step of a function of every number."""
    affine = _affine(part, channels)
    if isinstance(part, parts.Factor):
        affine = np.full(channels, part.factor), np.zeros(channels)
    if affine is not None:
        return {"kind": "affine", "scale": per_channel(affine[0], np.float64), "shift": per_channel(affine[1], np.float64)}
    if isinstance(part, parts.PReLU):
        weight = np.broadcast_to(part.weight.astype(np.float64), (channels,))
        return {"kind": "prelu", "scale": per_channel(weight, np.float64)}
    if not isinstance(part, parts.Activation):
        raise NoStepsError(f"it has no {part.name}")
    if part.function == "relu":
        return {"kind": "relu"}
    if part.function == "leaky_relu":
        return {"kind": "prelu", "scale": per_channel(np.full(channels, part.numbers[0]), np.float64)}
    numbers = dict(zip(("factor", "margin"), part.numbers, strict=False))
    return {"kind": "activation", "function": FUNCTIONS.index(part.function), **numbers}


def _moved(part: Part, shape: Shape) -> NDArray[np.int64] | None:
    """For parts that only move numbers: which number of the input every one of the output is."""
    source = np.arange(math.prod(shape)).reshape(shape)
    if isinstance(part, parts.Repeat):
        return np.concatenate([source] * part.times)
    if isinstance(part, parts.ChannelShuffle):
        return source.reshape(part.groups, -1, *shape[1:]).swapaxes(0, 1).reshape(shape)
    if not isinstance(part, parts.PixelShuffle):
        return None
    (channels, height, width), f = shape, part.factor
    if part.back:
        split = source.reshape(channels, height // f, f, width // f, f)
        return split.transpose(0, 2, 4, 1, 3).reshape(channels * f * f, height // f, width // f)
    split = source.reshape(channels // f**2, f, f, height, width)
    return split.transpose(0, 3, 1, 4, 2).reshape(channels // f**2, height * f, width * f)


def _pool_meetings(part: parts.WindowSum | parts.MaxPool, axis: int, size: int, count: int) -> Meetings:
    """The rows in every window, without those beyond the border."""
    kernel, stride, padding = part.kernel[axis], part.stride[axis], part.padding[axis]
    starts = [i * stride - padding for i in range(count)]
    return [[(i - start, i) for i in range(max(0, start), min(size, start + kernel))] for start in starts]


def _logistic(table: Array, scale: Array, shift: Array, bound: int) -> dict[str, Any]:
    """1 / (1 + 2^(slope t + offset)) in single precision, if that is near enough to the table."""
    slopes, offsets = (-scale / math.log(2)).astype(np.float32), (-shift / math.log(2)).astype(np.float32)
    t = np.arange(-bound, bound + 1, dtype=np.float32)
    powers = (slopes[:, None] * t + offsets[:, None]).clip(-64, 64)
    if np.abs(1 / (1 + np.exp2(powers)) - table / 2.0**32).max() > MARGIN / 8:
        return {}
    # Channels that fill the last block are never +1.
    return {"slopes": per_channel(slopes, np.float32), "offsets": per_channel(offsets, np.float32, 64), "margin": MARGIN}
