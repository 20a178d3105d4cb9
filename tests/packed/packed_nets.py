"""Networks of every kind that can be packed, drawn by hypothesis, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.noise import Noise, sign
from flipgrad.packed import PackedNetwork, plain
from flipgrad.packed.random_words import words
from flipgrad.sampling import Apart

CHANNELS = (1, 3, 63, 64, 65, 96, 192)
NOISES = (fg.Logistic(), fg.Normal(0.5), fg.Laplace(2.0), fg.Uniform(3.0))
# Decides states of pre-activations: by the number of the layer, its noise, and the pre-activations.
Decide = Callable[[int, Noise, Tensor], Tensor]


class Chain:
    """Modules in order, and the shape of what they give for one example."""

    def __init__(self, draw: st.DrawFn, *shape: int) -> None:
        self.draw, self.inputs, self.shape = draw, shape, torch.Size(shape)
        self.modules: list[nn.Module] = []

    def add(self, *modules: nn.Module) -> None:
        for module in modules:
            with torch.no_grad():
                self.shape = module.eval()(torch.ones(1, *self.shape)).shape[1:]
            self.modules.append(module)

    def pick(self, *values: object) -> object:
        return self.draw(st.sampled_from(values))

    def norm(self, channels: int) -> nn.Module | None:
        batch = nn.BatchNorm2d if len(self.shape) == 3 else nn.BatchNorm1d
        return self.pick(None, fg.ScaleShift(channels), batch(channels), batch(channels, affine=False, eps=1e-3))

    def options(self, channels: int) -> dict[str, object]:
        norm = self.norm(channels)
        drawn = self.pick(None, None, fg.Logistic(0.1))
        return {"bias": self.draw(st.booleans()), "norm": norm, "noise": self.pick(*NOISES), "weight_noise": drawn}

    def geometry(self) -> dict[str, object]:
        """Of a convolution that fits, without groups."""
        room = min(self.shape[1:])
        kernel = self.pick(1, 2, (3, 2), 3) if room > 2 else 1
        if self.draw(st.booleans()):
            return {
                "kernel_size": kernel,
                "padding": "same",
                "dilation": self.pick(1, (2, 1)),
                "padding_value": self.pick(0, -1, 1),
            }
        padding = self.pick(0, 1, (1, 2))
        dilation = self.pick(1, 2, (1, 2)) if room > 4 else 1
        stride = self.pick(1, 2, (2, 1))
        return {
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "padding_value": self.pick(0, 0, -1, 1),
        }

    def convolution(self, outputs: int) -> fg.BinaryConv2d:
        groups = self.pick(*(each for each in (1, 1, 3, 8) if self.shape[0] % each == 0 and outputs % each == 0))
        options = {**self.geometry(), **self.options(outputs), "groups": groups}
        return fg.BinaryConv2d(self.shape[0], outputs, weights="binary", **options)

    def network(self, *head: nn.Module) -> fg.Sequential:
        tail = Chain(self.draw, *self.shape)
        tail.add(*head)
        if len(tail.shape) == 3:
            tail.add(nn.Flatten())
        tail.add(nn.Linear(tail.shape[0], self.pick(1, 2, 10)))
        net = fg.Sequential(*self.modules, head=nn.Sequential(*tail.modules))
        randomise(net, self.draw(st.integers(0, 2**30)))
        return net.train(self.draw(st.booleans()))


def randomise(net: nn.Module, seed: int) -> None:
    """Parameters and statistics at random: also negative scales, and some that are 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(normal(parameter))
                if name.endswith("scale"):
                    parameter[torch.rand(parameter.shape, generator=generator) < 0.1] = 0
            else:
                parameter.copy_(normal(parameter) / parameter[0].numel() ** 0.5)
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(normal(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(normal(buffer).square() + 0.1)


@st.composite
def fully_connected(draw: st.DrawFn) -> tuple[fg.Sequential, Tensor]:
    """Fully connected layers, some of them in branches, one perhaps used twice."""
    chain = Chain(draw, draw(st.sampled_from([1, 7, 64])))
    width = chain.pick(*CHANNELS)
    if draw(st.booleans()):
        chain.add(nn.Linear(chain.shape[0], 9), nn.BatchNorm1d(9), nn.LeakyReLU(0.2))
    first = {**chain.options(width), "weights": chain.pick("real", "binary")}
    if first["weights"] == "real":
        del first["weight_noise"]
    chain.add(fg.BinaryLinear(chain.shape[0], width, **first))
    for _ in range(draw(st.integers(0, 3))):
        width, now = chain.pick(*CHANNELS), chain.shape[0]
        layer = fg.BinaryLinear(now, width, weights="binary", **chain.options(width))
        kind = chain.pick("plain", "twice", "concat")
        if kind == "twice" and now == width:
            chain.add(layer, layer)
        elif kind == "concat":
            chain.add(fg.Concat(nn.Identity(), layer, dim=chain.pick(1, -1)))
        else:
            chain.add(layer)
    head = chain.pick([], [nn.BatchNorm1d(chain.shape[0])], [nn.Linear(chain.shape[0], 4), nn.ELU(), nn.Dropout()])
    return chain.network(*head), torch.randn(3, *chain.inputs)


def between(chain: Chain) -> None:
    """Add something between binary convolutions: pooling, reshaping, padding, branches, a convolution."""
    channels, height, width = chain.shape
    even = height % 2 == width % 2 == 0
    kinds = ["convolution", "convolution", "pad", "concat", "shuffle", "flat"]
    kinds += ["max", "max"] if min(height, width) >= 2 else []
    kinds += ["average", "average"] if min(height, width) >= 2 else []
    kinds += ["unshuffle"] if even and channels < 50 else []
    kinds += ["pixels"] if channels % 4 == 0 else []
    kind = chain.pick(*kinds)
    if kind == "convolution":
        chain.add(chain.convolution(chain.pick(*CHANNELS[:-1])))
    elif kind == "pad":
        pad = chain.pick(nn.ZeroPad2d(1), nn.ConstantPad2d((1, 0, 0, 2), -1.0), nn.ConstantPad2d(1, 1.0))
        chain.add(pad, chain.convolution(chain.pick(3, 65)))
    elif kind == "max":
        chain.add(nn.MaxPool2d(2, chain.pick(2, 3), chain.pick(0, 1), ceil_mode=chain.draw(st.booleans())))
    elif kind == "average":
        pool = chain.pick(nn.AvgPool2d(2), nn.AvgPool2d(2, 2, 1), nn.AvgPool2d((1, 2)), nn.AvgPool2d(2, divisor_override=8))
        with torch.no_grad():
            seen = pool(torch.ones(1, *chain.shape)).shape[1:]
        layer = fg.BinaryConv2d(seen[0], 5, 1, padding=chain.pick(0, 1), weights="binary", **chain.options(5))
        chain.add(pool, layer)
    elif kind == "concat":
        layer = fg.BinaryConv2d(channels, 6, 3, padding=1, weights="binary", **chain.options(6))
        chain.add(fg.Concat(layer, nn.Identity()))
    elif kind == "unshuffle":
        chain.add(nn.PixelUnshuffle(2))
    elif kind == "pixels":
        chain.add(nn.PixelShuffle(2))
    elif kind == "shuffle":
        chain.add(nn.ChannelShuffle(next(each for each in (3, 2, 1) if channels % each == 0)))
    else:
        chain.add(nn.Flatten(2), nn.Unflatten(2, (width, height)), nn.Identity())


@st.composite
def convolutional(draw: st.DrawFn) -> tuple[fg.Sequential, Tensor]:
    """Convolutions of every geometry with what may stand between them, perhaps a fully connected layer at their end."""
    chain = Chain(draw, draw(st.sampled_from([1, 3])), *draw(st.sampled_from([(4, 6), (7, 7), (7, 5)])))
    mode = chain.pick("zeros", "reflect", "replicate", "circular")
    if draw(st.booleans()):
        front = nn.Conv2d(chain.shape[0], 4, 3, padding=chain.pick(1, "same", (2, 1)), padding_mode=mode)
        function = chain.pick(
            nn.ReLU(), nn.Tanh(), nn.Hardtanh(), nn.SiLU(), nn.PReLU(4), nn.ReLU6(), nn.Softplus(), nn.Sigmoid()
        )
        chain.add(front, nn.BatchNorm2d(4), function, nn.MaxPool2d(2, 1, 1))
    width = chain.pick(*CHANNELS[:-1])
    first = {**chain.options(width), "padding_mode": mode, "weights": chain.pick("real", "binary")}
    if first["weights"] == "real":
        del first["weight_noise"]
    chain.add(fg.BinaryConv2d(chain.shape[0], width, 3, padding=1, **first))
    for _ in range(draw(st.integers(0, 3))):
        between(chain)
    if draw(st.booleans()):
        chain.add(nn.Flatten())
        chain.add(fg.BinaryLinear(chain.shape[0], 12, weights="binary", **chain.options(12)))
        return chain.network(), torch.randn(2, *chain.inputs)
    channels = chain.shape[0]
    head = chain.pick([], [nn.AdaptiveAvgPool2d(1)], [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1)])
    return chain.network(*head), torch.randn(2, *chain.inputs)


def block_options(chain: Chain, inputs: int, outputs: int) -> dict[str, object]:
    """Of a residual block."""
    options = chain.options(outputs)
    shortcut = chain.pick("repeat", "project") if outputs % inputs == 0 else "project"
    norms = {"norm": chain.norm(inputs), "branch_norm": options.pop("norm")}
    return {**options, **norms, "shortcut": shortcut, "prelu": chain.draw(st.booleans()), "weights": "binary"}


@st.composite
def residual(draw: st.DrawFn) -> tuple[fg.Sequential, Tensor]:
    """Residual blocks, with what may stand on their stream, perhaps ended by a sign and binary layers."""
    images = draw(st.booleans())
    chain = Chain(draw, *((3, 4, 4) if images else (6,)))
    width = chain.pick(3, 8, 64)
    chain.add(nn.Conv2d(3, width, 3, padding=1) if images else nn.Linear(6, width))
    for _ in range(draw(st.integers(1, 3))):
        now = chain.shape[0]
        width = chain.pick(now, 2 * now, 65)
        options = block_options(chain, now, width)
        if not images:
            chain.add(fg.ResidualLinear(now, width, **options))
            continue
        stride = chain.pick(1, 2) if chain.shape[1] % 2 == 0 else 1
        padding_value = chain.pick(0, 1, -1)
        chain.add(fg.ResidualConv2d(now, width, chain.pick(1, 3), stride, padding_value=padding_value, **options))
        if draw(st.booleans()):
            chain.add(
                chain.pick(nn.PReLU(), nn.PReLU(width), nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, width, 1), nn.AvgPool2d(1))
            )
    now = chain.shape[0]
    if draw(st.booleans()):
        chain.add(fg.Sign(chain.pick(*NOISES), chain.norm(now)))
        if images:
            chain.add(chain.convolution(7))
        else:
            chain.add(fg.BinaryLinear(now, 5, weights="binary", **chain.options(5)))
        return chain.network(), torch.randn(2, *chain.inputs)
    # Whatever ends with a module that belongs to the head does so there.
    last = max(number for number, module in enumerate(chain.modules) if isinstance(module, fg.Residual))
    head, chain.modules = chain.modules[last + 1 :], chain.modules[: last + 1]
    with torch.no_grad():
        chain.shape = nn.Sequential(*chain.modules)(torch.ones(1, *chain.inputs)).shape[1:]
    pools = [nn.BatchNorm2d(now), nn.AdaptiveAvgPool2d(1)] if images else []
    return chain.network(*head, *pools), torch.randn(2, *chain.inputs)


