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
from flipgrad.packed.parts import (
    GROWTH,
    LARGEST_VALUE,
    NO_NOISE,
    Array,
    Part,
    Shape,
    Sign,
    Value,
    after,
    arrays_of,
    from_json,
    largest,
    number,
    several,
    to_json,
    walk,
)

Engine = Literal["auto", "compiled", "numpy"]
# Numbers of inputs that one call of an engine gets at most: larger batches are cut.
NUMBERS_AT_ONCE = 2**24
# Of the engine in numpy, whose values are of double precision: numbers of one value.
VALUES_AT_ONCE = 2**22
LONGEST_NAME = 200
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

    def __post_init__(self) -> None:
        """Refuse what the file could not hold, or nobody could print."""
        words = [*(self.classes or ()), *(self.accuracy or ()), self.made_by, *([] if self.data is None else [self.data])]
        if not all(isinstance(word, str) and word.isprintable() and len(word) <= LONGEST_NAME for word in words):
            raise InputError(
                "the names of classes, data, accuracies and made_by must be words that can be printed, of at most "
                f"{LONGEST_NAME} letters each"
            )
        numbers = (self.pixel_scale, self.pixel_shift, *(self.accuracy or {}).values())
        if not all(each is None or _finite(each) for each in numbers):
            raise InputError("pixel_scale, pixel_shift and accuracies must be finite numbers")
        if (self.pixel_scale is None) != (self.pixel_shift is None):
            raise InputError("pixel_scale and pixel_shift must both be given, or none of them")

    @staticmethod
    def from_json(told: Any) -> Facts:
        """The facts that a file holds, or an error that says what is wrong with them."""
        known = {each.name for each in fields(Facts)}
        if not isinstance(told, dict) or set(told) != known:
            raise InputError(f"its facts must be {', '.join(sorted(known))}")
        classes, accuracy = told["classes"], told["accuracy"]
        if not isinstance(classes, list | None) or not isinstance(accuracy, dict | None):
            raise InputError("its classes must be a list of names, its accuracy numbers by name")
        return Facts(**{**told, "classes": None if classes is None else tuple(classes)})


@final
class PackedNetwork:
    """A network in bits, ready to run: ``net(x)`` and ``net(x, samples=10, seed=0)``.

    Parts that do not fit together are refused, and so are those whose evaluation would take memory that the network's size
    does not explain: no array of one example, padding included, may have more than 256 numbers for every number of the input
    and byte of the arrays, nor more than 2^25.

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
            raise InputError(f"a network's inputs must have from 1 to {LARGEST_VALUE:,} numbers")
        try:
            self.value = after(self.program, Value(self.inputs))
        except ValueError as error:
            raise InputError(f"the parts of the network do not fit together: {error}") from None
        self._largest = largest(self.program, Value(self.inputs))
        most = min(LARGEST_VALUE, GROWTH * (math.prod(self.inputs) + sum(each.nbytes for each in self._arrays().values())))
        if self._largest > most:
            raise InputError(f"an evaluation would hold {self._largest:,} numbers, for a network of its size at most {most:,}")
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
    def draws(self) -> bool:
        """Whether states can be drawn, which they cannot if the network was packed without noise."""
        return not any(isinstance(part, Sign) and part.noise == NO_NOISE for part in walk(self.program))

    def check_draws(self) -> None:
        """Refuse draws of a network that was packed without noise."""
        if not self.draws:
            raise InputError(
                "the network was packed without draws, and has no noise: leave samples, or pack it again without "
                "--deterministic (draws=True)"
            )

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
        """The outputs [samples, B, K] of members of the ensemble, each a draw of all units, which ``samples=`` averages."""
        self.check_draws()
        return self._evaluate(x, _whole("samples", samples, 1, MOST_SAMPLES), seed)

    def save(self, path: Path | str) -> int:
        """Write it to a file; returns the bytes of its arrays, which is the file without its header."""
        content, size = self.to_bytes()
        files.write(Path(path), content)
        return size

    def to_bytes(self) -> tuple[bytes, int]:
        """The content of its file, and how many bytes of that are arrays."""
        arrays = self._arrays()
        names = {id(values): name for name, values in arrays.items()}
        chain = to_json(self.program, lambda values: names[id(values)])
        told = {each.name: getattr(self.facts, each.name) for each in fields(Facts)}
        content = archive.to_bytes(arrays, {"inputs": list(self.inputs), "program": chain, **told})
        return content, sum(values.nbytes for values in arrays.values())

    def _arrays(self) -> dict[str, Array]:
        """The arrays of all parts, by their names in the file."""
        arrays: dict[str, Array] = {}
        seen: set[int] = set()
        for part in walk(self.program):
            for field_name, values in arrays_of(part):
                if id(values) not in seen:
                    numbered = f"{len(seen)}.{part.name}.{field_name}"
                    name = self._names.get(id(values), numbered)
                    arrays[numbered if name in arrays else name] = values
                    seen.add(id(values))
        return arrays

    def _evaluate(self, x: ArrayLike, samples: int | None, seed: int) -> NDArray[np.float32]:
        """The outputs [samples or 1, B, K]."""
        seed = _whole("seed", seed, 0, LARGEST_SEED)
        x = self.checked(x)
        numbers = math.prod(self.inputs) * (samples or 1) if self._compiled else self._largest
        some = max(1, (NUMBERS_AT_ONCE if self._compiled else VALUES_AT_ONCE) // numbers)
        found = [np.empty((samples or 1, 0, self.outputs), np.float32)]
        # Whatever overflows is seen in the end.
        with np.errstate(all="ignore"):
            for first in range(0, len(x), some):
                part = x[first : first + some]
                if self._compiled is not None:
                    found.append(self._compiled.run(part, samples, seed, first))
                else:
                    found.append(plain.outputs(self.program, part, samples, seed, first))
        outputs = np.concatenate(found, 1)
        if not np.isfinite(outputs).all():
            raise InputError("the outputs are not finite: the inputs or the network's weights are too large")
        return outputs

    def checked(self, x: ArrayLike) -> NDArray[np.float64]:
        """The inputs in double precision; raises ``InputError`` if they do not fit the network."""
        try:
            given = np.asarray(x)
            if given.dtype.kind not in "fiub":
                raise ValueError(f"of dtype {given.dtype}")
        except (ValueError, TypeError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise InputError(f"inputs must be an array of real numbers [batch, {self._wanted()}]: {why}") from None
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
        return plain.sigmoid(outputs.astype(np.float64)).astype(np.float32)
    outputs = outputs.astype(np.float64)
    powers = np.exp(outputs - outputs.max(-1, keepdims=True))
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
        try:
            shape = several(None, 1, 3)(inputs)
        except ValueError as error:
            raise InputError(f"its inputs must be {error}") from None
        program = from_json(written, arrays)
        if {id(values) for part in walk(program) for _, values in arrays_of(part)} != {id(each) for each in arrays.values()}:
            raise InputError("it holds arrays that no part uses")
        names = {id(values): name for name, values in arrays.items()}
        net = PackedNetwork(program, shape, Facts.from_json(told), names=names, engine="numpy")
    except InputError as error:
        raise InputError(f"'{path}' is no right network: {error}; {archive.AGAIN}") from None
    net.engine = engine
    return net


def _whole(name: str, value: int, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not low <= number <= high:
        raise InputError(f"{name}={value!r}: give a whole number from {low} to {high}")
    return number


def _finite(value: Any) -> bool:
    try:
        number(value)
    except ValueError:
        return False
    return True
