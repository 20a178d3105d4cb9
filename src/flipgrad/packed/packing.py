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
from flipgrad.guards import has_hooks, in_eval_mode
from flipgrad.network import Sequential, check_sequential
from flipgrad.noise import Noise, sign
from flipgrad.norms import Norm, ScaleShift, scale_and_shift
from flipgrad.packed import parts
from flipgrad.packed.network import Facts, PackedNetwork
from flipgrad.packed.parts import Array, Part, Value, after
from flipgrad.packed.tables import first_positive, thresholds
from flipgrad.pooling import Pool, PoolModule
from flipgrad.residual import Projection, Residual, Sign
from flipgrad.steps import AddToStream, Apply, Branch, Concat, OnStream, PoolStates, Sample

# Shifts are moved by at most this many units in their last place, so that exact arithmetic decides as rounded does.
MOST_NUDGES = 16
# What 16 bits hold.
LARGEST_THRESHOLD = 2**15 - 1
TRAIN_AGAIN = "train the network again, with a smaller learning rate"
WAY_OUT = "train it with weights='binary' (flipgrad train --weights binary), or export it: flipgrad export RUN --to onnx"


def pack(net: Sequential, example: Tensor, facts: Facts | None = None, *, draws: bool = True) -> PackedNetwork:
    """The network in bits, as :func:`flipgrad.packed.load` reads it from a file.

    Binary weights behind states become bits, drawn ones their likeliest values; norms are those of eval mode. Layers that see
    real numbers, and the head, stay as they are, in single precision. ``packed.save(path)`` writes the file, whose arrays have
    the bytes that :func:`flipgrad.summary` tells.

    Args:
        net: the trained network.
        example: inputs [B, ...], B >= 1, of the size that it will see.
        facts: names of classes, how pixels become inputs, and what else is to stand in the file.
        draws: whether states can be drawn: ``packed(x, samples=10)``. Without, a binary layer needs no more of its norm than
            one whole number of two bytes for every channel, instead of a scale and a shift of four each: the file is smaller.

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
    _check_numbers(net)
    packer = _Packer(net, draws)
    with torch.no_grad(), in_eval_mode(net):
        program = packer.network(Value(tuple(example.shape[1:])))
    return PackedNetwork(program, tuple(example.shape[1:]), facts, names=packer.names)


@final
class _Packer:
    """Turns modules into parts. Arrays that modules share are one array."""

    def __init__(self, net: Sequential, draws: bool) -> None:
        self.net, self.draws = net, draws
        self.names: dict[int, str] = {}
        self._keys = {id(tensor): name for name, tensor in (*net.named_parameters(), *net.named_buffers())}
        self._modules = {id(module): name for name, module in net.named_modules()}
        self._arrays: dict[tuple[object, ...], Array] = {}
        # What arrays were made of, so that nothing else gets the same identity.
        self._kept: list[object] = []

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
                found.append(_concat([self.steps(chain, now) for chain in step.chains], step.dim, now))
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
        _check_hooks(layer, name)
        drawn = self.sign(layer.noise, name)
        if isinstance(layer, Sign):
            return [*self.norm(layer.norm), drawn]
        if not isinstance(layer, Connections):
            raise _refused(name)
        if not step.binary:
            return [*self.real_connections(layer), drawn]
        if layer.weights != "binary":
            raise InputError(f"{name} has real weights behind states, which no bits can hold: {WAY_OUT}")
        views, factor = _undivided(self.modules(step.views, given))
        sums = self.sums(layer)
        seen = _after([*views, sums], given)
        scale, shift = self.folded(layer, seen.bound, factor)
        if not self.draws and seen.bound < LARGEST_THRESHOLD:
            limits, falls = thresholds(scale, shift, seen.bound, factor)
            shift = self.made((-limits).astype(np.int16), f"{self._key(layer)}.shift", owner=layer)
            return [*views, self.sums(layer, falls), parts.Affine(None, shift), drawn]
        return [*views, sums, *([parts.Factor(factor)] if factor != 1 else []), parts.Affine(scale, shift), drawn]

    def block(self, block: Residual, given: Value) -> list[Part]:
        """A residual block."""
        name, branch = self._name(block), block.branch
        block.check_weights()
        for each in (block, branch, block.shortcut):
            _check_hooks(each, name)
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
        drawn = self.sign(block.noise, name)
        added = [*self.norm(block.norm), drawn, self.sums(branch), *self.after_sums(branch)]
        prelu = [] if block.prelu is None else self.module(block.prelu, given)
        return [parts.Add((tuple(past), tuple(added))), *prelu]

    def sign(self, noise: Noise, name: str) -> parts.Sign:
        """The part that makes states, of a layer of that ``name``."""
        known = _noise(noise, name)
        return parts.Sign(*known) if self.draws else parts.Sign(parts.NO_NOISE)

    def sums(self, layer: Any, turned: Array | None = None) -> parts.Sums:
        """The part of a layer's binary weights; those of ``turned`` outputs have the other sign."""
        weight = layer.weight.detach()
        positive = (weight >= 0).flatten(1).cpu().numpy()
        positive = positive if turned is None else positive ^ turned[:, None]
        bits = self.made(np.packbits(positive), f"{self._key(layer)}.bits", owner=layer.weight)
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
        if layer.norm is not None:
            # Refuses one without statistics.
            scale_and_shift(layer.norm)
        affine = layer.affine()
        scale = affine.scale.detach().cpu()
        shift = torch.zeros_like(scale) if affine.bias is None else affine.bias.detach().cpu()
        if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
            raise InputError(f"{self._name(layer)} has a scale or a shift that is not finite: {TRAIN_AGAIN}")
        key, scales = self._key(layer), scale.numpy()
        shifts = _nudged(scales, shift.numpy(), _rounded_thresholds(layer, scale, shift, bound, factor), bound, factor)
        return self.made(scales, f"{key}.scale", owner=layer), self.made(shifts, f"{key}.shift", owner=layer)

    def real_connections(self, layer: Any) -> list[Part]:
        """A layer on real numbers: its weights, be they binary, are as good as real."""
        weight = layer.weight
        if layer.weights == "binary":
            stored = self.made(sign(weight.detach()).cpu().numpy(), self._keys.get(id(weight)), owner=weight)
        else:
            stored = self.array(weight)
        bias = None if layer.bias is None or layer.weight_scale is not None else self.array(layer.bias)
        connected: Part = parts.Linear(stored, bias)
        if isinstance(layer, Convolution):
            connected = parts.Convolution(stored, bias, **_geometry(layer), padding_mode=layer.padding_mode)
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
        _check_hooks(module, name)
        if type(module) is nn.Sequential:
            return list(self.modules(module, given))
        if type(module) is Concat:
            return [_concat([self.modules([branch], given) for branch in module.branches], module.dim, given)]
        if isinstance(module, PoolModule):
            if len(given.shape) != 3:
                raise InputError(f"{name} pools images [channels, height, width], and is given {list(given.shape)}")
            pool = Pool.of(module, given.shape[1:])
            if pool.weight <= 0:
                raise InputError(f"{name} has a negative divisor, and cannot be packed: use a positive divisor_override")
            return [parts.WindowSum(pool.kernel, pool.stride, pool.padding), parts.Factor(pool.weight)]
        if type(module) in RESHAPED:
            batch, *shape = module(torch.empty(2, *given.shape, device="meta")).shape
            if batch != 2 or not shape:
                raise InputError(f"{name} mixes examples, and cannot be packed: start at dimension 1")
            return [parts.Reshape(tuple(shape))]
        make = MODULES.get(type(module))
        if make is None:
            raise _refused(name)
        return make(self, module, name)

    def array(self, tensor: Tensor) -> Array:
        """The array of a ``tensor``, which has the name of the state dict."""
        place = (id(tensor),)
        if place not in self._arrays:
            self._kept.append(tensor)
            self._arrays[place] = tensor.detach().cpu().numpy().copy()
            if id(tensor) in self._keys:
                self.names[id(self._arrays[place])] = self._keys[id(tensor)]
        return self._arrays[place]

    def made(self, values: Array, name: str | None, *, owner: object) -> Array:
        """An array that was made of a layer or a weight, the ``owner``: one array for equal ``values`` of one owner."""
        place = (id(owner), name and name.rpartition(".")[2], values.tobytes())
        if place not in self._arrays:
            self._kept.append(owner)
            self._arrays[place] = values.copy()
            if name is not None:
                self.names[id(self._arrays[place])] = name
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
    if not math.isfinite(module.value):
        raise InputError(f"{name} pads with a number that is not finite, and cannot be packed: pad with another")
    return [parts.Pad(sides, float(module.value))]  # type: ignore[arg-type]


