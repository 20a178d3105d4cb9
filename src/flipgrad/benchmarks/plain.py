"""The paper's network for CIFAR-10 as one would write it in torch alone, to compare times of a step with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad.network import Sequential

Activation = Callable[[Tensor], Tensor]


def clipped_sign(a: Tensor) -> Tensor:
    """The sign, with the derivative of the identity clipped to [-1, 1]."""
    clipped = functional.hardtanh(a)
    return clipped + (torch.where(a >= 0, 1.0, -1.0) - clipped).detach()


def straight_through(a: Tensor) -> Tensor:
    """States drawn with the probabilities of logistic noise, and straight-through behind them."""
    p = torch.sigmoid(a)
    states = 2 * torch.bernoulli(p) - 1
    return states + 2 * (p - p.detach())


# By their names in the results.
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu,
    "sign": clipped_sign,
    "bernoulli": straight_through,
}


class Plain(nn.Module):
    """The layers and the head of a ``net``, copies of their parameters, and an ``activation`` in place of noise and sign."""

    def __init__(self, net: Sequential, activation: Activation) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(_convolution(layer) for layer in net.binary_layers)
        head = net.head
        if not isinstance(head, nn.Linear):
            raise RuntimeError("the network is compared with one whose head is linear")
        self.head = nn.Linear(head.in_features, head.out_features)
        self.head.load_state_dict(head.state_dict())
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        outputs: Tensor = self.head(x.flatten(1))
        return outputs


def plain_update(net: Sequential, x: Tensor, labels: Tensor, activation: Activation, rate: float) -> Callable[[], None]:
    """Forward, backward and an update of stochastic gradient descent with momentum."""
    model = Plain(net, activation)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return run


def _convolution(layer: nn.Module) -> nn.Conv2d:
    """``nn.Conv2d`` with the shape and the parameters of a binary layer, which inherits from it."""
    if not isinstance(layer, nn.Conv2d):
        raise RuntimeError("the network is compared with one of convolutions")
    shape = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride
    twin = nn.Conv2d(*shape)  # type: ignore[arg-type]
    twin.load_state_dict(layer.state_dict())
    return twin