def medians(number: int, noise: Noise, a: Tensor) -> Tensor:
    """Decides as the deterministic network does."""
    return sign(a)


def by_words(seed: int, sample: int, first: int = 0) -> Decide:
    """Decides by the random words that a packed network draws."""

    def decide(number: int, noise: Noise, a: Tensor) -> Tensor:
        # Channels last, as units are numbered.
        p = noise.cdf(a.double()).movedim(1, -1)
        drawn = [words(p[0].numel(), seed=seed, layer=number, example=first + b, sample=sample) for b in range(len(p))]
        word = torch.from_numpy(np.stack(drawn).astype(np.float64)).view_as(p)
        limit = (p * 2**32).round().clamp(max=2**32 - 1)
        return torch.where(word < limit, 1.0, -1.0).to(a).movedim(-1, 1)

    return decide


@torch.no_grad()
def torch_states(net: fg.Sequential, x: Tensor, decide: Decide = medians) -> tuple[list[np.ndarray], np.ndarray]:
    """The states of all units and the outputs as PyTorch computes them; drawn weights are their likeliest values."""
    states: list[Tensor] = []

    def visit(call: object) -> Tensor:
        states.append(decide(len(states), call.layer.noise, call.affine(call.x)))
        return states[-1]

    def middle(noise: Noise, a: Tensor) -> Tensor:
        return torch.zeros_like(a)

    network = net.eval().network()
    outputs = network.outputs(network.run(network.front(x), visit, Apart(middle, middle)))
    return [each.numpy() for each in states], outputs.numpy()


def packed_states(
    packed: PackedNetwork, x: Tensor, sample: int | None = None, seed: int = 0, first: int = 0
) -> tuple[list[np.ndarray], np.ndarray]:
    """The same of a packed network."""
    states: list[np.ndarray] = []
    evaluation = plain.Evaluation(sample, seed, first, watch=states.append)
    outputs = plain.run(packed.program, x.double().numpy(), evaluation)
    return states, outputs
