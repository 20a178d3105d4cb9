"""What a network costs: shapes, weights, multiply-adds and bytes of every layer, as float32 and packed into bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from flipgrad.errors import InputError
from flipgrad.guards import in_eval_mode, keeping_buffers
from flipgrad.layers import BinaryLayer
from flipgrad.network import Sequential
from flipgrad.residual import Residual, Sign
from flipgrad.steps import Sample, samples

# Bytes of a float32, and bits.
FLOAT_BYTES, FLOAT_BITS = 4, 32
# A table fits into a terminal of this many columns; names of modules are shortened for it.
COLUMNS = 100
SHORTEST_NAME = 12
# The row of what is computed and kept outside of all layers.
OTHERS = "(others)"

Shape = Sequence[int]


@final
@dataclass(frozen=True)
class LayerSummary:
    """One row: a module that has parameters of its own.

    Attributes:
        name: the module's name in the network; "(others)" for what is computed in no such module.
        kind: its class.
        output_shape: of one example; None for a module that was not called.
        weights: numbers in its matrices and kernels, not in its biases, scales and shifts. A parameter that several modules
            share is counted in the first of them alone, and so are its bytes.
        bits: of one of them, packed: 1 for binary weights whose inputs are binary too, else 32.
        binary_operations: multiply-adds for one example where weight and input are both ±1.
        float_operations: all its other multiply-adds, of matrix products and convolutions, as far as
            ``torch.utils.flop_counter`` and this module know the operators.
        float_bytes: of all its parameters and running statistics as float32.
        packed_bytes: with binary weights and binary inputs, a bit for every weight (the last byte filled up) and 8 bytes for
            every output channel, its scale and its bias as float32; else ``float_bytes``.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    weights: int
    bits: int
    binary_operations: int
    float_operations: int
    float_bytes: int
    packed_bytes: int


