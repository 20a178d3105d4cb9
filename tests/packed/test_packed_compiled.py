"""The compiled engine gives the numpy engine's numbers: deterministic, and drawn by the same random words, to the bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import binary_layer, random_affine, random_norm, random_sums, real_weights

from flipgrad.packed import compiled, layout, lowering, parts, plain, random_words
from flipgrad.packed.parts import Array, Part, Shape, Value, after

pytestmark = pytest.mark.skipif(not compiled.best_instructions(), reason="the compiled library is missing")

# Those that this processor has: a lower one runs on every higher one.
AVAILABLE = ["portable", "avx2", "avx512"][: compiled.INSTRUCTIONS.get(compiled.best_instructions(), 1)]
SIGN = parts.Sign("logistic", 1.0)
SEED, FIRST = 2**40 + 7, 3


def inputs_of(rng: np.random.Generator, shape: Shape, batch: int) -> Array:
    """Inputs of which some are exactly 0."""
    return rng.normal(size=(batch, *shape)) * (rng.random((batch, *shape)) < 0.9)


def lowered(program: Sequence[Part], shape: Shape) -> compiled.Lowered:
    found, reason = compiled.lower(program, shape)
    assert found is not None, reason
    return found


def assert_same(program: Sequence[Part], shape: Shape, *, batch: int = 3, samples: int = 2, tolerance: float = 0.0) -> None:
    """The same results for every instruction set, alone and with threads that share examples or places."""
    rng = np.random.default_rng(1)
    x = inputs_of(rng, shape, batch)
    engine = lowered(program, shape)
    wanted = {draws: plain.outputs(program, x, draws, SEED, FIRST) for draws in (None, samples)}
    for number, instructions in enumerate(AVAILABLE):
        engine.instructions = instructions
        for threads in (1, 2, batch + 2)[: 3 if number == len(AVAILABLE) - 1 else 1]:
            engine.threads = threads
            for draws, right in wanted.items():
                found = engine.run(x, draws, SEED, FIRST)
                assert engine.reason == ""
                assert found.shape == right.shape
                if tolerance:
                    np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance)
                else:
                    np.testing.assert_array_equal(found, right)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[list[Part], Shape]:
    """A binary convolution of any geometry, on states with or without poolings and padding before."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    channels = draw(st.sampled_from([1, 3, 8, 16, 31, 32, 33, 48, 63, 64, 65, 96])) * (groups if groups > 1 else 1)
    outputs = groups * draw(st.sampled_from([1, 2, 5, 15, 16, 17, 31, 33, 48, 64, 65]))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = tuple(draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    views: list[Part] = []
    if draw(st.booleans()):
        views.append(parts.Pad((0, 1, 1, 0), draw(st.sampled_from([0.0, 1.0, -1.0]))))
    pool = draw(st.sampled_from([None, None, parts.WindowSum, parts.MaxPool]))
    if pool is not None:
        views.append(pool((2, 2), (draw(st.integers(1, 2)), 2), (draw(st.integers(0, 1)), 0)))
    size = [2 * n + draw(st.integers(1, 5)) for n in least]
    layer = binary_layer(
        rng,
        outputs,
        (channels // groups, *kernel),
        draw(st.sampled_from(parts.NOISES)),
        stride=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        padding=padding,
        padding_value=draw(st.sampled_from([0, 1, -1])),
        dilation=dilation,
        groups=groups,
    )
    if draw(st.booleans()):
        layer = [layer[0], parts.Factor(0.25), *layer[1:]]
    # Without its sign the sums themselves are compared.
    return [SIGN, *views, *layer[: len(layer) - draw(st.integers(0, 1))]], (channels, size[0], size[1])


@given(convolutions())
def test_binary_convolutions_of_any_geometry(case: tuple[list[Part], Shape]) -> None:
    program, shape = case
    assert_same(program, shape)


@given(
    st.sampled_from([1, 3, 63, 64, 65, 96, 192, 1000]), st.sampled_from([1, 3, 63, 64, 65, 96, 192, 1000]), st.integers(0, 9)
)
def test_connected_layers_of_any_width(inputs: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert_same([SIGN, *binary_layer(rng, outputs, (inputs,)), *binary_layer(rng, 7, (outputs,))], (inputs,), batch=9)


def test_flattened_images_keep_their_order() -> None:
    rng = np.random.default_rng(0)
    flat = [SIGN, parts.Reshape((33 * 6,))]
    head = parts.Linear(real_weights(rng, 10, 33 * 6), real_weights(rng, 10))
    for rest in (
        binary_layer(rng, 40, (33 * 6,)),
        [head],
        [random_affine(rng, 33 * 6), SIGN, head],
        [parts.Reshape((33, 2, 3)), parts.MaxPool((2, 2), (1, 1))],
        [parts.Reshape((11, 9, 2)), *binary_layer(rng, 5, (11, 2, 2))],
        [parts.Reshape((22, 9)), random_affine(rng, 22)],
        [parts.Reshape((6, 33)), parts.Reshape((33 * 6,)), SIGN, *binary_layer(rng, 40, (33 * 6,))],
    ):
        assert_same([*flat, *rest], (33, 2, 3), tolerance=1e-6)
    assert_same([parts.Reshape((33 * 6,)), parts.Linear(real_weights(rng, 10, 33 * 6)), SIGN], (33, 2, 3))


def test_moved_concatenated_and_padded_states() -> None:
    rng = np.random.default_rng(0)
    branches = ((), tuple(binary_layer(rng, 7, (36, 1, 1))), (random_affine(rng, 36), SIGN))
    zeros, ones = parts.Pad((1, 0, 2, 1), 0.0), parts.Pad((1, 0, 2, 1), 1.0)
    for views in (
        [parts.Concat(branches)],
        [parts.Concat(((), (parts.MaxPool((1, 2), (1, 1)),)), 2)],
        [parts.Concat(((parts.Reshape((36 * 24,)),), (parts.Reshape((36 * 24,)), random_affine(rng, 36 * 24), SIGN)))],
        [parts.Concat(((zeros,), (ones,)), 1)],
        [parts.Concat(((parts.WindowSum((2, 2), (1, 1)),), (parts.WindowSum((2, 2), (1, 1), (0, 0)),)))],
        [parts.PixelShuffle(2), parts.PixelShuffle(2, True), parts.PixelShuffle(3)],
        [parts.ChannelShuffle(3), parts.Repeat(3)],
        [zeros, parts.MaxPool((3, 2), (2, 1), (1, 1), True)],
        [zeros, zeros, parts.WindowSum((2, 3), (1, 2), (1, 1)), parts.Factor(0.5)],
        [parts.MaxPool((3, 2), (2, 2), (1, 0), True), ones, parts.Repeat(2)],
        [parts.WindowSum((2, 2), (1, 1)), parts.Pad((1, 1, 1, 1), 1.0), random_sums(rng, 5, (36, 2, 2))],
        [parts.WindowSum((2, 2), (1, 1)), random_sums(rng, 5, (36, 2, 2), padding=(1, 0, 0, 1), padding_value=-1)],
    ):
        assert_same([SIGN, *views], (36, 6, 4))
        shape = after([SIGN, *views], Value((36, 6, 4))).shape
        if len(shape) == 3:
            assert_same([SIGN, *views, SIGN, *binary_layer(rng, 20, (shape[0], 1, 1))], (36, 6, 4))


def test_real_parts() -> None:
    rng = np.random.default_rng(0)
    weights, bias = real_weights(rng, 50, 3, 3, 2), real_weights(rng, 50)
    for mode, value in (("zeros", 0), ("zeros", -1), ("reflect", 0), ("replicate", 0), ("circular", 0)):
        geometry = {"padding": (1, 2, 0, 1), "padding_mode": mode, "padding_value": value, "stride": (2, 1), "dilation": (1, 2)}
        assert_same([parts.Convolution(weights, bias, **geometry), random_norm(rng, 50)], (3, 7, 6), tolerance=1e-6)
    assert_same([parts.Convolution(real_weights(rng, 33, 2, 2, 2), groups=3), random_norm(rng, 33), SIGN], (6, 7, 6))
    assert_same([parts.Convolution(weights, bias), SIGN, *binary_layer(rng, 9, (50, 2, 2))], (3, 7, 6))
    assert_same([SIGN, parts.Convolution(weights, padding=(1, 0, 0, 0), padding_value=-1)], (3, 7, 6), tolerance=1e-6)
    assert_same([parts.WindowSum((2, 3), (2, 1), (1, 1)), parts.MaxPool((2, 2), (1, 2), (1, 0))], (3, 7, 6), tolerance=1e-6)
    assert_same(
        [parts.Pad((1, 0, 2, 1), 0.3), parts.PixelShuffle(2, True), parts.PReLU(real_weights(rng, 12))],
        (3, 7, 5),
        tolerance=1e-6,
    )
    assert_same([parts.PReLU(real_weights(rng, 1)), parts.Concat(((), (parts.Factor(2.0),)))], (5,), tolerance=1e-6)
    for function, count in parts.ACTIVATIONS.items():
        assert_same([parts.Activation(function, (-0.3, 0.7)[:count])], (19,), tolerance=1e-6)


@pytest.mark.parametrize("noise", parts.NOISES)
def test_signs_of_real_numbers(noise: str) -> None:
    assert_same([parts.Sign(noise, 0.7)], (37, 3, 5))
    assert_same([parts.Sign(noise, 0.7), *binary_layer(np.random.default_rng(0), 64, (130,), noise)], (130,))


def test_residual_streams() -> None:
    rng = np.random.default_rng(0)

    def block(channels: int, wider: int) -> list[Part]:
        shortcut: list[Part] = [parts.WindowSum((2, 2), (2, 2)), parts.Factor(0.25), parts.Repeat(wider)] if wider > 1 else []
        stride = (2, 2) if wider > 1 else (1, 1)
        branch = [random_norm(rng, channels), SIGN]
        branch.append(random_sums(rng, wider * channels, (channels, 3, 3), padding=(1, 1, 1, 1), stride=stride))
        branch.append(parts.Affine(None, real_weights(rng, wider * channels)))
        branch.append(random_norm(rng, wider * channels))
        return [parts.Add((tuple(shortcut), tuple(branch))), parts.PReLU(real_weights(rng, wider * channels))]

    stem: list[Part] = [parts.Convolution(real_weights(rng, 24, 3, 3, 3)), random_norm(rng, 24)]
    tail = [parts.WindowSum((3, 3), (3, 3)), parts.Reshape((48,)), parts.Linear(real_weights(rng, 10, 48))]
    assert_same([*stem, *block(24, 1), *block(24, 2), *block(48, 1), *tail], (3, 8, 8), samples=3, tolerance=1e-6)


def test_sums_at_the_threshold_count_as_positive() -> None:
    """Integer scales and shifts: pre-activations that are 0 exactly, also by a scale that falls."""
    rng = np.random.default_rng(0)
    affine = parts.Affine(np.array([1, -1, 0, 0, 0.5] * 5, np.float32), np.array([3, 3, 0, -1, 0.5] * 5, np.float32))
    assert_same([SIGN, random_sums(rng, 25, (9,)), affine, SIGN], (9,), batch=50)


def test_probabilities_that_are_certain() -> None:
    rng = np.random.default_rng(0)
    affine = parts.Affine(np.full(40, 1e6, np.float32), np.zeros(40, np.float32))
    assert_same([SIGN, random_sums(rng, 40, (99,)), affine, SIGN], (99,))


def test_a_layer_whose_table_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "LARGEST_TABLE", 100)
    assert_same([SIGN, *binary_layer(np.random.default_rng(0), 40, (99,))], (99,))


def test_sums_that_are_too_large_are_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "LARGEST_SUM", 100)
    assert_same([SIGN, *binary_layer(np.random.default_rng(0), 40, (3, 6, 6))], (3, 7, 8))


@pytest.mark.parametrize(("module", "name", "limit"), [(layout, "MOST_RUNS", 3), (lowering, "LONGEST_SIDE", 2)])
def test_what_there_are_no_steps_for_is_evaluated_in_numpy(
    module: object, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [SIGN, *binary_layer(np.random.default_rng(0), 5, (3, 3, 3), padding=(1, 1, 1, 1))]
    x = inputs_of(np.random.default_rng(1), (3, 4, 4), 2)
    monkeypatch.setattr(module, name, limit)
    engine = lowered(program, (3, 4, 4))
    np.testing.assert_array_equal(engine.run(x, 2, SEED, 0), plain.outputs(program, x, 2, SEED, 0))
    assert "more than" in engine.reason


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("units", [1, 15, 16, 63, 64, 65, 1000])
def test_random_words_are_those_of_numpy(instructions: str, units: int) -> None:
    place = {"seed": SEED, "layer": 5, "example": 2**31 + 1, "sample": 3}
    found = compiled.random_words(units, instructions=instructions, **place)
    np.testing.assert_array_equal(found, random_words.words(units, **place))


def test_the_logistic_approximation_is_within_its_margin() -> None:
    """A draw by the table alone, without the approximation, is the same for a million units: probabilities of all sizes."""
    rng = np.random.default_rng(0)
    affine = parts.Affine(np.geomspace(1e-3, 1, 512).astype(np.float32), rng.normal(size=512).astype(np.float32))
    program = [SIGN, random_sums(rng, 512, (200,)), affine, SIGN]
    x = inputs_of(rng, (200,), 100)
    engine, by_table = lowered(program, (200,)), lowered(program, (200,))
    prepared = by_table._prepare(True)
    assert prepared is not None
    approximated = [step for step in prepared._steps if step.slopes]
    assert len(approximated) == 1
    approximated[0].slopes = None
    np.testing.assert_array_equal(engine.run(x, 20, SEED, 0), by_table.run(x, 20, SEED, 0))


def test_frequencies_are_the_probabilities() -> None:
    """A million draws of 30 units; the chance that any of them is more than 5 standard errors off is below 1e-4."""
    rng = np.random.default_rng(0)
    bound = 31
    affine = random_affine(rng, 30, 31.0)
    scale, shift = affine.scale_and_shift(30)
    program = [random_sums(rng, 30, (bound,)), affine, SIGN]
    x = np.sign(rng.normal(size=(1, bound)))
    a = plain.run([parts.Reshape((bound,)), *program[:2]], x, plain.Evaluation())[0]
    p = 1 / (1 + np.exp(-a))
    assert np.isfinite(scale + shift).all()
    certain = parts.Sign("uniform", 1e-6)
    draws = 10**6
    frequencies = (lowered([certain, *program], (bound,)).run(x, draws, 1, 0)[:, 0] > 0).mean(0)
    assert (np.abs(frequencies - p) <= 5 * np.sqrt(p * (1 - p) / draws) + 1e-9).all()


def test_many_callers_at_once() -> None:
    """A network is used by several threads, each of which starts some."""
    rng = np.random.default_rng(0)
    program = [SIGN, *binary_layer(rng, 70, (40, 3, 3)), *binary_layer(rng, 33, (70, 3, 3))]
    x = inputs_of(rng, (40, 8, 8), 2)
    engine = lowered(program, (40, 8, 8))
    engine.threads = 3
    right = plain.outputs(program, x, 3, SEED, 0)
    found: list[bool] = []

    def use() -> None:
        found.extend(bool((engine.run(x, 3, SEED, 0) == right).all()) for _ in range(5))

    callers = [threading.Thread(target=use) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 15


def test_no_examples_and_many_samples() -> None:
    rng = np.random.default_rng(0)
    program = [SIGN, *binary_layer(rng, 7, (20,))]
    engine = lowered(program, (20,))
    assert engine.run(np.zeros((0, 20)), 4, 0, 0).shape == (4, 0, 7)
    x = inputs_of(rng, (20,), 3)
    np.testing.assert_array_equal(engine.run(x, 40, SEED, 5), plain.outputs(program, x, 40, SEED, 5))
    # A network without signs has the same outputs in every sample.
    real = [parts.Linear(real_weights(rng, 3, 20))]
    np.testing.assert_allclose(lowered(real, (20,)).run(x, 3, 0, 0), plain.outputs(real, x, 3, 0, 0), rtol=1e-6)


def test_a_lowered_network_is_copied_without_its_addresses() -> None:
    program = [SIGN, *binary_layer(np.random.default_rng(0), 7, (20,))]
    engine = lowered(program, (20,))
    x = np.ones((2, 20))
    right = engine.run(x, None, 0, 0)
    np.testing.assert_array_equal(copy.deepcopy(engine).run(x, None, 0, 0), right)
