"""Small networks, where every option is measured against the exact gradient."""

from __future__ import annotations

from collections.abc import Mapping

from flipgrad.reproduce._experiment import Accuracies
from flipgrad.reproduce._workshop import ToyNet, Workshop
from flipgrad.reproduce.beyond.options import OPTIONS, Net, named, per_layer

# Layers of 5 units of the networks of several depths.
UNITS = 5
# How many of the scale's epochs are looked at, depths, and widths of other networks.
ALONG = {"smoke": 1, "small": 3, "paper": 3}
DEPTHS = {"smoke": (2,), "small": (2, 4, 5, 6, 7), "paper": (2, 4, 5, 6, 7)}
WIDER = {"smoke": (), "small": ((10, 10, 10),), "paper": ((10, 10, 10),)}


def nets(shop: Workshop) -> list[ToyNet]:
    """5-5-5 along its training, a wider network and those of other depths after one epoch."""
    epochs = shop.scale.epochs
    along = [ToyNet((UNITS,) * 3, epoch, epochs) for epoch in epochs[: ALONG[shop.scale_name]]]
    others = [*WIDER[shop.scale_name], *((UNITS,) * depth for depth in DEPTHS[shop.scale_name])]
    return [*along, *(ToyNet(widths) for widths in others)]


def measure(shop: Workshop, costs: Mapping[str, Mapping[str, float]]) -> list[Net]:
    """The accuracy of every option in every network; ``costs`` are those of :mod:`flipgrad.reproduce.beyond.cost`."""
    labels = [named(option)[0] for option in OPTIONS]
    found = []
    for net in nets(shop):
        table = Accuracies.read(shop.measure(net, OPTIONS, shop.scale.samples, apart="beyond"))
        entries = {label: table.estimators[label]["layers"] for label in labels}
        layers = [entry["name"] for entry in entries[labels[0]]]
        options = {label: per_layer(entries[label]) for label in labels}
        state = f"epoch {net.epoch:,}"
        title = f"{net.shape if len(net.widths) <= 3 else f'{len(net.widths)} × {net.widths[0]}'},\n{state}"
        name = f"{net.shape}, {state}"
        found.append(Net(name, title, False, "the exact gradient", layers, options, {}, costs[net.shape]))
    return found
