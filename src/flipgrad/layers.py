r"""Binary layers: an affine map, injected noise, and a sign, :math:`x' = \mathrm{sign}(a(x) - Z)`."""

from abc import ABC
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.affine import AffineMap
from flipgrad.connections import Convolution, FullConnections, WeightKind
from flipgrad.contract import LayerCall, LocalEstimator, Visit, WeightCall, check_estimator
from flipgrad.errors import InputError
from flipgrad.guards import (
    capturing,
    check_exportable,
    check_same_checkpoint,
    checkpoint_at_work,
    estimate,
    hides_record,
    refuse_scripting,
    uncompiled,
    without_derivative,
)
from flipgrad.noise import Logistic, Noise
from flipgrad.norms import Norm
from flipgrad.record import Record, mark
from flipgrad.sampling import Apart, Draw, fresh, given


@final
@dataclass
class ModelRun:
    """One evaluation of a whole model written by hand, by :class:`flipgrad.Graph`: what its layers do in it.

    Attributes:
        visit: gives every layer's states.
        draw: the source of noise.
        known: of every evaluation, by its number, whether the input holds states, as an earlier run found: for runs whose
            record is hidden.
        evaluated: the layers so far, each when it is evaluated.
        recording: whether autograd recorded when it began.
        checkpoint: the one that was at work when it began.
    """

    visit: Visit
    draw: Draw
    known: dict[int, bool]
    evaluated: list[nn.Module]
    recording: bool = field(default_factory=torch.is_grad_enabled)
    checkpoint: object = field(default_factory=checkpoint_at_work)


# The evaluation of a model that this thread is in.
model_run: ContextVar[ModelRun | None] = ContextVar("model_run", default=None)


