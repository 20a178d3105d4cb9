"""Networks for the built-in data sets, and by name for the command line."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as brief
from typing import Any, Literal, final, get_args

import torch
from torch import nn

from flipgrad import memory
from flipgrad.connections import WeightKind
from flipgrad.data import DataSet
from flipgrad.errors import InputError
from flipgrad.layers import BinaryConv2d, BinaryLinear
from flipgrad.network import Sequential
from flipgrad.noise import Noise
from flipgrad.norms import ScaleShift
from flipgrad.residual import ResidualConv2d, ShortcutKind

# Before every sign: nothing, BatchNorm, or a learned scale and shift per channel.
NormName = Literal["none", "batch", "affine"]
NORMS: tuple[NormName, ...] = get_args(NormName)
WEIGHTS: tuple[WeightKind, ...] = get_args(WeightKind)

# The paper's network for CIFAR-10, layer by layer.
CIFAR_CHANNELS = (96, 96, 96, 192, 192, 192, 192, 192)
CIFAR_KERNELS = (3, 3, 3, 3, 3, 3, 3, 1)
CIFAR_STRIDES = (1, 1, 2, 1, 1, 2, 1, 1)

# Channels and residual blocks of every stage of the residual network.
RESIDUAL_STAGES = ((64, 2), (128, 3), (256, 3))

# Units of one layer: with more of them, sizes of weights leave the numbers of 64 bits.
MOST_UNITS = 2**24

# A convolution: channels of its output, kernel, stride, padding.
_Conv = tuple[int, int, int, int]


@final
@dataclass(frozen=True)
class _Kind:
    """What the binary layers of a network have in common; see :func:`digits_net`."""

    noise: Noise | None
    norm: NormName
    weights: WeightKind
    weight_noise: Noise | None

    def __post_init__(self) -> None:
        # Here, as a network of one layer, whose weights are real, hands none of them on to a layer that would look.
        if self.norm not in NORMS:
            raise InputError(f"unknown norm {self.norm!r}; choose from {', '.join(NORMS)}")
        if self.weights not in WEIGHTS:
            raise InputError(f"unknown weights {self.weights!r}; choose from {', '.join(WEIGHTS)}")
        if self.weight_noise is not None and self.weights != "binary":
            raise InputError(f"weight_noise={self.weight_noise!r} is for binary weights; give weights='binary', too")

    def options(self, batch_norm: Callable[[int], nn.Module], channels: int, *, real_inputs: bool) -> dict[str, Any]:
        """The options of one layer; one with a norm, which has a shift of its own, has no bias.

        A layer with real-valued inputs keeps real weights, whatever the others have. It is the first one: small, and where
        binary weights cost most accuracy. Its products are with real numbers anyway, so that bits would not make them cheap.
        """
        kinds: dict[str, Callable[[int], nn.Module]] = {"batch": batch_norm, "affine": ScaleShift}
        norm = kinds[self.norm](channels) if self.norm in kinds else None
        options: dict[str, Any] = {"noise": self.noise, "bias": self.norm == "none", "norm": norm}
        return options if real_inputs else {**options, "weights": self.weights, "weight_noise": self.weight_noise}


def digits_net(
    classes: int = 10,
    *,
    width: float = 1.0,
    noise: Noise | None = None,
    norm: NormName = "none",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """A small convolutional net for 8x8 images: a real-valued convolution, two binary ones, a linear head.

    Args:
        classes: outputs of the head.
        width: the factor on the numbers of channels.
        noise: of all units; logistic by default.
        norm: before every sign: "none", "batch" (``BatchNorm``) or "affine" (:class:`flipgrad.ScaleShift`).
        weights: "real" or "binary", of all binary layers but the first: that one sees real-valued inputs, and keeps real
            weights.
        weight_noise: that binary weights are drawn with; without it they are the signs of ``weight``.

    >>> [layer.weights for layer in digits_net(weights="binary").binary_layers]
    ['real', 'binary']
    """
    convs = [(32, 3, 1, 1), (64, 3, 2, 1), (64, 3, 1, 0)]
    return _convolutional("digits_net", 1, convs, classes, width, _Kind(noise, norm, weights, weight_noise), real=1)


def mnist_net(
    classes: int = 10,
    *,
    width: float = 1.0,
    noise: Noise | None = None,
    norm: NormName = "none",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """A convolutional net for 28x28 images: a real-valued convolution, three binary ones, a linear head on 512 units.

    Small enough for a processor: strides in place of pooling keep the binary layers at 7x7, 5x5 and 2x2 positions.
    Arguments are those of :func:`digits_net`.
    """
    convs = [(32, 5, 2, 2), (64, 3, 2, 1), (128, 3, 1, 0), (128, 3, 2, 0)]
    return _convolutional("mnist_net", 1, convs, classes, width, _Kind(noise, norm, weights, weight_noise), real=1)


def cifar_net(
    width: float = 1.0,
    classes: int = 10,
    *,
    noise: Noise | None = None,
    norm: NormName = "none",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """The paper's all-convolutional network for 32x32 colour images: eight binary convolutions and a linear head.

    Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks. NeurIPS 2020,
    appendix C.2, after Springenberg et al. 2014: strides instead of pooling, no padding, 192 x 2 x 2 units before the head.
    Arguments are those of :func:`digits_net`; the paper has no norm.
    """
    convs = [(*conv, 0) for conv in zip(CIFAR_CHANNELS, CIFAR_KERNELS, CIFAR_STRIDES, strict=True)]
    return _convolutional("cifar_net", 3, convs, classes, width, _Kind(noise, norm, weights, weight_noise), real=0)


def residual_net(
    width: float = 1.0,
    classes: int = 10,
    *,
    noise: Noise | None = None,
    norm: NormName = "batch",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """A residual network for 32x32 colour images: a real-valued convolution, eight residual blocks, a linear head.

    The first convolution has a stride of 2, as arithmetic is better spent on many channels of 16x16 pixels and fewer than at
    32x32. The blocks are :class:`flipgrad.ResidualConv2d` with PReLU, of 64, 128 and 256 channels at 16x16, 8x8 and 4x4.
    Arguments are those of :func:`digits_net`, with norms of the stream before every sign and of what a block adds to it; all
    weights of blocks may be binary. The recipe "cifar10" trains it, see :mod:`flipgrad.training.recipes`.
    """
    kind = _Kind(noise, norm, weights, weight_noise)
    channels = _widened("residual_net", width, [channels for channels, _ in RESIDUAL_STAGES])
    before = channels[0]
    blocks: list[nn.Module] = []
    for now, (_, count) in zip(channels, RESIDUAL_STAGES, strict=True):
        for number in range(count):
            options = kind.options(nn.BatchNorm2d, now, real_inputs=False)
            options["branch_norm"] = options["norm"]
            options["norm"] = kind.options(nn.BatchNorm2d, before, real_inputs=False)["norm"]
            shortcut: ShortcutKind = "project" if now % before else "repeat"
            stride = 2 if blocks and not number else 1
            blocks.append(ResidualConv2d(before, now, stride=stride, shortcut=shortcut, prelu=True, **options))
            before = now
    first = nn.Conv2d(3, channels[0], 4, 2, 1, bias=False), nn.BatchNorm2d(channels[0]), nn.PReLU(channels[0])
    head = nn.Sequential(nn.BatchNorm2d(before), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return Sequential(*first, *blocks, head=head)


def fully_connected(
    inputs: int,
    widths: Sequence[int],
    classes: int,
    *,
    noise: Noise | None = None,
    norm: NormName = "none",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """Binary layers of the given ``widths``, each connected to all of the one before, and a linear head.

    Args:
        inputs: numbers per example, [B, inputs].
        widths: units of every binary layer.
        classes: outputs of the head.
        noise, norm, weights, weight_noise: as for :func:`digits_net`.

    >>> fully_connected(2, [5, 5, 5], 2).head
    Linear(in_features=5, out_features=2, bias=True)
    """
    kind = _Kind(noise, norm, weights, weight_noise)
    return _fitting(lambda: Sequential(*_connected(inputs, widths, kind), head=nn.Linear(widths[-1], classes)))


# By name: the network, and the images [C, H, W] that it is for.
MODELS: dict[str, tuple[Callable[..., Sequential], tuple[int, int, int]]] = {
    "digits": (digits_net, (1, 8, 8)),
    "mnist": (mnist_net, (1, 28, 28)),
    "cifar": (cifar_net, (3, 32, 32)),
    "residual": (residual_net, (3, 32, 32)),
}


def model(
    name: str,
    data: DataSet,
    width: float = 1.0,
    *,
    noise: Noise | None = None,
    norm: NormName = "none",
    weights: WeightKind = "real",
    weight_noise: Noise | None = None,
) -> Sequential:
    """The network called ``name`` for a data set.

    Args:
        name: one of ``MODELS``, or the units of every layer of a fully connected net, such as "200-200-200-200".
        data: what it is to be trained on.
        width: as for :func:`digits_net`; a factor on units, too.
        noise, norm, weights, weight_noise: as for :func:`digits_net`.

    Raises:
        InputError: if there is no such network, it is not for such images, or it has no weights that could be binary.

    >>> from flipgrad.data import digits
    >>> model("50-50", digits()).head
    Linear(in_features=50, out_features=10, bias=True)
    """
    shape = tuple(data.train.x.shape[1:])
    if re.fullmatch(r"\d{1,20}(-\d{1,20})*", name, re.ASCII):
        widths = _widened("model", width, _checked([int(units) for units in name.split("-")]))
        inputs, head = math.prod(shape), (widths[-1], data.classes)
        kind = _Kind(noise, norm, weights, weight_noise)
        return _fitting(lambda: Sequential(nn.Flatten(), *_connected(inputs, widths, kind), head=nn.Linear(*head)))
    if name not in MODELS:
        raise InputError(
            f"unknown model {brief(name)}; choose from {', '.join(MODELS)}, or give widths such as 200-200-200-200"
        )
    make, wanted = MODELS[name]
    if shape != wanted:
        fitting = [other for other, (_, images) in MODELS.items() if images == shape]
        raise InputError(
            f"model {name!r} is for inputs {list(wanted)}, the data set '{data.name}' has {list(shape)}; choose "
            f"{' or '.join([*fitting, 'widths such as 200-200-200-200'])}"
        )
    options: dict[str, Any] = {"noise": noise, "norm": norm, "weights": weights, "weight_noise": weight_noise}
    return _fitting(lambda: make(width=width, classes=data.classes, **options))


def _fitting(make: Callable[[], Sequential]) -> Sequential:
    """The network, if its weights fit into the memory of this machine."""
    # On this device tensors have sizes and no content.
    with torch.device("meta"):
        size = sum(parameter.numel() * parameter.element_size() for parameter in make().parameters())
    memory.check_fits(size, "the network's weights", "give smaller widths, e.g. 200-200, or a smaller factor on them")
    return make()


def _convolutional(
    name: str, inputs: int, convs: Sequence[_Conv], classes: int, width: float, kind: _Kind, real: int
) -> Sequential:
    """Convolutions, the first ``real`` ones with ReLU and the others binary, and a linear head on their 2 x 2 positions."""
    channels = [inputs, *_widened(name, width, [conv[0] for conv in convs])]
    modules: list[nn.Module] = []
    for number, ((n, m), (_, kernel, stride, padding)) in enumerate(zip(pairwise(channels), convs, strict=True)):
        if number < real:
            modules += [nn.Conv2d(n, m, kernel, stride, padding), nn.ReLU()]
        else:
            options = kind.options(nn.BatchNorm2d, m, real_inputs=number == real)
            modules += [BinaryConv2d(n, m, kernel, stride, padding, **options)]
    return Sequential(*modules, nn.Flatten(), head=nn.Linear(channels[-1] * 2 * 2, classes))


def _connected(inputs: int, widths: Sequence[int], kind: _Kind) -> list[BinaryLinear]:
    sizes = list(pairwise([inputs, *_checked(widths)]))
    if kind.weights == "binary" and len(sizes) == 1:
        raise InputError(
            f"weights are to be binary, and the only binary layer has real-valued inputs, with which it keeps real weights; "
            f"give more layers, e.g. {widths[0]}-{widths[0]}, or leave the weights real"
        )
    return [
        BinaryLinear(n, m, **kind.options(nn.BatchNorm1d, m, real_inputs=not number)) for number, (n, m) in enumerate(sizes)
    ]


def _checked(widths: Sequence[int]) -> Sequence[int]:
    if not widths or min(widths) < 1:
        raise InputError(f"widths={brief(list(widths))}: give the units of every binary layer, e.g. 5-5-5")
    if max(widths) > MOST_UNITS:
        raise InputError(f"widths={brief(list(widths))}: a layer has at most {MOST_UNITS:,} units; give fewer, e.g. 5-5-5")
    return widths


def _widened(name: str, width: float, channels: Sequence[int]) -> list[int]:
    if not 0 < width < math.inf:
        raise InputError(f"{name}(width={width}): the factor on the channels must be positive, e.g. 0.25")
    if width * max(channels) > MOST_UNITS:
        raise InputError(f"{name}(width={width}): a layer has at most {MOST_UNITS:,} units; give a smaller factor, e.g. 1.0")
    return [max(1, round(width * depth)) for depth in channels]
