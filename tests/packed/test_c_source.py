"""Generated C code: states and outputs of the numpy engine, strict compilers, sanitizers, and what is refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from c_programs import COMPILERS, Program, compile_strictly, needs_compiler, network, networks
from hypothesis import example, given, settings
from random_programs import binary_layer, real_weights

import flipgrad as fg
from flipgrad.data import digits, mnist
from flipgrad.errors import InputError
from flipgrad.packed import Facts, PackedNetwork, pack, parts
from flipgrad.packed.c_source import to_c
from flipgrad.packed.network import probabilities
from flipgrad.packed.parts import Value, after, walk
from flipgrad.packed.tables import chances

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


def assert_equal_states(net, folder, count=3):
    program = Program(net, to_c(net, numbers="double", stream="real", stochastic=True), folder)
    for x in inputs(net, count):
        for sample in (None, 0):
            _, found = program.predict(x, None if sample is None else 1, 3)
            for states, right in zip(program.states(), program.plain_states(x, sample, 3), strict=True):
                np.testing.assert_array_equal(states, right)
            expected = probabilities(net(x[None]) if sample is None else net.members(x[None], 1, 3)[0])[0]
            np.testing.assert_allclose(found, expected, atol=2e-6)


@needs_compiler
def test_channels_that_fill_no_words(tmp_path):
    rng = np.random.default_rng(0)
    counts = (1000, 3, 63, 64, 65, 96, 192, 1, 31, 33)
    chain = [parts.Linear(real_weights(rng, 1000, 7)), parts.Sign("normal", 1.0)]
    for fan_in, outputs in pairwise(counts):
        chain += binary_layer(rng, outputs, (fan_in,))
    assert_equal_states(PackedNetwork([*chain, parts.Linear(real_weights(rng, 5, 33))], (7,)), tmp_path)


@needs_compiler
def test_states_that_are_moved_padded_and_pooled(tmp_path):
    rng = np.random.default_rng(1)
    branches = (tuple(binary_layer(rng, 9, (12, 1, 1))), (parts.ChannelShuffle(3), parts.Repeat(3)))
    chain = [
        parts.Convolution(real_weights(rng, 12, 2, 3, 3), padding_mode="reflect", padding=(1, 1, 1, 1)),
        *[parts.Sign("laplace", 1.0), parts.Concat(branches, 0)],
        *[parts.Pad((1, 1, 0, 2), 0.0), parts.Reshape((45, 8, 8)), *binary_layer(rng, 40, (45, 3, 3), dilation=(2, 1))],
        *[parts.Pad((0, 2, 2, 0), 1.0), parts.PixelShuffle(2), parts.MaxPool((3, 2), (2, 2), (0, 0), True)],
        *[parts.PixelShuffle(2, True), parts.Reshape((10, 12, 4)), parts.WindowSum((2, 2), (2, 1))],
        *binary_layer(rng, 6, (5, 3, 1), groups=2),
    ]
    size = after(chain, Value((2, 6, 6))).size
    head = [parts.Reshape((size,)), parts.Linear(real_weights(rng, 4, size))]
    assert_equal_states(PackedNetwork([*chain, *head], (2, 6, 6)), tmp_path)


@needs_compiler
def test_the_random_networks_have_every_part():
    seen: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(networks())
    def look(net):
        seen.update(part.name for part in walk(net.program))

    look()
    assert set(seen) == set(parts.PARTS)


@needs_compiler
@settings(max_examples=settings().max_examples // 5)
@given(networks(outputs=(3,)))
def test_the_usual_arithmetic_is_close_for_random_networks(net):
    x = inputs(net, 8)
    with tempfile.TemporaryDirectory() as folder:
        code = to_c(net, stochastic=True, examples=x)
        program = Program(net, code, Path(folder))
        for each in x:
            program.predict(each)
            states, right = program.states(), program.plain_states(each)
            wrong = sum(int((a != b).sum()) for a, b in zip(states[:1], right[:1], strict=True))
            # Rounding decides otherwise where a number is as good as 0.
            assert wrong <= 1
            _, found = program.predict(each, 3, 5)
            assert abs(found.sum() - 1) < 1e-5


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_strict_compilers_take_the_digits_network_with_all_options(compiler, digits_net, tmp_path):
    net, pixels = digits_net
    for options in (
        {},
        {"stochastic": True},
        {"numbers": "double"},
        {"numbers": "fixed", "stochastic": True},
        {"stream": "int32"},
    ):
        to_c(net, **options, examples=scaled(pixels[:8])).save(tmp_path, main=True)
        compile_strictly(tmp_path, "-O2", "net.c", "net_main.c", "-o", "net", compiler=compiler)


@needs_compiler
def test_the_digits_network_answers_as_the_runtime_does(digits_net, tmp_path):
    net, pixels = digits_net
    expected = probabilities(net(scaled(pixels)))
    program = Program(net, to_c(net, numbers="double", stochastic=True), tmp_path)
    for image, p in zip(pixels, expected, strict=True):
        best, found = program.predict(image)
        assert best == p.argmax()
        np.testing.assert_allclose(found, p, atol=1e-6)
    for image in pixels[:20]:
        best, found = program.predict(image, 4, 9)
        p = net(scaled(image)[None], samples=4, seed=9)[0]
        assert best == p.argmax()
        np.testing.assert_allclose(found, p, atol=1e-6)
    assert program.library.net_predict(np.ascontiguousarray(image).ctypes.data_as(ctypes.c_void_p), None) == best


@needs_compiler
def test_ones_are_counted_without_a_builtin_function(digits_net, tmp_path):
    net, pixels = digits_net
    code = to_c(net, numbers="double")
    assert "#if defined(__GNUC__)" in code.source
    program = Program(net, replace(code, source=code.source.replace("#if defined(__GNUC__)", "#if 0")), tmp_path)
    program.predict(pixels[0])
    for states, right in zip(program.states(), program.plain_states(scaled(pixels[0])), strict=True):
        np.testing.assert_array_equal(states, right)


@needs_compiler
@pytest.mark.parametrize("numbers", ["float", "fixed"])
def test_float_and_fixed_point_seldom_answer_otherwise(numbers, digits_net, tmp_path):
    net, pixels = digits_net
    program = Program(net, to_c(net, numbers=numbers, examples=scaled(pixels[:32])), tmp_path)
    same = [program.predict(image)[0] for image in pixels] == net(scaled(pixels)).argmax(1)
    # All of them when this was measured.
    assert same.sum() >= len(pixels) - (2 if numbers == "fixed" else 0)


@needs_compiler
def test_interpolated_probabilities_are_right(tmp_path):
    # One unit of a stream for every number from -12 to 12, each with its own probability.
    n, draws = 49, 4000
    numbers = np.linspace(-12, 12, n).astype(np.float32)
    for noise in parts.NOISES:
        shift = parts.Affine(np.full(n, 0.5, np.float32), numbers)
        sums = parts.Sums(np.full(-(-n * n // 8), 255, np.uint8), n, (n,))
        # It adds nothing to the stream.
        branch = (parts.Sign("logistic", 1.0), sums, parts.Affine(np.zeros(n, np.float32), None))
        block = parts.Add(((), branch))
        net = PackedNetwork([block, shift, parts.Sign(noise, 2.0), parts.Linear(np.ones((1, n), np.float32))], (n,))
        folder = tmp_path / noise
        folder.mkdir()
        x = np.full(n, 0.25, np.float32)
        program = Program(net, to_c(net, stochastic=True, examples=x[None]), folder)
        count = np.zeros(n)
        for seed in range(draws):
            program.predict(x, 1, seed)
            count += program.states()[1] > 0
        p = chances(noise, numbers + 0.125, 2.0) / 2**32
        # The largest of 4 x 49 deviations is beyond 5 standard errors once in 9,000 seeds; interpolation is off by 6e-5.
        assert (np.abs(count / draws - p) <= 5 * np.sqrt(p * (1 - p) / draws) + 1e-4).all()


@needs_compiler
@pytest.mark.slow
def test_sanitizers_find_nothing(digits_net, tmp_path):
    net, pixels = digits_net
    sanitize = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    for options in ({"stochastic": True}, {"numbers": "fixed", "stochastic": True}, {"numbers": "double"}):
        to_c(net, **options, examples=scaled(pixels[:8])).save(tmp_path, main=True)
        compile_strictly(tmp_path, *sanitize, "net.c", "net_main.c", "-o", "net")
        given_bytes = pixels[:40].tobytes()
        done = subprocess.run([tmp_path / "net"], input=given_bytes, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert len(done.stdout.splitlines()) == 40


@needs_compiler
@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@example(network(108612012)).via("sums over windows that overflow")
@given(networks())
def test_sanitizers_find_nothing_in_random_networks(net):
    x = inputs(net, 4)
    options = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    for numbers, stream in (("float", "int16"), ("fixed", "int32"), ("double", "real")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                to_c(net, numbers=numbers, stream=stream, stochastic=True, examples=x).save(folder, main=True)
            except InputError:
                continue
            compile_strictly(Path(folder), *options, "net.c", "net_main.c", "-o", "net")
            far = np.moveaxis(1000 * x, 1, -1).tobytes()
            done = subprocess.run([Path(folder) / "net", "2"], input=far, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b"")


@needs_compiler
@pytest.mark.slow
def test_the_mnist_network_answers_as_the_runtime_does(tmp_path):
    path = Path(os.environ.get("FLIPGRAD_DATA", ".")) / "mnist"
    if not path.exists():
        pytest.skip("MNIST's files are not there: set FLIPGRAD_DATA to the folder that has them")
    x = mnist(path).test.x[:1000]
    net = pack(fg.zoo.load("mnist-binary"), x[:1], replace(FACTS, data="mnist"))
    pixels = ((x + 1) * 127.5).round().byte().numpy()
    expected = net(scaled(pixels)).argmax(1)
    for numbers, most in (("double", 0), ("float", 0), ("fixed", 3)):
        folder = tmp_path / numbers
        folder.mkdir()
        program = Program(net, to_c(net, numbers=numbers, examples=scaled(pixels[:64])), folder)
        answers = np.array([program.predict(image)[0] for image in pixels])
        assert (answers != expected).sum() <= most


def test_memory_is_told_as_the_compiler_counts_it(digits_net):
    net, _ = digits_net
    code = to_c(net)
    # By hand: a layer of 64 x 8 x 8 x 4 bytes and its bits, twice, and rows.
    assert code.ram == 4 * 32 * 64 + 4 * (2 * 16 + 2 * 4) + 4 * 64 + 4 * 64
    size = code.compiled()
    if size is None:
        pytest.skip("no compiler is here")
    assert code.ram <= size.ram <= code.ram + 64
    assert code.flash <= size.flash <= code.flash + 10_000


def test_the_code_needs_no_memory_manager(digits_net):
    net, _ = digits_net
    code = to_c(net, stochastic=True)
    assert "malloc" not in code.source
    between = code.source.partition("static void sum_bits")[2].partition("\n}")[0]
    assert "real" not in between
    assert {line for line in code.source.splitlines() if line.startswith("#include")} == {
        '#include "net.h"',
        "#include <stddef.h>",
        "#include <math.h>",
    }


def test_what_files_tell_cannot_end_a_comment_or_a_string(digits_net):
    net, _ = digits_net
    bad = replace(FACTS, classes=("*/ int x;", '"', "\\", "%s", "ä", *"fghij"), data="*/ #error")
    code = to_c(PackedNetwork(net.program, net.inputs, bad, engine="numpy"))
    for text in (code.header, code.source, code.main):
        assert "*/ int" not in text
        assert "*/ #error" not in text
    assert '{"?? int x?", "?", "?", "?s", "?", "f"' in code.main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "2net"}, "the name '2net' is none of C"),
        ({"name": "my-net"}, "the name 'my-net' is none of C"),
        ({"numbers": "half"}, "numbers='half': choose 'float', 'double', 'fixed'"),
        ({"stream": "int8"}, "stream='int8': choose 'int16', 'int32', 'real'"),
        ({"numbers": "fixed", "stream": "real"}, "choose stream='int16' or 'int32'"),
        ({"numbers": "fixed"}, "hand in examples=x"),
        ({"examples": np.zeros((0, 1, 8, 8))}, "examples must hold at least one input"),
        ({"examples": np.zeros((1, 8))}, "inputs must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(options, message, digits_net):
    with pytest.raises(InputError, match=message):
        to_c(digits_net[0], **options)


def test_what_has_no_code_is_refused_by_name():
    sign, linear = parts.Sign("logistic", 1.0), parts.Linear(np.ones((1, 2), np.float32))
    sums, x = parts.Sums(np.zeros(1, np.uint8), 2, (2,)), np.ones((1, 2))
    smooth = [sign, parts.Add(((), (sums,))), parts.Activation("tanh"), parts.Repeat(1), sign, linear]
    with pytest.raises(InputError, match="activation 'tanh' has no code in fixed point: use numbers='float' and stream='real'"):
        to_c(PackedNetwork(smooth, (2,)), examples=x)
    turning = [sign, sums, parts.PReLU(np.float32([-1])), sign, linear]
    with pytest.raises(InputError, match="a PReLU with negative weights, or SiLU, before a sign has no threshold"):
        to_c(PackedNetwork(turning, (2,)))
    assert "sign_real" in to_c(PackedNetwork(turning, (2,)), stream="real").source
