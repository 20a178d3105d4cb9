"""What may stand between binary layers, and in which steps a network is evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flipgrad.affine import Affine
from flipgrad.errors import InputError
from flipgrad.layers import BinaryConv2d, BinaryLayer
from flipgrad.norms import ScaleShift
from flipgrad.pooling import PoolModule, check_even

# Modules that only move states around: a unit stays one unit and stays ±1.
RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)


class Concat(nn.Module):
    """Parallel branches on one input, concatenated.

    ``Concat(nn.Identity(), fg.BinaryLinear(8, 4))`` keeps 8 units and adds 4 that depend on them.

    Args:
        branches: modules that take the same input; between binary layers each is ``nn.Identity()``, a binary layer, or an
            ``nn.Sequential`` of what may stand in :class:`flipgrad.Sequential`.
        dim: the dimension to concatenate along.
    """

    def __init__(self, *branches: nn.Module, dim: int = 1) -> None:
        super().__init__()
        if not branches:
            raise InputError("Concat() needs at least one branch")
        self.branches = nn.ModuleList(branches)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


@dataclass(frozen=True)
class Apply:
    """A step that is a module as it is: real-valued, or moving states around."""

    module: nn.Module


@dataclass(frozen=True)
class Sample:
    """A step that evaluates a binary layer, on an input seen through average pooling and the like."""

    layer: BinaryLayer
    connectors: tuple[nn.Module, ...]
    binary: bool

    def affine(self) -> Affine:
        """The affine map of the states before the connectors."""
        return self.layer.affine(self.connectors)


@dataclass(frozen=True)
class Branch:
    """A step that runs several chains of steps on one input and concatenates their results."""

    chains: tuple[tuple[Step, ...], ...]
    dim: int


Step = Apply | Sample | Branch


class Plan(NamedTuple):
    """The real-valued modules in front, the steps up to the last states, and the modules between those and the head."""

    front: tuple[nn.Module, ...]
    steps: tuple[Step, ...]
    tail: tuple[nn.Module, ...]

    def layers(self) -> list[BinaryLayer]:
        """The binary layers in the order of evaluation."""
        return list(_layers(self.steps))


def plan(modules: Iterable[nn.Module]) -> Plan:
    """The steps of a chain of modules, refusing by name what would break the estimators."""
    steps, pending, binary = _chain(modules, binary=False)
    if not binary:
        raise InputError("the network has no binary layer; add fg.BinaryLinear or fg.BinaryConv2d before the head")
    sampling = [i for i, step in enumerate(steps) if not isinstance(step, Apply)]
    first, last = sampling[0], sampling[-1]
    front = tuple(step.module for step in steps[:first] if isinstance(step, Apply))
    tail = tuple(step.module for step in steps[last + 1 :] if isinstance(step, Apply))
    return Plan(front, tuple(steps[first : last + 1]), tail + tuple(pending))


def _chain(modules: Iterable[nn.Module], binary: bool) -> tuple[list[Step], list[nn.Module], bool]:
    """The steps, the linear modules that still wait for a layer to be folded into, and whether the result is binary."""
    steps: list[Step] = []
    pending: list[nn.Module] = []
    for module in _flat(modules):
        if isinstance(module, BinaryLayer):
            if binary:
                module.check_takes_states()
                _check_foldable(pending, module)
            steps.append(Sample(module, tuple(pending), binary))
            pending, binary = [], True
        elif isinstance(module, Concat) and (binary or _has_layers(module)):
            if pending:
                raise InputError(f"{_name(pending[0])} before Concat: pool inside the branches, each before its binary layer")
            steps.append(_branch(module, binary))
            binary = True
        elif not binary:
            if _has_layers(module):
                raise InputError(
                    f"{_name(module)} hides binary layers: list them in fg.Sequential themselves, or train the module as "
                    "it is with fg.use(model, estimator)"
                )
            steps.append(Apply(module))
        else:
            _check_between(module)
            if pending or isinstance(module, PoolModule):
                pending.append(module)
            else:
                steps.append(Apply(module))
    return steps, pending, binary


def _branch(module: Concat, binary: bool) -> Branch:
    chains = []
    for branch in module.branches:
        steps, pending, ends_binary = _chain([branch], binary)
        if pending or not ends_binary:
            name = _name(pending[0] if pending else branch)
            raise InputError(f"Concat: the branch ending with {name} does not give ±1 states; end it with a binary layer")
        chains.append(tuple(steps))
    if sum(_hands_on(chain) for chain in chains) > 1:
        raise InputError(
            "Concat: more than one branch hands the same states on, so a unit would stand there twice and each copy be flipped "
            "alone; keep one of these branches (a weight counts twice by doubling it)"
        )
    return Branch(tuple(chains), module.dim)


def _hands_on(steps: Iterable[Step]) -> bool:
    """Whether the input's own units are among those of the result."""
    return all(
        isinstance(step, Apply) or (isinstance(step, Branch) and any(_hands_on(chain) for chain in step.chains))
        for step in steps
    )


def _check_between(module: nn.Module) -> None:
    if isinstance(module, PoolModule):
        check_even(module)
        return
    if isinstance(module, RESHAPING):
        return
    if isinstance(module, nn.ConstantPad2d):
        if module.value in (-1, 0, 1):
            return
        raise InputError(f"{_name(module)} between binary layers pads with {module.value:g}; pad with 0, -1 or 1")
    raise InputError(
        f"{_name(module)} may not stand between binary layers: it would change the ±1 states behind the estimator's back. Move "
        "it before the first binary layer, into the head, or leave it out; reshaping, padding with 0 or ±1, AvgPool2d and "
        f"fg.Concat may stay{_advice(module)}"
    )


def _advice(module: nn.Module) -> str:
    """What to do with a module that has another place."""
    if not isinstance(module, _BatchNorm | ScaleShift):
        return ""
    return ". To normalise before the sign, give it to the binary layer before it: norm=" + _name(module)


def _check_foldable(pending: list[nn.Module], layer: BinaryLayer) -> None:
    """A convolution folds poolings; a fully connected layer folds any linear module."""
    if not isinstance(layer, BinaryConv2d):
        return
    for module in pending:
        if not isinstance(module, PoolModule | nn.Identity):
            raise InputError(
                f"{_name(module)} between average pooling and BinaryConv2d does not fold into its kernel; put it before the "
                "pooling, or use the convolution's own padding"
            )


def _flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules with every plain ``nn.Sequential`` opened."""
    for module in modules:
        if type(module) is nn.Sequential:
            yield from _flat(module)
        else:
            yield module


def _layers(steps: Iterable[Step]) -> Iterator[BinaryLayer]:
    for step in steps:
        if isinstance(step, Sample):
            yield step.layer
        elif isinstance(step, Branch):
            for chain in step.chains:
                yield from _layers(chain)


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(part, BinaryLayer) for part in module.modules())


def _name(module: nn.Module) -> str:
    return str(module) if not list(module.children()) else type(module).__name__
