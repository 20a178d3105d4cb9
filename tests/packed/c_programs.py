"""Generated C code, compiled and called from the tests; and random packed networks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from flipgrad.packed import PackedNetwork, parts, plain
from flipgrad.packed.c_source import Code
from flipgrad.packed.parts import Value, after

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang is here")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
# Keeps the states of every sign, one after the other.
WATCHING = """
#include <stdint.h>
#include <string.h>
uint32_t seen[{total}];
static void watch(int layer, const uint32_t *states)
{{
    static const int starts[] = {{{starts}}};
    memcpy(seen + starts[layer], states, sizeof(uint32_t) * (size_t)(starts[layer + 1] - starts[layer]));
}}
#define NET_WATCH watch
#include "net.c"
"""


def compile_strictly(folder: Path, *options: str, compiler: str = COMPILERS[0] if COMPILERS else "") -> None:
    done = subprocess.run([compiler, *STRICT, *options, "-lm"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Program:
    """The code of a network, compiled as a library whose states can be looked at."""

    def __init__(self, net: PackedNetwork, code: Code, folder: Path) -> None:
        self.net = net
        code.save(folder)
        # Of every sign [C, H, W] or [n].
        self.shapes = [states.shape for states in self.plain_states(np.zeros(net.inputs))]
        sizes = [-(-shape[0] // 32) * int(np.prod(shape[1:])) for shape in self.shapes]
        self.starts = [0, *np.cumsum(sizes, dtype=int).tolist()]
        watching = WATCHING.format(total=max(1, self.starts[-1]), starts=", ".join(map(str, self.starts)))
        (folder / "watching.c").write_text(watching if sizes else '#include "net.c"\n')
        compile_strictly(folder, "-shared", "-fPIC", "watching.c", "-o", "net.so")
        self.library = ctypes.CDLL(str(folder / "net.so"))

    def plain_states(self, x: np.ndarray, sample: int | None = None, seed: int = 0) -> list[np.ndarray]:
        """States of every sign by the numpy engine."""
        found: list[np.ndarray] = []
        evaluation = plain.Evaluation(sample, seed, watch=lambda states: found.append(states[0]))
        plain.run(self.net.program, x[None].astype(np.float64), evaluation)
        return found

    def states(self) -> list[np.ndarray]:
        """States of every sign in the last evaluation of the library."""
        seen = np.array((ctypes.c_uint32 * max(1, self.starts[-1])).in_dll(self.library, "seen"), np.uint32)
        found = []
        for start, end, (channels, *rest) in zip(self.starts[:-1], self.starts[1:], self.shapes, strict=True):
            words = seen[start:end].reshape(int(np.prod(rest)), -1)
            bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")[:, :channels]
            found.append((2.0 * bits - 1).T.reshape(channels, *rest))
        return found

    def predict(self, x: np.ndarray, samples: int | None = None, seed: int = 0) -> tuple[int, np.ndarray]:
        """Class and probabilities of one input [C, H, W] or [n]: bytes of an image, or floats."""
        given = np.ascontiguousarray(np.moveaxis(x, 0, -1), np.uint8 if x.dtype == np.uint8 else np.float32)
        probabilities = np.full(self.net.outputs, np.nan, np.float32)
        pointers = given.ctypes.data_as(ctypes.c_void_p), probabilities.ctypes.data_as(ctypes.c_void_p)
        if samples is None:
            best = self.library.net_predict(*pointers)
        else:
            best = self.library.net_predict_samples(pointers[0], samples, ctypes.c_uint64(seed), pointers[1])
        return best, probabilities


class Builder:
    """Draws the parts of a network, one after the other."""

    def __init__(self, seed: int) -> None:
        # Hypothesis draws the seed alone: its own choices would be too much alike.
        self.random = np.random.default_rng(seed)
        self.value = Value(self.one_of((7,), (1, 6, 5), (3, 5, 6), (34, 3, 3), (12, 4, 4)))

    def one_of(self, *choices):
        return choices[self.random.integers(len(choices))]

    def numbers(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)

    def fits(self, part: parts.Part, value: Value) -> bool:
        try:
            return after([part], value).size <= 2000
        except ValueError:
            return False

    def chain(self, value: Value, candidates: list[str], count: int) -> tuple[list[parts.Part], Value]:
        """Parts of some of these kinds, those that fit."""
        found: list[parts.Part] = []
        for _ in range(count):
            for part in getattr(self, self.one_of(*candidates))(value):
                if not self.fits(part, value):
                    break
                found.append(part)
                value = after([part], value)
        return found, value

    def geometry(self) -> dict:
        return {
            "stride": (self.one_of(1, 2), self.one_of(1, 2)),
            "padding": tuple(self.random.integers(0, 3, 4).tolist()),
            "padding_value": self.one_of(0, 1, -1),
            "dilation": (self.one_of(1, 2), self.one_of(1, 1, 2)),
        }

    def groups(self, channels: int) -> int:
        return self.one_of(*[n for n in (1, 2, 3, channels) if channels % n == 0])

    def convolution(self, value: Value):
        if len(value.shape) != 3:
            outputs = self.one_of(3, 40)
            return [parts.Linear(self.numbers(outputs, value.size), self.numbers(outputs))]
        groups = self.groups(value.shape[0])
        outputs = groups * self.one_of(1, 2, 33) if groups < 20 else groups
        weight = self.numbers(outputs, value.shape[0] // groups, self.one_of(1, 3), self.one_of(1, 2, 3))
        mode = self.one_of("zeros", "zeros", "reflect", "replicate", "circular")
        geometry = {**self.geometry(), **({} if mode == "zeros" else {"padding": (1, 1, 0, 1), "padding_value": 0})}
        return [
            parts.Convolution(weight, self.one_of(None, self.numbers(outputs)), **geometry, padding_mode=mode, groups=groups)
        ]

    def layer(self, value: Value):
        """A binary layer."""
        if value.kind == "real":
            return [*self.norm(value), *self.sign(value)]
        outputs, geometry, groups = self.one_of(1, 5, 31, 32, 33, 70), {}, 1
        shape = value.shape
        if len(shape) == 3:
            groups = self.groups(shape[0])
            outputs = groups * self.one_of(1, 2) if groups > 1 else outputs
            shape = (shape[0] // groups, self.one_of(1, 2, 3), self.one_of(1, 3))
            geometry = self.geometry()
        bits = self.random.integers(0, 256, -(-outputs * int(np.prod(shape)) // 8), dtype=np.uint8)
        sums = parts.Sums(bits, outputs, shape, **geometry, groups=groups)
        if not self.fits(sums, value):
            return []
        after_sums = [sums, *self.one_of([], [parts.Factor(1 / 9)]), *self.norm(after([sums], value))]
        return [*after_sums, *self.one_of([], self.leaky(value)), *self.sign(value)]

    def norm(self, value: Value):
        n = value.shape[0]
        scale = self.numbers(n) / max(1, np.sqrt(value.bound))
        # Whole shifts and halves make ties.
        tied = parts.Affine(np.full(n, self.one_of(0.5, -0.5), np.float32), self.random.integers(-3, 4, n).astype(np.float32))
        normed = parts.BatchNorm(self.numbers(n), self.numbers(n) ** 2, self.numbers(n), self.numbers(n))
        return [self.one_of(parts.Affine(scale, self.numbers(n)), parts.Affine(None, self.numbers(n)), tied, normed)]

    def leaky(self, value: Value):
        return [parts.Activation("leaky_relu", (0.1,))]

    def prelu(self, value: Value):
        return [parts.PReLU(np.abs(self.numbers(self.one_of(1, value.shape[0]))))]

    def sign(self, value: Value):
        return [parts.Sign(self.one_of(*parts.NOISES), self.one_of(0.5, 1.0, 2.0))]

    def activation(self, value: Value):
        name = self.one_of(*parts.ACTIVATIONS)
        return [parts.Activation(name, {"leaky_relu": (0.2,), "hardtanh": (-1.0, 0.5), "elu": (0.7,)}.get(name, ()))]

    def pool(self, value: Value):
        kernel = (self.one_of(1, 2, 3), self.one_of(2, 3))
        options = {"padding": (self.one_of(0, kernel[0] // 2), self.one_of(0, 1)), "ceil": self.one_of(True, False)}
        return [parts.MaxPool(kernel, (self.one_of(1, 2), 2), **options)]

    def averages(self, value: Value):
        window = parts.WindowSum((2, self.one_of(1, 3)), (1, self.one_of(1, 2)), self.one_of((0, 0), (1, 0)))
        if value.kind == "real":
            return [window, parts.Factor(0.25)]
        return [window, *self.layer(after([window], value))] if self.fits(window, value) else []

    def move(self, value: Value):
        f, n = self.one_of(1, 2), value.size
        return [
            self.one_of(
                parts.PixelShuffle(f),
                parts.PixelShuffle(f, True),
                parts.ChannelShuffle(self.one_of(2, 3)),
                parts.Repeat(self.one_of(2, 3)),
                parts.Reshape((n,)),
                parts.Reshape((n // 4, 2, 2) if n % 4 == 0 else (n,)),
            )
        ]

    def pad(self, value: Value):
        return [parts.Pad((1, 0, 2, 1), self.one_of(0.0, 1.0, -1.0))]

    def branches(self, value: Value):
        """Two chains of states, one after the other."""
        kinds = ["layer", "layer", "pool", "move"]
        chains = []
        for _ in range(2):
            found, _ = self.chain(value, kinds, 2)
            chains.append(tuple(found if after(found, value).kind == "states" else [*found, *self.sign(value)]))
        return [parts.Concat(tuple(chains), self.one_of(0, 0, 1, 2))]

    def residual(self, value: Value):
        """A block whose branch keeps the shape, or has a shortcut of its own."""
        drawn = [*self.norm(value), *self.sign(value)] if value.kind == "real" else []
        c = value.shape[0]
        kernel = (c, 3, 3) if len(value.shape) == 3 else (c,)
        geometry = {"padding": (1, 1, 1, 1)} if len(value.shape) == 3 else {}
        bits = self.random.integers(0, 256, -(-c * int(np.prod(kernel)) // 8), dtype=np.uint8)
        sums = parts.Sums(bits, c, kernel, **geometry)
        branch = (*drawn, sums, *self.norm(Value(value.shape, "integers", int(np.prod(kernel)))))
        past: tuple[parts.Part, ...] = ()
        if len(value.shape) == 3 and self.one_of(True, False):
            past = (parts.Convolution(self.numbers(c, c, 1, 1), None),)
        chains = self.one_of((past, branch), (branch, past))
        return [parts.Add(chains), *self.one_of([], self.prelu(value))]


def network(seed: int, outputs: tuple[int, ...] = (1, 3, 10)) -> PackedNetwork:
    """A random small network with real layers in front, binary ones, and a head."""
    build = Builder(seed)
    real = ["convolution", "convolution", "activation", "norm", "prelu", "pool", "averages", "move", "pad"]
    front, value = build.chain(build.value, real, 2)
    first, value = build.chain(value, ["layer"], 1)
    states = ["layer", "layer", "pool", "move", "move", "pad", "averages", "branches", "branches", "residual"]
    body, value = build.chain(value, states, build.one_of(0, 2, 4, 6))
    flat = [parts.Reshape((value.size,))] if len(value.shape) > 1 else []
    k = build.one_of(*outputs)
    head = parts.Linear(build.numbers(k, value.size) / np.float32(np.sqrt(value.size)), build.numbers(k))
    return PackedNetwork([*front, *first, *body, *flat, head], build.value.shape, engine="numpy")


def networks(outputs: tuple[int, ...] = (1, 3, 10)) -> st.SearchStrategy[PackedNetwork]:
    """Random small networks."""
    return st.integers(0, 2**32).map(lambda seed: network(seed, outputs))
