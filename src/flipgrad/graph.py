"""Models written by hand, as networks: any graph of binary layers has what ``Sequential`` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from flipgrad.contract import Known, LayerCall, Network, Step, Visit
from flipgrad.errors import InputError
from flipgrad.guards import in_eval_mode, keeping_buffers, run_uncompiled
from flipgrad.layers import BinaryLayer, ModelRun, model_run
from flipgrad.network import BinaryNetwork
from flipgrad.sampling import Draw, Mirrored


@final
class Graph(BinaryNetwork):
    """A model written by hand, with the methods of :class:`flipgrad.Sequential`.

    The model is any module with binary layers in its ``forward``: skip connections, branches, concatenations, a layer that is
    applied several times. While the network is evaluated, it gives all of them their estimator and their noise; what was given
    by :func:`flipgrad.use` counts where none is handed in.

    - *Local estimators* (PSA, ST, Concrete, ...) are what they are with :func:`flipgrad.use`, and refuse the same: what
      follows the binary layers is differentiated in the ordinary way, i.e. the head is linearised, and their options of the
      head do not count.
    - *Estimators of sampled paths* (REINFORCE, ARM, DisARM, ...) are unbiased here too: they need the layers' probabilities in
      the order of evaluation, and whatever stands between them is differentiated in the ordinary way. So
      :func:`flipgrad.gradeval.evaluate` measures estimators against the mean of many of their draws. Those that look at
      alternatives evaluate the whole model for each.
    - ``fg.Exact()`` and :mod:`flipgrad.exact` need :class:`flipgrad.Sequential`.

    Which layers are evaluated, and in which order, must always be the same; it is found by an evaluation in eval mode, and
    another one later is an error. A layer that is applied several times counts as often: ``noise`` has one tensor for each, and
    ``initialize`` whitens what the last application gives.

    Args:
        model: maps inputs [B, ...] to outputs [B, K]. It is kept as ``model``, and not copied.
        x: any inputs [B, ...], B >= 1, of the size that it will see.

    >>> import flipgrad as fg
    >>> class Skip(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.first, self.second, self.head = fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 3), nn.Linear(7, 2)
    ...
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         states = self.first(x)
    ...         return self.head(torch.cat([states, self.second(states)], 1))
    >>> x, y = torch.randn(10, 2), torch.randint(2, (10,))
    >>> net = fg.Graph(Skip(), x).initialize(x)
    >>> net(x, fg.CrossEntropy(y), estimator=fg.PSA()).mean().backward()
    >>> net.predict(x, samples=10).shape
    torch.Size([10, 2])
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or not isinstance(x, Tensor) or not x.dim() or not len(x):
            got = f"{type(model).__name__} and {type(x).__name__}" + (f" {list(x.shape)}" if isinstance(x, Tensor) else "")
            raise InputError(f"Graph(model, x) takes a module and a batch of at least one example, got {got}")
        for name, module in model.named_modules():
            if isinstance(module, BinaryNetwork):
                where = f"{name!r} of the model" if name else "the model"
                raise InputError(
                    f"Graph: {where} is a flipgrad.{type(module).__name__}, a network of its own with its own estimates; use "
                    "it as it is, or put its layers into the model, e.g. in nn.Sequential"
                )
        self.model = model
        self._known: dict[int, bool] = {}
        self._order, self._batch_first = _order(model, x)

    def network(self) -> Network:
        layers = tuple(self.model.get_submodule(name) for name in self._order)
        return Network((), (_WholeModel(self.model, layers, self._batch_first, self._known),), (), _Outputs(self.model))


def as_network(model: nn.Module, x: Tensor) -> BinaryNetwork:
    """A network as it is, and a :class:`Graph` of a model written by hand, for inputs ``x``."""
    return model if isinstance(model, BinaryNetwork) else Graph(model, x)


