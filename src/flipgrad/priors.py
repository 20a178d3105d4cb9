"""Where a layer's binary input came from, and with which probabilities it was drawn.

A prior follows the states through whatever only moves them around: reshaping, padding, concatenation. In
:class:`flipgrad.Sequential` the same modules move it; in a graph written by hand it is found from autograd's record of how the
input was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from flipgrad.errors import InputError
from flipgrad.noise import Noise

# The log-odds of what is not random.
CERTAIN = 1e4

_MARK = "flipgrad.source"


@final
@dataclass(eq=False)
class Source:
    """A draw of a layer's states.

    Attributes:
        noise: of the layer.
        a: the pre-activations that the states were drawn for.
        readers: how many layers (and heads) were given the states.
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
    """

    sources: tuple[Source, ...]
    log_odds: Callable[[], Tensor]

    @classmethod
    def of(cls, source: Source) -> Prior:
        """That of the states just drawn."""
        return cls((source,), source.log_odds)

    def moved(self, module: nn.Module) -> Prior:
        """That of the states after a module that moves them around."""
        if isinstance(module, nn.ConstantPad2d):
            padding, value = module.padding, CERTAIN * float(module.value)
            return Prior(self.sources, lambda: functional.pad(self.log_odds(), padding, value=value))
        return Prior(self.sources, lambda: module(self.log_odds()))

    @classmethod
    def joined(cls, parts: Sequence[Prior], dim: int) -> Prior:
        """That of the concatenated states of several."""
        sources = dict.fromkeys(source for part in parts for source in part.sources)
        return cls(tuple(sources), lambda: torch.cat([part.log_odds() for part in parts], dim))

    def read(self) -> None:
        """Note that a layer or a head was given the states."""
        for source in self.sources:
            source.readers += 1

    @property
    def shared(self) -> bool:
        """Whether more than one layer (or head) was given states of the same draw."""
        return any(source.readers > 1 for source in self.sources)


def mark(states: Tensor, source: Source | None) -> None:
    """Note in autograd's graph that these are a layer's states, and where they were drawn (None: nowhere)."""
    if states.grad_fn is not None:
        _metadata(states.grad_fn)[_MARK] = source


def came_from_states(x: Tensor) -> bool:
    """Whether ``x`` was computed from the states of a binary layer: its autograd graph leads back to one."""
    return bool(_marked(x))


def from_graph(x: Tensor) -> Prior | None:
    """The prior of ``x``, an input that was computed from the states of binary layers; None if it is not known."""
    nodes = _marked(x)
    sources = [source for source in (_metadata(node)[_MARK] for node in nodes) if source is not None]
    if not nodes or len(sources) < len(nodes):
        return None
    if nodes == [x.grad_fn]:
        return Prior.of(sources[0])
    return Prior(tuple(sources), lambda: _follow(x, nodes, [source.log_odds() for source in sources]))


def _follow(x: Tensor, nodes: Sequence[Any], values: Sequence[Tensor]) -> Tensor:
    """Numbers of the units of some ``nodes``' states, moved as these were to become ``x``; what came from elsewhere is certain.

    Autograd knows the transpose of that movement; the transpose of the transpose is the movement.
    """
    message = "cannot be followed to the layer that drew them: only reshape, slice, pad or concatenate states"
    with torch.enable_grad():
        moved_back = torch.zeros_like(x, requires_grad=True)
        edges = [GradientEdge(node, 0) for node in nodes]
        try:
            at_nodes = torch.autograd.grad(x, edges, moved_back, create_graph=True, allow_unused=True)
            forward = [
                torch.autograd.grad(at_nodes, moved_back, what, retain_graph=True)[0]
                for what in (list(values), [torch.ones_like(value) for value in values])
            ]
        except RuntimeError as error:
            raise InputError(f"the input's states {message}") from error
    log_odds, known = forward
    if not bool(((known == 0) | (known == 1)).all()):
        raise InputError(f"the input's states {message}")
    return torch.where(known == 1, log_odds, CERTAIN * x.detach())


def _marked(x: Tensor) -> list[Any]:
    """The nodes of autograd's graph behind ``x`` that gave layers' states; what is behind these is not looked at."""
    pending, seen, found = [x.grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in _metadata(node):
            found.append(node)
        else:
            pending.extend(parent for parent, _ in node.next_functions)
    return found


def _metadata(node: Any) -> dict[str, Source | None]:
    """The notes that autograd keeps with a node (typed as a method in torch, but a property)."""
    notes: dict[str, Source | None] = node.metadata
    return notes
