"""The evaluation of a packed network by the compiled library: one call for a batch and all its samples; see csrc/packed.cpp."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from flipgrad import machine
from flipgrad.errors import InputError
from flipgrad.native.loading import PORTABLE, load
from flipgrad.packed import lowering, plain
from flipgrad.packed.lowering import NoStepsError, Program
from flipgrad.packed.parts import Array, Part, Shape

# The fields of the structures in csrc/packed.h, in their order; those of PackedStep with the dtypes of arrays.
_NUMBERS = (
    "kind source second target positions in_channels out_channels filter inputs result sign table_stride table_shift "
    "first function tile"
)
_ARRAYS = {
    **dict.fromkeys(("bases", "lists", "list_runs", "list_inputs", "runs"), np.int32),
    **dict.fromkeys(("weights", "masks"), None),
    "lows": np.int32,
    **dict.fromkeys(("bias", "scale", "shift"), np.float64),
    "thresholds": np.int32,
    "table": np.uint32,
    **dict.fromkeys(("slopes", "offsets"), np.float32),
}


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        ("factor", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("margin", ctypes.c_double),
        ("index", ctypes.c_void_p),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.POINTER(_Step)),
        ("count", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("slot_bytes", ctypes.c_void_p),
        ("slot_shared", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("input_size", ctypes.c_int64),
        ("output_size", ctypes.c_int64),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "samples", "first_example", "first_sample")),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int64),
        ("instructions", ctypes.c_int64),
    ]


# What `instructions` may be: the best there are, those of every processor, at most AVX2, at most AVX-512.
INSTRUCTIONS = {"best": 0, "portable": 1, "avx2": 2, "avx512": 3}

_library, _reason = load(["flipgrad_packed_run", "flipgrad_packed_words", "flipgrad_packed_instructions"])


def lower(program: Sequence[Part], inputs: Shape) -> tuple[Lowered | None, str]:
    """The network as the compiled library runs it, or None and why there is none."""
    if _library is None:
        return None, _reason
    return Lowered(program, inputs), ""


def best_instructions() -> str:
    """The instructions that the library uses here: "portable", "avx2" or "avx512"; an empty string without it."""
    if _library is None:
        return ""
    found = _library.flipgrad_packed_instructions()
    return next(name for name, number in INSTRUCTIONS.items() if number == found)


def random_words(units: int, *, seed: int, layer: int, example: int, sample: int, instructions: str = "best") -> Array:
    """The library's own :func:`flipgrad.packed.random_words.words`, to be compared."""
    call = _Call(0, 0, example, sample, seed, 1, INSTRUCTIONS[instructions])
    found = np.empty(units, np.uint32)
    if _library is None:
        raise InputError("the compiled library is not there: install the package where there is a C++ compiler (pip install .)")
    _library.flipgrad_packed_words(ctypes.byref(call), ctypes.c_int64(layer), ctypes.c_int64(units), _address(found))
    return found


