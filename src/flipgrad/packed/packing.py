"""Packs a trained network: binary weights into bits, norms into a scale and a shift, all else as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

import flipgrad.max_pooling
from flipgrad.connections import Connections, Convolution
from flipgrad.contract import Step
from flipgrad.errors import InputError
from flipgrad.guards import has_hooks
from flipgrad.network import Sequential, check_sequential
from flipgrad.noise import Noise, sign
from flipgrad.norms import Norm, ScaleShift, scale_and_shift
from flipgrad.packed import parts
from flipgrad.packed.network import Facts, PackedNetwork
from flipgrad.packed.parts import Array, Part, Value, after
from flipgrad.packed.tables import thresholds
from flipgrad.pooling import Pool, PoolModule
from flipgrad.residual import Projection, Residual, Sign
from flipgrad.steps import AddToStream, Apply, Branch, OnStream, PoolStates, Sample

# Shifts are moved by at most this many of their last digits, so that exact arithmetic decides as rounded does.
MOST_NUDGES = 64
WAY_OUT = "train it with weights='binary' (flipgrad train --weights binary), or export it: flipgrad export RUN --to onnx"


def pack(net: Sequential, example: Tensor, facts: Facts | None = None) -> PackedNetwork:
    """The network in bits, as :func:`flipgrad.packed.load` reads it from a file.

    Binary weights behind states become bits, drawn ones their likeliest values; norms are those of eval mode. Layers that see
    real numbers, and the head, stay as they are, in single precision. ``packed.save(path)`` writes the file, whose arrays have
    the bytes that :func:`flipgrad.summary` tells.

    Args:
        net: the trained network.
        example: inputs [B, ...], B >= 1, of the size that it will see.
        facts: names of classes, how pixels become inputs, and what else is to stand in the file.

    Raises:
        InputError: if a part of it cannot be packed: which one, and the way out.

    >>> import flipgrad as fg
    >>> hidden = fg.BinaryLinear(64, 32, weights="binary")
    >>> net = fg.Sequential(fg.BinaryLinear(8, 64), hidden, head=nn.Linear(32, 10))
    >>> x = torch.randn(5, 8)
    >>> packed = pack(net, x)
    >>> packed(x.numpy()).shape, packed(x.numpy(), samples=10).shape
    ((5, 10), (5, 10))
    """
    check_sequential(net, "pack")
    if not isinstance(example, Tensor) or not 2 <= example.dim() <= 4 or not len(example):
        raise InputError("pack(net, example) takes at least one example, [B, n] or [B, channels, height, width]")
    packer = _Packer(net)
    with torch.no_grad():
        program = packer.network(Value(tuple(example.shape[1:])))
    return PackedNetwork(program, tuple(example.shape[1:]), facts, names=packer.names)


@final
class _Packer:
    """Turns modules into parts. Arrays that modules share are one array."""

    def __init__(self, net: Sequential) -> None:
        self.net = net
        self.names: dict[int, str] = {}
        self._keys = {id(tensor): name for name, tensor in (*net.named_parameters(), *net.named_buffers())}
        self._modules = {id(module): name for name, module in net.named_modules()}
        self._arrays: dict[tuple[int, str], Array] = {}
        # What arrays were made of, so that nothing else gets the same identity.
        self._kept: list[Tensor] = []

    def network(self, given: Value) -> tuple[Part, ...]:
        """The program of the whole network on inputs like ``given``."""
        network = self.net.network()
        front = self.modules(network.real, given)
        body = self.steps(network.steps, _after(front, given))
        tail = self.modules((*network.tail, network.head), _after((*front, *body), given))
        return (*front, *body, *tail)

    def steps(self, steps: Iterable[Step], given: Value) -> tuple[Part, ...]:
        """The parts of the steps of a network."""
        found: list[Part] = []
        for step in steps:
            now = _after(found, given)
            if isinstance(step, Sample):
                found += self.layer(step, now)
            elif isinstance(step, AddToStream):
                found += self.block(step.block, now)
            elif isinstance(step, Branch):
                # Without the dimension of the batch.
                dim = step.dim - 1 if step.dim > 0 else step.dim + len(now.shape)
                found.append(parts.Concat(tuple(self.steps(chain, now) for chain in step.chains), dim))
            elif isinstance(step, Apply | OnStream | PoolStates):
                found += self.module(step.module, now)
            else:
                raise _refused(type(step).__name__)
        return tuple(found)

    def layer(self, step: Sample, given: Value) -> list[Part]:
        """A binary layer."""
        layer = step.layer
        name = self._name(layer)
        layer.check_weights()
        drawn = parts.Sign(*_noise(layer.noise, name))
        if isinstance(layer, Sign):
            return [*self.norm(layer.norm), drawn]
        if not isinstance(layer, Connections):
            raise _refused(name)
        if not step.binary:
            return [*self.real_connections(layer), drawn]
        if layer.weights != "binary":
            raise InputError(f"{name} has real weights behind states, which no bits can hold: {WAY_OUT}")
        views = list(self.modules(step.views, given))
        # Averages are divided after the sums, which stay whole numbers.
        factor = math.prod(view.factor for view in views if isinstance(view, parts.Factor))
        views = [view for view in views if not isinstance(view, parts.Factor)]
        sums = self.sums(layer)
        seen = _after([*views, sums], given)
        scale, shift = self.folded(layer, seen.bound, factor)
        return [*views, sums, *([parts.Factor(factor)] if factor != 1 else []), parts.Affine(scale, shift), drawn]

    def block(self, block: Residual, given: Value) -> list[Part]:
        """A residual block."""
        name, branch = self._name(block), block.branch
        block.check_weights()
        if branch.weights != "binary":
            raise InputError(f"{name} has real weights behind states, which no bits can hold: {WAY_OUT}")
        past: list[Part] = []
        stride = block.shortcut.stride
        if stride != (1, 1):
            past += [parts.WindowSum(stride, stride), parts.Factor(1 / math.prod(stride))]
        if isinstance(block.shortcut, Projection):
            past += self.module(block.shortcut.linear, given)
        elif block.shortcut.times > 1:
            past.append(parts.Repeat(block.shortcut.times))
        drawn = parts.Sign(*_noise(block.noise, name))
        added = [*self.norm(block.norm), drawn, self.sums(branch), *self.after_sums(branch)]
        prelu = [] if block.prelu is None else self.module(block.prelu, given)
        return [parts.Add((tuple(past), tuple(added))), *prelu]

    def sums(self, layer: Any) -> parts.Sums:
        """The part of a layer's binary weights."""
        weight = layer.weight
        bits = self.array(
            weight, lambda: np.packbits(weight.detach().flatten().cpu().numpy() >= 0), "bits", f"{self._key(layer)}.bits"
        )
        shape = tuple(weight.shape)
        return parts.Sums(bits, shape[0], shape[1:], **(_geometry(layer) if isinstance(layer, Convolution) else {}))

    def after_sums(self, layer: Connections) -> list[Part]:
        """What comes after the sums by binary weights: their scale and bias, or a bias and a norm."""
        bias = None if layer.bias is None else self.array(layer.bias)
        if layer.weight_scale is not None:
            return [parts.Affine(self.array(layer.weight_scale), bias)]
        return [*([] if bias is None else [parts.Affine(None, bias)]), *self.norm(layer.norm)]

    def folded(self, layer: Any, bound: int, factor: float) -> tuple[Array, Array]:
        """The scale and the shift of a binary layer, with which integers are decided as PyTorch decides them."""
        affine = layer.affine()
        scale = affine.scale.detach().float()
        shift = torch.zeros_like(scale) if affine.bias is None else affine.bias.detach().float()
        if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
            raise InputError(f"{self._name(layer)} has a scale or a bias that is not finite; train it again")
        key = self._key(layer)
        return (
            self.array(layer.weight, lambda: scale.cpu().numpy().copy(), "scale", f"{key}.scale"),
            self.array(layer.weight, lambda: _nudged(layer, scale, shift, bound, factor), "shift", f"{key}.shift"),
        )

    def real_connections(self, layer: Any) -> list[Part]:
        """A layer on real numbers: its weights, be they binary, are as good as real."""
        binary = layer.weights == "binary"
        weight = (
            self.array(layer.weight, lambda: sign(layer.weight.detach()).cpu().numpy(), "signs")
            if binary
            else self.array(layer.weight)
        )
        bias = None if layer.bias is None or layer.weight_scale is not None else self.array(layer.bias)
        connected: Part = parts.Linear(weight, bias)
        if isinstance(layer, Convolution):
            connected = parts.Convolution(weight, bias, **_geometry(layer), padding_mode=layer.padding_mode)
        return [connected, *(self.after_sums(layer) if layer.weight_scale is not None else self.norm(layer.norm))]

    def norm(self, norm: Norm | None) -> list[Part]:
        """A norm, by the statistics that it keeps."""
        if norm is None:
            return []
        if isinstance(norm, ScaleShift):
            return [parts.Affine(self.array(norm.scale), self.array(norm.shift))]
        # Refuses one without statistics.
        scale_and_shift(norm)
        kept: list[Any] = [
            None if each is None else self.array(each) for each in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        ]
        return [parts.BatchNorm(*kept, eps=norm.eps)]  # type: ignore[misc]

    def modules(self, modules: Iterable[nn.Module], given: Value) -> tuple[Part, ...]:
        """The parts of modules in order."""
        found: list[Part] = []
        for module in modules:
            found += self.module(module, _after(found, given))
        return tuple(found)

    def module(self, module: nn.Module, given: Value) -> list[Part]:
        """The parts of a module of torch's."""
        name = f"{self._name(module)} ({module})" if not list(module.children()) else self._name(module)
        if has_hooks(module, anywhere=False) or "forward" in vars(module):
            raise InputError(f"{name} has hooks, or a forward of its own, which would not run in a packed network: remove them")
        if type(module) is nn.Sequential:
            return list(self.modules(module, given))
        if isinstance(module, PoolModule):
            if len(given.shape) != 3:
                raise InputError(f"{name} pools images [channels, height, width], and is given {list(given.shape)}")
            pool = Pool.of(module, given.shape[1:])
            return [parts.WindowSum(pool.kernel, pool.stride, pool.padding), parts.Factor(pool.weight)]
        if type(module) in RESHAPED:
            shape = module(torch.empty(1, *given.shape, device="meta")).shape[1:]
            return [parts.Reshape(tuple(shape))]
        make = MODULES.get(type(module))
        if make is None:
            raise _refused(name)
        return make(self, module, name)

    def array(self, tensor: Tensor, make: Callable[[], Array] | None = None, what: str = "", name: str | None = None) -> Array:
        """The array of a ``tensor`` in single precision, or what ``make`` gives, made once and called ``name`` in the file."""
        place = (id(tensor), what)
        if place not in self._arrays:
            self._kept.append(tensor)
            made = tensor.detach().float().cpu().numpy().copy() if make is None else make()
            self._arrays[place] = made
            told = name or self._keys.get(id(tensor))
            if told is not None:
                self.names[id(made)] = told
        return self._arrays[place]

    def _name(self, module: nn.Module) -> str:
        return f"{type(module).__name__} {self._modules.get(id(module), '')!r}"

    def _key(self, layer: nn.Module) -> str:
        return str(self._modules.get(id(layer), type(layer).__name__))


