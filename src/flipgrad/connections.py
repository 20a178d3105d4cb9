"""The weighted connections from a layer's input to its output channels: real or binary weights, and a norm after them."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from flipgrad.affine import Affine, AffineMap, Padding, over_channels, per_channel
from flipgrad.errors import InputError
from flipgrad.flips import Geometry
from flipgrad.noise import Noise, sign
from flipgrad.norms import Norm, check_norm, normalise, normalised, scale_and_shift, uses_batch

# What weights are: any numbers, or ±1 times a scale per output channel.
WeightKind = Literal["real", "binary"]


class Connections(nn.Module, ABC):
    """What :class:`FullConnections` and :class:`Convolution` share; ``weight`` is latent if weights are binary."""

    weight: Tensor
    bias: Any
    weight_scale: nn.Parameter | None

    def __init__(
        self,
        *arguments: Any,
        norm: Norm | None,
        weights: WeightKind,
        weight_noise: Noise | None,
        weight_clip: float | None,
    ) -> None:
        super().__init__(*arguments)
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

    def affine(self, views: tuple[nn.Module, ...] = (), weight: Tensor | None = None) -> AffineMap:
        """The map to the pre-activations, norm and scale included; see :meth:`plain`."""
        plain = self.plain(views, weight)
        # Anew each time: a norm may have been replaced, by torch's converters for instance.
        check_norm(self.norm, plain)
        return normalised(plain, self.norm, self.weight_scale)

    def scaled(self, sums: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the norm, or the scale of binary weights, makes of what :meth:`before_scale` gave, and that scale [out]."""
        plain = self.plain()
        check_norm(self.norm, plain)
        if self.norm is not None or self.weight_scale is None:
            return normalise(self.norm, sums, plain.channel_dim)
        scale = over_channels(self.weight_scale, plain)
        scaled = sums * scale if self.bias is None else torch.addcmul(over_channels(self.bias, plain), sums, scale)
        return scaled, self.weight_scale.detach()

    def before_scale(self, weight: Tensor | None = None) -> Affine:
        """The map whose result :meth:`scaled` takes: :meth:`plain`, without a bias that comes after the scale."""
        plain = self.plain((), weight)
        return plain if self.weight_scale is None else replace(plain, bias=None)

    def effective_weight(self) -> Tensor:
        """The weight times its scale, which is what flips depend on; of ``BatchNorm``, that of eval mode.

        Of binary weights, the likeliest.
        """
        weight = self.plain().weight
        if self.norm is not None:
            return per_channel(weight, scale_and_shift(self.norm)[0])
        return weight if self.weight_scale is None else per_channel(weight, self.weight_scale)

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
    def weights_repr(self) -> str:
        """Binary weights and their noise, as ``repr`` shows them; of real ones, nothing."""
        return f", weights='binary', weight_noise={self.weight_noise}" if self.weights == "binary" else ""

    @final
    @property
    def mixes_examples(self) -> bool:
        """Whether the norm takes its statistics from the batch, so that pre-activations depend on the other examples."""
        return uses_batch(self.norm)


class FullConnections(Connections, nn.Linear):
    """Of every input with every output: the map of ``nn.Linear``."""

    def map_of(self, weight: Tensor) -> Affine:
        return Affine(weight, self.bias)


class Convolution(Connections, nn.Conv2d):
    """The map of ``nn.Conv2d``; a ``padding_value`` of ±1 pads with a constant state."""

    padding_value: float = 0

    def __init__(self, *arguments: Any, padding_value: float = 0, **options: Any) -> None:
        if padding_value not in (-1, 0, 1):
            raise InputError(f"padding_value={padding_value}: choose 0 (no unit there), or the state -1 or 1")
        super().__init__(*arguments, **options)
        if padding_value and self.padding_mode != "zeros":
            raise InputError(f"padding_value={padding_value} with padding_mode={self.padding_mode!r}: give only one of them")
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


def _first_scale(weight: Tensor) -> Tensor:
    """A scale of binary weights with which sums of independent states have variance 1."""
    return weight.detach().new_full((weight.shape[0],), max(1, weight[0].numel()) ** -0.5)
