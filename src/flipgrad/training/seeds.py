"""Streams of random numbers that one seed gives, independent of one another."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np
import torch
from torch import Generator


@unique
class Stream(IntEnum):
    """What random numbers are for."""

    START = 0
    ORDER = 1
    NOISE = 2
    AUGMENT = 3
    EVALUATE = 4
    MODULES = 5
    EVALUATE_TRAINING = 6


def stream_seed(seed: int, stream: Stream, *numbers: int) -> int:
    """A seed for one stream; ``numbers`` tell apart epochs or processes."""
    return int(np.random.SeedSequence([seed, stream, *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(seed: int, stream: Stream, *numbers: int, device: torch.device | str = "cpu") -> Generator:
    """A generator of one stream.

    >>> generator(0, Stream.ORDER, 1).initial_seed() == generator(0, Stream.ORDER, 2).initial_seed()
    False
    """
    return torch.Generator(device).manual_seed(stream_seed(seed, stream, *numbers))