class BinaryLayer(nn.Module, ABC):
    """What draws states: an affine map to pre-activations, which a subclass gives, then ``noise`` and a sign.

    ``input_dims`` are the last dimensions of one input.
    """

    # What else it has: that of Connections, or of a layer without weights.
    weight: Tensor
    bias: Any
    weight_scale: nn.Parameter | None
    weights: WeightKind
    weight_noise: Noise | None
    norm: Norm | None
    affine: Callable[..., AffineMap]
    check_weights: Callable[[], None]
    check_takes_states: Callable[[], None]
    effective_weight: Callable[[], Tensor]
    input_dims: ClassVar[int]
    estimator: LocalEstimator | None = None
    generator: Generator | None = None
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *arguments: Any, noise: Noise | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise = noise or Logistic()

    def forward(
        self,
        x: Tensor,
        *,
        estimator: LocalEstimator | None = None,
        generator: Generator | None = None,
        noise: Tensor | None = None,
        weight_noise: Tensor | None = None,
        binary: bool | None = None,
        within: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Sampled states ±1 of the layer for the input ``x``.

        Args:
            x: the input: real values (the network's input, or real-valued modules' output) or another layer's ±1 states.
            estimator: gives the states their gradient; without one here or through :func:`flipgrad.use`, going backward
                through the sampled sign is an error.
            generator: the source of randomness.
            noise: Z itself, instead of drawing it; it broadcasts to the pre-activations.
            weight_noise: that of binary weights, likewise.
            binary: whether ``x`` holds states, to be flipped by estimators that do so. By default found out from where ``x``
                came from, by autograd's record: each of its entries must then be one unit of another binary layer, moved or
                with its sign changed, and still ±1, unless the estimator relaxes states. With False the layer's derivative in
                ``x`` is the ordinary one, whatever ``x`` is.
            within: how :class:`flipgrad.Sequential` evaluates the layer; nothing else counts then.

        In a model that :class:`flipgrad.Graph` evaluates, that gives the estimator and the noise, and the layer takes no other.
        """
        if within is not None:
            return within(x)
        check_exportable()
        self.check_weights()
        # Nothing is compiled inside of such a run.
        run = None if torch.compiler.is_dynamo_compiling() else model_run.get()
        if run is not None:
            if any(option is not None for option in (estimator, generator, noise, weight_noise)):
                raise InputError(
                    f"{type(self).__name__} was handed an estimator, a generator or noise inside of a model in fg.Graph, which "
                    "gives its layers these: hand them to net(x, objective, estimator=..., generator=..., noise=...)"
                )
            return uncompiled(self._in_run, x, run, binary)
        _check_local(estimator, type(self).__name__)
        drawn = fresh(generator or self.generator)
        if weight_noise is not None and self.weight_noise is None:
            raise InputError(f"weight_noise was handed in, and {type(self).__name__} draws no weights; give it weight_noise=")
        units = drawn if noise is None else given(noise)
        weights = drawn if weight_noise is None else given(weight_noise, "weights")
        draw = units if units is weights else Apart(units, weights)
        return uncompiled(self._by_hand, x, estimated(estimator or self.estimator), draw, binary)

    def _in_run(self, x: Tensor, run: ModelRun, binary: bool | None) -> Tensor:
        """The states in a graph written by hand that is evaluated as a whole."""
        check_same_checkpoint(run.checkpoint, run.recording)
        number = len(run.evaluated)
        run.evaluated.append(self)
        if binary is None and number in run.known and hides_record(x):
            return self._visited(LayerCall(self, x, run.known[number], (), run.draw), run.visit)
        return self._by_hand(x, run.visit, run.draw, binary, found=partial(run.known.__setitem__, number))

    def _by_hand(
        self, x: Tensor, visit: Visit, draw: Draw, binary: bool | None, found: Callable[[bool], None] = lambda binary: None
    ) -> Tensor:
        """What the layer gives in a graph written by hand; see :meth:`_call`."""
        return self._visited(self._call(x, draw, binary, found), visit)

    @final
    def _visited(self, call: LayerCall, visit: Visit) -> Tensor:
        states = visit(call)
        mark(states, call.distribution and call.distribution.prior())
        return self.result(call, states)

    def result(self, call: LayerCall, states: Tensor) -> Tensor:
        """What the layer gives, of the ``states`` that it drew; by default these."""
        return states

    def _call(self, x: Tensor, draw: Draw, binary: bool | None, found: Callable[[bool], None]) -> LayerCall:
        """The evaluation in a graph written by hand; once ``x`` was checked, ``found`` is told whether it holds states."""
        prior = check = None
        if binary is not False:
            record, told = Record.of(x), binary is not None
            binary = binary or bool(record.states)
            check = partial(self._check_input, record, binary, told, found)
            prior = record.prior()
        if prior is not None:
            prior.read()
        return LayerCall(self, x, binary, (), draw, prior, check=check)

    def _check_input(self, record: Record, binary: bool, told: bool, found: Callable[[bool], None], relaxed: bool) -> None:
        """Refuse what a local estimator would silently be wrong for; see :meth:`Record.check`."""
        name = type(self).__name__
        if not told and hides_record(record.x):
            raise InputError(
                f"{name} cannot see whether its input holds states of other layers: torch.vmap hides autograd's record of it. "
                "Say layer(x, binary=True) for states, binary=False for real values that are never flipped; or evaluate "
                "fg.Graph(model, x) once without vmap, which then knows"
            )
        if binary:
            self.check_takes_states()
            _check_states(record.x, name, relaxed=relaxed)
        record.check(name, self.input_dims, relaxed=relaxed, told=told)
        found(binary)


@final
class BinaryLinear(BinaryLayer, FullConnections):
    """A fully connected binary layer: ``nn.Linear``, noise, sign.

    Takes the arguments of ``nn.Linear``, keeps its parameters' names, and adds ``noise`` and ``norm``: an
    ``nn.BatchNorm1d(out_features)`` or :class:`flipgrad.ScaleShift` of the pre-activations, before the noise and the sign. It
    is folded into the weight that estimators see, see :mod:`flipgrad.norms`; the layer's own bias may then be left out.

    With ``weights="binary"`` the layer computes with weights ±1 and one scale per output, the norm's or, without a norm, the
    parameter ``weight_scale``. The parameter ``weight`` then holds *latent* weights: a checkpoint of real weights loads, and
    goes on as binary. Discrete derivatives in states and in weights are exact at the price of ordinary ones, for every noise
    (:mod:`flipgrad.flips.rank_one`). If the input is real-valued, those in weights cost more.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        noise: of the units, logistic by default.
        norm: of the pre-activations, none by default.
        weights: "real", or "binary".
        weight_noise: the noise Z of binary weights sign(weight - Z), drawn once per evaluation for all examples of the batch.
            Without it, as by default, they are sign(weight), and the gradient in the sign goes to the latent weight as it is.
            That ends at lower losses than drawing them (digits, 25 epochs, two seeds: 0.067; with noise of scale 0.1 0.087, and
            0.103 if that falls to 0.005 on the way).
        weight_clip: without a ``weight_noise``, a latent weight beyond this size gets no gradient. None never clips.

    >>> layer = BinaryLinear(4, 2)
    >>> states = layer(torch.randn(3, 4))
    >>> states.shape, bool((states.abs() == 1).all())
    (torch.Size([3, 2]), True)
    >>> BinaryLinear(4, 2, weights="binary").effective_weight().abs()
    tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]], grad_fn=<AbsBackward0>)
    """

    input_dims = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noise | None = None,
        norm: Norm | None = None,
        weights: WeightKind = "real",
        weight_noise: Noise | None = None,
        weight_clip: float | None = None,
    ) -> None:
        options: dict[str, Any] = {"weights": weights, "weight_noise": weight_noise, "weight_clip": weight_clip}
        super().__init__(in_features, out_features, bias, device, dtype, noise=noise, norm=norm, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, noise={self.noise}{self.weights_repr()}"


@final
class BinaryConv2d(BinaryLayer, Convolution):
    """A convolutional binary layer: ``nn.Conv2d``, noise, sign.

    Takes the arguments of ``nn.Conv2d``, keeps its parameters' names, and adds ``noise``, ``norm`` (an
    ``nn.BatchNorm2d(out_channels)`` or :class:`flipgrad.ScaleShift`), ``weights``, ``weight_noise`` and ``weight_clip``, all as
    for :class:`BinaryLinear`, and ``padding_value``. A position padded with 0 is no unit; ``padding_value`` = -1 or +1 pads
    with a constant state instead, so that every input of the convolution is ±1. Padding that repeats units ("reflect",
    "replicate", "circular") is for real-valued inputs only.

    >>> BinaryConv2d(1, 8, 3, padding=1, padding_value=-1)(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 8, 8, 8])
    """

    input_dims = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noise | None = None,
        norm: Norm | None = None,
        padding_value: float = 0,
        weights: WeightKind = "real",
        weight_noise: Noise | None = None,
        weight_clip: float | None = None,
    ) -> None:
        arguments = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        options: dict[str, Any] = {"weights": weights, "weight_noise": weight_noise, "weight_clip": weight_clip}
        super().__init__(*arguments, device, dtype, noise=noise, norm=norm, padding_value=padding_value, **options)

    def extra_repr(self) -> str:
        value = f", padding_value={self.padding_value}" if self.padding_value else ""
        arguments: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}{value}, noise={self.noise}{self.weights_repr()}"


@final
class Undefined(LocalEstimator):
    """The rule of a layer without an estimator: sampled states, and an error instead of a wrong gradient."""

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        return without_derivative(a, call.sample(a))

    def weights(self, call: WeightCall) -> Tensor:
        return call.undefined()


UNDEFINED = Undefined()


def estimated(rule: LocalEstimator | None) -> Visit:
    """Gives a layer's states with the gradient of ``rule``, guarded; without one, that is an error on the way back."""
    chosen: LocalEstimator = rule or UNDEFINED
    return lambda call: estimate(chosen.visit(call), twice=chosen.second_derivatives)