@final
@dataclass(frozen=True)
class Summary:
    """What :func:`summary` found; ``str`` of it is a table, its attributes are the totals of ``rows``."""

    rows: tuple[LayerSummary, ...]

    @property
    def weights(self) -> int:
        """Numbers in all matrices and kernels."""
        return sum(row.weights for row in self.rows)

    @property
    def binary_weights(self) -> int:
        """Those of them that take one bit."""
        return sum(row.weights for row in self.rows if row.bits == 1)

    @property
    def binary_operations(self) -> int:
        """Multiply-adds for one example where weight and input are both ±1."""
        return sum(row.binary_operations for row in self.rows)

    @property
    def float_operations(self) -> int:
        """All other multiply-adds for one example."""
        return sum(row.float_operations for row in self.rows)

    @property
    def float_bytes(self) -> int:
        """Bytes of the network as float32."""
        return sum(row.float_bytes for row in self.rows)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the network, packed."""
        return sum(row.packed_bytes for row in self.rows)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [
            ("", "", "", "bits per", "multiply-adds", "", "bytes as", "bytes"),
            ("layer", "output", "weights", "weight", "binary", "float", "float32", "packed"),
        ]
        for row in self.rows:
            shape = "" if row.output_shape is None else "x".join(map(str, row.output_shape)) or "1"
            lines.append((f"{row.name} {row.kind}".strip(), shape, *_numbers(row, str(row.bits) if row.weights else "")))
        average = sum(row.bits * row.weights for row in self.rows) / max(1, self.weights)
        lines.append(("total", "", *_numbers(self, f"{average:.2f}" if self.weights else "")))
        return _table(lines)


def summary(net: nn.Module, x: Tensor) -> Summary:
    """What every layer of a network costs for one example: its shape, weights, multiply-adds and bytes.

    Works for :class:`flipgrad.Sequential` and for networks written by hand: the modules that have parameters are watched while
    the network is evaluated once, in eval mode, on the first example of ``x``. Nothing is changed by it, and no random number
    is taken from torch's generators.

    In a graph written by hand a layer's inputs count as binary if all of them are ±1; in ``Sequential`` if they are states of
    binary layers, or averages of these. Padding counts as if it were units.

    Args:
        net: the network.
        x: inputs [B, ...], B >= 1, of the size that it will see.

    Returns:
        The rows, with their totals; printed, it is a table.

    >>> import flipgrad as fg
    >>> hidden = fg.BinaryLinear(64, 32, weights="binary")
    >>> found = summary(fg.Sequential(fg.BinaryLinear(8, 64), hidden, head=nn.Linear(32, 10)), torch.randn(1, 8))
    >>> print(found)
                                     bits per  multiply-adds         bytes as   bytes
    layer           output  weights    weight         binary  float   float32  packed
    0 BinaryLinear      64      512        32              0    512     2,304   2,304
    1 BinaryLinear      32    2,048         1          2,048      0     8,448     512
    head Linear         10      320        32              0    320     1,320   1,320
    total                     2,880      9.96          2,048    832    12,072   4,136
    >>> found.binary_weights, found.rows[1].packed_bytes == 64 * 32 // 8 + 8 * 32
    (2048, True)
    """
    if not isinstance(net, nn.Module) or not isinstance(x, Tensor) or not x.dim() or not len(x):
        got = f"{type(net).__name__} and {type(x).__name__}" + (f" {list(x.shape)}" if isinstance(x, Tensor) else "")
        raise InputError(f"summary(net, x) takes a module and a batch of at least one example, got {got}")
    watch = _Watch(net)
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), in_eval_mode(net), keeping_buffers(net), watch.counter, watch:
        net(x[:1])
    return Summary(tuple(watch.rows()))


@final
class _Watch:
    """Notes, while a network is evaluated, what its layers give and how many operations they take."""

    def __init__(self, net: nn.Module) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=_fused_operators())
        self._layers = dict(_layers(net))
        self._steps = dict(_steps(net))
        self._handles: list[RemovableHandle] = []
        self._shapes: dict[nn.Module, tuple[int, ...]] = {}
        self._operations = dict.fromkeys(self._layers.values(), 0)
        # Layers all of whose inputs so far were binary.
        self._binary = dict.fromkeys(self._layers.values(), True)
        # Of the layers that are being evaluated, one within the other: operations before it, and those of layers within it.
        self._open: list[tuple[int, int]] = []
        self._within = 0

    def __enter__(self) -> None:
        for layer in self._layers.values():
            self._handles.append(layer.register_forward_pre_hook(self._before))
            self._handles.append(layer.register_forward_hook(self._after))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def rows(self) -> Iterator[LayerSummary]:
        """The rows, in the order of the first calls, then modules that were not called."""
        named = {layer: name for name, layer in self._layers.items()}
        counted: set[Tensor] = set()
        for layer in dict.fromkeys([*self._shapes, *self._layers.values()]):
            yield self._row(named[layer], layer, counted)
            counted |= {*_own(layer, "parameters"), *_own(layer, "buffers")}
        others = self._counted() - self._within
        if others:
            yield LayerSummary(OTHERS, "", None, 0, FLOAT_BITS, 0, others, 0, 0)

    def _before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._open.append((self._counted(), 0))

    def _after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        before, of_others = self._open.pop()
        operations = self._counted() - before
        if self._open:
            self._open[-1] = (self._open[-1][0], self._open[-1][1] + operations)
        else:
            self._within += operations
        operations -= of_others
        result = output if isinstance(output, Tensor) else _first_tensor(output)
        if isinstance(layer, BinaryLayer):
            # An estimator may compute more than the layer itself.
            operations = 0 if isinstance(layer, Sign) else result.numel() * layer.weight[0].numel()
            self._binary[layer] &= self._takes_states(layer, inputs[0])
        self._operations[layer] += operations
        self._shapes[layer] = tuple(result.shape[1:])

    def _counted(self) -> int:
        """Multiply-adds so far."""
        return self.counter.get_total_flops() // 2

    def _takes_states(self, layer: BinaryLayer, x: Tensor) -> bool:
        if isinstance(layer, Residual):
            return True
        step = self._steps.get(layer)
        return bool((x.abs() == 1).all()) if step is None else step.binary

    def _row(self, name: str, layer: nn.Module, counted: set[Tensor]) -> LayerSummary:
        """The row of a layer, without the tensors that were ``counted`` in another one's."""
        parameters = [t for t in _own(layer, "parameters") if t not in counted]
        statistics = [t for t in _own(layer, "buffers") if t.is_floating_point() and t not in counted]
        size = FLOAT_BYTES * sum(t.numel() for t in (*parameters, *statistics))
        weights = sum(t.numel() for t in parameters if t.dim() > 1)
        kind, operations, shape = type(layer).__name__, self._operations[layer], self._shapes.get(layer)
        if isinstance(layer, BinaryLayer) and layer.weights == "binary" and shape is not None and self._binary[layer]:
            bits = 0 if layer.weight in counted else layer.weight.numel()
            packed = -(-bits // 8) + 2 * FLOAT_BYTES * layer.weight.shape[0]
            if isinstance(layer, Residual):
                # The stream is real-valued, and so is all that acts on it.
                packed = -(-bits // 8) + size - FLOAT_BYTES * bits
            return LayerSummary(name, kind, shape, weights, 1, operations, 0, size, packed)
        return LayerSummary(name, kind, shape, weights, FLOAT_BITS, 0, operations, size, size)


def _fused_operators() -> dict[Any, Callable[..., int]]:
    """Operations, two for every multiply-add, of operators that stand for whole modules and that torch counts as nothing."""

    def lstm(x: Shape, of_inputs: Shape, of_states: Shape, *_: Any, **__: Any) -> int:
        steps = x[0] * x[1]
        return 2 * steps * (prod(of_inputs) + prod(of_states))

    def attention(
        query: Shape,
        key: Shape,
        value: Shape,
        size: int,
        heads: int,
        inner: Shape,
        bias: Shape,
        outer: Shape,
        *_: Any,
        **__: Any,
    ) -> int:
        batch, length = query[:2]
        return 2 * batch * length * (prod(inner) + prod(outer) + 2 * length * size)

    return {torch.ops.aten.mkldnn_rnn_layer: lstm, torch.ops.aten._native_multi_head_attention: attention}


def _layers(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters of their own, by name; what a binary layer consists of is a part of it."""
    layers = [layer for layer in net.modules() if isinstance(layer, BinaryLayer)]
    inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    for name, module in net.named_modules():
        if id(module) not in inside and (isinstance(module, BinaryLayer) or any(True for _ in _own(module, "parameters"))):
            yield name, module


def _own(layer: nn.Module, what: str) -> Iterable[Any]:
    """The "parameters" or "buffers" of a layer alone, and of the parts of a binary layer."""
    found: Iterable[Any] = getattr(layer, what)(recurse=isinstance(layer, BinaryLayer))
    return found


def _steps(net: nn.Module) -> Iterator[tuple[BinaryLayer, Sample]]:
    """The layers of every ``Sequential``, with how they are evaluated there."""
    for module in net.modules():
        if isinstance(module, Sequential):
            yield from ((step.layer, step) for step in samples(module.network().steps))


def _first_tensor(output: Any) -> Tensor:
    """The first tensor of what a module returned, whose batch comes first."""
    values = list(output.values()) if isinstance(output, dict) else list(output) if isinstance(output, list | tuple) else []
    for value in values:
        found = value if isinstance(value, Tensor) else _first_tensor(value)
        if found.numel():
            return found
    return torch.empty(0)


def _numbers(counted: LayerSummary | Summary, bits: str) -> tuple[str, ...]:
    operations = (f"{counted.binary_operations:,}", f"{counted.float_operations:,}")
    return f"{counted.weights:,}", bits, *operations, f"{counted.float_bytes:,}", f"{counted.packed_bytes:,}"


def _table(lines: list[tuple[str, ...]]) -> str:
    """The columns below one another, the first one of names shortened so that all fit into the columns of a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = max(SHORTEST_NAME, COLUMNS - sum(widths[1:]) - 2 * (len(widths) - 1))
    widths[0] = min(widths[0], room)
    return "\n".join(_line(widths, line) for line in lines)


def _line(widths: list[int], cells: tuple[str, ...]) -> str:
    name, *numbers = cells
    if len(name) > widths[0]:
        name = "…" + name[len(name) - widths[0] + 1 :]
    return "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))])
