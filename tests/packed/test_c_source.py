"""Generated C code: states and outputs of the numpy engine, strict compilers, sanitizers, and what is refused."""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import flipgrad as fg
from c_programs import COMPILERS, Program, compile_strictly, needs_compiler, networks
from flipgrad.data import digits
from flipgrad.errors import InputError
from flipgrad.packed import Facts, PackedNetwork, pack, parts
from flipgrad.packed.c_source import to_c
from flipgrad.packed.network import probabilities
from flipgrad.packed.parts import walk

pytestmark = pytest.mark.xdist_group("c source")

FACTS = Facts(tuple("abcdefghij"), 1 / 127.5, -1.0, {"deterministic": 0.98}, "digits", "a test")
ANY = np.random.default_rng(0)


def inputs(net, count):
    return ANY.normal(size=(count, *net.inputs)).astype(np.float32)


@pytest.fixture(scope="module")
def digits_net():
    """A network of digits, and the pixels of its test images [B, 1, 8, 8]."""
    x = digits().test.x
    net = pack(fg.zoo.load("digits-binary"), x[:1], FACTS)
    net.engine = "numpy"
    return net, ((x + 1) * 127.5).round().byte().numpy()


def scaled(pixels):
    return (pixels * (1 / 127.5) - 1).astype(np.float32)


@needs_compiler
@settings(max_examples=settings().max_examples // 2)
@given(networks())
def test_states_and_answers_of_random_networks_are_those_of_the_numpy_engine(net):
    code = to_c(net, numbers="double", stream="real", stochastic=True)
    with tempfile.TemporaryDirectory() as folder:
        program = Program(net, code, Path(folder))
        for number, x in enumerate(inputs(net, 2)):
            best, found = program.predict(x)
            expected = probabilities(net(x[None]))[0]
            for states, right in zip(program.states(), program.plain_states(x), strict=True):
                np.testing.assert_array_equal(states, right)
            np.testing.assert_allclose(found, expected, atol=2e-6)
            assert best == (int(expected[0] > 0.5) if net.outputs == 1 else expected.argmax())
            seed = 2**40 + number
            _, found = program.predict(x, 1, seed)
            for states, right in zip(program.states(), program.plain_states(x, 0, seed), strict=True):
                np.testing.assert_array_equal(states, right)
            np.testing.assert_allclose(found, net(x[None], samples=1, seed=seed)[0], atol=2e-6)
