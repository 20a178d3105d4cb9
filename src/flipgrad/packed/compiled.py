"""The evaluation of a packed network by the compiled library; see csrc/packed.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flipgrad.packed.parts import Part, Shape


class Lowered(Protocol):
    """A network as the compiled library runs it."""

    def run(self, x: NDArray[np.float64], samples: int | None, seed: int, first: int) -> NDArray[np.float32]:
        """The outputs [samples or 1, B, K] of inputs [B, ...], of which the first example has the number ``first``."""


def lower(program: Sequence[Part], inputs: Shape) -> tuple[Lowered | None, str]:
    """The network as the compiled library runs it, or None and why it cannot."""
    return None, "the compiled engine is not there"
