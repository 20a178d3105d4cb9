"""Random words, probabilities, thresholds and tables against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flipgrad as fg
from flipgrad.noise import NOISES
from flipgrad.packed import tables
from flipgrad.packed.random_words import philox, words

# Counter, key and result of Random123's file of known answers (kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, result):
    numbers = tuple(np.array([int(word, 16)], np.uint32) for word in counter.split())
    drawn = philox(numbers, tuple(int(word, 16) for word in key.split()))
    assert [f"{int(word[0]):08x}" for word in drawn] == result.split()


def test_words_are_those_of_the_units_places():
    seed, examples = 0x123456789ABCDEF, np.array([5, 9])
    drawn = words(150, seed=seed, layer=2, example=examples, sample=7)
    assert drawn.shape == (2, 150)
    np.testing.assert_array_equal(drawn[1], words(150, seed=seed, layer=2, example=9, sample=7))
    for unit in (0, 15, 16, 63, 64, 100, 149):
        place = (16 * (unit // 64) + unit % 16, 9, 7, 2)
        four = philox(tuple(np.array([number], np.uint32) for number in place), (seed & 0xFFFFFFFF, seed >> 32))
        assert drawn[1, unit] == four[unit % 64 // 16][0]


@pytest.mark.parametrize("name", NOISES)
def test_probabilities_are_those_of_the_noise(name):
    a = np.concatenate([np.linspace(-30, 30, 3001), [-1e300, -1e-300, 0, 1e300]])
    for scale in (0.3, 1.0, 7.0):
        wanted = NOISES[name](scale).cdf(torch.from_numpy(a)).numpy()
        found = tables.probabilities(name, a, scale)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
        p = tables.chances(name, a, scale)
        assert p.dtype == np.uint32
        assert (np.abs(p - np.minimum(wanted * 2**32, 2**32 - 1)) <= 0.51).all()


def test_the_error_function_is_right_between_the_values_that_are_known():
    z = np.concatenate([np.random.default_rng(0).uniform(0, 9, 5000), [0, 8, 8.5, 40, 1e200]])
    np.testing.assert_allclose(tables._erfc(z), [math.erfc(value) for value in z], rtol=0, atol=1e-14)


@given(st.integers(0, 2**30), st.integers(1, 40), st.sampled_from([1.0, 0.25, 1 / 9]))
def test_thresholds_and_tables_are_those_of_every_integer(seed, bound, factor):
    random = np.random.default_rng(seed)
    scale = (random.normal(size=50) * random.integers(0, 2, 50)).astype(np.float32)
    shift = (np.round(random.normal(size=50) * 4) * np.where(random.random(50) < 0.5, 1, scale)).astype(np.float32)
    first, falls = tables.thresholds(scale, shift, bound, factor)
    assert first.min() >= -bound
    assert first.max() <= bound + 1
    t = np.arange(-bound, bound + 1)[:, None]
    a = (t * factor) * scale.astype(np.float64) + shift
    np.testing.assert_array_equal(np.where(falls, -t, t) >= first, a >= 0)
    table = tables.table("laplace", 2.0, scale, shift, bound, factor)
    np.testing.assert_array_equal(table, tables.chances("laplace", a.T, 2.0))


def test_a_unit_that_is_certain_is_as_good_as_certain():
    assert tables.chances("logistic", np.array([1e4, -1e4, np.inf, -np.inf]), 1e-3).tolist() == [2**32 - 1, 0] * 2
    assert fg.packed.Facts().classes is None
