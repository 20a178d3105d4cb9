"""What an estimator is, and what it is given: a network as it is now, a batch, and the evaluations of its layers.

``net(x, objective, estimator=...)`` makes a :class:`Network` and a :class:`Batch`, and returns ``estimator.losses`` of them.
That runs the network's steps on the batch. Every :class:`Step` that is a binary layer makes a :class:`LayerCall`, and asks
``visit``, mostly the estimator's own rule, for the layer's states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from flipgrad.affine import AffineMap, called
from flipgrad.errors import InputError
from flipgrad.guards import without_derivative
from flipgrad.jets import Jets
from flipgrad.noise import Noise, sign
from flipgrad.objectives import Objective, evaluate
from flipgrad.sampling import Draw, for_weights, states

# The log-odds of what is not random.
CERTAIN = 1e4


@final
@dataclass(eq=False)
class StateDistribution:
    """The distribution of a layer's states sign(a - Z), given its input: the layer's noise, and its pre-activations ``a``.

    ``readers`` counts the layers and branches that were given the states drawn from it, where that is asked.
    """

    noise: Noise
    a: Tensor
    readers: int = 0

    def log_odds(self) -> Tensor:
        """log p(+1) / p(-1) of every state, given the layer's input."""
        return self.noise.log_odds(self.a)

    def prior(self) -> Prior:
        """What the layer that is given the states knows of them."""
        return Prior((self,), self.log_odds)


@final
@dataclass(frozen=True)
class Prior:
    """With which probabilities a layer's binary input was drawn; the posterior is given the layer's own states besides.

    It follows the states through whatever only moves them around. In :class:`flipgrad.Sequential` the same modules move it; in
    a graph written by hand it is found from autograd's record, see :mod:`flipgrad.record`.

    Attributes:
        distributions: what the states were drawn from, in every layer that drew some of them.
        log_odds: gives log p(+1) / p(-1) of every state, given the input of the layer that drew it.
        watch: in a graph written by hand, gives the states to be read in place of the input, with which it is an error on the
            way back if anyone else read them.
    """

    distributions: tuple[StateDistribution, ...]
    log_odds: Callable[[], Tensor]
    watch: Callable[[], Tensor] | None = None

    def read(self, readers: int = 1) -> None:
        """Note that these many layers or branches are given the states."""
        for distribution in self.distributions:
            distribution.readers += readers

    @property
    def shared(self) -> bool:
        """Whether more than one layer (or the head) was given states of the same draw."""
        return any(distribution.readers > 1 for distribution in self.distributions)

    def check_alone(self) -> None:
        """Refuse states that are :attr:`shared`, whose posterior is not known."""
        if self.shared:
            raise InputError(
                "the posterior of a unit is known only where its states go to one layer, and here several layers (or the head) "
                "were given them; use inputs='mean' or 'sampled'"
            )


@final
@dataclass(frozen=True)
class WeightCall:
    """One evaluation of a layer's binary weights sign(latent - Z), as an estimator sees it.

    Attributes:
        latent: the layer's parameter.
        noise: the distribution of Z; None where the weights are sign(latent), and nothing is drawn.
        clip: of weights that are not drawn, a latent weight beyond it is to get no gradient.
        draw: gives Z for the latent weights.
    """

    latent: Tensor
    noise: Noise | None
    clip: float | None
    draw: Draw

    def sample(self) -> Tensor:
        """The weights, ±1, without a gradient."""
        latent = self.latent.detach()
        return sign(latent) if self.noise is None else states(for_weights(self.draw), self.noise, latent)

    def drawn_from(self, who: str) -> Noise:
        """The noise of weights that are drawn; on behalf of ``who``, others are refused."""
        if self.noise is None:
            raise InputError(
                f"{who} relaxes the distribution of binary weights, and these are not drawn: give the layer a weight_noise, or "
                "use fg.PSA(), fg.ST() or fg.HardST()"
            )
        return self.noise

    def undefined(self) -> Tensor:
        """The weights, with an error in place of a gradient: the rule where no estimator has one."""
        return without_derivative(self.latent, self.sample())


