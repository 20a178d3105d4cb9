"""Small problems to train on."""

from __future__ import annotations

import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import DataSet, Split
from flipgrad.training import RunFolder, TrainConfig, read_checkpoint, train


def blobs(n=60):
    """Two well separated classes of 4x4 images."""
    y = torch.arange(n) % 2
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) / 3 + (2 * y - 1).view(-1, 1, 1, 1)
    return DataSet("blobs", Split(x[:40], y[:40]), Split(x[40:], y[40:]), classes=2, background=0.0)


def small_net(seed=0, *front):
    torch.manual_seed(seed)
    return fg.Sequential(*front, fg.BinaryConv2d(1, 4, 3), fg.BinaryConv2d(4, 4, 2), nn.Flatten(), head=nn.Linear(4, 2))


def binary_net(seed=0, weight_noise=None):
    """The small network with binary weights in its second layer."""
    torch.manual_seed(seed)
    second = fg.BinaryConv2d(4, 4, 2, weights="binary", weight_noise=weight_noise)
    return fg.Sequential(fg.BinaryConv2d(1, 4, 3), second, nn.Flatten(), head=nn.Linear(4, 2))


def drawn_net(seed=0):
    """The same with weights that are drawn."""
    return binary_net(seed, fg.Logistic(0.2))


def config(**options):
    return TrainConfig(**{"epochs": 3, "batch_size": 10, "eval_samples": 3, **options})


def run(path, net=None, data=None, arguments=None, **options):
    """A run that stores its files in ``path``: the evaluation and the network."""
    net = small_net() if net is None else net
    with RunFolder(path) as folder:
        return train(config(**options), net, data or blobs(), folder, **(arguments or {})), net


def resume(path, net=None, data=None, arguments=None, **options):
    """Go on with the run in ``path``."""
    net = small_net() if net is None else net
    with RunFolder.reopen(path) as folder:
        checkpoint = read_checkpoint(path)
        return train(config(**options), net, data or blobs(), folder, checkpoint=checkpoint, **(arguments or {})), net


class StopAfter:
    """Says after some updates that it is time to stop."""

    def __init__(self, updates):
        self.left = updates

    def __call__(self):
        self.left -= 1
        return self.left == 0
