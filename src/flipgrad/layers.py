r"""Binary layers: an affine map, injected noise, and a sign, :math:`x' = \mathrm{sign}(a(x) - Z)`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.affine import Affine, AffineMap, Padding
from flipgrad.contract import LayerCall, LocalEstimator, check_estimator
from flipgrad.errors import InputError
from flipgrad.flips import Geometry
from flipgrad.guards import capturing, check_exportable, estimate, refuse_scripting, uncompiled
from flipgrad.noise import Logistic, Noise
from flipgrad.norms import Norm, check_norm, normalised, per_channel, scale_and_shift, uses_batch
from flipgrad.record import Record, mark
from flipgrad.sampling import fresh, given


class BinaryLayer(nn.Module, ABC):
    """What :class:`BinaryLinear` and :class:`BinaryConv2d` share; ``input_dims`` are the last dimensions of one input."""

    weight: Tensor
    bias: Any
    input_dims: ClassVar[int]
    estimator: LocalEstimator | None = None
    generator: Generator | None = None
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *arguments: Any, noise: Noise | None, norm: Norm | None) -> None:
        super().__init__(*arguments)
        self.noise = noise or Logistic()
        self.norm = norm
        check_norm(norm, self.plain())

    @abstractmethod
    def plain(self) -> Affine:
        """The map before the norm, with its parameters as they are now."""

    def check_takes_states(self) -> None:
        """Refuse a configuration that is sound only for real-valued inputs."""

    @final
    def affine(self, views: tuple[nn.Module, ...] = ()) -> AffineMap:
        """The map to the pre-activations, norm included, with its parameters as they are now.

        ``views`` are linear modules that the layer sees its input through.
        """
        plain = replace(self.plain(), views=views)
        # Anew each time: a norm may have been replaced, by torch's converters for instance.
        check_norm(self.norm, plain)
        return normalised(plain, self.norm)

    @final
    def effective_weight(self) -> Tensor:
        """The weight times the norm's scale, which is what flips depend on; of ``BatchNorm``, that of eval mode."""
        return self.weight if self.norm is None else per_channel(self.weight, scale_and_shift(self.norm)[0])

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
            binary: whether ``x`` holds states, to be flipped by estimators that do so. By default found out from where ``x``
                came from, by autograd's record: each of its entries must then be one unit of another binary layer, moved or
                with its sign changed, and still ±1, unless the estimator relaxes states. With False the layer's derivative in
                ``x`` is the ordinary one, whatever ``x`` is.
            within: how :class:`flipgrad.Sequential` evaluates the layer; nothing else counts then.
        """
        if within is not None:
            return within(x)
        check_exportable()
        _check_local(estimator, type(self).__name__)
        return uncompiled(self._alone, x, estimator or self.estimator or UNDEFINED, generator, noise, binary)

    def _alone(
        self, x: Tensor, rule: LocalEstimator, generator: Generator | None, noise: Tensor | None, binary: bool | None
    ) -> Tensor:
        """The states in a graph written by hand."""
        prior = None
        if binary is not False:
            record, told = Record.of(x), binary is not None
            binary = binary or bool(record.states)
            if binary:
                self.check_takes_states()
                _check_states(x, type(self).__name__, relaxed=rule.relaxed_objective)
            record.check(type(self).__name__, self.input_dims, relaxed=rule.relaxed_objective, told=told)
            prior = record.prior()
        if prior is not None:
            prior.read()
        draw = fresh(generator or self.generator) if noise is None else given(noise)
        call = LayerCall(self, x, binary, self.affine(), draw, prior)
        result = estimate(rule.states(call), twice=rule.second_derivatives)
        mark(result, call.distribution)
        return result


@final
class BinaryLinear(BinaryLayer, nn.Linear):
    """A fully connected binary layer: ``nn.Linear``, noise, sign.

    Takes the arguments of ``nn.Linear``, keeps its parameters' names, and adds ``noise`` and ``norm``: an
    ``nn.BatchNorm1d(out_features)`` or :class:`flipgrad.ScaleShift` of the pre-activations, before the noise and the sign. It
    is folded into the weight that estimators see, see :mod:`flipgrad.norms`; the layer's own bias may then be left out.

    >>> layer = BinaryLinear(4, 2)
    >>> states = layer(torch.randn(3, 4))
    >>> states.shape, bool((states.abs() == 1).all())
    (torch.Size([3, 2]), True)
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
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, noise=noise, norm=norm)

    def plain(self) -> Affine:
        return Affine(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, noise={self.noise}"


@final
class BinaryConv2d(BinaryLayer, nn.Conv2d):
    """A convolutional binary layer: ``nn.Conv2d``, noise, sign.

    Takes the arguments of ``nn.Conv2d``, keeps its parameters' names, and adds ``noise``, ``norm`` (an
    ``nn.BatchNorm2d(out_channels)`` or :class:`flipgrad.ScaleShift`, as for :class:`BinaryLinear`) and ``padding_value``. A
    position padded with 0 is no unit; ``padding_value`` = -1 or +1 pads with a constant state instead, so that every input of
    the convolution is ±1. Padding that repeats units ("reflect", "replicate", "circular") is for real-valued inputs only.

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
    ) -> None:
        if padding_value not in (-1, 0, 1):
            raise InputError(f"padding_value={padding_value}: choose 0 (no unit there), or the state -1 or 1")
        if padding_value and padding_mode != "zeros":
            raise InputError(f"padding_value={padding_value} with padding_mode={padding_mode!r}: give only one of them")
        arguments = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(*arguments, device, dtype, noise=noise, norm=norm)
        self.padding_value = padding_value

    def plain(self) -> Affine:
        sides = left, right, top, bottom = self._pads()
        stride, dilation = (self.stride[0], self.stride[1]), (self.dilation[0], self.dilation[1])
        constant = self.padding_mode == "zeros"
        if not any(sides) or (constant and not self.padding_value and left == right and top == bottom):
            # The convolution pads by itself.
            return Affine(self.weight, self.bias, Geometry(stride, (top, left), dilation, self.groups))
        padding = Padding(sides, "constant" if constant else self.padding_mode, self.padding_value)
        return Affine(self.weight, self.bias, Geometry(stride, (0, 0), dilation, self.groups), padding)

    def check_takes_states(self) -> None:
        if self.padding_mode != "zeros" and any(self._pads()):
            raise InputError(
                f"BinaryConv2d(padding_mode={self.padding_mode!r}) with binary inputs: it repeats units, and one flip "
                "would count as several; use padding_mode='zeros', with padding_value=-1 or 1 for constant states"
            )

    def extra_repr(self) -> str:
        value = f", padding_value={self.padding_value}" if self.padding_value else ""
        arguments: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}{value}, noise={self.noise}"

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
class _UndefinedGradient(torch.autograd.Function):
    """The sampled sign, whose derivative nobody has chosen."""

    @staticmethod
    def forward(a: Tensor, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # An operator: torch.compile looks at the way back, too, before anyone has asked to go it.
        return torch.ops.flipgrad.refuse_backward(grads[0]), None


def _refuse_backward(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "backward() through sampled binary states without an estimator: call net(x, objective, estimator=fg.PSA()), or "
        "fg.use(model, fg.PSA()) before model(x); or evaluate under torch.no_grad()"
    )


torch.library.define("flipgrad::refuse_backward", "(Tensor grad) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl("flipgrad::refuse_backward", "default", _refuse_backward)
torch.library.register_fake("flipgrad::refuse_backward", torch.empty_like)


@final
class Undefined(LocalEstimator):
    """The rule of a layer without an estimator: sampled states, and an error instead of a wrong gradient."""

    def states(self, call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        result: Tensor = _UndefinedGradient.apply(a, call.sample(a))  # type: ignore[no-untyped-call]
        return result


UNDEFINED = Undefined()

ModelT = TypeVar("ModelT", bound=nn.Module)


def use(model: ModelT, estimator: LocalEstimator | None, *, generator: Generator | None = None) -> ModelT:
    """Give every binary layer of ``model`` a local estimator, for an ordinary ``model(x)`` and an ordinary loss.

    For networks written by hand: skip connections, branches, concatenations. Whatever follows the last binary layer is
    differentiated in the ordinary way, i.e. the head is linearised; :class:`flipgrad.Sequential` flips it exactly.

    Between binary layers states may be reshaped, permuted, sliced, padded with ±1, concatenated, or change their sign: from
    autograd's record every layer sees that each entry of its input is one unit. All else, max-pooling or a sum say, is refused
    by name. So is a unit that one input holds twice, whose copies would be flipped one at a time; it may go to many layers.
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
            f"{who}: {type(estimator).__name__} needs the whole network; pass it to fg.Sequential: "
            "net(x, objective, estimator=...)"
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