# Gives binary weights the gradient of an estimator.
WeightRule = Callable[[WeightCall], Tensor]


@final
@dataclass
class LayerCall:
    """One evaluation of a binary layer, as an estimator sees it.

    Attributes:
        layer: the layer itself.
        x: its input.
        binary: whether ``x`` is made of ±1 states (then a zero is padding, no unit); else it is real-valued and never flipped.
        views: linear modules that the layer sees its input through.
        draw: gives Z for given pre-activations.
        prior: with which probabilities binary states ``x`` were drawn, if that is known.
        weight_rule: gives binary weights, where the layer has them.
        jets: of a real input that is a residual stream, what carries its higher derivatives, see :mod:`flipgrad.jets`.
        order: of the derivatives that flips of the layer's states are to have along the stream that they are added to; 1 are
            the ordinary ones. An estimator sets it.
        branch_rule: gives what a residual block adds to the stream, and its scale, of the sums by its weights.
        after: of a residual block, the jets of the stream behind it, once that is known.
        check: in a graph written by hand, refuses an input that a local estimator would be wrong for, whose states are relaxed
            (True) or ±1 (False).
        earlier: of the last layer, the evaluations of all before it, once the head is asked.
        distribution: what the layer's own states were drawn from, after :meth:`sample`.
    """

    layer: Any
    x: Tensor
    binary: bool
    views: tuple[nn.Module, ...]
    draw: Draw
    prior: Prior | None = None
    weight_rule: WeightRule = WeightCall.undefined
    jets: Jets | None = None
    order: int = 1
    branch_rule: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]] | None = None
    check: Callable[[bool], None] | None = None
    after: Jets | None = field(default=None, init=False)
    earlier: tuple[LayerCall, ...] = field(default=(), init=False)
    distribution: StateDistribution | None = field(default=None, init=False)
    _weight: Tensor | None = field(default=None, init=False)
    _affine: AffineMap | None = field(default=None, init=False)
    # Whoever asks first for the map, maybe under torch.no_grad, others differentiate it.
    _differentiable: bool = field(default_factory=torch.is_grad_enabled, init=False)

    @property
    def affine(self) -> AffineMap:
        """The map from the input to the pre-activations, the same one whenever it is asked for."""
        if self._affine is None:
            with torch.set_grad_enabled(self._differentiable):
                self._affine = self.layer.affine(self.views, self.binary_weights())
        return self._affine

    @property
    def before_norm(self) -> AffineMap:
        """The map without the layer's norm."""
        result: AffineMap = self.layer.plain(self.views, self.binary_weights())
        return result

    def binary_weights(self) -> Tensor | None:
        """The binary weights, drawn once; None where the layer's are real."""
        if self._weight is None and self.layer.weights == "binary":
            layer = self.layer
            self._weight = self.weight_rule(WeightCall(layer.weight, layer.weight_noise, layer.weight_clip, self.draw))
        return self._weight

    @property
    def noise(self) -> Noise:
        """The distribution of Z."""
        noise: Noise = self.layer.noise
        return noise

    def sample(self, a: Tensor) -> Tensor:
        """States sign(a - Z), without a gradient."""
        self.distribution = StateDistribution(self.noise, a.detach())
        return states(self.draw, self.noise, a)


# Turns one layer's evaluation into that layer's states: an estimator's rule, or a plain sample.
Visit = Callable[[LayerCall], Tensor]


@final
@dataclass(frozen=True)
class Latents:
    """The states [B, units] of all layers so far, for a head that is given those of all layers."""

    states: tuple[Tensor, ...]


# What is known of what goes from step to step: of states their prior, of a residual stream its jets, of latents those before.
Known = Prior | Jets | Latents | None


