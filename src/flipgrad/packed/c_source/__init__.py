"""A packed network as C: one file without dependencies and its header.

>>> import numpy as np
>>> from flipgrad.packed import PackedNetwork, parts
>>> linear = parts.Linear(np.ones((2, 3), np.float32))
>>> code = to_c(PackedNetwork([linear], (3,)), "tiny")
>>> sorted(code.files())
['tiny.c', 'tiny.h']
>>> code.flash, code.ram
(88, 8)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.packed import parts, plain
from flipgrad.packed.c_source.rendering import Rendered, render
from flipgrad.packed.c_source.stages import STORED, Compiler, Numbers, Stream
from flipgrad.packed.c_source.values import Stored
from flipgrad.packed.network import PackedNetwork
from flipgrad.packed.parts import Array, Part, Value

__all__ = ["Code", "Numbers", "Size", "Stream", "to_c"]

# Examples that are looked at for the ranges of fixed point.
MOST_EXAMPLES = 256
COMPILERS = ("cc", "gcc", "clang")


@final
@dataclass(frozen=True)
class Size:
    """Bytes of the compiled code: what stays in flash, and what it needs of memory besides its stack."""

    flash: int
    ram: int


@final
@dataclass(frozen=True)
class Code:
    """The C code of a network.

    Attributes:
        name: what its function is called: ``name_predict``.
        header: the text of ``name.h``.
        source: the text of ``name.c``.
        main: the text of ``name_main.c``, a program that classifies what it reads.
        flash: bytes of the constants.
        ram: bytes of the static buffers.
    """

    name: str
    header: str
    source: str
    main: str
    flash: int
    ram: int

    def files(self, main: bool = False) -> dict[str, str]:
        """The texts by the names of their files, with the program for trying or without it."""
        found = {f"{self.name}.h": self.header, f"{self.name}.c": self.source}
        return {**found, f"{self.name}_main.c": self.main} if main else found

    def save(self, folder: Path | str, main: bool = False) -> list[Path]:
        """Write the files into a folder; returns their paths."""
        paths = []
        for name, text in self.files(main).items():
            paths.append(Path(folder) / name)
            files.write(paths[-1], text.encode())
        return paths

    def compiled(self) -> Size | None:
        """The size of the object file that this machine's compiler makes with -Os, or None if it has no compiler."""
        compiler, size = next(filter(None, map(shutil.which, COMPILERS)), None), shutil.which("size")
        if compiler is None or size is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            for command in ([compiler, "-std=c99", "-Os", "-c", f"{self.name}.c", "-o", "net.o"], [size, "net.o"]):
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode:
                    return None
        found = re.search(r"^\s*(\d+)\s+(\d+)\s+(\d+)", done.stdout, re.MULTILINE)
        if found is None:
            return None
        text, data, bss = map(int, found.groups())
        return Size(text + data, data + bss)


def to_c(
    net: PackedNetwork,
    name: str = "net",
    *,
    numbers: Numbers = "float",
    stream: Stream = "int16",
    stochastic: bool = False,
    examples: ArrayLike | None = None,
) -> Code:
    """The network as one C99 file that needs no library but C's own, and a header that tells how to use it.

    States and binary weights are bits, and whole numbers are compared with thresholds, or with tables of probabilities: between
    the first layer and the head there is no floating point. It allocates nothing.

    Args:
        net: the network.
        name: what its function is called: ``name_predict``.
        numbers: the arithmetic of the first layer and the head. "double" is what the Python runtime has, and gives its answers;
            "fixed" is fixed point with weights of 16 bits and sums of 32.
        stream: how the stream of residual blocks is stored: in fixed point of 16 or 32 bits, or "real", as ``numbers`` has it.
        stochastic: whether there is also ``name_predict_samples``, the mean over draws of all units. Its tables need room.
        examples: inputs [B, ...] that tell how large numbers of fixed point get; needed only for these.

    Raises:
        InputError: if something in it has no code: what, and the way out.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,40}", name):
        raise InputError(f"the name {name!r:.60} is none of C: give one of letters, digits and underscores, e.g. 'net'")
    for what, value, known in (
        ("numbers", numbers, ("float", "double", "fixed")),
        ("stream", stream, ("int16", "int32", "real")),
    ):
        if value not in known:
            raise InputError(f"{what}={value!r:.60}: choose {', '.join(map(repr, known))}")
    if numbers == "fixed" and stream == "real":
        raise InputError("stream='real' has no sense with numbers='fixed': choose stream='int16' or 'int32'")
    if stochastic:
        net.check_draws()
    ranges = None if examples is None else _ranges(net, np.asarray(examples), stochastic)
    for wide in (False, True):
        compiler = Compiler(numbers, stream, stochastic, ranges, wide)
        given, pixels = _given(net, numbers, compiler, ranges)
        compiler.network(net.program, given)
        if not compiler.needs_wide:
            break
    made: Rendered = render(net, name, compiler, given, pixels)
    return Code(name, made.header, made.source, made.main, made.flash, made.ram)


def _given(
    net: PackedNetwork, numbers: Numbers, compiler: Compiler, ranges: dict[int, float] | None
) -> tuple[Stored, Array | None]:
    """The network's input, and of fixed point what every pixel is."""
    scale, shift = net.facts.pixel_scale, net.facts.pixel_shift
    magnitude = None if ranges is None else ranges[0]
    if scale is None or shift is None:
        return Stored(Value(net.inputs), "input", exact=False, magnitude=magnitude), None
    if numbers != "fixed":
        return Stored(Value(net.inputs), "image", exact=False, magnitude=magnitude), None
    values = np.arange(256) * scale + shift
    fraction = int(np.floor(np.log2(STORED["int16"] / max(np.abs(values).max(), 2.0**-20))))
    pixels = np.rint(values * 2.0**fraction).astype(np.int16)
    return Stored(Value(net.inputs), "image", fraction, exact=False, magnitude=magnitude), pixels


def _ranges(net: PackedNetwork, examples: Array, stochastic: bool) -> dict[int, float]:
    """The largest magnitude of numbers of examples after every part, by its identity; of the input under 0."""
    x = net.checked(examples[:MOST_EXAMPLES])
    if not len(x):
        raise InputError("examples must hold at least one input")
    found = {0: float(np.abs(x).max())}
    for evaluation in (plain.Evaluation(), *([plain.Evaluation(sample=0)] if stochastic else [])):
        _look(net.program, x, evaluation, found)
    return found


def _look(chain: Sequence[Part], x: Array, evaluation: plain.Evaluation, found: dict[int, float]) -> Array:
    for part in chain:
        if isinstance(part, parts.Concat | parts.Add):
            branches = [_look(branch, x, evaluation, found) for branch in part.branches]
            x = np.concatenate(branches, part.dim + 1) if isinstance(part, parts.Concat) else sum(branches[1:], branches[0])
        else:
            x = plain.evaluate(part, x, evaluation)
        found[id(part)] = max(found.get(id(part), 0.0), float(np.abs(x).max()))
    return x
