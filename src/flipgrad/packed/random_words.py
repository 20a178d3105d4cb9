"""The random words of stochastic inference: a function of the seed and of the unit's place, so that any engine draws the same.

Philox-4x32-10: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

# Units that 16 counters of four words each serve, see `words`.
BLOCK, LANES = 64, 16
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """The four random words of every counter.

    >>> zero = np.zeros(1, np.uint32)
    >>> [f"{int(word[0]):08x}" for word in philox((zero, zero, zero, zero), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    for step in range(ROUNDS):
        key0, key1 = ((start + step * by) & 0xFFFFFFFF for start, by in zip(key, KEY_STEPS, strict=True))
        first, second = (c.astype(np.uint64) * np.uint64(by) for c, by in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = (
            _high(second) ^ c1 ^ np.uint32(key0),
            _low(second),
            _high(first) ^ c3 ^ np.uint32(key1),
            _low(first),
        )
    return c0, c1, c2, c3


def words(units: int, *, seed: int, layer: int, example: int | NDArray[Any], sample: int) -> Words:
    """One word for each of the ``units`` of a layer, for a sample and an example, or several of these: [units] or [B, units].

    Unit e takes the word (e mod 64) // 16 of the counter (16 (e // 64) + e mod 16, example, sample, layer).
    """
    blocks = -(-units // BLOCK)
    examples = np.asarray(example, np.uint32)[..., None]
    index, examples = np.broadcast_arrays(np.arange(blocks * LANES, dtype=np.uint32), examples)
    counter = (index, examples, np.full_like(index, sample), np.full_like(index, layer))
    drawn = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    shape = index.shape[:-1]
    # [..., block, word, lane]
    return np.stack([word.reshape(*shape, blocks, LANES) for word in drawn], -2).reshape(*shape, blocks * BLOCK)[..., :units]


def _high(product: NDArray[np.uint64]) -> Words:
    return (product >> np.uint64(32)).astype(np.uint32)


def _low(product: NDArray[np.uint64]) -> Words:
    return (product & np.uint64(0xFFFFFFFF)).astype(np.uint32)