class Step(ABC):
    """A part of a network, from one binary layer to the next: a layer, or what may stand between layers."""

    # Whether it is a whole model written by hand, head included: what comes out are outputs, and no states.
    by_hand: ClassVar[bool] = False

    @abstractmethod
    def run(self, x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
        """What comes out of the step, and what is known of it, of what comes in: states, a residual stream, or real values.

        ``visit`` gives the states of every layer in the step, and ``draw`` is the source of noise.
        """

    def layers(self) -> Iterable[nn.Module]:
        """Its binary layers in the order of evaluation."""
        return ()

    def check_examples_alone(self, who: str) -> None:
        """Refuse, on behalf of ``who``, to mix the examples of a batch, as far as its layers do not tell; by default never."""
        return

    def modules(self) -> Iterable[nn.Module]:
        """All its modules that may have parameters."""
        return self.layers()

    @property
    def keeps_units(self) -> bool:
        """Whether the units that come in are among those that go out."""
        return False


@final
@dataclass(frozen=True)
class Network:
    """A stochastic binary network as estimators see it: :class:`flipgrad.Sequential` with the modules that it has now.

    That of :class:`flipgrad.Graph` is a single step, and a head that hands the outputs on.

    Attributes:
        real: the real-valued modules in front.
        steps: from the first binary layer to the last, or to max-pooling behind it.
        tail: linear modules between the last states and the head.
        head: the module that gives outputs [B, K].
        streams: whether there are residual blocks, and
        ends_in_stream: whether what comes to the tail is the stream of such blocks, and not states.
    """

    real: tuple[nn.Module, ...]
    steps: tuple[Step, ...]
    tail: tuple[nn.Module, ...]
    head: nn.Module
    streams: bool = False
    ends_in_stream: bool = False

    @property
    def binary_layers(self) -> list[Any]:
        """The binary layers in the order of evaluation."""
        return [layer for step in self.steps for layer in step.layers()]

    @property
    def by_hand(self) -> bool:
        """Whether it is a model written by hand, of which only the binary layers are known."""
        return any(step.by_hand for step in self.steps)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all its modules, each once."""
        within = (module for step in self.steps for module in step.modules())
        modules = (*self.real, *within, *self.tail, self.head)
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def default_estimator(self) -> Estimator:
        """The estimator where none is chosen: the one given to :func:`flipgrad.use`, or the recommended one."""
        attached: Estimator | None = self.binary_layers[0].estimator
        if attached is None and not _recommended:
            # The package imports its parts when they are used; this one recommends an estimator.
            import_module("flipgrad.estimators")
        return attached or _recommended[0]()

    def front(self, x: Tensor) -> Tensor:
        """What the first binary layer sees of ``x``: the output of the real-valued modules before it."""
        for module in self.real:
            x = module(x)
        return x

    def run(self, inputs: Tensor, visit: Visit, draw: Draw) -> Tensor:
        """The last states for ``inputs`` = :meth:`front` (x), where ``visit`` gives each layer's states in turn."""
        return run_steps(self.steps, inputs, None, visit, draw)[0]

    def outputs(self, states: Tensor) -> Tensor:
        """The head's outputs [..., K] for the last states, as :meth:`run` gives them."""
        outputs: Tensor = self.head(called(self.tail, states))
        if outputs.dim() < 2 or outputs.shape[0] != states.shape[0]:
            raise InputError(
                f"the head must map states to outputs [batch, K], it gave {list(outputs.shape)} for {list(states.shape)}; one "
                "output still needs the last dimension: nn.Linear(n, 1)"
            )
        # Flips compare losses that differ little: half the digits would not do.
        half = outputs.dtype in (torch.bfloat16, torch.float16)
        return outputs.float() if half or torch.is_autocast_enabled(outputs.device.type) else outputs

    def check_no_stream(self, who: str, advice: str) -> None:
        """Refuse, on behalf of ``who``, residual blocks."""
        if self.streams:
            raise InputError(f"{who} is not for residual streams, where a unit acts on all later layers: {advice}")

    def check_examples_alone(self, who: str) -> None:
        """Refuse, on behalf of ``who``, a network whose examples depend on each other through the statistics of a batch."""
        for layer in self.binary_layers:
            if layer.mixes_examples:
                raise InputError(
                    f"{who}: {layer.norm} of {type(layer).__name__} takes its statistics from the batch, so that examples "
                    "depend on each other; call net.eval() (or norm.eval() alone) to use the running statistics, or take "
                    "norm=fg.ScaleShift(channels)"
                )
        for step in self.steps:
            step.check_examples_alone(who)


class CostHead(nn.Module, ABC):
    """A head that is given the states of all layers, [B, all units], and adds costs of neighbouring layers to the losses.

    Its outputs hold what the objective needs. For estimators that know what a flip is worth it gives the losses itself.
    """

    @abstractmethod
    def losses(
        self,
        states: Tensor,
        calls: tuple[LayerCall, ...],
        objective: Any,
        of_decoder: OfDecoder,
        *,
        flips: bool,
        tolerance: float,
    ) -> Tensor:
        """The losses [B] of the ``states`` that were sampled in the ``calls`` of all layers, with their gradient in the states.

        That is discrete with ``flips``, to a ``tolerance``, else ordinary. ``of_decoder`` gives the losses of the module behind
        the first layer's states.
        """


# Gives the losses of a network's head behind the states of a layer, with an objective and a tolerance.
OfDecoder = Callable[[Network, LayerCall, Tensor, Objective, float], Tensor]


def no_weight_rule(who: str) -> InputError:
    """The error of an estimator that is asked for the gradient of binary weights and has no rule for it."""
    return InputError(
        f"{who} has no rule for binary weights: use fg.PSA(), fg.ST() or fg.HardST(), or weights='real'; an estimator of your "
        "own gives one by a method weights(self, call) like fg.ST's"
    )


def run_steps(steps: tuple[Step, ...], x: Tensor, known: Known, visit: Visit, draw: Draw) -> tuple[Tensor, Known]:
    """What comes out of all ``steps``, and what is known of it, as :meth:`Step.run` of each gives them."""
    for step in steps:
        x, known = step.run(x, known, visit, draw)
    return x, known


@final
@dataclass(frozen=True)
class Batch:
    """What an estimate is made from.

    Attributes:
        x: inputs [B, ...].
        objective: maps outputs [..., B, K] to losses [..., B].
        draw: the source of noise.
        index: the examples' numbers in the data set, [B], for estimators that remember something of each of them.
    """

    x: Tensor
    objective: Objective
    draw: Draw
    index: Tensor | None = None


class Estimator(ABC):
    """An estimator of the gradient of the expected loss.

    Attributes:
        unbiased: whether the estimate has the exact gradient as its mean, in every network.
        unbiased_in: where a biased estimator is unbiased all the same, in words.
        relaxed_objective: whether it differentiates a surrogate of the expected loss, which is then its loss value.
        second_derivatives: whether its losses are an ordinary function that may be differentiated twice; else that is an error.
        cost: the cost in words, where the number of passes does not tell it.
        citation: where it comes from.
    """

    unbiased: ClassVar[bool]
    unbiased_in: ClassVar[str] = ""
    relaxed_objective: ClassVar[bool] = False
    second_derivatives: bool = False
    cost: ClassVar[str] = ""
    citation: ClassVar[str]

    def __repr__(self) -> str:
        """The class with the arguments that are not its defaults, as far as attributes of the same names tell them."""
        shown = []
        for name, parameter in signature(type(self)).parameters.items():
            value = self.argument(name)
            if isinstance(value, bool | int | float | str | None | nn.Module) and value != parameter.default:
                shown.append(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def argument(self, name: str) -> Any:
        """The argument ``name`` that the estimator was made with: by default the attribute of that name."""
        value = getattr(self, name, None)
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    @abstractmethod
    def passes(self, depth: int) -> int:
        """How many evaluations of the network one estimate takes, for ``depth`` binary layers."""

    def check_latent(self, depth: int, *, sampled: bool) -> None:
        """Refuse latent-variable models of ``depth`` layers for which the estimate would be wrong; by default none.

        ``sampled``: whether the model's entropies are, and not analytic.
        """
        return

    @abstractmethod
    def losses(self, net: Network, batch: Batch) -> Tensor:
        """Losses [B] of the batch: their value is the sampled (or relaxed) loss, their gradient the estimate.

        The objective is evaluated first on the outputs [B, K] whose losses are the value; then anywhere else. An estimator
        that samples nothing may evaluate it on more dimensions from the start. :func:`flipgrad.bounds.bound_losses` needs it
        so, to know what the batch's other draws came to.
        """


class LocalEstimator(Estimator):
    """An estimator that needs only the layer at hand, so that it also works in any graph of binary layers.

    ``needs_head``: whether it has a rule of its own at the head, without which it would be another estimator: then it is for
    :class:`flipgrad.Sequential` alone.
    """

    needs_head: bool = False

    def passes(self, depth: int) -> int:
        return 1

    @abstractmethod
    def states(self, call: LayerCall) -> Tensor:
        """The layer's sampled (or relaxed) states, carrying the estimator's gradient."""

    def weights(self, call: WeightCall) -> Tensor:
        """A layer's sampled (or relaxed) binary weights, carrying the estimator's gradient; by default they are refused."""
        raise no_weight_rule(type(self).__name__)

    @final
    def visit(self, call: LayerCall) -> Tensor:
        """The :meth:`states` of a layer, with its binary weights, if any, by :meth:`weights`."""
        if call.check is not None:
            call.check(self.relaxed_objective)
        call.weight_rule = self.weights
        return self.states(call)

    @final
    def losses(self, net: Network, batch: Batch) -> Tensor:
        calls: list[LayerCall] = []

        def visit(call: LayerCall) -> Tensor:
            calls.append(call)
            return self.visit(call)

        states = net.run(net.front(batch.x), visit, batch.draw)
        if net.by_hand:
            self.check_by_hand("fg.Graph")
            # What is behind the last layers, or beside them, is not known, and differentiated in the ordinary way.
            return evaluate(batch.objective, net.outputs(states))
        calls[-1].earlier = tuple(calls[:-1])
        return self.head(net, calls[-1], states, batch.objective)

    @final
    def check_by_hand(self, who: str) -> None:
        """Refuse, on behalf of ``who``, graphs written by hand, whose head is not known, where the rule needs one."""
        if self.needs_head:
            raise InputError(
                f"{who}: {self} has a rule of its own for the states before the head, and in a graph written by hand these are "
                "not known; use fg.Sequential, or another estimator such as fg.PSA()"
            )

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        """The losses [B] of the ``states`` that the ``last`` layer's evaluation gave; by default with the ordinary gradient."""
        return evaluate(objective, net.outputs(states))


def check_estimator(estimator: object, what: str = "estimator") -> None:
    """Refuse, for ``what`` it was given, anything but an estimator: its class or name, or an object of another kind."""
    if isinstance(estimator, type | str):
        name = estimator.__name__ if isinstance(estimator, type) else estimator
        raise InputError(f"{what}={name!r}: pass an object, e.g. fg.PSA()")
    if not isinstance(estimator, Estimator):
        raise InputError(
            f"{what}: got {type(estimator).__name__}; give estimators, e.g. fg.PSA(), or objects of a class of your own that "
            "inherits from fg.LocalEstimator, fg.PathEstimator or fg.Estimator"
        )


_recommended: list[Callable[[], Estimator]] = []


def recommend(estimator: Callable[[], Estimator]) -> None:
    """Make new objects of an ``estimator`` what :meth:`Network.default_estimator` gives."""
    _recommended[:] = [estimator]
