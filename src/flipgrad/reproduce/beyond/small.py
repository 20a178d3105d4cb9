"""Small networks, where every option is measured against the exact gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from flipgrad.reproduce._experiment import Table, Workshop
from flipgrad.reproduce.beyond.options import OPTIONS, Net, named, per_layer

# Layers of 5 units of the networks of several depths.
UNITS = 5
# How many of the scale's epochs are looked at, depths, and widths of other networks.
ALONG = {"smoke": 1, "small": 3, "paper": 3}
DEPTHS = {"smoke": (2,), "small": (2, 4, 5, 6, 7), "paper": (2, 4, 5, 6, 7)}
WIDER = {"smoke": (), "small": ((10, 10, 10),), "paper": ((10, 10, 10),)}


@final
@dataclass(frozen=True)
class Small:
    """A network of these ``widths`` after ``epoch`` of the epochs at which its training is looked at."""

    widths: tuple[int, ...]
    epoch: int
    epochs: Sequence[int]

    @property
    def shape(self) -> str:
        """Such as "5-5-5"."""
        return "-".join(map(str, self.widths))

    @property
    def name(self) -> str:
        """With its state."""
        return f"{self.shape}, epoch {self.epoch:,}"


def nets(shop: Workshop) -> list[Small]:
    """5-5-5 along its training, a wider network and those of other depths after one epoch."""
    epochs = shop.scale.epochs
    along = [Small((UNITS,) * 3, epoch, epochs) for epoch in epochs[: ALONG[shop.scale_name]]]
    others = [*WIDER[shop.scale_name], *((UNITS,) * depth for depth in DEPTHS[shop.scale_name])]
    return [*along, *(Small(widths, 1, (1,)) for widths in others)]


def measure(shop: Workshop, costs: Mapping[str, Mapping[str, float]]) -> list[Net]:
    """The accuracy of every option in every network; ``costs`` are those of :mod:`flipgrad.reproduce.beyond.cost`."""
    labels = [named(option)[0] for option in OPTIONS]
    found = []
    for net in nets(shop):
        path = shop.measure(net.widths, net.epoch, net.epochs, OPTIONS, shop.scale.samples, apart="beyond")
        table = Table.read(path)
        entries = {label: table.estimators[label]["layers"] for label in labels}
        layers = [entry["name"] for entry in entries[labels[0]]]
        options = {label: per_layer(entries[label]) for label in labels}
        title = f"{net.shape if len(net.widths) <= 3 else f'{len(net.widths)} × {net.widths[0]}'},\nepoch {net.epoch:,}"
        found.append(Net(net.name, title, False, "the exact gradient", layers, options, {}, costs[net.shape]))
    return found
