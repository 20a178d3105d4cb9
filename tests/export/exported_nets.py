"""Networks with every kind of layer and step, and the three ways to export each, with what the network itself gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.network import BinaryNetwork
from hand_written import Branches, Shared

Net = tuple[BinaryNetwork, Tensor]
BINARY = {"weights": "binary"}
DRAWN = {"weights": "binary", "weight_noise": fg.Logistic(0.3)}


def fully_connected() -> Net:
    """Real, binary and drawn weights, with and without norms; few outputs, for which layers have a way of their own."""
    layers = [
        fg.BinaryLinear(6, 20, noise=fg.Normal(0.7)),
        fg.BinaryLinear(20, 11, norm=nn.BatchNorm1d(11)),
        fg.Concat(nn.Identity(), fg.BinaryLinear(11, 9, **BINARY)),
        fg.BinaryLinear(20, 9, bias=False, norm=fg.ScaleShift(9), **BINARY),
        fg.BinaryLinear(9, 8, noise=fg.Uniform(2.0), **DRAWN),
        fg.BinaryLinear(8, 7, bias=False, noise=fg.Laplace()),
    ]
    return fg.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), *layers, head=nn.Linear(7, 3)), torch.randn(40, 5)


def convolutions() -> Net:
    """Stride, dilation, groups and padding with 0, -1 and 1, real and binary weights, poolings of both kinds between them."""
    layers = [
        fg.BinaryConv2d(4, 8, 3, padding=1, norm=nn.BatchNorm2d(8)),
        nn.MaxPool2d(2, padding=1),
        fg.BinaryConv2d(8, 8, 3, padding=2, dilation=2, groups=2, padding_value=-1, **BINARY),
        nn.AvgPool2d(2),
        fg.BinaryConv2d(8, 6, 2, padding="same", padding_value=1, norm=fg.ScaleShift(6), **BINARY),
        nn.ConstantPad2d((1, 0, 0, 1), -1.0),
        fg.BinaryConv2d(6, 8, (2, 3), stride=(1, 2), bias=False, **DRAWN),
        fg.MaxPool2d((2, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        fg.BinaryLinear(8, 5, **BINARY),
    ]
    return fg.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *layers, head=nn.Linear(5, 3)), torch.randn(30, 2, 10, 10)


def padded_by_images(mode: str) -> Net:
    """A first convolution that pads real values with these themselves, then modules that move states around."""
    layers = [
        fg.BinaryConv2d(1, 8, 3, padding=(1, 2), padding_mode=mode),
        nn.PixelShuffle(2),
        nn.ZeroPad2d(1),
        fg.BinaryConv2d(2, 4, 3, stride=2, **BINARY),
        nn.ChannelShuffle(2),
        nn.Flatten(),
        nn.Unflatten(1, (2, -1)),
        nn.Flatten(),
    ]
    return fg.Sequential(*layers, head=nn.Linear(4 * 4 * 8, 2)), torch.randn(20, 1, 4, 6)


def residual_images() -> Net:
    """Convolutional blocks: repeated, averaged and projected shortcuts, norms, PReLU, binary and drawn weights, and an end."""
    layers = [
        fg.ResidualConv2d(4, 4, norm=nn.BatchNorm2d(4), branch_norm=nn.BatchNorm2d(4), **BINARY),
        fg.ResidualConv2d(4, 8, stride=2, norm=fg.ScaleShift(4), padding_value=-1, prelu=True),
        nn.PReLU(),
        fg.ResidualConv2d(8, 6, shortcut="project", **DRAWN),
        fg.ResidualConv2d(6, 6, 1, branch_norm=fg.ScaleShift(6), bias=False),
        nn.AvgPool2d(2),
        fg.Sign(fg.Logistic(0.3), norm=nn.BatchNorm2d(6)),
        nn.Flatten(),
        fg.BinaryLinear(6 * 4, 5, **BINARY),
    ]
    return fg.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, head=nn.Linear(5, 3)), torch.randn(30, 1, 8, 8)


def residual_features() -> Net:
    """Fully connected blocks, up to the head."""
    layers = [
        fg.ResidualLinear(6, 12, norm=nn.BatchNorm1d(6), prelu=True, **BINARY),
        fg.ResidualLinear(12, 5, shortcut="project", branch_norm=nn.BatchNorm1d(5), **DRAWN),
        fg.ResidualLinear(5, 5, noise=fg.Normal()),
    ]
    return fg.Sequential(nn.Linear(3, 6), *layers, head=nn.Linear(5, 2)), torch.randn(40, 3)


def by_hand() -> Net:
    """A model written by hand."""
    x = torch.randn(30, 2)
    return fg.Graph(Branches(), x), x


def by_hand_shared() -> Net:
    """One whose layer is applied twice, with other drawn weights each time, and told what its inputs are."""

    class Told(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.again(self.l1(x, binary=False), binary=True)))

    model, x = Told(), torch.randn(30, 2)
    model.again = fg.BinaryLinear(4, 4, **DRAWN)
    return fg.Graph(model, x), x


MAKERS: dict[str, Callable[[], Net]] = {
    "fully connected": fully_connected,
    "convolutions": convolutions,
    "reflect": lambda: padded_by_images("reflect"),
    "replicate": lambda: padded_by_images("replicate"),
    "circular": lambda: padded_by_images("circular"),
    "residual images": residual_images,
    "residual features": residual_features,
    "by hand": by_hand,
    "by hand, shared": by_hand_shared,
}


def trained(make: Callable[[], Net]) -> Net:
    """A network in eval mode whose every parameter and statistic is something else than at its start, and inputs."""
    torch.manual_seed(0)
    net, x = make()
    net.initialize(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval(), x


# Of a network and inputs, a plain module, its arguments besides the inputs, and the network's own function of the inputs.
Way = tuple[nn.Module, tuple, Callable[[Tensor], Tensor]]


def deterministic(net: BinaryNetwork, x: Tensor) -> Way:
    return fg.export.deterministic(net), (), net.deterministic


def member(net: BinaryNetwork, x: Tensor) -> Way:
    one = net.member(x, generator=torch.Generator().manual_seed(0))
    return fg.export.member(one), (), one


def sampled(net: BinaryNetwork, x: Tensor) -> Way:
    plain = fg.export.sampled(net)
    noise, weight_noise = plain.draw(x, generator=torch.Generator().manual_seed(6))
    return plain, (noise, weight_noise), lambda x: net(x, noise=noise, weight_noise=weight_noise)


WAYS = {"deterministic": deterministic, "member": member, "sampled": sampled}