@final
class _Outputs(nn.Module):
    """The head of a model written by hand: its outputs are there already. It has the model's modules, for who looks at them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs


@final
@dataclass(frozen=True)
class _WholeModel(Step):
    """A step that evaluates a model written by hand, from inputs to outputs.

    ``order`` are its layers as they are evaluated, ``batch_first`` is whether their pre-activations have the examples in the
    first dimension, and ``known`` which evaluations had states as their input.
    """

    by_hand: ClassVar[bool] = True

    model: nn.Module
    order: tuple[nn.Module, ...]
    batch_first: bool
    known: dict[int, bool]

    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        if torch.compiler.is_dynamo_compiling():
            raise InputError(
                "fg.Graph cannot be one compiled graph: compile without fullgraph=True, and it runs as it is; or build "
                "fg.Sequential, which compiles whole"
            )
        if isinstance(draw, Mirrored):
            self.check_examples_alone("antithetic=True")
        outputs, evaluated = _evaluated(self.model, x, visit, draw, self.known)
        if [id(layer) for layer in evaluated] != [id(layer) for layer in self.order]:
            raise InputError(
                f"Graph: the model evaluated its binary layers in the order {_names(self.model, evaluated)}, and "
                f"{_names(self.model, self.order)} when fg.Graph(model, x) was made; which are evaluated must not depend on "
                "data, mode or chance: make the Graph anew after a change, or train such a model with fg.use(model, estimator)"
            )
        return outputs, None

    def layers(self) -> Sequence[nn.Module]:
        return self.order

    def check_examples_alone(self, who: str) -> None:
        if not self.batch_first:
            raise InputError(
                f"{who}: a binary layer of the model has pre-activations whose first dimension is not the batch, so that it is "
                "not known which examples they belong to; keep the batch first, or use an estimator such as fg.PSA()"
            )


def _order(model: nn.Module, x: Tensor) -> tuple[tuple[str, ...], bool]:
    """The names of the layers in the order of their evaluation, and whether all of them have the batch first."""
    if not any(isinstance(module, BinaryLayer) for module in model.modules()):
        raise InputError(f"Graph: {type(model).__name__} has no binary layer; build it with fg.BinaryLinear or fg.BinaryConv2d")
    (_, of_two), (layers, of_three) = (_shapes(model, x[:1].expand(count, *x.shape[1:])) for count in (2, 3))
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if isinstance(module, BinaryLayer) and module not in layers:
            raise InputError(
                f"Graph: the model does not evaluate its binary layer {name!r}: call it in its forward, or take it out; "
                "in a part that is compiled it cannot be seen: give that as it was before torch.compile"
            )
    for layer in layers:
        if id(layer) not in names:
            raise InputError(
                f"Graph: the model evaluates a {type(layer).__name__} that is no submodule of it, so that its parameters would "
                "be left out; make it an attribute of the model, or keep it in nn.ModuleList"
            )
    sizes = [shape[1:] for shape in of_three]
    batch_first = of_two == [(2, *size) for size in sizes] and of_three == [(3, *size) for size in sizes]
    return tuple(names[id(layer)] for layer in layers), batch_first


@torch.no_grad()
def _shapes(model: nn.Module, x: Tensor) -> tuple[list[nn.Module], list[tuple[int, ...]]]:
    """The layers in the order of their evaluation on ``x``, in eval mode, and the shapes of their pre-activations."""
    shapes: list[tuple[int, ...]] = []

    def visit(call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        shapes.append(tuple(a.shape))
        return call.sample(a)

    # Without noise, and without a random number of torch's generators.
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), in_eval_mode(model), keeping_buffers(model):
        _, evaluated = _evaluated(model, x, visit, lambda noise, a: torch.zeros_like(a), {})
    return evaluated, shapes


def _evaluated(model: nn.Module, x: Tensor, visit: Visit, draw: Draw, known: dict[int, bool]) -> tuple[Tensor, list[nn.Module]]:
    """The model's outputs, and its layers in the order of their evaluation; see :class:`ModelRun`."""
    evaluated: list[nn.Module] = []
    outputs: Any = run_uncompiled(_called, model, x, visit, draw, known, evaluated)
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != len(x):
        got = list(outputs.shape) if isinstance(outputs, Tensor) else brief(outputs)
        raise InputError(
            f"Graph: the model must map inputs {list(x.shape)} to outputs [{len(x)}, K], it gave {got}; one output still needs "
            "the last dimension: nn.Linear(n, 1)"
        )
    return outputs, evaluated


def _called(model: nn.Module, x: Tensor, *run: Any) -> Any:
    token = model_run.set(ModelRun(*run))
    try:
        return model(x)
    finally:
        model_run.reset(token)


def _names(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    return ", ".join(names.get(id(layer), type(layer).__name__) or "itself" for layer in layers) or "none"
