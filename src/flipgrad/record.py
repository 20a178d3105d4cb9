"""What autograd's record says of a layer's input in a graph written by hand.

A layer marks the states that it gives. The layer that is handed something computed from them looks back for such marks, and at
what stands between: flips of its input's entries are flips of the other layers' units only if each entry is one unit, moved or
with its sign changed. Everything else is refused by name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from flipgrad.contract import CERTAIN, Prior
from flipgrad.errors import InputError

# The name of the Mark that autograd keeps with a node which gave states.
_MARK = "flipgrad.states"

# fmt: off
# Operations that move entries or leave some out, and have none twice.
MOVING = {
    "Alias", "BackwardHookFunction", "Cat", "ChannelShuffle", "Clone", "ConstantPadNd", "Diagonal", "Flip", "Permute",
    "PixelShuffle", "PixelUnshuffle", "ReshapeAlias", "Roll", "Rot90", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze",
    "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}
# Linear operations that may do so, or not: it depends on their numbers, which are looked at.
LINEAR = {
    "Add", "AsStrided", "Col2Im", "CopyBackwards", "CopySlices", "Div", "Expand", "Im2Col", "Index", "IndexSelect", "Mul",
    "Neg", "ReflectionPad2D", "Repeat", "ReplicationPad2D", "Rsub", "Sub", "Unfold", "UpsampleNearest2D",
}
# Of the first kind, those whose result may hold entries that come from elsewhere.
JOINING = {"Cat", "ConstantPadNd", "Stack"}
# fmt: on

# How a layer can do without what it refuses.
ORDINARY_INSTEAD = "; layer(x, binary=False) takes the ordinary derivative there"


class Mark(NamedTuple):
    """What is known of states: with which probabilities they were drawn, if that is known, and a sign of every draw of them."""

    prior: Prior | None
    sources: frozenset[object]


@final
@dataclass(frozen=True)
class Record:
    """How ``x`` was computed.

    Attributes:
        x: what a layer was handed.
        states: the nodes of autograd's graph behind it that gave layers' states.
        between: these and the nodes on the way from them to ``x``, with how many others there use each.
        opaque: a node behind ``x`` that hides what it was computed from, if there is one.
    """

    x: Tensor
    states: tuple[Any, ...]
    between: dict[Any, int]
    opaque: Any

    @classmethod
    def of(cls, x: Tensor) -> Record:
        """What is known of ``x``; nothing where there is no record, under ``torch.no_grad()`` for instance."""
        users: defaultdict[Any, list[Any]] = defaultdict(list)
        states, opaque = [], None
        pending: list[Any] = [] if x.grad_fn is None else [x.grad_fn]
        while pending:
            node = pending.pop()
            if _MARK in node.metadata:
                states.append(node)
                continue
            if opaque is None and _is_opaque(node):
                opaque = node
            for parent, _ in node.next_functions:
                if parent is not None:
                    if parent not in users:
                        pending.append(parent)
                    users[parent].append(node)
        between: dict[Any, int] = {}
        pending = list(states)
        while pending:
            node = pending.pop()
            if node not in between:
                # The first node has one user: the layer.
                between[node] = max(1, len(users[node]))
                pending.extend(users[node])
        return cls(x, tuple(states), between, opaque)

    def check(
        self, layer: str, dims: int, *, relaxed: bool = False, told: bool = False, otherwise: str = ORDINARY_INSTEAD
    ) -> None:
        """Refuse, on behalf of a ``layer``, what its estimator would silently be wrong for.

        The last ``dims`` dimensions of ``x`` make one input of the layer, in which a unit may stand once; ``relaxed`` states
        may be anywhere between -1 and 1; ``told`` is whether it was said that ``x`` holds states; ``otherwise`` is a last
        piece of advice.
        """
        if not self.states:
            if self.opaque is not None and not told and bool((self.x.abs() <= 1 if relaxed else self.x.abs() == 1).all()):
                raise InputError(
                    f"{layer} cannot see whether its input holds states of other layers: {_name(self.opaque)} hides how it was "
                    "computed. Checkpoint with use_reentrant=False and compile the whole model; or say layer(x, binary=True) "
                    "for states, binary=False for real values that are never flipped"
                )
            return
        passed = [node for node in self.between if node not in self.states]
        for node in passed:
            if _operation(node) == "CompiledFunction":
                raise InputError(
                    f"{layer} was handed states that went through compiled code, which hides what it did with them: keep what "
                    "stands between binary layers out of it, with model.forward = torch.compiler.disable(model.forward), or "
                    "build fg.Sequential, which compiles whole"
                )
            if not _is_linear(node, self.between):
                raise InputError(
                    f"{layer} was handed states that went through {_name(node)}, which is not known to keep gradients right: "
                    "between binary layers only reshape, permute, slice, pad, concatenate states or change their sign. Move it "
                    "before the first binary layer or behind the last; in place of pooling, use fg.MaxPool2d, a stride, or "
                    f"nn.AvgPool2d in fg.Sequential; a residual stream is quantised first, fg.Sign(noise)(x){otherwise}"
                )
        if len(self.sources) < sum(len(mark.sources) for mark in self._marks):
            raise InputError(
                f"{layer} was handed states of one layer twice, pooled and as they are or pooled in two ways, and a flip of a "
                f"unit may then be one of several entries: hand over one of them{otherwise}"
            )
        operations = {_operation(node) for node in passed}
        plain = operations <= MOVING and set(self.between.values()) == {1}
        shifted = relaxed and any(_shifts(node, self.between) for node in passed)
        if not plain and (shifted or not self._is_one_to_one(dims)):
            raise InputError(
                f"{layer} was handed states that are not each one unit of another layer: a unit stands there twice, or units "
                "were added up, shifted or scaled, so that a flip of an entry is no flip of a unit. Hand every unit over once "
                f"(a unit twice is the unit once with the sum of both weights){otherwise}"
            )
        if relaxed and not (plain and operations.isdisjoint(JOINING)):
            self._check_others(layer)

    def prior(self) -> Prior | None:
        """With which probabilities ``x``, made of states, was drawn; None if that is not known."""
        priors = [mark.prior for mark in self._marks if mark.prior is not None]
        if not priors or len(priors) < len(self.states):
            return None
        distributions = tuple(distribution for prior in priors for distribution in prior.distributions)
        return Prior(distributions, lambda: self._log_odds(priors), watch=lambda: self.watch(self.x.view_as(self.x)))

    @property
    def sources(self) -> frozenset[object]:
        """A sign of every draw of states that ``x`` was computed from."""
        return frozenset().union(*(mark.sources for mark in self._marks))

    @property
    def _marks(self) -> list[Mark]:
        return [node.metadata[_MARK] for node in self.states]

    def _log_odds(self, priors: Sequence[Prior]) -> Tensor:
        """Those of the states' units, moved as these were to become ``x``; what came from elsewhere is certain."""
        if self._is_unmoved:
            return priors[0].log_odds()
        moved = self._moved([prior.log_odds() for prior in priors])
        return torch.where(self._units() != 0, moved, CERTAIN * self.x.detach())

    @property
    def _is_unmoved(self) -> bool:
        """Whether ``x`` is the states of one layer as they are."""
        return self.states == (self.x.grad_fn,)

    def watch(self, read: Tensor) -> Tensor:
        """What the only layer that reads the units ``x`` has ``read``: on the way back, a gradient from elsewhere is an error.

        The gradient that comes to the units must be the one that this layer gave, only moved. No hook here may refer to nodes
        of the graph, which would keep it alive for ever.
        """
        shares = [torch.ones_like(self.x)] if self._is_unmoved else [self._units(k) for k in range(len(self.states))]
        given: dict[int, float] = {}
        read.register_hook(lambda grad: given.update((k, _energy(grad * share)) for k, share in enumerate(shares)))
        for k, node in enumerate(self.states):
            node.register_prehook(partial(_check_alone, given, k))
        for mark in self._marks:
            # Units that were pooled to become these.
            if mark.prior is not None and mark.prior.watch is not None:
                mark.prior.watch()
        return read

    def _check_others(self, layer: str) -> None:
        """Refuse entries that are no units and not ±1: among relaxed states a zero would count as a unit of mean 0."""
        others = self.x.detach()[self._units() == 0]
        if not bool((others.abs() == 1).all()):
            raise InputError(
                f"{layer} was handed relaxed states together with {others[others.abs() != 1][0].item():g}, which is no unit "
                "but would count as one: pad with -1 or 1, or use the padding of BinaryConv2d"
            )

    def _is_one_to_one(self, dims: int) -> bool:
        """Whether every entry of ``x`` is one unit, or its opposite, or none, and no unit stands twice in one input."""
        generic = [_generic(part) for part in self._movement[1]]
        value, square = self._moved(generic), self._moved([numbers.square() for numbers in generic])
        # Of one number the square is its own; of sums it is another one.
        exact, squared = value.double().square(), square.double().abs()
        if bool(((exact - squared).abs() > 4 * torch.finfo(value.dtype).eps * (exact + squared)).any()):
            return False
        numbers = self._numbers().flatten(-dims).sort(-1).values
        return not bool(((numbers[..., 1:] == numbers[..., :-1]) & (numbers[..., 1:] > 0)).any())

    @cached_property
    def _movement(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The linear map from the units of all the states to ``x``: zeros like ``x``, and these through the map's transpose.

        Autograd knows the transpose; the transpose of the transpose is the map.
        """
        with torch.enable_grad():
            entries = torch.zeros_like(self.x, requires_grad=True)
            edges = [GradientEdge(node, 0) for node in self.states]
            # States may be behind other states, whose estimator's derivative is no movement: the way back ends at each of them.
            ends = [node.register_prehook(_nothing) for node in self.states]
            try:
                return entries, torch.autograd.grad(self.x, edges, entries, create_graph=True)
            finally:
                for end in ends:
                    end.remove()

    def _moved(self, values: Sequence[Tensor]) -> Tensor:
        """Numbers of the units of every layer, where they are in ``x``; 0 where nothing came from a unit."""
        entries, back = self._movement
        typed = [value.to(part.dtype) for value, part in zip(values, back, strict=True)]
        (result,) = torch.autograd.grad(back, entries, typed, retain_graph=True, materialize_grads=True)
        return result

    def _units(self, of: int | None = None) -> Tensor:
        """1 or -1 where an entry of ``x`` is a unit (``of`` the states with that number), else 0."""
        back = self._movement[1]
        return self._moved([torch.ones_like(part) * (of in (None, k)) for k, part in enumerate(back)])

    def _numbers(self) -> Tensor:
        """The number of the unit that every entry of ``x`` is, from 1, where each is one; 0 for none. All units count."""
        entries, back = self._movement
        sizes = [part.numel() for part in back]
        all_numbers = torch.arange(1, sum(sizes) + 1, device=entries.device)
        parts = [part.view(like.shape) for part, like in zip(all_numbers.split(sizes), back, strict=True)]
        # Digit by digit: what the states' type holds exactly.
        base = round(1 / torch.finfo(entries.dtype).eps)
        total, place = torch.zeros_like(entries, dtype=torch.int64), 1
        while place <= sum(sizes):
            total += place * self._moved([part // place % base for part in parts]).abs().long()
            place *= base
        return total


def mark(states: Tensor, prior: Prior | None, sources: frozenset[object] | None = None) -> None:
    """Note in autograd's graph that these are states, how they were drawn (None: not known), and where, if not here."""
    node: Any = states.grad_fn
    if node is not None:
        node.metadata[_MARK] = Mark(prior, sources or frozenset([object()]))


def _check_alone(given: dict[int, float], k: int, grads: tuple[Tensor | None, ...]) -> None:
    """Compare the gradient that comes to the units of layer ``k`` with the one that their reader has ``given``."""
    expected = given.pop(k, None)
    if expected is not None and grads[0] is not None and not math.isclose(_energy(grads[0]), expected, rel_tol=1e-3):
        raise InputError(
            "the posterior of a unit is known only where its states go to one layer, and here the head or another layer "
            "was given them too; use inputs='mean' or 'sampled'"
        )


def _nothing(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """In place of gradients: zeros that depend on nothing."""
    return tuple(grad if grad is None else torch.zeros_like(grad) for grad in grads)


def _is_linear(node: Any, between: dict[Any, int]) -> bool:
    """Whether the operation is known, and linear in those of its operands that came from states."""
    operation = _operation(node)
    if _is_opaque(node):
        return False
    operands = [parent in between for parent, _ in node.next_functions]
    if operation == "Mul":
        return sum(operands) == 1
    if operation == "Div":
        return operands[0] and sum(operands) == 1
    if operation == "Index":
        # One index for all examples. What an example is asked for by indices of its own may depend on its states.
        indices = [index for index in node._saved_indices if index is not None]
        return len(indices) == 1 and indices[0].dim() == 1 and indices[0].dtype != torch.bool
    return operation in MOVING or operation in LINEAR


def _shifts(node: Any, between: dict[Any, int]) -> bool:
    """Whether something that did not come from states is added to what did; of states, ±1, their values tell."""
    return _operation(node) in {"Add", "Rsub", "Sub"} and not all(parent in between for parent, _ in node.next_functions)


def _is_opaque(node: Any) -> bool:
    """Whether a node is no operation of torch itself, so that anything may have happened inside, whatever its name is."""
    custom = isinstance(node, BackwardCFunction) and _operation(node) != "BackwardHookFunction"
    return custom or "CppNode" in node.name()


def _energy(values: Tensor) -> float:
    """The sum of squares."""
    return float(values.detach().double().square().sum())


def _generic(like: Tensor) -> Tensor:
    """Random numbers, always the same ones, for which no equation holds by accident."""
    numbers = torch.rand(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (1 + numbers).to(like)


def _operation(node: Any) -> str:
    """The operation that a node differentiates.

    >>> _operation(torch.ones(2, requires_grad=True).cumsum(0).grad_fn)
    'Cumsum'
    """
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


def _name(node: Any) -> str:
    """The operation as a person would look for it."""
    operation = _operation(node)
    return "torch.utils.checkpoint (use_reentrant=True)" if operation == "CheckpointFunction" else f"the operation {operation}"
