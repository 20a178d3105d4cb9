"""A packed network: read from a file, evaluated with numpy or compiled code, deterministic or as an ensemble of draws."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.packed import archive, compiled, plain
from flipgrad.packed.parts import LARGEST_VALUE, Array, Part, Shape, Value, after, arrays_of, from_json, to_json, walk

Engine = Literal["auto", "compiled", "numpy"]
# Numbers of inputs that one call of an engine gets at most: larger batches are cut.
NUMBERS_AT_ONCE = 2**24
LARGEST_SEED = 2**63 - 1
MOST_SAMPLES = 2**20


@final
@dataclass(frozen=True)
class Facts:
    """What a file tells of its network besides the parts.

    Attributes:
        classes: the names of the outputs, if these are classes.
        pixel_scale: with ``pixel_shift``, what an input is of a pixel from 0 to 255: pixel · scale + shift.
        pixel_shift: see ``pixel_scale``; None of both for inputs that are no images.
        accuracy: what was measured when it was trained, by name: shares between 0 and 1.
        data: the name of the data set that it was trained on.
        made_by: the version of flipgrad that packed it.
    """

    classes: tuple[str, ...] | None = None
    pixel_scale: float | None = None
    pixel_shift: float | None = None
    accuracy: Mapping[str, float] | None = None
    data: str | None = None
    made_by: str = ""

    @staticmethod
    def from_json(told: Any) -> Facts:
        """The facts that a file holds, or an error that says what is wrong with them."""
        known = {each.name for each in fields(Facts)}
        if not isinstance(told, dict) or set(told) != known:
            raise InputError(f"its facts must be {', '.join(sorted(known))}")
        classes, accuracy = told["classes"], told["accuracy"]
        if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise InputError("its classes must be a list of names")
        for name in ("pixel_scale", "pixel_shift"):
            if told[name] is not None and not _finite(told[name]):
                raise InputError(f"its {name} must be a finite number")
        if (told["pixel_scale"] is None) != (told["pixel_shift"] is None):
            raise InputError("its pixel_scale and pixel_shift must both be given, or none of them")
        if accuracy is not None and not (isinstance(accuracy, dict) and all(map(_finite, accuracy.values()))):
            raise InputError("its accuracy must be numbers by name")
        if not isinstance(told["made_by"], str) or not isinstance(told["data"], str | None):
            raise InputError("its data and made_by must be words")
        return Facts(**{**told, "classes": None if classes is None else tuple(classes)})


@final
class PackedNetwork:
    """A network in bits, ready to run: ``net(x)`` and ``net(x, samples=10, seed=0)``.

    Args:
        program: the parts.
        inputs: the shape of one example.
        facts: what else is known of it.
        names: what arrays are called in the file; by default they are numbered.
        engine: "compiled", "numpy", or "auto": the first where it can.
    """

    def __init__(
        self,
        program: Sequence[Part],
        inputs: Shape,
        facts: Facts | None = None,
        *,
        names: Mapping[int, str] | None = None,
        engine: Engine = "auto",
    ) -> None:
        self.program, self.inputs, self.facts = tuple(program), tuple(inputs), facts or Facts()
        self._names = dict(names or {})
        if not 1 <= math.prod(self.inputs) <= LARGEST_VALUE:
            raise InputError(f"a network's inputs {list(inputs)} must have from 1 to {LARGEST_VALUE:,} numbers")
        try:
            self.value = after(self.program, Value(self.inputs))
        except ValueError as error:
            raise InputError(f"the parts of the network do not fit together: {error}") from None
        if len(self.value.shape) != 1:
            raise InputError(f"a network must end with outputs [K], this one ends with {list(self.value.shape)}")
        if self.facts.classes is not None and len(self.facts.classes) != max(2, self.outputs):
            raise InputError(f"the network has {self.outputs} outputs, and {len(self.facts.classes)} names of classes")
        self.engine = engine

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return self.value.shape[0]

    @property
    def engine(self) -> Engine:
        """What evaluates it, "compiled" or "numpy"."""
        return "numpy" if self._compiled is None else "compiled"

    @engine.setter
    def engine(self, wanted: Engine) -> None:
        if wanted not in ("auto", "compiled", "numpy"):
            raise InputError(f"engine={wanted!r}: choose 'auto', 'compiled' or 'numpy'")
        self._compiled: compiled.Lowered | None = None
        self.reason = ""
        if wanted != "numpy":
            self._compiled, self.reason = compiled.lower(self.program, self.inputs)
        if wanted == "compiled" and self._compiled is None:
            raise InputError(f"the compiled engine cannot run this network: {self.reason}; use engine='numpy'")

    def __call__(self, x: ArrayLike, samples: int | None = None, seed: int = 0) -> NDArray[np.float32]:
        """The outputs [B, K] of the deterministic network; with ``samples`` the mean class probabilities of so many draws.

        The first is what ``net.deterministic(x)`` is of the network that was packed, the second ``net.predict(x, samples)``.

        Args:
            x: inputs [B, ...], real numbers.
            samples: how many members of the ensemble to average.
            seed: of the draws; the same seed gives the same draws on every machine.
        """
        if samples is None:
            outputs: NDArray[np.float32] = self._evaluate(x, None, seed)[0]
            return outputs
        means: NDArray[np.float32] = probabilities(self.members(x, samples, seed)).mean(0, dtype=np.float64).astype(np.float32)
        return means

    def members(self, x: ArrayLike, samples: int, seed: int = 0) -> NDArray[np.float32]:
        """The outputs [samples, B, K] of members of the ensemble, each a draw of all units; see :meth:`__call__`."""
        return self._evaluate(x, _whole("samples", samples, 1, MOST_SAMPLES), seed)

    def save(self, path: Path | str) -> int:
        """Write it to a file; returns the bytes of its arrays, which is the file without its header."""
        content, size = self.to_bytes()
        files.write(Path(path), content)
        return size

    def to_bytes(self) -> tuple[bytes, int]:
        """The content of its file, and how many bytes of that are arrays."""
        arrays: dict[str, Array] = {}
        names: dict[int, str] = {}
        for part in walk(self.program):
            for field_name, values in arrays_of(part):
                if id(values) not in names:
                    names[id(values)] = self._names.get(id(values), f"{len(names)}.{part.name}.{field_name}")
                    arrays[names[id(values)]] = values
        chain = to_json(self.program, lambda values: names[id(values)])
        told = {each.name: getattr(self.facts, each.name) for each in fields(Facts)}
        content = archive.to_bytes(arrays, {"inputs": list(self.inputs), "program": chain, **told})
        return content, sum(values.nbytes for values in arrays.values())

    def _evaluate(self, x: ArrayLike, samples: int | None, seed: int) -> NDArray[np.float32]:
        """The outputs [samples or 1, B, K]."""
        seed = _whole("seed", seed, 0, LARGEST_SEED)
        x = self._checked(x)
        some = max(1, NUMBERS_AT_ONCE // (math.prod(self.inputs) * (samples or 1)))
        found = []
        for first in range(0, max(1, len(x)), some):
            part = x[first : first + some]
            if self._compiled is not None:
                found.append(self._compiled.run(part, samples, seed, first))
            else:
                draws = [None] if samples is None else list(range(samples))
                evaluations = [plain.Evaluation(sample, seed, first) for sample in draws]
                found.append(np.stack([plain.run(self.program, part, each).astype(np.float32) for each in evaluations]))
        return np.concatenate(found, 1)

    def _checked(self, x: ArrayLike) -> NDArray[np.float64]:
        try:
            given = np.asarray(x)
            if given.dtype.kind not in "fiub":
                raise ValueError(f"of dtype {given.dtype}")
        except (ValueError, TypeError) as error:
            raise InputError(f"inputs must be an array of real numbers [batch, {self._wanted()}]: {error}") from None
        if given.shape[1:] != self.inputs or given.ndim == 0:
            raise InputError(f"inputs must be [batch, {self._wanted()}], got {list(given.shape)}")
        given = given.astype(np.float64)
        if not np.isfinite(given).all():
            raise InputError("inputs hold numbers that are not finite")
        return given

    def _wanted(self) -> str:
        return ", ".join(map(str, self.inputs))


def probabilities(outputs: Array) -> NDArray[np.float32]:
    """Class probabilities of outputs [..., K]: softmax, or the sigmoid where K = 1."""
    if outputs.shape[-1] == 1:
        return (1 / (1 + np.exp(-outputs.astype(np.float64)))).astype(np.float32)
    powers = np.exp(outputs - outputs.max(-1, keepdims=True), dtype=np.float64)
    shares: NDArray[np.float32] = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    return shares


def load(path: Path | str, *, engine: Engine = "auto") -> PackedNetwork:
    """The packed network in a file of ``flipgrad pack``.

    Args:
        path: the file.
        engine: what evaluates it: "compiled", "numpy", or "auto", which is the first where it can.

    Raises:
        InputError: if it is missing, damaged, or not such a file.
    """
    arrays, told = archive.read(Path(path))
    try:
        inputs, written = told.pop("inputs", None), told.pop("program", None)
        if not (isinstance(inputs, list) and 1 <= len(inputs) <= 3 and all(type(n) is int and n >= 1 for n in inputs)):
            raise InputError("its inputs must be a shape, one to three positive whole numbers")
        program = from_json(written, arrays)
        if {id(values) for part in walk(program) for _, values in arrays_of(part)} != {id(each) for each in arrays.values()}:
            raise InputError("it holds arrays that no part uses")
        names = {id(values): name for name, values in arrays.items()}
        return PackedNetwork(program, tuple(inputs), Facts.from_json(told), names=names, engine=engine)
    except InputError as error:
        raise InputError(f"'{path}' is no right network: {error}; {archive.AGAIN}") from None


def _whole(name: str, value: int, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not low <= number <= high:
        raise InputError(f"{name}={value!r}: give a whole number from {low} to {high}")
    return number


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
