"""Networks written by hand, with skips, branches and shared layers, and their graphs for the reference algorithms."""

from __future__ import annotations

import torch
from torch import nn

import flipgrad as fg
from reference import Graph, Node


class Skip(nn.Module):
    """The first layer's states go to the second and, concatenated, to the third."""

    shape = (3, 2)

    def __init__(self):
        super().__init__()
        self.l1, self.l2 = fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 3, noise=fg.Normal(1.5))
        self.l3, self.head = fg.BinaryLinear(7, 3, noise=fg.Laplace()), nn.Linear(3, 3)

    def forward(self, x):
        h1 = self.l1(x)
        return self.head(self.l3(torch.cat([h1, self.l2(h1)], 1)))

    def graph(self):
        nodes = [
            Node(self.l1, lambda h: h[0], ()),
            Node(self.l2, lambda h: h[1], (1,)),
            Node(self.l3, lambda h: torch.cat([h[1], h[2]], 1), (1, 2)),
        ]
        return Graph(nodes, lambda h: self.head(h[3]), (3,))


class Branches(nn.Module):
    """Overlapping slices of a layer go to two branches; the head sees the states of two layers."""

    shape = (3, 2)

    def __init__(self):
        super().__init__()
        self.l1, self.left, self.right = fg.BinaryLinear(2, 5), fg.BinaryLinear(3, 2), fg.BinaryLinear(4, 3)
        self.l4, self.head = fg.BinaryLinear(5, 2), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        h1 = self.l1(x)
        left, right = self.left(h1[:, :3]), self.right(h1[:, 1:])
        return self.head(torch.cat([self.l4(torch.cat([left, right], 1)), right], 1))

    def graph(self):
        nodes = [
            Node(self.l1, lambda h: h[0], ()),
            Node(self.left, lambda h: h[1][:, :3], (1,)),
            Node(self.right, lambda h: h[1][:, 1:], (1,)),
            Node(self.l4, lambda h: torch.cat([h[2], h[3]], 1), (2, 3)),
        ]
        return Graph(nodes, lambda h: self.head(torch.cat([h[4], h[3]], 1)), (4, 3))


class Shared(nn.Module):
    """One layer applied twice, as in a recurrent net."""

    shape = (3, 2)

    def __init__(self):
        super().__init__()
        self.l1, self.again, self.head = fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.again(self.again(self.l1(x))))

    def graph(self):
        nodes = [
            Node(self.l1, lambda h: h[0], ()),
            Node(self.again, lambda h: h[1], (1,)),
            Node(self.again, lambda h: h[2], (2,)),
        ]
        return Graph(nodes, lambda h: self.head(h[3]), (3,))


class Images(nn.Module):
    """A real-valued front, and a convolution whose states are concatenated with those that it sees."""

    shape = (2, 1, 5, 5)

    def __init__(self):
        super().__init__()
        self.front, self.c1 = nn.Conv2d(1, 2, 2), fg.BinaryConv2d(2, 2, 2, stride=2)
        self.c2 = fg.BinaryConv2d(2, 3, 3, padding=1, noise=fg.Uniform(5.0))
        self.l3, self.head = fg.BinaryLinear(20, 3), nn.Linear(3, 3)

    def forward(self, x):
        h1 = self.c1(self.front(x).relu())
        return self.head(self.l3(torch.cat([h1, self.c2(h1)], 1).flatten(1)))

    def graph(self):
        nodes = [
            Node(self.c1, lambda h: self.front(h[0]).relu(), ()),
            Node(self.c2, lambda h: h[1], (1,)),
            Node(self.l3, lambda h: torch.cat([h[1], h[2]], 1).flatten(1), (1, 2)),
        ]
        return Graph(nodes, lambda h: self.head(h[3]), (3,))


class ByHand(nn.Module):
    """The modules of a Sequential, called one after the other: a model written by hand that is its twin."""

    def __init__(self, net: fg.Sequential) -> None:
        super().__init__()
        self.body, self.head = nn.ModuleList(net[index] for index in range(len(net))), net.head

    def forward(self, x):
        for module in self.body:
            x = module(x)
        return self.head(x)
