"""The evaluation of a packed network in numpy, part by part: what every other engine is compared with.

Real numbers are of double precision, integers and states exact. Arrays are [B, C, H, W] or [B, n].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from itertools import count
from typing import Any, final

import numpy as np

from flipgrad.packed import parts
from flipgrad.packed.parts import Array, Part
from flipgrad.packed.random_words import words
from flipgrad.packed.tables import chances


@final
@dataclass
class Evaluation:
    """One evaluation of a network: which draw it is, how many signs there were, and who looks at their states.

    Attributes:
        sample: the number of the draw, or None for the deterministic network.
        seed: of the draws.
        first: the number of the batch's first example.
        watch: is given every sign's states, in order.
    """

    sample: int | None = None
    seed: int = 0
    first: int = 0
    watch: Callable[[Array], None] | None = None
    signs: Iterator[int] = field(default_factory=count)

    def states(self, a: Array, sign: parts.Sign) -> Array:
        """States ±1 of pre-activations ``a``."""
        layer = next(self.signs)
        if self.sample is None:
            positive = a >= 0
        else:
            # Units are numbered with their channel last.
            p = np.moveaxis(chances(sign.noise, a, sign.noise_scale), 1, -1)
            examples = self.first + np.arange(len(a))
            word = words(math.prod(p.shape[1:]), seed=self.seed, layer=layer, example=examples, sample=self.sample)
            positive = np.moveaxis(word.reshape(p.shape) < p, -1, 1)
        states = np.where(positive, 1.0, -1.0)
        if self.watch is not None:
            self.watch(states)
        return states


def run(chain: Sequence[Part], x: Array, evaluation: Evaluation) -> Array:
    """What a chain of parts makes of ``x`` [B, ...]."""
    for part in chain:
        x = evaluate(part, x, evaluation)
    return x


def outputs(chain: Sequence[Part], x: Array, samples: int | None, seed: int, first: int) -> Array:
    """The outputs [samples or 1, B, ...] of a network, whose first example has the number ``first``, as float32."""
    draws: list[int | None] = [None] if samples is None else list(range(samples))
    return np.stack([run(chain, x, Evaluation(draw, seed, first)).astype(np.float32) for draw in draws])


@singledispatch
def evaluate(part: Part, x: Array, evaluation: Evaluation) -> Array:
    """What one part makes of ``x`` [B, ...]."""
    raise TypeError(f"{type(part).__name__} cannot be evaluated")


@evaluate.register
def _(part: parts.Linear, x: Array, evaluation: Evaluation) -> Array:
    result = x @ part.weight.astype(np.float64).T
    return result if part.bias is None else result + part.bias


@evaluate.register
def _(part: parts.Convolution, x: Array, evaluation: Evaluation) -> Array:
    mode: Any = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[part.padding_mode]
    options: dict[str, Any] = {"constant_values": part.padding_value} if mode == "constant" else {}
    padded = np.pad(x, _widths(part.padding), mode, **options)
    result = _convolve(padded, part.weight.astype(np.float64), part)
    return result if part.bias is None else result + part.bias[:, None, None]


@evaluate.register
def _(part: parts.Sums, x: Array, evaluation: Evaluation) -> Array:
    weights = part.weights().astype(np.float64)
    if weights.ndim == 2:
        return x @ weights.T
    return _convolve(np.pad(x, _widths(part.padding), constant_values=part.padding_value), weights, part)


@evaluate.register(parts.Affine)
@evaluate.register(parts.BatchNorm)
def _(part: parts.Affine | parts.BatchNorm, x: Array, evaluation: Evaluation) -> Array:
    scale, shift = part.scale_and_shift(x.shape[1])
    return x * _channels(scale, x) + _channels(shift, x)


@evaluate.register
def _(part: parts.PReLU, x: Array, evaluation: Evaluation) -> Array:
    return np.where(x >= 0, x, x * _channels(part.weight, x))


@evaluate.register
def _(part: parts.Activation, x: Array, evaluation: Evaluation) -> Array:
    numbers = part.numbers
    functions: dict[str, Callable[[], Array]] = {
        "relu": lambda: np.maximum(x, 0),
        "leaky_relu": lambda: np.where(x >= 0, x, x * numbers[0]),
        "hardtanh": lambda: np.clip(x, numbers[0], numbers[1]),
        "tanh": lambda: np.tanh(x),
        "sigmoid": lambda: sigmoid(x),
        "silu": lambda: x * sigmoid(x),
        "elu": lambda: np.where(x >= 0, x, numbers[0] * np.expm1(np.minimum(x, 0))),
        "softplus": lambda: np.logaddexp(x, 0),
    }
    return functions[part.function]()


@evaluate.register
def _(part: parts.Factor, x: Array, evaluation: Evaluation) -> Array:
    return x * part.factor


@evaluate.register
def _(part: parts.WindowSum, x: Array, evaluation: Evaluation) -> Array:
    rows, columns = part.padding
    result: Array = _windows(x, part.kernel, part.stride, (columns, columns, rows, rows), 0.0).sum((-2, -1))
    return result


@evaluate.register
def _(part: parts.MaxPool, x: Array, evaluation: Evaluation) -> Array:
    rows, columns = (part.count(axis, size) for axis, size in enumerate(x.shape[2:]))
    found = _windows(x, part.kernel, part.stride, part.sides(x.shape[2:]), -np.inf)
    result: Array = found[:, :, :rows, :columns].max((-2, -1))
    return result


@evaluate.register
def _(part: parts.Sign, x: Array, evaluation: Evaluation) -> Array:
    return evaluation.states(x, part)


@evaluate.register
def _(part: parts.Reshape, x: Array, evaluation: Evaluation) -> Array:
    return x.reshape(len(x), *part.shape)


@evaluate.register
def _(part: parts.PixelShuffle, x: Array, evaluation: Evaluation) -> Array:
    batch, channels, height, width = x.shape
    f = part.factor
    if part.back:
        split = x.reshape(batch, channels, height // f, f, width // f, f)
        return split.transpose(0, 1, 3, 5, 2, 4).reshape(batch, channels * f * f, height // f, width // f)
    split = x.reshape(batch, channels // f**2, f, f, height, width)
    return split.transpose(0, 1, 4, 2, 5, 3).reshape(batch, channels // f**2, height * f, width * f)


@evaluate.register
def _(part: parts.ChannelShuffle, x: Array, evaluation: Evaluation) -> Array:
    split = x.reshape(len(x), part.groups, x.shape[1] // part.groups, *x.shape[2:])
    return split.swapaxes(1, 2).reshape(x.shape)


@evaluate.register
def _(part: parts.Pad, x: Array, evaluation: Evaluation) -> Array:
    return np.pad(x, _widths(part.sides), constant_values=part.value)


@evaluate.register
def _(part: parts.Repeat, x: Array, evaluation: Evaluation) -> Array:
    return np.concatenate([x] * part.times, 1)


@evaluate.register
def _(part: parts.Concat, x: Array, evaluation: Evaluation) -> Array:
    return np.concatenate([run(chain, x, evaluation) for chain in part.branches], part.dim + 1)


@evaluate.register
def _(part: parts.Add, x: Array, evaluation: Evaluation) -> Array:
    first, *others = (run(chain, x, evaluation) for chain in part.branches)
    for other in others:
        first = first + other
    return first


def _convolve(x: Array, weight: Array, part: parts.Convolution | parts.Sums) -> Array:
    """The convolution of ``x``, which has its padding: one product of matrices for every place in the kernel."""
    outputs, channels, rows, columns = weight.shape
    (down, right), (apart, aside) = part.stride, part.dilation
    height = (x.shape[2] - apart * (rows - 1) - 1) // down + 1
    width = (x.shape[3] - aside * (columns - 1) - 1) // right + 1
    # [rows, columns, groups, outputs / groups, channels / groups]
    filters = weight.transpose(2, 3, 0, 1).reshape(rows, columns, part.groups, -1, channels)
    result = np.zeros((len(x), part.groups, outputs // part.groups, height * width))
    for row, column in np.ndindex(rows, columns):
        top, left = row * apart, column * aside
        seen = x[:, :, top : top + (height - 1) * down + 1 : down, left : left + (width - 1) * right + 1 : right]
        result += filters[row, column] @ seen.reshape(len(x), part.groups, channels, height * width)
    return result.reshape(len(x), outputs, height, width)


def _windows(x: Array, kernel: parts.Pair, stride: parts.Pair, sides: parts.Sides, value: float) -> Array:
    """The windows [B, C, H, W, rows, columns] of ``x`` with padding of that ``value``."""
    padded = np.pad(x, _widths(sides), constant_values=value)
    view: Array = np.lib.stride_tricks.sliding_window_view(padded, kernel, (2, 3))
    return view[:, :, :: stride[0], :: stride[1]]


def _widths(sides: parts.Sides) -> list[tuple[int, int]]:
    left, right, top, bottom = sides
    return [(0, 0), (0, 0), (top, bottom), (left, right)]


def _channels(values: Array, x: Array) -> Array:
    """Values of every channel in a shape that broadcasts over ``x`` [B, C, ...], in double precision."""
    return values.astype(np.float64).reshape(-1, *[1] * (x.ndim - 2))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), which never overflows."""
    tail = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1, tail) / (1 + tail)
    return result