def _conv(packer: _Packer, module: Any, name: str) -> list[Part]:
    weight, bias = packer.array(module.weight), None if module.bias is None else packer.array(module.bias)
    pads = Convolution._pads(module)
    options = {"stride": _pair(module.stride), "dilation": _pair(module.dilation), "groups": module.groups, "padding": pads}
    return [parts.Convolution(weight, bias, padding_mode=module.padding_mode, **options)]


def _linear(packer: _Packer, module: Any, name: str) -> list[Part]:
    return [parts.Linear(packer.array(module.weight), None if module.bias is None else packer.array(module.bias))]


def _max_pool(packer: _Packer, module: Any, name: str) -> list[Part]:
    if _pair(module.dilation) != (1, 1) or module.return_indices:
        raise InputError(f"{name} cannot be packed: use dilation=1 and return_indices=False")
    return [parts.MaxPool(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding), bool(module.ceil_mode))]


def _pad(packer: _Packer, module: Any, name: str) -> list[Part]:
    sides = tuple(int(side) for side in module.padding)
    if min(sides) < 0:
        raise InputError(f"{name} cuts pixels off, and cannot be packed: cut them before the network")
    return [parts.Pad(sides, float(module.value))]  # type: ignore[arg-type]


def _activation(function: str, *names: str) -> Callable[[_Packer, Any, str], list[Part]]:
    return lambda packer, module, name: [parts.Activation(function, tuple(float(getattr(module, each)) for each in names))]