@final
class Lowered:
    """A network as the compiled library runs it: steps for the deterministic one, and others for draws, made when needed.

    What there are no steps for is evaluated in numpy; ``reason`` then says why.

    Attributes:
        threads: how many to use; None: as many as torch does if that is loaded, else all cores.
        instructions: one of ``INSTRUCTIONS``.
        reason: an empty string, or why it is evaluated in numpy.
    """

    def __init__(self, program: Sequence[Part], inputs: Shape) -> None:
        self.threads: int | None = None
        self.instructions = "portable" if PORTABLE else "best"
        self.reason = ""
        self._parts, self._inputs = tuple(program), tuple(inputs)
        self._cache: dict[Any, Any] = {}
        self._prepared: dict[bool, _Prepared | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # What it has prepared holds addresses.
        return Lowered, (self._parts, self._inputs)

    def run(self, x: NDArray[np.float64], samples: int | None, seed: int, first: int) -> NDArray[np.float32]:
        """The outputs [samples or 1, B, ...] of inputs [B, ...], of which the first example has the number ``first``."""
        prepared = self._prepare(samples is not None)
        if prepared is None or _library is None:
            return plain.outputs(self._parts, x, samples, seed, first)
        x = np.ascontiguousarray(x, np.float64)
        found = np.empty((samples or 1, len(x), *prepared.outputs), np.float32)
        threads = _threads() if self.threads is None else self.threads
        call = _Call(len(x), samples or 1, first, 0, seed, threads, INSTRUCTIONS[self.instructions])
        status = _library.flipgrad_packed_run(prepared.address, ctypes.byref(call), _address(x), _address(found))
        if status:
            raise MemoryError("no memory for the values of a packed network; give fewer examples at once")
        return found

    def _prepare(self, stochastic: bool) -> _Prepared | None:
        if stochastic not in self._prepared:
            try:
                program = lowering.program(self._parts, self._inputs, stochastic=stochastic, cache=self._cache)
                self._prepared[stochastic] = _Prepared(program, math.prod(self._inputs))
            except NoStepsError as error:
                self._prepared[stochastic], self.reason = None, str(error)
        return self._prepared[stochastic]


@final
class _Prepared:
    """The structures of a program, and the arrays that they point to."""

    def __init__(self, program: Program, input_size: int) -> None:
        steps = program.steps
        drawn = [number for number, step in enumerate(steps) if step.draws]
        # The output is written for every sample.
        shared = min([*drawn, len(steps) - 1])
        slot_of, self.slot_bytes, self.slot_shared = _slots(program, shared)
        self._kept: list[Array] = []
        self._steps = (_Step * len(steps))(*[self._structure(step, slot_of) for step in steps])
        self.outputs = program.outputs
        self._program = _Program(
            self._steps,
            len(steps),
            shared,
            _address(self.slot_bytes),
            _address(self.slot_shared),
            len(self.slot_bytes),
            input_size,
            math.prod(program.outputs),
        )
        self.address = ctypes.byref(self._program)

    def _structure(self, step: lowering.Step, slot_of: dict[int, int]) -> _Step:
        numbers = {"sign": -1, "result": -1, "tile": _tile(step), **step.numbers}
        slots = {name: slot_of.get(getattr(step, name), -1) for name in ("source", "second", "target")}
        made = _Step(kind=lowering.KINDS.index(step.kind), **slots, **numbers)
        for name, values in step.arrays.items():
            wanted = np.int32 if name == "index" else _ARRAYS[name]
            values = np.ascontiguousarray(values, wanted)
            self._kept.append(values)
            setattr(made, name, _address(values))
        return made


def _tile(step: lowering.Step) -> int:
    """Places that are computed together: their integers and random words fit into a core's first cache."""
    channels = step.numbers["out_channels"]
    return 48 if channels <= 128 else 24 if channels <= 256 else 8


def _slots(program: Program, shared: int) -> tuple[dict[int, int], Array, Array]:
    """The slot of every value, and of every slot its bytes and whether its values are shared: slots are used again."""
    steps = program.steps
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last.update({value: number for value in (step.source, step.second, step.target) if value >= 0})
    slot_of: dict[int, int] = {}
    sizes: list[int] = []
    kinds: list[int] = []
    free: list[int] = []
    for number, step in enumerate(steps):
        if step.target >= 0 and step.target not in slot_of:
            kind, wanted = int(number < shared), program.value_bytes[step.target]
            fitting = [slot for slot in free if kinds[slot] == kind]
            slot = min(fitting, key=lambda slot: abs(sizes[slot] - wanted), default=len(sizes))
            if slot == len(sizes):
                sizes.append(0)
                kinds.append(kind)
            else:
                free.remove(slot)
            sizes[slot] = max(sizes[slot], -(-wanted // 64) * 64)
            slot_of[step.target] = slot
        ended = {value for value in (step.source, step.second, step.target) if value >= 0 and last[value] == number}
        # Shared values are read again for every further part of the samples.
        free += [slot_of[value] for value in ended if not (kinds[slot_of[value]] and number >= shared)]
    return slot_of, np.array(sizes, np.int64), np.array(kinds, np.int64)


def _threads() -> int:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if hasattr(torch, "get_num_threads") else machine.cores()  # type: ignore[union-attr]


def _address(values: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