def _activation(function: str, *names: str) -> Callable[[_Packer, Any, str], list[Part]]:
    return lambda packer, module, name: [parts.Activation(function, tuple(float(getattr(module, each)) for each in names))]


def _softplus(packer: _Packer, module: Any, name: str) -> list[Part]:
    if module.beta != 1:
        raise InputError(f"{name} cannot be packed: use beta=1")
    return [parts.Activation("softplus")]


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
    nn.Softplus: _softplus,
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


def _nudged(scale: Array, shift: Array, wanted: Array, bound: int, factor: float) -> Array:
    """The shifts, changed in their last digits where their thresholds are not those ``wanted``, with which PyTorch decides.

    It decides by the rounded number fl(fl(t scale) + shift). Where t scale + shift is as good as 0, the exact one may have
    another sign.
    """
    for _ in range(MOST_NUDGES):
        # A larger shift has a smaller threshold.
        missed = thresholds(scale, shift, bound, factor)[0] - wanted
        if not missed.any():
            return shift
        shift = np.where(missed == 0, shift, np.nextafter(shift, np.where(missed > 0, np.inf, -np.inf).astype(np.float32)))
    raise InputError(f"a layer's scales and shifts are too far apart to be told by float32: {TRAIN_AGAIN}")


def _rounded_thresholds(layer: Any, scale: Tensor, shift: Tensor, bound: int, factor: float) -> Array:
    """What :func:`thresholds` would be of pre-activations as PyTorch computes them in a ``layer``, in float32."""
    channels = len(scale)
    # In the layout of images, or of units, and of the size of a vector of the processor: it may round in another way.
    wide, over = ((1, channels, 1, 16), (-1, 1, 1)) if isinstance(layer, Convolution) else ((16, channels), (-1,))
    turned = np.where(scale.numpy() < 0, -1, 1)

    def positive(t: Array) -> Array:
        sums = torch.from_numpy((t * turned).astype(np.float32) * np.float32(factor))
        a = torch.addcmul(shift.view(over), sums.view(over).expand(wide).contiguous(), scale.view(over))
        return (a.movedim(1, 0).flatten(1)[:, 0] >= 0).numpy()

    return first_positive(positive, bound, channels)