RESHAPED = (nn.Flatten, nn.Unflatten)
# What a module of torch's becomes; those that only train are nothing.
MODULES: dict[type[nn.Module], Callable[[_Packer, Any, str], list[Part]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.BatchNorm1d: lambda packer, module, name: packer.norm(module),
    nn.BatchNorm2d: lambda packer, module, name: packer.norm(module),
    ScaleShift: lambda packer, module, name: packer.norm(module),
    nn.PReLU: lambda packer, module, name: [parts.PReLU(packer.array(module.weight))],
    nn.MaxPool2d: _max_pool,
    flipgrad.max_pooling.MaxPool2d: _max_pool,
    nn.ConstantPad2d: _pad,
    nn.ZeroPad2d: _pad,
    nn.PixelShuffle: lambda packer, module, name: [parts.PixelShuffle(module.upscale_factor)],
    nn.PixelUnshuffle: lambda packer, module, name: [parts.PixelShuffle(module.downscale_factor, True)],
    nn.ChannelShuffle: lambda packer, module, name: [parts.ChannelShuffle(module.groups)],
    nn.ReLU: _activation("relu"),
    nn.ReLU6: _activation("hardtanh", "min_val", "max_val"),
    nn.Hardtanh: _activation("hardtanh", "min_val", "max_val"),
    nn.LeakyReLU: _activation("leaky_relu", "negative_slope"),
    nn.ELU: _activation("elu", "alpha"),
    nn.Tanh: _activation("tanh"),
    nn.Sigmoid: _activation("sigmoid"),
    nn.SiLU: _activation("silu"),
    nn.Identity: lambda packer, module, name: [],
    nn.Dropout: lambda packer, module, name: [],
    nn.Dropout2d: lambda packer, module, name: [],
}


def _geometry(layer: Convolution) -> dict[str, Any]:
    return {
        "stride": _pair(layer.stride),
        "padding": layer._pads(),
        "padding_value": int(layer.padding_value),
        "dilation": _pair(layer.dilation),
        "groups": layer.groups,
    }


def _noise(noise: Noise, name: str) -> tuple[str, float]:
    kind = type(noise).__name__.lower()
    if kind not in parts.NOISES or type(noise).__module__ != Noise.__module__:
        raise InputError(
            f"{name} has {noise!r}, whose probabilities a packed network does not know; use fg.Logistic() or fg.Normal()"
        )
    return kind, float(noise.scale)


def _nudged(layer: Any, scale: Tensor, shift: Tensor, bound: int, factor: float) -> Array:
    """The shifts, changed in their last digits where exact arithmetic would decide otherwise than PyTorch's.

    A unit is decided by the rounded number fl(t scale + shift). Where t scale + shift is as good as 0, the sign of the exact
    number may be another one.
    """
    scales, shifts = scale.cpu().numpy(), shift.cpu().numpy().copy()
    wanted = _rounded_thresholds(layer, scale, shift, bound, factor)
    steps = [np.inf, -np.inf]
    for number in range(2 * MOST_NUDGES):
        wrong = thresholds(scales, shifts, bound, factor)[0] != wanted
        if not wrong.any():
            return shifts
        if number == MOST_NUDGES:
            # The other way.
            shifts = np.where(wrong, shift.cpu().numpy(), shifts)
        shifts = np.where(wrong, np.nextafter(shifts, np.float32(steps[number >= MOST_NUDGES])), shifts)
    raise InputError(f"{type(layer).__name__} has scales that PyTorch rounds in its own way; train it in float32")


def _rounded_thresholds(layer: Any, scale: Tensor, shift: Tensor, bound: int, factor: float) -> Array:
    """What :func:`thresholds` would be of pre-activations as PyTorch computes them."""
    channels = len(scale)
    # In the shape of images, or of units: its vector instructions may round in another way.
    wide = (1, channels, 1, 8) if isinstance(layer, Convolution) else (8, channels)
    over = (-1, 1, 1) if isinstance(layer, Convolution) else (-1,)
    turned = torch.where(scale < 0, -1.0, 1.0)

    def positive(t: Tensor) -> Tensor:
        sums = (t * turned * factor).view(over).expand(wide).contiguous()
        a = torch.addcmul(shift.view(over), sums, scale.view(over))
        return (a.movedim(1, 0).reshape(channels, -1) >= 0)[:, 0]

    low, high = torch.full((channels,), -float(bound)), torch.full((channels,), bound + 1.0)
    while bool((low < high).any()):
        middle = ((low + high) / 2).floor()
        above, done = positive(middle), low >= high
        high, low = torch.where(above & ~done, middle, high), torch.where(above | done, low, middle + 1)
    return high.long().cpu().numpy()


def _after(chain: Sequence[Part], given: Value) -> Value:
    try:
        return after(chain, given)
    except ValueError as error:
        raise InputError(f"the network cannot be packed for inputs {list(given.shape)}: {error}") from None


def _refused(name: str) -> InputError:
    return InputError(
        f"{name} cannot be packed: packed networks know linear layers, convolutions, norms, poolings, reshaping and usual "
        "activations; replace it, or export the network: flipgrad export RUN --to onnx"
    )


def _pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return int(first), int(second)
