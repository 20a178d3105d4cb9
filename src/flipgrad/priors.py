"""Where a layer's binary input came from, and with which probabilities it was drawn.

A prior follows the states through whatever only moves them around: reshaping, padding, concatenation. In
:class:`flipgrad.Sequential` the same modules move it; in a graph written by hand it is found from autograd's record of how the
input was computed, see :mod:`flipgrad.record`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.noise import Noise

# The log-odds of what is not random.
CERTAIN = 1e4


@final
@dataclass(eq=False)
class Source:
    """A draw of a layer's states.

    Attributes:
        noise: of the layer.
        a: the pre-activations that the states were drawn for.
        readers: how many layers were given the states, in a graph written by hand.
    """

    noise: Noise
    a: Tensor
    readers: int = 0

    def log_odds(self) -> Tensor:
        """log p(+1) / p(-1) of every state, given the layer's input."""
        return self.noise.log_odds(self.a)


@final
@dataclass(frozen=True)
class Prior:
    """With which probabilities the states at hand were drawn.

    Attributes:
        sources: the draws that they came from.
        log_odds: gives log p(+1) / p(-1) of every state given the input of the layer that drew it.
        branched: whether several branches of a network were given the states.
        watch: where it is not known who else is given the states: the states to be read in their place, with which that anyone
            else was is noticed on the way back, as an error.
    """

    sources: tuple[Source, ...]
    log_odds: Callable[[], Tensor]
    branched: bool = False
    watch: Callable[[], Tensor] | None = None

    @classmethod
    def of(cls, source: Source) -> Prior:
        """That of the states just drawn."""
        return cls((source,), source.log_odds)

    def moved(self, module: nn.Module) -> Prior:
        """That of the states after a module that moves them around."""
        if isinstance(module, nn.ConstantPad2d):
            padding, value = module.padding, CERTAIN * float(module.value)
            return replace(self, log_odds=lambda: functional.pad(self.log_odds(), padding, value=value))
        return replace(self, log_odds=lambda: module.forward(self.log_odds()))

    @classmethod
    def joined(cls, parts: Sequence[Prior], dim: int) -> Prior:
        """That of the concatenated states of several."""
        sources = dict.fromkeys(source for part in parts for source in part.sources)
        branched = any(part.branched for part in parts)
        return cls(tuple(sources), lambda: torch.cat([part.log_odds() for part in parts], dim), branched)

    def read(self) -> None:
        """Note that a layer was given the states."""
        for source in self.sources:
            source.readers += 1

    @property
    def shared(self) -> bool:
        """Whether more than one layer (or head) was given states of the same draw."""
        return self.branched or any(source.readers > 1 for source in self.sources)

    def check_alone(self) -> None:
        """Refuse states that are :attr:`shared`, whose posterior is not known."""
        if self.shared:
            raise InputError(
                "the posterior of a unit is known only where its states go to one layer, and here several layers (or the head) "
                "were given them; use inputs='mean' or 'sampled'"
            )
