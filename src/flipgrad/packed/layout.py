"""How the compiled engine lays out weights and windows; see csrc/packed.h.

Values have their channels last. The windows that an output place sums over are lists of runs: elements, words of states or real
numbers, that lie side by side both in the input and in the filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from flipgrad.packed.parts import Array

# Output channels that are computed side by side, and states in a word.
BLOCK, WORD = 16, 32
# Runs that all windows of a layer may have together.
MOST_RUNS = 2**20

# For every row (or column) of a view of an image: the rows of the image that it is the sum of.
Axis = list[list[int]]
# For every output row (or column): which row of the kernel meets which row of the image.
Meetings = list[list[tuple[int, int]]]


@final
@dataclass(frozen=True, eq=False)
class Windows:
    """Of every output place its first input element and its list of runs; the lists, and how many inputs each sums up."""

    bases: NDArray[np.int32]
    lists: NDArray[np.int32]
    list_runs: NDArray[np.int32]
    list_inputs: NDArray[np.int32]
    runs: NDArray[np.int32]


@final
@dataclass(frozen=True, eq=False)
class Filters:
    """Weights [blocks, elements, 16], masks alike or None, and the first input element of every block."""

    weights: Array
    masks: Array | None
    lows: NDArray[np.int32]
    # Input elements that a block's filter has for every place of the kernel.
    width: int


def words_of(channels: int) -> int:
    """Words that hold the states of one place."""
    return -(-channels // WORD)


def blocks_of(channels: int) -> int:
    """Blocks of output channels."""
    return -(-channels // BLOCK)


def plain_axis(size: int) -> Axis:
    """The rows of an image themselves."""
    return [[i] for i in range(size)]


def padded_axis(axis: Axis, before: int, after: int) -> Axis:
    """The same with zeros around, which are sums of nothing."""
    return [[] for _ in range(before)] + axis + [[] for _ in range(after)]


def summed_axis(axis: Axis, kernel: int, stride: int, padding: int) -> Axis:
    """Sums of ``kernel`` rows each."""
    wide = padded_axis(axis, padding, padding)
    starts = range(0, len(wide) - kernel + 1, stride)
    return [[i for row in wide[start : start + kernel] for i in row] for start in starts]


def meetings(axis: Axis, kernel: int, stride: int, dilation: int) -> Meetings:
    """Which rows of the kernel meet which rows of the image, for every output row."""
    starts = range(0, len(axis) - dilation * (kernel - 1), stride)
    return [[(k, i) for k in range(kernel) for i in axis[start + k * dilation]] for start in starts]


def windows(rows: Meetings, columns: Meetings, *, size: Sequence[int], width: int, inputs: int) -> Windows | None:
    """The windows of a convolution, or of a pooling; None if their runs are too many.

    Args:
        rows: of every output row the meetings of rows of the kernel and of the image.
        columns: the same of columns.
        size: columns of the image, and of the kernel; elements of one place of the image.
        width: elements of one place that are used.
        inputs: numbers that are summed up for one place of the kernel.
    """
    image_columns, kernel_columns, elements = size
    row_bases, row_kinds, row_lists = _kinds(rows)
    column_bases, column_kinds, column_lists = _kinds(columns)
    if sum(map(len, row_lists)) * sum(map(len, column_lists)) > MOST_RUNS:
        return None
    runs: list[tuple[int, int, int]] = []
    list_runs, list_inputs = [0], []
    for row_list in row_lists:
        for column_list in column_lists:
            begin = len(runs)
            for ky, iy in row_list:
                for kx, ix in column_list:
                    place, tap = (iy * image_columns + ix) * elements, (ky * kernel_columns + kx) * width
                    if len(runs) > begin and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (place, tap):
                        runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + width)
                    else:
                        runs.append((place, tap, width))
            list_runs.append(len(runs))
            list_inputs.append(inputs * len(row_list) * len(column_list))
    bases = (np.array(row_bases)[:, None] * image_columns + np.array(column_bases)) * elements
    lists = np.array(row_kinds)[:, None] * len(column_lists) + np.array(column_kinds)
    return Windows(
        bases.reshape(-1).astype(np.int32),
        lists.reshape(-1).astype(np.int32),
        np.array(list_runs, np.int32),
        np.array(list_inputs, np.int32),
        np.array(runs, np.int32).reshape(-1, 3),
    )


def bit_filters(weights: NDArray[np.int8], groups: int) -> Filters:
    """Weights ±1 [outputs, C / groups, places] as words for inputs of C channels."""
    words = words_of(weights.shape[1] * groups)
    starts, lows, width = _extents(weights.shape, groups, words, WORD)
    placed, mask = _placed(weights > 0, starts, lows * WORD, width * WORD)
    whole = groups == 1 or bool(mask[: len(weights)].all())
    return Filters(_as_words(placed), None if whole else _as_words(mask), lows.astype(np.int32), width)


def real_filters(weights: Array, groups: int) -> Filters:
    """Real weights [outputs, C / groups, places]."""
    starts, lows, width = _extents(weights.shape, groups, weights.shape[1] * groups, 1)
    placed, _ = _placed(weights.astype(np.float64), starts, lows, width)
    return Filters(_in_blocks(placed), None, lows.astype(np.int32), width)


def per_channel(values: Array, dtype: Any, rest: float = 0) -> Array:
    """One number for every output channel, and ``rest`` for those that fill the last block."""
    filled = np.full(blocks_of(len(values)) * BLOCK, rest, dtype)
    filled[: len(values)] = values
    return filled


def _kinds(all_meetings: Meetings) -> tuple[list[int], list[int], list[list[tuple[int, int]]]]:
    """Of every output row its first input row and the number of its list; and the lists, from their first row on."""
    known: dict[tuple[tuple[int, int], ...], int] = {}
    bases, kinds = [], []
    for met in all_meetings:
        base = min((i for _, i in met), default=0)
        bases.append(base)
        kinds.append(known.setdefault(tuple((k, i - base) for k, i in met), len(known)))
    return bases, kinds, [list(each) for each in known]


def _extents(shape: Sequence[int], groups: int, elements: int, size: int) -> tuple[Array, Array, int]:
    """The first input channel of every output; the first element of every block, and how many its outputs need at most.

    An element holds ``size`` channels, and a place has ``elements`` of them.
    """
    outputs, channels = shape[0], shape[1]
    group = np.arange(blocks_of(outputs) * BLOCK).clip(max=outputs - 1) // (outputs // groups)
    starts = group * channels
    first = (starts // size).reshape(-1, BLOCK).min(1)
    last = ((starts + channels - 1) // size + 1).reshape(-1, BLOCK).max(1)
    width = int((last - first).max())
    return starts[:outputs], np.minimum(first, elements - width), width


def _placed(weights: Array, starts: Array, lows: Array, channels: int) -> tuple[Array, Array]:
    """The weights [outputs, places, channels] of every output where they stand among its block's inputs, and where they do."""
    outputs, own, places = weights.shape
    placed = np.zeros((blocks_of(outputs) * BLOCK, places, channels), weights.dtype)
    mask = np.zeros((len(placed), 1, channels), bool)
    offsets = starts - lows[np.arange(outputs) // BLOCK]
    for offset in np.unique(offsets):
        these = np.flatnonzero(offsets == offset)
        placed[these, :, offset : offset + own] = weights[these].swapaxes(1, 2)
        mask[these, :, offset : offset + own] = True
    return placed, np.broadcast_to(mask, placed.shape)


def _as_words(bits: Array) -> Array:
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return _in_blocks(packed.view("<u4").astype(np.uint32))


def _in_blocks(weights: Array) -> Array:
    """[outputs, places, elements] as [blocks, elements of all places, 16]."""
    flat = weights.reshape(-1, BLOCK, weights.shape[1] * weights.shape[2])
    return np.ascontiguousarray(flat.swapaxes(1, 2))
