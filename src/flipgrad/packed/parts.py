"""The parts of a packed network: what each computes from one value to the next, and how it is written down.

A value holds, for every example, an array [C, H, W] or [n] of real numbers, of integers, or of states ±1 (0 where zero padding
is: no unit). A network is a chain of parts. A binary layer is ``Sums``, ``Affine``, ``Sign``, which engines evaluate as one; a
residual block is ``Add`` of a branch and a shortcut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from flipgrad.errors import InputError

Array = NDArray[Any]
Shape = tuple[int, ...]
Pair = tuple[int, int]
# Left, right, top, bottom.
Sides = tuple[int, int, int, int]
Kind = Literal["real", "integers", "states"]

# Numbers of one value of one example, parts of a chain, and chains within chains, at most: larger files are not ours.
LARGEST_VALUE, MOST_PARTS, DEEPEST = 2**25, 10_000, 8
# Of sizes, strides, paddings and the like.
LARGEST_NUMBER = 2**20
# Of integers: their product with a float32 is exact in double precision.
LARGEST_BOUND = 2**29
# Numbers that an evaluation may hold at once for every number of the network's input and byte of its arrays, see `largest`. The
# networks of the zoo need less than 1, 512 channels by a kernel of one pixel about 160.
GROWTH = 256

LARGEST_FLOAT = float(np.finfo(np.float64).max)

NOISES = ("logistic", "normal", "laplace", "uniform")
NO_NOISE = "none"
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
# How many numbers each takes.
ACTIVATIONS = {"relu": 0, "leaky_relu": 1, "hardtanh": 2, "tanh": 0, "sigmoid": 0, "silu": 0, "elu": 1, "softplus": 0}


@final
@dataclass(frozen=True)
class Value:
    """What is known of a value before it is there: the shape for one example, what it holds, and how large integers get."""

    shape: Shape
    kind: Kind = "real"
    bound: int = 0

    @property
    def size(self) -> int:
        """Numbers of one example."""
        return math.prod(self.shape)

    def real(self, shape: Sequence[int] | None = None) -> Value:
        """A value of real numbers, of this shape or another."""
        return Value(self.shape if shape is None else tuple(shape))


def setting(check: Callable[[Any], Any], default: Any = ...) -> Any:
    """A field of a part: ``check`` turns what JSON holds into its value, or raises ``ValueError``."""
    return field(metadata={"check": check}) if default is ... else field(default=default, metadata={"check": check})


def array(*dims: int, dtype: type = np.float32) -> Any:
    """A field that is an array of one of these numbers of dimensions; JSON holds its name in the file."""
    return field(metadata={"dims": dims, "dtypes": (np.dtype(dtype),)})


def optional_array(*dims: int, dtypes: tuple[type, ...] = (np.float32,)) -> Any:
    """A field that is such an array of one of these ``dtypes``, or None."""
    return field(default=None, metadata={"dims": dims, "dtypes": tuple(map(np.dtype, dtypes))})


def whole(low: int, high: int = LARGEST_NUMBER) -> Callable[[Any], int]:
    """Checks for an integer from ``low`` to ``high``."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return check


def several(count: int | None, low: int, most: int = 4) -> Callable[[Any], tuple[int, ...]]:
    """Checks for ``count`` integers from ``low`` on, or for 1 to ``most`` of them."""

    def check(value: Any) -> tuple[int, ...]:
        right = isinstance(value, list | tuple) and (len(value) == count if count else 1 <= len(value) <= most)
        if not right or any(type(each) is not int or not low <= each <= LARGEST_NUMBER for each in value):
            raise ValueError(f"{count or f'1 to {most}'} whole numbers from {low} to {LARGEST_NUMBER}")
        return tuple(value)

    return check


def number(value: Any) -> float:
    """Checks for a finite number."""
    # Whole numbers may be too large for math.isfinite.
    if type(value) not in (int, float) or not abs(value) <= LARGEST_FLOAT:
        raise ValueError("a finite number")
    return float(value)


def positive(value: Any) -> float:
    """Checks for a positive number."""
    if number(value) <= 0:
        raise ValueError("a positive number")
    return float(value)


def numbers(value: Any) -> tuple[float, ...]:
    """Checks for at most two numbers."""
    if not isinstance(value, list | tuple) or len(value) > 2:
        raise ValueError("at most two numbers")
    return tuple(number(each) for each in value)


