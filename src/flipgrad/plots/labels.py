"""Names beside what they name, without overlaps: lengths are points, from the lower left corner of the axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from flipgrad.plots.results import Reference
from flipgrad.plots.style import GREY, SMALL, TINY, Style, plain, text_width

# From one label's middle to the next one's, and from a line's end to its label.
LINE, GAP = 1.3 * SMALL, 9.0


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least ``gap`` apart within [low, high], in the order of ``wanted`` and closest to it in squares.

    Where they cannot all fit, the gap shrinks.

    >>> spread([1.0, 1.0, 5.0], 2.0, 0.0, 10.0)
    [0.0, 2.0, 5.0]
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = np.argsort(wanted, kind="stable")
    # Isotonic regression by pooling neighbours that violate the order, after taking the gaps out.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        total, count = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    flat = [total / count for total, count in pools for _ in range(count)]
    positions = [0.0] * len(wanted)
    for rank, (index, value) in enumerate(zip(order, flat, strict=True)):
        positions[index] = min(max(value, low), high - (len(wanted) - 1) * gap) + rank * gap
    return positions


def size(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in points."""
    scale = 72 / axes.figure.dpi
    return scale * axes.bbox.width, scale * axes.bbox.height


def place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of the data, in points; the limits must have been set."""
    across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    width, height = size(axes)
    return float(across * width), float(up * height)


def write(axes: Axes, name: str, x: float, y: float, style: Style, *, align: str = "left", halo: str = "white") -> None:
    """Write an estimator's name in its colour, its middle at height ``y``."""
    width, height = size(axes)
    axes.text(
        x / width,
        y / height,
        name,
        transform=axes.transAxes,
        horizontalalignment=align,
        verticalalignment="center_baseline",
        color=style.colour,
        fontsize=SMALL,
        fontweight=style.weight,
        zorder=6,
        gid="label",
        path_effects=[withStroke(linewidth=1.6, foreground=halo)],
    )


def lead(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A hairline from what is named to its name."""
    width, height = size(axes)
    xs, ys = [start[0] / width, end[0] / width], [start[1] / height, end[1] / height]
    axes.plot(
        xs, ys, transform=axes.transAxes, color=colour, linewidth=0.45, alpha=0.75, clip_on=False, gid="leader", zorder=2.5
    )


def label_ends(axes: Axes, ends: dict[str, tuple[float, float, Style]]) -> None:
    """Name lines to the right of the axes, each from its last point, with a hairline where the name had to move."""
    width, height = size(axes)
    points = {name: place(axes, x, y) for name, (x, y, _) in ends.items()}
    heights = spread([y for _, y in points.values()], LINE, LINE / 2, height - LINE / 2)
    for (name, (x, y)), moved in zip(points.items(), heights, strict=True):
        style = ends[name][2]
        write(axes, name, width + GAP, moved, style)
        if abs(moved - y) > LINE / 4 or x < width - GAP:
            lead(axes, (x, y), (width + GAP - 1.5, moved), style.colour)


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """The common area."""
        across = min(self.right, other.right) - max(self.left, other.left)
        up = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(across, 0.0) * max(up, 0.0)

    def within(self, other: Box) -> bool:
        """Whether it is part of ``other``."""
        return self.left >= other.left and self.bottom >= other.bottom and self.right <= other.right and self.top <= other.top


@dataclass(frozen=True)
class Spot:
    """A point to be named, and where its name's middle went."""

    x: float
    y: float
    name: str
    style: Style

    @property
    def marker(self) -> Box:
        """What the marker covers."""
        return Box(self.x - 3.5, self.y - 3.5, self.x + 3.5, self.y + 3.5)

    def label(self, radius: float, angle: float) -> Box:
        """The name's box when its edge is ``radius`` away from the point in the direction ``angle``."""
        half, tall = text_width(self.name, SMALL, self.style.weight) / 2 + 1, LINE / 2
        x, y = self.x + (radius + half) * cos(angle), self.y + (radius + tall) * sin(angle)
        return Box(x - half, y - tall, x + half, y + tall)


def label_spots(axes: Axes, spots: Sequence[Spot], area: Box, taken: Iterable[Box] = (), whiskers: Sequence[Box] = ()) -> None:
    """Name points inside ``area``: each name as near as it can be without covering a name, a marker or what is ``taken``."""
    hard = [*(spot.marker for spot in spots), *taken]
    # The crowded first, as they have the least choice.
    for spot in sorted(spots, key=lambda spot: -sum(abs(spot.x - o.x) + abs(spot.y - o.y) < 40 for o in spots)):
        choices = [(radius, spot.label(radius, turn * pi / 8)) for radius in (5, 8, 12, 17, 23, 30, 40) for turn in range(16)]
        inside = [choice for choice in choices if choice[1].within(area)] or choices
        radius, box = min(inside, key=lambda choice: choice[0] + _cost(choice[1], hard, whiskers))
        hard.append(box)
        write(axes, spot.name, (box.left + box.right) / 2, (box.bottom + box.top) / 2, spot.style, align="center")
        if radius > 8:
            end = min(max(spot.x, box.left), box.right), min(max(spot.y, box.bottom), box.top)
            lead(axes, (spot.x, spot.y), end, spot.style.colour)


def _cost(box: Box, hard: Sequence[Box], soft: Sequence[Box]) -> float:
    """Covering a name or marker is worse than any distance; a whisker may be crossed."""
    return sum(1000 * (box.overlap(other) > 0) for other in hard) + sum(6 * (box.overlap(other) > 0) for other in soft)


def note(
    axes: Axes, x: float, y: float, text: str, *, va: str = "bottom", ha: str = "left", rotation: float = 0, halo: str = "white"
) -> None:
    """A remark in the margin's voice, at a fraction of the axes."""
    axes.text(
        x,
        y,
        text,
        transform=axes.transAxes,
        fontsize=TINY,
        fontstyle="italic",
        color=GREY,
        va=va,
        ha=ha,
        rotation=rotation,
        zorder=5,
        gid="note",
        path_effects=[withStroke(linewidth=1.4, foreground=halo)],
    )


def source(reference: Reference) -> str:
    """Where a reference that is not exact comes from."""
    return f"{reference.estimator}, {plain(reference.draws)} draws"
