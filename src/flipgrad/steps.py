"""The steps in which a network is evaluated: binary layers, and what may stand between them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from flipgrad.affine import called, transpose
from flipgrad.contract import CERTAIN, Known, LayerCall, Network, Prior, Step, Visit, run_steps
from flipgrad.errors import InputError
from flipgrad.guards import check_unchanged, has_hooks
from flipgrad.jets import Jets
from flipgrad.layers import BinaryConv2d, BinaryLayer
from flipgrad.max_pooling import MaxPool2d, Windows
from flipgrad.norms import ScaleShift
from flipgrad.pooling import Pool, PoolModule, check_even
from flipgrad.residual import Residual, Sign
from flipgrad.sampling import Draw

# Modules that only move states around (a unit stays one unit and stays ±1), and those that pad or average them.
RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
BETWEEN_LAYERS = (*RESHAPING, nn.ConstantPad2d, nn.ZeroPad2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.MaxPool2d, MaxPool2d)
# Modules on a residual stream behind which flips have ordinary derivatives only.
ON_STREAM = (nn.PReLU, nn.MaxPool2d, nn.Conv2d, nn.Linear)

# What goes from module to module.
Kind = Literal["real", "states", "stream"]


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


@final
@dataclass(frozen=True)
class Apply(Step):
    """A step that is a module as it is: real-valued, or moving states around."""

    module: nn.Module

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        if not isinstance(known, Prior):
            return called([self.module], x), None
        return called([self.module], x), replace(known, log_odds=lambda: self.moved(known.log_odds()))

    def modules(self) -> Iterable[nn.Module]:
        return (self.module,)

    @property
    def keeps_units(self) -> bool:
        return True

    def moved(self, log_odds: Tensor) -> Tensor:
        """The log-odds of states, where these are after the module; padding is certain."""
        if isinstance(self.module, nn.ConstantPad2d):
            return functional.pad(log_odds, self.module.padding, value=CERTAIN * float(self.module.value))
        moved: Tensor = self.module.forward(log_odds)
        return moved


@final
@dataclass(frozen=True)
class Sample(Step):
    """A step that evaluates a binary layer, on an input seen through average pooling and the like."""

    layer: BinaryLayer
    views: tuple[nn.Module, ...]
    binary: bool

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        prior, jets = (known if isinstance(known, Prior) else None), (known if isinstance(known, Jets) else None)
        call = LayerCall(self.layer, x, self.binary, self.views, draw, prior, jets=jets)
        states = _hooked(self.layer, call, visit)
        return states, call.distribution and call.distribution.prior()

    def layers(self) -> Iterable[BinaryLayer]:
        return (self.layer,)


@final
@dataclass(frozen=True)
class PoolStates(Step):
    """A step that takes the maximum of states in windows, see :mod:`flipgrad.max_pooling`."""

    module: nn.MaxPool2d

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        if not isinstance(known, Prior):
            return self.states(x), None
        return self.states(x), replace(known, log_odds=lambda: self.moved(known.log_odds()))

    def modules(self) -> Iterable[nn.Module]:
        return (self.module,)

    @property
    def keeps_units(self) -> bool:
        return True

    def states(self, x: Tensor) -> Tensor:
        """Those after the step. Hooks of :class:`flipgrad.MaxPool2d` run, and may look; ``nn.MaxPool2d`` may have none."""
        windows = Windows.of(self.module)
        windows.check(x)
        if not isinstance(self.module, MaxPool2d):
            return windows.states(x)
        result: Tensor = self.module(x, within=windows.states)
        if has_hooks(self.module):
            check_unchanged(self.module, "result", windows.states(x), result)
        return result

    def moved(self, log_odds: Tensor) -> Tensor:
        """The log-odds of the pooled states, from those of their units."""
        return Windows.of(self.module).log_odds(log_odds)


@final
@dataclass(frozen=True)
class AddToStream(Step):
    """A step that evaluates a residual block on the stream."""

    block: Residual

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        jets = known if isinstance(known, Jets) else Jets()
        call = LayerCall(self.block, x, False, (), draw, jets=jets)
        stream = _hooked(self.block, call, lambda call: self.block.result(call, visit(call)))
        return stream, call.after

    def layers(self) -> Iterable[BinaryLayer]:
        return (self.block,)


@final
@dataclass(frozen=True)
class OnStream(Step):
    """A step that is a module on a residual stream.

    Behind other modules than poolings by averages, and reshaping, flips have ordinary derivatives only.
    """

    module: nn.Module

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        result = called([self.module], x)
        if not isinstance(known, Jets):
            return result, None
        if type(self.module) in ON_STREAM:
            return result, Jets()
        module, like = self.module, x.detach()[:1]
        weight = Pool.of(module, like.shape[2:]).weight if isinstance(module, PoolModule) else 1.0

        def back(grad: Tensor, order: int = 1) -> Tensor:
            moved = transpose(module.forward, like.expand(len(grad), *like.shape[1:]), grad)
            return moved * weight ** (order - 1)

        jets = known.through(result.shape, back)
        return result, replace(jets, trail=(*jets.trail, back))

    def modules(self) -> Iterable[nn.Module]:
        return (self.module,)


def _hooked(layer: BinaryLayer, call: LayerCall, visit: Visit) -> Tensor:
    """What ``visit`` gives of a layer's evaluation, through the module, so that its hooks run.

    They may look at the input and the result, not change them.
    """
    evaluated: list[Tensor] = []
    x = call.x

    def evaluate(x: Tensor) -> Tensor:
        call.x = x
        evaluated.append(visit(call))
        return evaluated[-1]

    result: Tensor = layer(x, within=evaluate)
    if not evaluated:
        raise RuntimeError(f"a hook kept {type(layer).__name__} from being evaluated")
    if has_hooks(layer):
        check_unchanged(layer, "input", x, call.x)
        check_unchanged(layer, "states", evaluated[-1], result)
    return result


@final
@dataclass(frozen=True)
class Branch(Step):
    """A step that runs several chains of steps on one input and concatenates their results."""

    chains: tuple[tuple[Step, ...], ...]
    dim: int

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        if isinstance(known, Prior) and len(self.chains) > 1:
            known.read(len(self.chains))
        results = [run_steps(chain, x, known, visit, draw) for chain in self.chains]
        states = torch.cat([states for states, _ in results], self.dim)
        priors = [prior for _, prior in results if isinstance(prior, Prior)]
        if len(priors) < len(results):
            return states, None
        distributions = dict.fromkeys(distribution for prior in priors for distribution in prior.distributions)
        return states, Prior(tuple(distributions), lambda: torch.cat([prior.log_odds() for prior in priors], self.dim))

    def layers(self) -> Iterable[nn.Module]:
        return (layer for chain in self.chains for step in chain for layer in step.layers())

    def modules(self) -> Iterable[nn.Module]:
        return (module for chain in self.chains for step in chain for module in step.modules())

    @property
    def keeps_units(self) -> bool:
        return any(_keep_units(chain) for chain in self.chains)


def samples(steps: Iterable[Step]) -> Iterator[Sample]:
    """The evaluations of binary layers among ``steps``, those in branches too."""
    for step in steps:
        if isinstance(step, Sample):
            yield step
        elif isinstance(step, Branch):
            for chain in step.chains:
                yield from samples(chain)


def _keep_units(steps: Iterable[Step]) -> bool:
    return all(step.keeps_units for step in steps)


def network(modules: Iterable[nn.Module], head: nn.Module) -> Network:
    """The network of a chain of modules and a head, refusing by name what would break the estimators."""
    steps, pending, kind = _chain(modules, "real")
    if kind == "real":
        raise InputError("the network has no binary layer; add fg.BinaryLinear or fg.BinaryConv2d before the head")
    sampling = [i for i, step in enumerate(steps) if not isinstance(step, Apply | OnStream)]
    first, last = sampling[0], sampling[-1]
    front = tuple(step.module for step in steps[:first] if isinstance(step, Apply))
    tail = tuple(step.module for step in steps[last + 1 :] if isinstance(step, Apply | OnStream))
    for module in tail:
        if type(module) in ON_STREAM:
            raise InputError(
                f"{_name(module)} behind the last residual block belongs into the head: "
                f"head=nn.Sequential({type(module).__name__}(...), ...)"
            )
    _holds_zeros(steps[first : last + 1], zeros=False)
    streams = any(isinstance(step, AddToStream) for step in steps)
    return Network(front, tuple(steps[first : last + 1]), tail + tuple(pending), head, streams, kind == "stream")


def _chain(modules: Iterable[nn.Module], kind: Kind) -> tuple[list[Step], list[nn.Module], Kind]:
    """The steps, the linear modules that still wait for a layer to be folded into, and what the result is."""
    steps: list[Step] = []
    pending: list[nn.Module] = []
    for module in _flat(modules):
        if isinstance(module, Residual):
            steps.append(_block(module, kind))
            kind = "stream"
        elif kind == "stream" and not isinstance(module, Sign):
            _check_on_stream(module)
            steps.append(OnStream(module))
        elif isinstance(module, BinaryLayer):
            module.check_weights()
            if kind == "states":
                module.check_takes_states()
                _check_foldable(pending, module)
            steps.append(Sample(module, tuple(pending), kind == "states"))
            pending, kind = [], "states"
        elif isinstance(module, Concat) and (kind == "states" or _has_layers(module)):
            if pending:
                raise InputError(f"{_name(pending[0])} before Concat: pool inside the branches, each before its binary layer")
            steps.append(_branch(module, kind))
            kind = "states"
        elif kind == "real":
            _check_real(module)
            steps.append(Apply(module))
        else:
            _check_between(module)
            if isinstance(module, nn.MaxPool2d):
                _check_pooled_states(module, pending)
                steps.append(PoolStates(module))
            elif pending or isinstance(module, PoolModule):
                pending.append(module)
            else:
                steps.append(Apply(module))
    return steps, pending, kind


def _block(block: Residual, kind: Kind) -> AddToStream:
    block.check_weights()
    if kind == "states":
        raise InputError(
            f"{type(block).__name__} adds to real numbers, and here states ±1 come in: put it before the first binary layer, "
            "or use fg.BinaryLinear and fg.BinaryConv2d behind states"
        )
    return AddToStream(block)


def _check_real(module: nn.Module) -> None:
    """Refuse, before the first binary layer, modules that are for states, or hold layers that would not be seen."""
    if _has_layers(module):
        raise InputError(
            f"{_name(module)} hides binary layers: list them in fg.Sequential themselves, or train the module as it is with "
            f"fg.use(model, estimator){_advice(module)}"
        )
    if isinstance(module, MaxPool2d):
        raise InputError(f"{module} before the first binary layer is handed real values: use nn.MaxPool2d there")


def _check_on_stream(module: nn.Module) -> None:
    if isinstance(module, BinaryLayer):
        raise InputError(
            f"{type(module).__name__} behind a residual block: it would take the stream's real numbers for its input, and "
            "flips of the block's units would have ordinary derivatives in it only; end the stream before it with "
            "fg.Sign(noise, norm)"
        )
    known = (*RESHAPING, *ON_STREAM, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
    if type(module) not in known or "forward" in vars(module):
        names = ", ".join(kind.__name__ for kind in (nn.AvgPool2d, *ON_STREAM))
        raise InputError(
            f"{_name(module)} is not known on a residual stream: there {names}, reshaping and fg.Residual... may stand; move "
            "it before the first block, into the head, or normalise in the block: norm=, branch_norm="
        )
    if isinstance(module, PoolModule):
        check_even(module)


def _branch(module: Concat, kind: Kind) -> Branch:
    if has_hooks(module, anywhere=False):
        raise InputError("Concat has hooks, which would never run: register them on its branches' modules")
    chains = []
    for branch in module.branches:
        steps, pending, ends = _chain([branch], kind)
        if pending or ends != "states":
            name = _name(pending[0] if pending else branch)
            raise InputError(f"Concat: the branch ending with {name} does not give ±1 states; end it with a binary layer")
        chains.append(tuple(steps))
    if sum(_keep_units(chain) for chain in chains) > 1:
        raise InputError(
            "Concat: more than one branch hands the same states on, so a unit would stand there twice and each copy be flipped "
            "alone; keep one of these branches (a weight counts twice by doubling it)"
        )
    return Branch(tuple(chains), module.dim)


def _check_between(module: nn.Module) -> None:
    # Exactly these classes, and their own forward: anything else may do anything.
    if type(module) not in BETWEEN_LAYERS or "forward" in vars(module):
        raise InputError(
            f"{_name(module)} may not stand between binary layers: it would change the ±1 states behind the estimator's back. "
            "Move it before the first binary layer, into the head, or leave it out; reshaping, padding with 0 or ±1, AvgPool2d"
            f", MaxPool2d and fg.Concat may stay{_advice(module)}"
        )
    if isinstance(module, PoolModule):
        check_even(module)
    if isinstance(module, nn.MaxPool2d):
        Windows.of(module)
    if isinstance(module, nn.ConstantPad2d) and module.value not in (-1, 0, 1):
        raise InputError(f"{_name(module)} between binary layers pads with {module.value:g}; pad with 0, -1 or 1")


def _check_pooled_states(module: nn.MaxPool2d, pending: list[nn.Module]) -> None:
    """Refuse a maximum of other things than states, and hooks that would never run."""
    if pending:
        raise InputError(
            f"{_name(module)} behind {_name(pending[0])} takes the maximum of averages, not of ±1 states: put it before the "
            "average pooling, or leave out one of them"
        )
    if not isinstance(module, MaxPool2d) and has_hooks(module, anywhere=False):
        raise InputError(f"{_name(module)} between binary layers has hooks, which would never run: use fg.MaxPool2d")


def _holds_zeros(steps: Iterable[Step], *, zeros: bool) -> bool:
    """Whether zeros, which are no units, are among the states after ``steps``; before max-pooling they are refused.

    ``zeros``: whether they come in.
    """
    for step in steps:
        if isinstance(step, Sample):
            zeros = False
        elif isinstance(step, Branch):
            zeros = sum(_holds_zeros(chain, zeros=zeros) for chain in step.chains) > 0
        elif isinstance(step, Apply):
            zeros |= isinstance(step.module, nn.ConstantPad2d) and step.module.value == 0
        elif isinstance(step, PoolStates) and zeros:
            raise InputError(
                f"{_name(step.module)} behind padding with 0, which is no unit but would count for more than -1: use the "
                "padding of MaxPool2d itself, or pad with -1"
            )
    return zeros


def _advice(module: nn.Module) -> str:
    """What to do with a module that has another place."""
    if isinstance(module, _MaxPoolNd | _AdaptiveMaxPoolNd | nn.FractionalMaxPool2d):
        return ". For the maximum of states use nn.MaxPool2d, of sequences on [batch, channels, 1, length] with a kernel (1, k)"
    if type(module) is nn.Sequential:
        return ". Its hooks keep it from being opened: register them on the modules inside"
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
    """The modules with every plain ``nn.Sequential`` opened, unless it has hooks, which would never run."""
    for module in modules:
        if type(module) is nn.Sequential and not has_hooks(module, anywhere=False):
            yield from _flat(module)
        else:
            yield module


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(part, BinaryLayer) for part in module.modules())


def _name(module: nn.Module) -> str:
    return str(module) if not list(module.children()) else type(module).__name__