def one_of(*names: Any) -> Callable[[Any], Any]:
    """Checks for one of ``names``."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(name) and value == name for name in names):
            raise ValueError(f"one of {', '.join(map(str, names))}")
        return value

    return check


class Part(ABC):
    """One step of a packed network."""

    # What it is called in a file.
    name: ClassVar[str]

    @abstractmethod
    def result(self, given: Value) -> Value:
        """What comes out, of what comes in. Raises ``ValueError`` where the part does not fit: what it needs."""

    def chains(self) -> tuple[tuple[Part, ...], ...]:
        """The chains of parts inside of it."""
        return ()

    def held(self, given: Value) -> int:
        """Numbers of the largest array that it makes of one example: its result, or its input with padding."""
        return self.result(given).size


@final
@dataclass(frozen=True, eq=False)
class Linear(Part):
    """W x + b of real numbers or states [n]."""

    name = "linear"
    weight: Array = array(2)
    bias: Array | None = optional_array(1)

    def result(self, given: Value) -> Value:
        _need(given.shape == self.weight.shape[1:], f"numbers [{self.weight.shape[1]}]")
        _need(_fits(self.bias, len(self.weight)), "a bias for every output")
        return given.real((len(self.weight),))


@final
@dataclass(frozen=True, eq=False)
class Convolution(Part):
    """A convolution of real numbers or states [C, H, W], by weights [outputs, C / groups, rows, columns]."""

    name = "convolution"
    weight: Array = array(4)
    bias: Array | None = optional_array(1)
    stride: Pair = setting(several(2, 1), (1, 1))
    padding: Sides = setting(several(4, 0), (0, 0, 0, 0))
    padding_mode: str = setting(one_of(*PADDING_MODES), "zeros")
    padding_value: float = setting(one_of(-1, 0, 1), 0)
    dilation: Pair = setting(several(2, 1), (1, 1))
    groups: int = setting(whole(1), 1)

    def result(self, given: Value) -> Value:
        _need(_fits(self.bias, len(self.weight)), "a bias for every output")
        shape = windows(self, given.shape, self.weight.shape)
        if self.padding_mode in ("reflect", "circular"):
            # As torch has it.
            most = [size - (self.padding_mode == "reflect") for size in given.shape[:0:-1]]
            _need(all(pad <= most[i // 2] for i, pad in enumerate(self.padding)), "padding that is smaller than the image")
        return given.real(shape)

    def held(self, given: Value) -> int:
        return max(self.result(given).size, padded(given.shape, self.padding))


@final
@dataclass(frozen=True, eq=False)
class Affine(Part):
    """scale · a + shift, a scale and a shift for every channel; without them 1 and 0.

    Behind sums that a deterministic network only compares with a threshold the shift is a whole number, and there is no scale.
    """

    name = "affine"
    scale: Array | None = optional_array(1)
    shift: Array | None = optional_array(1, dtypes=(np.float32, np.int16))

    def result(self, given: Value) -> Value:
        _need(all(_fits(each, given.shape[0]) for each in (self.scale, self.shift)), "a scale and a shift for every channel")
        return given.real()

    def scale_and_shift(self, channels: int) -> tuple[Array, Array]:
        """Those of so many ``channels``, in double precision."""
        scale = np.ones(channels) if self.scale is None else self.scale.astype(np.float64)
        return scale, np.zeros(channels) if self.shift is None else self.shift.astype(np.float64)


@final
@dataclass(frozen=True, eq=False)
class BatchNorm(Part):
    """(a - mean) / sqrt(variance + eps) · weight + bias, by statistics that are kept."""

    name = "batch_norm"
    mean: Array = array(1)
    variance: Array = array(1)
    weight: Array | None = optional_array(1)
    bias: Array | None = optional_array(1)
    eps: float = setting(number, 1e-5)

    def result(self, given: Value) -> Value:
        kept = (self.mean, self.variance, self.weight, self.bias)
        _need(all(_fits(each, given.shape[0]) for each in kept), "statistics of every channel")
        _need(bool((self.variance.astype(np.float64) + self.eps > 0).all()), "positive variances")
        return given.real()

    def scale_and_shift(self, channels: int) -> tuple[Array, Array]:
        """The same as a scale and a shift of every channel, in double precision."""
        scale = 1 / np.sqrt(self.variance.astype(np.float64) + self.eps)
        scale = scale if self.weight is None else self.weight * scale
        shift = -self.mean.astype(np.float64) * scale
        return scale, shift if self.bias is None else self.bias + shift


@final
@dataclass(frozen=True, eq=False)
class PReLU(Part):
    """a, or weight · a where a is negative; one weight, or one for every channel."""

    name = "prelu"
    weight: Array = array(1)

    def result(self, given: Value) -> Value:
        _need(len(self.weight) in (1, given.shape[0]), "one weight, or one for every channel")
        return given.real()


@final
@dataclass(frozen=True, eq=False)
class Activation(Part):
    """A function of every number: one of ``ACTIVATIONS``."""

    name = "activation"
    function: str = setting(one_of(*ACTIVATIONS))
    numbers: tuple[float, ...] = setting(numbers, ())

    def result(self, given: Value) -> Value:
        _need(len(self.numbers) == ACTIVATIONS[self.function], f"{ACTIVATIONS[self.function]} numbers for {self.function}")
        return given.real()


@final
@dataclass(frozen=True, eq=False)
class Factor(Part):
    """a times one number: what makes an average of a sum."""

    name = "factor"
    factor: float = setting(positive)

    def result(self, given: Value) -> Value:
        return given.real()


@final
@dataclass(frozen=True, eq=False)
class WindowSum(Part):
    """The sum in every window of [C, H, W], zeros around it: average pooling, before it is divided. Whole numbers stay so."""

    name = "window_sum"
    kernel: Pair = setting(several(2, 1))
    stride: Pair = setting(several(2, 1))
    padding: Pair = setting(several(2, 0), (0, 0))

    def result(self, given: Value) -> Value:
        _need(len(given.shape) == 3, "images [C, H, W]")
        _need(all(2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True)), "padding of at most half the kernel")
        size = zip(given.shape[1:], self.kernel, self.stride, self.padding, strict=True)
        counts = [(n + 2 * padding - kernel) // stride + 1 for n, kernel, stride, padding in size]
        _need(min(counts) >= 1, f"images of at least {self.kernel[0]}x{self.kernel[1]}")
        shape = (given.shape[0], *counts)
        if given.kind == "real":
            return given.real(shape)
        return Value(shape, "integers", given.bound * math.prod(self.kernel))

    def held(self, given: Value) -> int:
        rows, columns = self.padding
        return padded(given.shape, (columns, columns, rows, rows))


@final
@dataclass(frozen=True, eq=False)
class MaxPool(Part):
    """The largest number in every window of [C, H, W]; what is beyond the border does not count. Of states: OR."""

    name = "max_pool"
    kernel: Pair = setting(several(2, 1))
    stride: Pair = setting(several(2, 1))
    padding: Pair = setting(several(2, 0), (0, 0))
    ceil: bool = setting(one_of(True, False), False)

    def result(self, given: Value) -> Value:
        _need(len(given.shape) == 3, "images [C, H, W]")
        _need(all(2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True)), "padding of at most half the kernel")
        counts = [self.count(axis, size) for axis, size in enumerate(given.shape[1:])]
        _need(min(counts) >= 1, f"images of at least {self.kernel[0]}x{self.kernel[1]}")
        return replace(given, shape=(given.shape[0], *counts))

    def count(self, axis: int, size: int) -> int:
        """Windows along an axis of that ``size``; a last one that is not whole must begin in the image."""
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        count = (size + 2 * padding - kernel + (stride - 1) * self.ceil) // stride + 1
        return count - (self.ceil and (count - 1) * stride >= size + padding)

    def sides(self, shape: Sequence[int]) -> Sides:
        """The padding around images [H, W] of that ``shape`` that makes every window whole."""
        ends = []
        for axis, size in enumerate(shape):
            extent = (self.count(axis, size) - 1) * self.stride[axis] + self.kernel[axis]
            ends.append(max(0, extent - size - self.padding[axis]))
        return (self.padding[1], ends[1], self.padding[0], ends[0])

    def held(self, given: Value) -> int:
        return padded(given.shape, self.sides(given.shape[1:]))


@final
@dataclass(frozen=True, eq=False)
class Sign(Part):
    """States: +1 where a >= Z, else -1. ``noise`` is the distribution of Z; without draws 0 is in its place.

    Networks that were packed without draws have the noise "none".
    """

    name = "sign"
    noise: str = setting(one_of(*NOISES, NO_NOISE))
    noise_scale: float = setting(positive, 1.0)

    def result(self, given: Value) -> Value:
        return Value(given.shape, "states", 1)


@final
@dataclass(frozen=True, eq=False)
class Sums(Part):
    """Σ W x of states x, or of sums of these, by weights W = ±1: one integer for every output and place.

    Attributes:
        bits: the weights [outputs, *filter], a bit each, 1 for +1; eight to a byte, the first in the highest bit.
        outputs: how many there are.
        filter: the shape of one output's weights: [n] of a fully connected layer, [C / groups, rows, columns] of a convolution.
        stride, padding, dilation, groups: of a convolution; ``padding`` is on the left, right, top, bottom.
        padding_value: 0, which is no unit, or a constant state.
    """

    name = "sums"
    bits: Array = array(1, dtype=np.uint8)
    outputs: int = setting(whole(1))
    filter: Shape = setting(several(None, 1, 3))
    stride: Pair = setting(several(2, 1), (1, 1))
    padding: Sides = setting(several(4, 0), (0, 0, 0, 0))
    padding_value: float = setting(one_of(-1, 0, 1), 0)
    dilation: Pair = setting(several(2, 1), (1, 1))
    groups: int = setting(whole(1), 1)

    def result(self, given: Value) -> Value:
        count = self.outputs * math.prod(self.filter)
        _need(len(self.bits) == -(-count // 8), f"the bits of {count} weights")
        _need(given.kind != "real", "states, or sums of these")
        shape: Shape = (self.outputs,)
        if len(self.filter) == 1:
            _need(given.shape == self.filter, f"states [{self.filter[0]}]")
            image = (self.stride, self.padding, self.dilation, self.groups) != ((1, 1), (0, 0, 0, 0), (1, 1), 1)
            _need(not image, "no stride, padding, dilation and groups where states are no images")
        else:
            shape = windows(self, given.shape, (self.outputs, *self.filter))
        return Value(shape, "integers", max(1, given.bound) * math.prod(self.filter))

    def held(self, given: Value) -> int:
        return max(self.result(given).size, padded(given.shape, self.padding) if len(given.shape) == 3 else 0)

    def weights(self) -> NDArray[np.int8]:
        """The weights ±1, [outputs, *filter]."""
        count = self.outputs * math.prod(self.filter)
        return (2 * np.unpackbits(self.bits, count=count).astype(np.int8) - 1).reshape(self.outputs, *self.filter)


@final
@dataclass(frozen=True, eq=False)
class Reshape(Part):
    """The same numbers in another shape."""

    name = "reshape"
    shape: Shape = setting(several(None, 1))

    def result(self, given: Value) -> Value:
        _need(math.prod(self.shape) == given.size, f"{math.prod(self.shape)} numbers")
        return replace(given, shape=self.shape)


@final
@dataclass(frozen=True, eq=False)
class PixelShuffle(Part):
    """[C·f², H, W] becomes [C, H·f, W·f]; with ``back`` the other way round."""

    name = "pixel_shuffle"
    factor: int = setting(whole(1))
    back: bool = setting(one_of(True, False), False)

    def result(self, given: Value) -> Value:
        _need(len(given.shape) == 3, "images [C, H, W]")
        (channels, height, width), factor = given.shape, self.factor
        if self.back:
            _need(height % factor == width % factor == 0, f"a height and a width that {factor} divides")
            return replace(given, shape=(channels * factor**2, height // factor, width // factor))
        _need(channels % factor**2 == 0, f"channels that {factor}² divides")
        return replace(given, shape=(channels // factor**2, height * factor, width * factor))


@final
@dataclass(frozen=True, eq=False)
class ChannelShuffle(Part):
    """Channels [groups, C / groups] in the order [C / groups, groups]."""

    name = "channel_shuffle"
    groups: int = setting(whole(1))

    def result(self, given: Value) -> Value:
        _need(given.shape[0] % self.groups == 0, f"channels that {self.groups} divides")
        return given


@final
@dataclass(frozen=True, eq=False)
class Pad(Part):
    """A constant around [C, H, W]."""

    name = "pad"
    sides: Sides = setting(several(4, 0))
    value: float = setting(number, 0.0)

    def result(self, given: Value) -> Value:
        _need(len(given.shape) == 3, "images [C, H, W]")
        _need(given.kind == "real" or self.value in (-1, 0, 1), "padding of states with 0, 1 or -1")
        left, right, top, bottom = self.sides
        channels, height, width = given.shape
        return replace(given, shape=(channels, height + top + bottom, width + left + right))


@final
@dataclass(frozen=True, eq=False)
class Repeat(Part):
    """The channels, several times."""

    name = "repeat"
    times: int = setting(whole(1))

    def result(self, given: Value) -> Value:
        return replace(given, shape=(given.shape[0] * self.times, *given.shape[1:]))


@final
@dataclass(frozen=True, eq=False)
class Concat(Part):
    """The results of chains on one input, one after the other along a dimension of an example."""

    name = "concat"
    branches: tuple[tuple[Part, ...], ...] = field(metadata={"chains": True})
    dim: int = setting(whole(0, 3), 0)

    def chains(self) -> tuple[tuple[Part, ...], ...]:
        return self.branches

    def result(self, given: Value) -> Value:
        _need(bool(self.branches), "at least one chain")
        results = [after(chain, given) for chain in self.branches]
        first, dim = results[0], self.dim
        _need(dim < len(first.shape), "a dimension that there is")
        rest = {(each.kind, each.shape[:dim], each.shape[dim + 1 :]) for each in results}
        _need(len(rest) == 1, "chains that differ in this dimension alone")
        length = sum(each.shape[dim] for each in results)
        return Value((*first.shape[:dim], length, *first.shape[dim + 1 :]), first.kind, max(each.bound for each in results))


@final
@dataclass(frozen=True, eq=False)
class Add(Part):
    """The sum of the results of chains on one input."""

    name = "add"
    branches: tuple[tuple[Part, ...], ...] = field(metadata={"chains": True})

    def chains(self) -> tuple[tuple[Part, ...], ...]:
        return self.branches

    def result(self, given: Value) -> Value:
        results = [after(chain, given) for chain in self.branches]
        _need(len(results) > 1 and len({each.shape for each in results}) == 1, "two chains or more, of results alike in shape")
        return results[0].real()


PARTS: dict[str, type[Part]] = {
    part.name: part
    for part in (
        Linear,
        Convolution,
        Affine,
        BatchNorm,
        PReLU,
        Activation,
        Factor,
        WindowSum,
        MaxPool,
        Sign,
        Sums,
        Reshape,
        PixelShuffle,
        ChannelShuffle,
        Pad,
        Repeat,
        Concat,
        Add,
    )
}


def windows(part: Convolution | Sums, given: Shape, weight: Sequence[int]) -> Shape:
    """The shape [outputs, H, W] of a convolution of images by a ``weight`` [outputs, C / groups, rows, columns]."""
    outputs, channels, *kernel = weight
    _need(len(given) == 3 and len(kernel) == 2, "images [C, H, W] and weights [outputs, C / groups, rows, columns]")
    _need(given[0] == channels * part.groups, f"{channels * part.groups} channels")
    _need(outputs % part.groups == 0, f"outputs that {part.groups} groups divide")
    left, right, top, bottom = part.padding
    sizes = zip(given[1:], kernel, part.stride, part.dilation, (top + bottom, left + right), strict=True)
    counts = [(n + pads - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, dilation, pads in sizes]
    _need(min(counts) >= 1, f"images of at least the size of the kernel {kernel[0]}x{kernel[1]}")
    return (outputs, *counts)


def padded(shape: Shape, sides: Sides) -> int:
    """Numbers of images [C, H, W] with padding."""
    channels, height, width = shape
    left, right, top, bottom = sides
    return channels * (height + top + bottom) * (width + left + right)


def after(chain: Sequence[Part], given: Value) -> Value:
    """What a chain of parts makes of a value; see :meth:`Part.result`."""
    for part in chain:
        try:
            given = part.result(given)
        except ValueError as error:
            raise ValueError(f"{part.name} of {list(given.shape)} needs {error}") from None
        if not 1 <= given.size <= LARGEST_VALUE:
            raise ValueError(f"{part.name} gives {given.size:,} numbers, and an example has from 1 to {LARGEST_VALUE:,}")
        if given.bound > LARGEST_BOUND:
            raise ValueError(f"{part.name} gives integers up to {given.bound:,}, the largest are {LARGEST_BOUND:,}")
    return given


def largest(chain: Sequence[Part], given: Value) -> int:
    """Numbers of the largest array that the evaluation of a chain, which fits together, makes of one example."""
    most = given.size
    for part in chain:
        most = max(most, part.held(given), *(largest(inner, given) for inner in part.chains()))
        given = part.result(given)
    return most


def walk(chain: Sequence[Part]) -> Iterator[Part]:
    """All parts of a chain and of the chains in it, in the order of evaluation; a part that holds chains comes after these."""
    for part in chain:
        for inner in part.chains():
            yield from walk(inner)
        yield part


def arrays_of(part: Part) -> Iterator[tuple[str, Array]]:
    """The arrays of a part, by the names of its fields."""
    for each in fields(part):  # type: ignore[arg-type]
        value = getattr(part, each.name)
        if "dims" in each.metadata and value is not None:
            yield each.name, value


def to_json(chain: Sequence[Part], name_of: Callable[[Array], str]) -> list[dict[str, Any]]:
    """A chain as JSON, in which arrays are told by their names in the file."""
    written = []
    for part in chain:
        entry: dict[str, Any] = {"part": part.name}
        for each in fields(part):  # type: ignore[arg-type]
            value = getattr(part, each.name)
            if "chains" in each.metadata:
                entry[each.name] = [to_json(inner, name_of) for inner in value]
            elif "dims" in each.metadata:
                entry[each.name] = None if value is None else name_of(value)
            else:
                entry[each.name] = list(value) if isinstance(value, tuple) else value
        written.append(entry)
    return written


def from_json(written: Any, arrays: Mapping[str, Array], depth: int = 0) -> tuple[Part, ...]:
    """The chain that :func:`to_json` wrote.

    Raises:
        InputError: if it is none, with what is wrong in it.
    """
    if not isinstance(written, list) or len(written) > MOST_PARTS or depth > DEEPEST:
        raise InputError(f"a chain must be a list of at most {MOST_PARTS:,} parts, at most {DEEPEST} chains deep")
    return tuple(_part(entry, arrays, depth) for entry in written)


def _part(entry: Any, arrays: Mapping[str, Array], depth: int) -> Part:
    kind = PARTS.get(entry["part"]) if isinstance(entry, dict) and isinstance(entry.get("part"), str) else None
    if kind is None:
        raise InputError("it has a part that this version of flipgrad does not know")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if set(entry) != {"part", *known}:
        raise InputError(f"part {kind.name!r} must have the fields {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, each in known.items():
        given = entry[name]
        if "chains" in each.metadata:
            if not isinstance(given, list) or len(given) > MOST_PARTS:
                raise InputError(f"the {name} of part {kind.name!r} must be a list of chains")
            values[name] = tuple(from_json(inner, arrays, depth + 1) for inner in given)
        elif "dims" in each.metadata:
            values[name] = _stored(given, arrays, each.metadata, optional=each.default is None, where=f"{kind.name}.{name}")
        else:
            try:
                values[name] = each.metadata["check"](given)
            except ValueError as error:
                raise InputError(f"{kind.name}.{name} must be {error}") from None
    return kind(**values)


def _stored(name: Any, arrays: Mapping[str, Array], wanted: Mapping[str, Any], *, optional: bool, where: str) -> Array | None:
    if name is None and optional:
        return None
    found = arrays.get(name) if isinstance(name, str) else None
    if found is None or found.dtype not in wanted["dtypes"] or found.ndim not in wanted["dims"]:
        known = " or ".join(map(str, wanted["dtypes"]))
        raise InputError(f"{where} must name an array of {known} with {wanted['dims'][0]} dimensions")
    if found.dtype == np.float32 and not np.isfinite(found).all():
        raise InputError(f"{where} holds numbers that are not finite")
    return found


def _fits(values: Array | None, channels: int) -> bool:
    return values is None or len(values) == channels


def _need(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)
