"""A network as plain modules: constants and tensor operations, without estimators, to be captured by ``torch.export``.

Every binary layer is replaced by what it computes: an affine map whose norm and scales are constants, noise that is handed in
or fixed, and a sign. All else is copied. What is captured this way has the values of the net in eval mode, in the same order of
operations; nothing of it can be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from typing import Any, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.affine import Affine, AffineMap, along
from flipgrad.binary_weights import BinaryWeightMap
from flipgrad.connections import Connections
from flipgrad.errors import InputError
from flipgrad.graph import Graph
from flipgrad.guards import in_eval_mode
from flipgrad.layers import BinaryConv2d, BinaryLayer, BinaryLinear
from flipgrad.max_pooling import MaxPool2d
from flipgrad.network import BinaryNetwork, Member, Sequential, check_network, given_noise
from flipgrad.noise import Noise, sign
from flipgrad.norms import SignMap, scale_and_shift
from flipgrad.residual import Residual, ResidualConv2d, ResidualLinear, Sign
from flipgrad.sampling import Apart, Draw, for_weights

# The layers whose every part is known.
KNOWN = (BinaryLinear, BinaryConv2d, Sign, ResidualLinear, ResidualConv2d)

# The source of noise of the evaluation that this thread is in.
_noise: ContextVar[Draw] = ContextVar("noise")


@final
class ConstantMap(nn.Module):
    """An affine map of constants: connections (of :class:`~flipgrad.affine.Affine`) or none, then a scale and a shift.

    Attributes:
        coefficients: of the connections: real weights with a norm folded into them, or ±1. Where weights are still drawn, by
            ``draws``, these are the latent ones.
        bias: of the connections.
        scale, shift: of every channel, after the connections; None where there are none.
    """

    coefficients: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self,
        connections: Affine | None,
        scale: Tensor | None,
        shift: Tensor | None,
        channel_dim: int,
        draws: Noise | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"scale": scale, "shift": shift}.items():
            self.register_buffer(name, _constant(value))
        if connections is not None:
            self.register_buffer("coefficients", _constant(connections.weight))
            self.register_buffer("bias", _constant(connections.bias))
            # The numbers are in the buffers, which move to other devices.
            nothing = torch.empty_like(connections.weight, device="meta")
            connections = replace(connections, weight=nothing, bias=None, views=())
        self.connections = connections
        self.channel_dim = channel_dim
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        if self.connections is not None:
            x = replace(self.connections, weight=self._weight(), bias=self.bias)(x)
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        """What the scale and the shift make of what comes from the connections."""
        if self.scale is None:
            return x
        scale = along(self.scale, x.dim(), self.channel_dim)
        if self.shift is None:
            return x * scale
        return torch.addcmul(along(self.shift, x.dim(), self.channel_dim), x, scale)

    def _weight(self) -> Tensor:
        if self.draws is None:
            return self.coefficients
        return sign(self.coefficients - for_weights(_source())(self.draws, self.coefficients))

    def extra_repr(self) -> str:
        shape = "" if self.connections is None else f"{list(self.coefficients.shape)}, "
        return f"{shape}scale={self.scale is not None}, shift={self.shift is not None}"


@final
class PlainLayer(nn.Module):
    """States sign(a - Z) of an affine ``map`` a of the input.

    ``noise`` is Z, a constant. Without it Z is taken from where the whole module has it, if ``draws`` is its distribution, and
    is 0 if not.
    """

    noise: Tensor | None

    def __init__(self, map: ConstantMap, draws: Noise | None, noise: Tensor | None = None) -> None:  # noqa: A002
        super().__init__()
        self.map = map
        self.draws = draws
        self.register_buffer("noise", _constant(noise))

    def forward(self, x: Tensor, *, binary: bool | None = None) -> Tensor:
        """The states; what ``binary`` tells a layer's estimator does not matter here."""
        return sign(self.less_noise(self.map(x)))

    def less_noise(self, a: Tensor) -> Tensor:
        """Pre-activations ``a`` less Z."""
        if self.noise is not None:
            return a - self.noise
        return a if self.draws is None else a - _source()(self.draws, a)


@final
class PlainBlock(nn.Module):
    """A residual block: ``shortcut(h) + branch(states(h))``, then a ``prelu`` if there is one."""

    def __init__(self, states: PlainLayer, branch: ConstantMap, shortcut: nn.Module, prelu: nn.PReLU | None) -> None:
        super().__init__()
        self.states, self.branch, self.shortcut, self.prelu = states, branch, shortcut, prelu

    def forward(self, x: Tensor) -> Tensor:
        stream: Tensor = self.shortcut(x) + self.branch(self.states(x))
        if self.prelu is None:
            return stream
        channel = self.branch.channel_dim
        result: Tensor = self.prelu(stream.transpose(1, channel)).transpose(1, channel)
        return result


