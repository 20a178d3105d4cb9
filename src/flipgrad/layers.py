r"""Binary layers: an affine map, injected noise, and a sign, :math:`x' = \mathrm{sign}(a(x) - Z)`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.affine import Affine, AffineMap, Padding, per_channel
from flipgrad.contract import LayerCall, LocalEstimator, Visit, WeightCall, check_estimator
from flipgrad.errors import InputError
from flipgrad.flips import Geometry
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
from flipgrad.noise import Logistic, Noise, sign
from flipgrad.norms import Norm, check_norm, normalised, scale_and_shift, uses_batch
from flipgrad.record import Record, mark
from flipgrad.sampling import Apart, Draw, fresh, given

# What a layer's weights are: any numbers, or ±1 times a scale per output channel.
WeightKind = Literal["real", "binary"]


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
    """What :class:`BinaryLinear` and :class:`BinaryConv2d` share; ``input_dims`` are the last dimensions of one input."""

    weight: Tensor
    bias: Any
    weight_scale: nn.Parameter | None
    input_dims: ClassVar[int]
    estimator: LocalEstimator | None = None
    generator: Generator | None = None
    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        *arguments: Any,
        noise: Noise | None,
        norm: Norm | None,
        weights: WeightKind,
        weight_noise: Noise | None,
        weight_clip: float | None,
    ) -> None:
        super().__init__(*arguments)
        self.noise = noise or Logistic()
        self.norm = norm
        self.weights = weights
        self.weight_noise = weight_noise
        self.weight_clip = weight_clip
        own_scale = weights == "binary" and norm is None
        self.register_parameter("weight_scale", nn.Parameter(_first_scale(self.weight)) if own_scale else None)
        self.check_weights()
        check_norm(norm, self.plain())

    @abstractmethod
    def map_of(self, weight: Tensor) -> Affine:
        """The map before the norm with this ``weight``, and the other parameters as they are now."""

    @final
    def plain(self, views: tuple[nn.Module, ...] = (), weight: Tensor | None = None) -> Affine:
        """The map before the norm. Binary weights are ``weight``, or the likeliest, and have no scale here.

        ``views`` are linear modules that the layer sees its input through.
        """
        if self.weights == "real":
            return replace(self.map_of(self.weight), views=views)
        return replace(self.map_of(sign(self.weight.detach()) if weight is None else weight), views=views, binary_weights=True)

    def check_takes_states(self) -> None:
        """Refuse a configuration that is sound only for real-valued inputs."""

    @final
    def affine(self, views: tuple[nn.Module, ...] = (), weight: Tensor | None = None) -> AffineMap:
        """The map to the pre-activations, norm and scale included; see :meth:`plain`."""
        plain = self.plain(views, weight)
        # Anew each time: a norm may have been replaced, by torch's converters for instance.
        check_norm(self.norm, plain)
        return normalised(plain, self.norm, self.weight_scale)

    @final
    def effective_weight(self) -> Tensor:
        """The weight times its scale, which is what flips depend on; of ``BatchNorm``, that of eval mode.

        Of binary weights, the likeliest.
        """
        weight = self.plain().weight
        if self.norm is not None:
            return per_channel(weight, scale_and_shift(self.norm)[0])
        return weight if self.weight_scale is None else per_channel(weight, self.weight_scale)

    @final
    def check_weights(self) -> None:
        """Refuse options of the weights that do not go together; asked anew each time, as they may have been changed."""
        name = type(self).__name__
        if self.weights not in ("real", "binary"):
            raise InputError(f"{name}(weights={self.weights!r}): choose 'real' or 'binary'")
        if self.weights == "real" and (self.weight_noise is not None or self.weight_clip is not None):
            raise InputError(f"{name}: weight_noise and weight_clip are options of weights='binary', these are real")
        if self.weight_noise is not None and not isinstance(self.weight_noise, Noise):
            raise InputError(f"{name}(weight_noise={self.weight_noise!r}): give a noise, e.g. fg.Logistic(0.1), or None")
        if self.weight_clip is not None and not (isinstance(self.weight_clip, float | int) and self.weight_clip > 0):
            raise InputError(f"{name}(weight_clip={self.weight_clip!r}): the limit must be a positive number, e.g. 1.0")
        if self.weight_clip is not None and self.weight_noise is not None:
            raise InputError(f"{name}: weight_clip is for weights that are not drawn; leave out it or weight_noise")
        if self.weight_scale is not None and (self.weights == "real" or self.norm is not None):
            why = "its weights became real" if self.weights == "real" else "it was given a norm, whose scale counts"
            raise InputError(
                f"{name} has a weight_scale, which would be ignored, as {why}: set layer.weight_scale = None, or make the "
                "layer anew"
            )

    @final
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # A checkpoint of real weights goes on as binary ones of the same mean size.
        weight, own = state_dict.get(f"{prefix}weight"), f"{prefix}weight_scale"
        if self.weight_scale is not None and own not in state_dict and isinstance(weight, Tensor) and weight.dim() > 1:
            state_dict = {**state_dict, own: weight.abs().flatten(1).mean(1)}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @final
    def options_repr(self) -> str:
        """The noise and, of binary weights, these, as ``repr`` shows them."""
        weights = f", weights='binary', weight_noise={self.weight_noise}" if self.weights == "binary" else ""
        return f"noise={self.noise}{weights}"

    @final
    @property
    def mixes_examples(self) -> bool:
        """Whether the norm takes its statistics from the batch, so that pre-activations depend on the other examples."""
        return uses_batch(self.norm)

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
            return run.visit(LayerCall(self, x, run.known[number], (), run.draw))
        return self._by_hand(x, run.visit, run.draw, binary, found=partial(run.known.__setitem__, number))

    def _by_hand(
        self, x: Tensor, visit: Visit, draw: Draw, binary: bool | None, found: Callable[[bool], None] = lambda binary: None
    ) -> Tensor:
        """The states in a graph written by hand; once ``x`` was checked, ``found`` is told whether it holds states."""
        prior = check = None
        if binary is not False:
            record, told = Record.of(x), binary is not None
            binary = binary or bool(record.states)
            check = partial(self._check_input, record, binary, told, found)
            prior = record.prior()
        if prior is not None:
            prior.read()
        call = LayerCall(self, x, binary, (), draw, prior, check=check)
        result = visit(call)
        mark(result, call.distribution)
        return result

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
class BinaryLinear(BinaryLayer, nn.Linear):
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

    def map_of(self, weight: Tensor) -> Affine:
        return Affine(weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options_repr()}"


@final
class BinaryConv2d(BinaryLayer, nn.Conv2d):
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
    padding_value: float = 0

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
        if padding_value not in (-1, 0, 1):
            raise InputError(f"padding_value={padding_value}: choose 0 (no unit there), or the state -1 or 1")
        if padding_value and padding_mode != "zeros":
            raise InputError(f"padding_value={padding_value} with padding_mode={padding_mode!r}: give only one of them")
        arguments = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        options: dict[str, Any] = {"weights": weights, "weight_noise": weight_noise, "weight_clip": weight_clip}
        super().__init__(*arguments, device, dtype, noise=noise, norm=norm, **options)
        self.padding_value = padding_value

    def map_of(self, weight: Tensor) -> Affine:
        sides = left, right, top, bottom = self._pads()
        stride, dilation = (self.stride[0], self.stride[1]), (self.dilation[0], self.dilation[1])
        constant = self.padding_mode == "zeros"
        if not any(sides) or (constant and not self.padding_value and left == right and top == bottom):
            # The convolution pads by itself.
            return Affine(weight, self.bias, Geometry(stride, (top, left), dilation, self.groups))
        padding = Padding(sides, "constant" if constant else self.padding_mode, self.padding_value)
        return Affine(weight, self.bias, Geometry(stride, (0, 0), dilation, self.groups), padding)

    def check_takes_states(self) -> None:
        if self.padding_mode != "zeros" and any(self._pads()):
            raise InputError(
                f"BinaryConv2d(padding_mode={self.padding_mode!r}) with binary inputs: it repeats units, and one flip "
                "would count as several; use padding_mode='zeros', with padding_value=-1 or 1 for constant states"
            )

    def extra_repr(self) -> str:
        value = f", padding_value={self.padding_value}" if self.padding_value else ""
        arguments: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}{value}, {self.options_repr()}"

    def _pads(self) -> tuple[int, int, int, int]:
        """Left, right, top, bottom; "same" puts the odd one at the end, as ``nn.Conv2d`` does."""
        if self.padding == "valid":
            return (0, 0, 0, 0)
        if self.padding == "same":
            whole = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            halves = [n // 2 for n in whole]
            return halves[1], whole[1] - halves[1], halves[0], whole[0] - halves[0]
        rows, columns = (int(pad) for pad in self.padding)
        return columns, columns, rows, rows


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

    Between binary layers states may be reshaped, permuted, sliced, padded with ±1, concatenated, or change their sign: from
    autograd's record every layer sees that each entry of its input is one unit. All else, max-pooling or a sum say, is refused
    by name. So is a unit that one input holds twice, whose copies would be flipped one at a time; it may go to many layers.
    :class:`flipgrad.Graph` gives such a model the methods of ``Sequential``: predictions, members, initialisation, training.
    With ``inputs="posterior"`` or "rao-blackwell" it may go to one layer only, and not to the head besides. What autograd does
    not record (``detach``, ``torch.no_grad``, comparisons) is taken for constant, as everywhere in torch.

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
            f"{who}: {type(estimator).__name__} needs the whole network; pass it to fg.Sequential, or to fg.Graph(model, x) of a "
            "model written by hand: net(x, objective, estimator=...)"
        )


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
        "two states is the concatenation with the weight twice, an average pooling belongs into fg.Sequential)"
    )


def _first_scale(weight: Tensor) -> Tensor:
    """A scale of binary weights with which sums of independent states have variance 1."""
    return weight.detach().new_full((weight.shape[0],), max(1, weight[0].numel()) ** -0.5)
