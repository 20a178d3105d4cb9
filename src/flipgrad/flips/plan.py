"""What the sums over flips of one layer share within a step: statistics of its tensors, and the choices they lead to."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, final

from torch import Tensor

from flipgrad.flips.form import moments, root_mean_square
from flipgrad.guards import capturing

ResultT = TypeVar("ResultT")


@final
class Plan:
    """Keeps what was read from a layer's tensors, so that a step reads it once.

    An evaluation of a layer makes one, and hands it to the sums over flips of the way there and back. What was read counts as
    long as the tensors are the same memory, unchanged: of another tensor, or of one that was written to since, it is read anew.
    """

    def __init__(self) -> None:
        # The tensors are kept too, so that no other one can have their memory.
        self._kept: dict[Hashable, tuple[Any, tuple[Tensor, ...], Any]] = {}

    def once(self, name: Hashable, tensors: tuple[Tensor, ...], make: Callable[[], ResultT]) -> ResultT:
        """What ``make`` reads from ``tensors``, under a ``name``."""
        mark = [_mark(t) for t in tensors]
        kept = self._kept.get(name)
        if kept is None or kept[0] != mark:
            kept = self._kept[name] = (mark, tensors, make())
        result: ResultT = kept[2]
        return result

    def moments(self, weight: Tensor) -> tuple[float, float, float]:
        """:func:`flipgrad.flips.form.moments`, once."""
        return self.once("moments", (weight,), lambda: moments(weight))

    def root_mean_square(self, a: Tensor) -> float:
        """:func:`flipgrad.flips.form.root_mean_square`, once."""
        return self.once("rms", (a,), lambda: root_mean_square(a))


def new_plan() -> Plan | None:
    """A plan, but none where a graph is captured: there nothing is read."""
    return None if capturing() else Plan()


def _mark(t: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others that are in use, and from itself before it was written to."""
    return t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.shape, t.stride()