ModelT = TypeVar("ModelT", bound=nn.Module)


def use(model: ModelT, estimator: LocalEstimator | None, *, generator: Generator | None = None) -> ModelT:
    """Give every binary layer of ``model`` a local estimator, for an ordinary ``model(x)`` and an ordinary loss.

    For networks written by hand: skip connections, branches, concatenations. Whatever follows the last binary layer is
    differentiated in the ordinary way, i.e. the head is linearised; :class:`flipgrad.Sequential` flips it exactly.

    Between binary layers states may be reshaped, permuted, sliced, padded with ±1, concatenated, change their sign, or be
    pooled by :class:`flipgrad.MaxPool2d`: from autograd's record every layer sees that each entry of its input is one unit. All
    else, torch's own max-pooling or a sum say, is refused by name. So is a unit that one input holds twice, whose copies would
    be flipped one at a time; it may go to many layers. :class:`flipgrad.Graph` gives such a model the methods of
    ``Sequential``: predictions, members, initialisation, training. With ``inputs="posterior"`` or "rao-blackwell" it may go to
    one layer only, and not to the head besides. What autograd does not record (``detach``, ``torch.no_grad``, comparisons) is
    taken for constant, as everywhere in torch.

    Args:
        model: any module with binary layers in it.
        estimator: one that needs only the layer at hand, such as ``fg.PSA()`` or ``fg.ST()``; None takes it away again.
        generator: the source of randomness of all these layers, kept until the next call of ``use``.

    Returns:
        ``model``, changed in place.
    """
    layers = [module for module in model.modules() if isinstance(module, BinaryLayer)]
    if not layers:
        raise InputError(
            f"fg.use: {type(model).__name__} has no binary layer; build it with fg.BinaryLinear or fg.BinaryConv2d"
        )
    _check_local(estimator, "fg.use")
    for layer in layers:
        layer.estimator = estimator
        layer.generator = generator
    return model


def _check_local(estimator: object, who: str) -> None:
    """Refuse, on behalf of ``who``, anything but a local estimator or None."""
    if estimator is None:
        return
    check_estimator(estimator)
    if not isinstance(estimator, LocalEstimator):
        raise InputError(
            f"{who}: {type(estimator).__name__} needs the whole network; pass it to fg.Sequential, or to fg.Graph(model, x) of "
            "a model written by hand: net(x, objective, estimator=...)"
        )
    estimator.check_by_hand(who)


def _check_states(x: Tensor, layer: str, *, relaxed: bool) -> None:
    """Refuse, on behalf of a ``layer``, what is not ±1 or, of relaxed states, what is not between -1 and 1."""
    if capturing():
        return
    right = x.abs() <= 1 if relaxed else x.abs() == 1
    if bool(right.all()):
        return
    wrong = x[~right].flatten()[0].item()
    kind = "relaxed hidden states that are not in [-1, 1]" if relaxed else "hidden states that are not ±1"
    raise InputError(
        f"{layer} was handed {kind} (for example {wrong:g}): binary layers take each other's states as they "
        "are. Reshape, slice or concatenate them; do not scale, add or activate them, nor mix them with real values (a sum of "
        "two states is the concatenation with the weight twice, an average pooling belongs into fg.Sequential). To make states "
        "of real numbers, such as a residual stream, quantise them: fg.Sign(noise)(x)"
    )