def _check_numbers(net: nn.Module) -> None:
    """Refuse other than finite float32."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise InputError(f"pack takes a network in float32, and {name!r} is {tensor.dtype}: convert it, net.float()")
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name!r} holds numbers that are not finite: {TRAIN_AGAIN}")


def _check_hooks(module: nn.Module, name: str) -> None:
    if has_hooks(module, anywhere=False):
        raise InputError(f"{name} has hooks, or a forward of its own, which would not run in a packed network: remove them")


def _undivided(views: Iterable[Part]) -> tuple[list[Part], float]:
    """What a layer sees its states through, without the division of averages, and the factor that stands for it.

    It comes after the sums, which stay whole numbers.
    """
    kept: list[Part] = []
    factor = 1.0
    for view in views:
        if isinstance(view, parts.Pad) and factor != 1 and view.value:
            raise InputError(
                f"padding of averages with {view.value:g} cannot be packed: pad before the average pooling, or with 0"
            )
        if isinstance(view, parts.Factor):
            factor *= view.factor
        else:
            kept.append(view)
    return kept, factor


def _concat(chains: Sequence[tuple[Part, ...]], dim: int, given: Value) -> parts.Concat:
    """Chains on one input, concatenated along a dimension of the batch's."""
    dims = len(_after(chains[0], given).shape) + 1
    if not -dims < dim < dims or not dim:
        raise InputError(f"Concat(dim={dim}) of {dims} dimensions mixes examples, and cannot be packed: concatenate channels")
    return parts.Concat(tuple(chains), dim % dims - 1)


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
