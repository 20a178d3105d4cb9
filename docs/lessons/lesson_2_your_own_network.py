"""
.. index:: ! skip connections, ! skip connection, ! norms, ! pooling

2. Your own network, in a plain PyTorch loop
============================================

Skip connections, norms, pooling, residual streams: what may stand between binary layers, and how to write a network by hand.
"""

# %%
# Everything that ``fg.Sequential`` accepts
# -----------------------------------------
#
# Real-valued modules come first, whatever they are. Between binary layers may stand what only moves states around (flatten,
# padding, ``fg.Concat``) and pooling. A norm belongs *into* the layer, by ``norm=``: it scales and shifts the pre-activation before
# the sign, and is folded into the weights that flips see.

import matplotlib.pyplot as plt
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import digits

torch.manual_seed(0)
data = digits()

net = fg.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    fg.BinaryConv2d(8, 16, 3, padding=1, bias=False, norm=nn.BatchNorm2d(16), noise=fg.Logistic(0.3)),
    nn.MaxPool2d(2),
    fg.BinaryConv2d(16, 32, 3, padding=1, bias=False, norm=nn.BatchNorm2d(32), noise=fg.Logistic(0.3)),
    nn.AvgPool2d(2),
    nn.Flatten(),
    head=nn.Linear(32 * 2 * 2, 10),
)
print(fg.summary(net, data.train.x[:1]))

# %%
# What would silently break the gradient is refused, by name and with the way out:

try:
    fg.Sequential(fg.BinaryLinear(4, 4), nn.ReLU(), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2))
except fg.InputError as error:
    print(error)

# %%
# A skip connection
# -----------------
#
# A network written by hand is an ordinary ``nn.Module``. Two branches are concatenated here; ``fg.Graph`` runs the model once to see
# which layers it has, and gives it the methods of ``fg.Sequential``: ``initialize``, ``predict``, ``member``.


class Skip(nn.Module):
    """Three binary layers; the third sees the states of both others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fg.BinaryLinear(64, 64, bias=False, norm=nn.BatchNorm1d(64), noise=fg.Logistic(0.3))
        self.second = fg.BinaryLinear(64, 64, bias=False, norm=nn.BatchNorm1d(64), noise=fg.Logistic(0.3))
        self.third = fg.BinaryLinear(128, 64, bias=False, norm=nn.BatchNorm1d(64), noise=fg.Logistic(0.3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        a = self.first(x.flatten(1))
        b = self.second(a)
        return self.head(self.third(torch.cat([a, b], 1)))


skip = fg.Graph(Skip(), data.train.x[:64])
skip.initialize(data.train.x[:256])

# %%
# A residual stream
# -----------------
#
# Deep networks train best with a stream of real numbers that blocks add to; what is multiplied with weights are still states ±1.


def block(channels: int, out: int, stride: int = 1) -> fg.ResidualConv2d:
    """A block with a norm before its sign and one behind its convolution."""
    norms = {"norm": nn.BatchNorm2d(channels), "branch_norm": nn.BatchNorm2d(out)}
    return fg.ResidualConv2d(channels, out, 3, stride, bias=False, noise=fg.Logistic(0.3), **norms)


residual = fg.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    block(16, 16),
    block(16, 32, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    head=nn.Linear(32, 10),
)

# %%
# One loop trains all of them
# ---------------------------
#
# Any optimizer will do. With norms, Adam at 0.003 to 0.01 is a good start.

EPOCHS = 3


def train(model: fg.Sequential | fg.Graph) -> list[float]:
    """The losses of all updates."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.train)).split(64):
            optimizer.zero_grad()
            loss = model(data.train.x[batch], fg.CrossEntropy(data.train.y[batch]), estimator=fg.PSA()).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, model in {"pooling": net, "skip": skip, "residual": residual}.items():
    losses = torch.tensor(train(model))
    model.eval()
    accuracy = (model.predict(data.test.x, samples=10).argmax(1) == data.test.y).float().mean()
    axes.plot(losses.unfold(0, 10, 1).mean(1), label=f"{name}: {accuracy:.1%} of the test images")
axes.set(xlabel="update", ylabel="loss, mean of 10 updates")
axes.legend()
plt.show()

# %%
# Without ``fg.Graph``, ``fg.use(model, fg.PSA())`` attaches an estimator to a model's layers for an ordinary ``model(x)`` and an
# ordinary loss; :doc:`/reference/networks` has the details.