@final
class FixedNet(nn.Module):
    """A network as one deterministic function: what :func:`deterministic` and :func:`member` make.

    ``model`` holds the layers, with their noise. Only where a member applies a layer several times, with other noise each time,
    that is in buffers ``noise_1``, ``noise_2``, ... and ``weight_noise_1``, ... in the order of evaluation.
    """

    def __init__(self, model: nn.Module, noise: Sequence[Tensor] = (), weight_noise: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.model = model
        self.counts = (len(noise), len(weight_noise))
        for name, tensors in {"noise": noise, "weight_noise": weight_noise}.items():
            for number, z in enumerate(tensors, 1):
                self.register_buffer(f"{name}_{number}", _constant(z))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, K] of inputs ``x`` [B, ...]."""
        draw = None
        if any(self.counts):
            noise, weight_noise = (
                [self.get_buffer(f"{name}_{number}") for number in range(1, count + 1)]
                for name, count in zip(("noise", "weight_noise"), self.counts, strict=True)
            )
            draw = given_noise(noise, weight_noise, self.counts)
        return _outputs(self.model, x, draw)


@final
class SampledNet(nn.Module):
    """A network whose noise is handed in, ``net(x, noise, weight_noise)``: what :func:`sampled` makes.

    ``model`` holds the layers. :meth:`draw` gives noise of the right shapes.
    """

    def __init__(self, model: nn.Module, units: int, weights: int) -> None:
        super().__init__()
        self.model = model
        self.counts = (units, weights)
        self.eval()

    def forward(self, x: Tensor, noise: Sequence[Tensor], weight_noise: Sequence[Tensor] = ()) -> Tensor:
        """Outputs [B, K] of inputs ``x`` [B, ...], with Z of every binary layer and of all weights that are drawn, in order."""
        return _outputs(self.model, x, given_noise(noise, weight_noise, self.counts))

    @torch.no_grad()
    def draw(self, x: Tensor, *, generator: Generator | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """New noise of the units and of the weights for inputs ``x``: the other arguments of :meth:`forward`."""
        kept: tuple[list[Tensor], list[Tensor]] = ([], [])

        def keeping(noise: list[Tensor]) -> Draw:
            def draw(distribution: Noise, a: Tensor) -> Tensor:
                noise.append(distribution.sample_like(a, generator=generator))
                return noise[-1]

            return draw

        _outputs(self.model, x, Apart(*map(keeping, kept)))
        return kept


def deterministic(net: BinaryNetwork) -> FixedNet:
    """The deterministic net as a plain module: every noise replaced by its median, as ``net.deterministic`` does.

    Args:
        net: a :class:`flipgrad.Sequential` or :class:`flipgrad.Graph`. It is copied, as it is in eval mode.

    >>> import flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(4, 8), fg.BinaryLinear(8, 8, weights="binary"), head=nn.Linear(8, 3)).eval()
    >>> x = torch.randn(5, 4)
    >>> bool(torch.equal(fg.export.deterministic(net)(x), net.deterministic(x)))
    True
    """
    check_network(net, "fg.export.deterministic")
    # Latent weights at their median noise have the sign that weights have which are not drawn.
    likeliest = [sign(latent) for latent in _latents(net)]
    return FixedNet(_plain_model(net, "fg.export.deterministic", likeliest, [None] * len(net.binary_layers)))


def member(chosen: Member) -> FixedNet:
    """One member of the ensemble as a plain module, its noise fixed in buffers.

    Args:
        chosen: ``net.member(x)``. Its net is copied, as it is in eval mode.

    >>> import flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(4, 8), head=nn.Linear(8, 3)).eval()
    >>> x = torch.randn(5, 4)
    >>> one = net.member(x)
    >>> bool(torch.equal(fg.export.member(one)(x), one(x)))
    True
    """
    if not isinstance(chosen, Member):
        raise InputError(f"fg.export.member takes a member of a network, net.member(x), got {type(chosen).__name__}")
    net, who = chosen.net, "fg.export.member"
    layers = net.binary_layers
    if len({id(layer) for layer in layers}) < len(layers):
        # A layer that is applied several times has other noise each time.
        return FixedNet(_plain_model(net, who), chosen.noise, chosen.weight_noise)
    pairs = zip(_latents(net), chosen.weight_noise, strict=True)
    drawn = [sign(latent - z.to(latent.dtype)) for latent, z in pairs]
    return FixedNet(_plain_model(net, who, drawn, chosen.noise))


def sampled(net: BinaryNetwork) -> SampledNet:
    """The sampled net as a plain module with its noise as inputs, drawn by the caller: ``net(x, noise=..., weight_noise=...)``.

    Args:
        net: a :class:`flipgrad.Sequential` or :class:`flipgrad.Graph`. It is copied, as it is in eval mode.

    >>> import flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(4, 8), head=nn.Linear(8, 3)).eval()
    >>> plain, x = fg.export.sampled(net), torch.randn(5, 4)
    >>> noise, weight_noise = plain.draw(x)
    >>> bool(torch.equal(plain(x, noise, weight_noise), net(x, noise=noise, weight_noise=weight_noise)))
    True
    """
    check_network(net, "fg.export.sampled")
    return SampledNet(_plain_model(net, "fg.export.sampled"), len(net.binary_layers), len(_latents(net)))


def _source() -> Draw:
    draw = _noise.get(None)
    if draw is None:
        raise RuntimeError("a layer of a plain module with noise is evaluated as a part of that module")
    return draw


def _outputs(model: nn.Module, x: Tensor, draw: Draw | None) -> Tensor:
    # Torch cannot compile the setting of a source, and who has no noise needs none.
    token = None if draw is None else _noise.set(draw)
    try:
        outputs: Tensor = model(x)
    finally:
        if token is not None:
            _noise.reset(token)
    # As those of the network.
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def _latents(net: BinaryNetwork) -> list[Tensor]:
    """The latent weights of every layer that draws its weights, in the order of evaluation."""
    return [layer.weight.detach() for layer in net.binary_layers if layer.weight_noise is not None]


@torch.no_grad()
def _plain_model(
    net: BinaryNetwork, who: str, drawn: Sequence[Tensor] | None = None, noise: Sequence[Tensor | None] | None = None
) -> nn.Module:
    """A copy of the network's modules, in which every binary layer is a plain one.

    ``drawn`` are the weights ±1 of every layer that draws its weights, and ``noise`` is Z of every layer (a None of it is 0),
    both in the order of evaluation. Without them both stay random.
    """
    layers = net.binary_layers
    weights, zs = iter(drawn or ()), iter(noise or ())
    plain: dict[int, nn.Module] = {}
    with in_eval_mode(net):
        net.network().check_examples_alone(who)
        for layer in layers:
            weight = next(weights) if drawn is not None and layer.weight_noise is not None else None
            z = next(zs, None)
            if id(layer) not in plain:
                plain[id(layer)] = _plain_layer(layer, who, weight, layer.noise if noise is None else None, z)
        for module in net.modules():
            if isinstance(module, MaxPool2d):
                # Of states ±1 the ordinary maximum is the same.
                plain[id(module)] = nn.MaxPool2d(module.kernel_size, module.stride, module.padding, ceil_mode=module.ceil_mode)
        # What is known already is taken in place of a copy, wherever the model refers to it.
        copied: nn.Module = deepcopy(_modules(net), dict[int, Any](plain))
    return copied.eval().requires_grad_(False)


def _modules(net: BinaryNetwork) -> nn.Module:
    """What maps inputs to outputs, if its binary layers draw their states by themselves."""
    if isinstance(net, Graph):
        return net.model
    if not isinstance(net, Sequential):
        raise InputError(f"fg.export knows fg.Sequential and fg.Graph, got {type(net).__name__}")
    return nn.Sequential(*(net[index] for index in range(len(net))), net.head)


def _plain_layer(layer: BinaryLayer, who: str, weight: Tensor | None, draws: Noise | None, noise: Tensor | None) -> nn.Module:
    """A layer by what it computes: with this binary ``weight`` if one was drawn, and this ``noise``, or what it ``draws``."""
    # A parametrised layer has a class of its own.
    if not isinstance(layer, KNOWN):
        names = ", ".join(f"fg.{kind.__name__}" for kind in KNOWN)
        raise InputError(f"{who}: {type(layer).__name__} is not known to be right there; known are {names}")
    layer.check_weights()
    draws_weight = layer.weight_noise if weight is None else None
    if draws_weight is not None:
        weight = layer.weight
    states = PlainLayer(_constant_map(layer.affine((), weight), draws_weight), draws, noise)
    if not isinstance(layer, Residual):
        return states
    branch = _branch(layer.branch, weight, draws_weight)
    return PlainBlock(states, branch, deepcopy(layer.shortcut), deepcopy(layer.prelu))


def _constant_map(affine: AffineMap, draws: Noise | None) -> ConstantMap:
    """The map of a layer to its pre-activations."""
    if isinstance(affine, BinaryWeightMap):
        return ConstantMap(affine.inner, affine.scale, affine.bias, affine.inner.channel_dim, draws)
    if isinstance(affine, SignMap):
        scale, shift = (None, None) if affine.norm is None else scale_and_shift(affine.norm)
        return ConstantMap(None, scale, shift, affine.channel_dim)
    if isinstance(affine, Affine):
        return ConstantMap(affine, None, None, affine.channel_dim)
    raise RuntimeError(f"a {type(affine).__name__} depends on the batch")


def _branch(branch: Connections, weight: Tensor | None, draws: Noise | None) -> ConstantMap:
    """What a residual block adds to the stream, of its states."""
    connections = branch.before_scale(weight)
    scale, shift = (None, None) if branch.norm is None else scale_and_shift(branch.norm)
    if branch.weight_scale is not None:
        scale, shift = branch.weight_scale, branch.bias
    return ConstantMap(connections, scale, shift, connections.channel_dim, draws)


def _constant(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
