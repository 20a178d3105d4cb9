"""Names beside what they name, without overlaps: lengths are points, from the lower left corner of the axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, ScaledTranslation, Transform
from scipy.optimize import isotonic_regression

from flipgrad.plots.style import GREY, SMALL, TINY, Style, fit

# From one label's middle to the next one's, and from a line's end to its label.
LINE, GAP = 1.3 * SMALL, 9.0

# The last points of lines, and their styles, by what they are called.
Ends = dict[str, tuple[float, float, Style]]


def keep_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least ``gap`` apart within [low, high], in the order of ``wanted`` and closest to it in squares.

    Where they cannot all fit, the gap shrinks.

    >>> keep_apart([1.0, 1.0, 5.0], 2.0, 0.0, 10.0)
    [0.0, 2.0, 5.0]
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = np.argsort(wanted, kind="stable")
    gaps = gap * np.arange(len(wanted))
    # Without the gaps, the positions only have to be in order.
    inside = isotonic_regression(np.take(wanted, order) - gaps).x.clip(low, high - gaps[-1])
    positions = np.empty(len(wanted))
    positions[order] = inside + gaps
    return [float(position) for position in positions]


def points(axes: Axes, *, right: bool = False) -> Transform:
    """From points, beginning at the lower left (or right) corner of the axes, to the screen."""
    inches = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    return inches + ScaledTranslation(float(right), 0, axes.transAxes)  # type: ignore[arg-type]


def place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of the data, in points; the limits must have been set."""
    across, up = points(axes).inverted().transform(axes.transData.transform((x, y)))
    return float(across), float(up)


@lru_cache(maxsize=1000)
def text_width(text: str, weight: str = "normal") -> float:
    """The width in points of one line of small text."""
    return float(TextPath((0, 0), text, prop=FontProperties(size=SMALL, weight=weight)).get_extents().width) if text else 0.0


def write(axes: Axes, name: str, x: float, y: float, style: Style, **options: Any) -> Text:
    """Write an estimator's name in its colour, its middle at height ``y``."""
    look: dict[str, Any] = {"color": style.colour, "fontweight": style.weight, "fontsize": SMALL, "zorder": 6, "gid": "label"}
    return _text(axes, x, y, name, **{"transform": points(axes), "va": "center_baseline", **look, **options})


def note(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """A remark in grey italics, at a fraction of the axes."""
    look: dict[str, Any] = {"color": GREY, "fontstyle": "italic", "fontsize": TINY, "zorder": 5, "gid": "note"}
    _text(axes, x, y, text, **{"transform": axes.transAxes, "va": "bottom", **look, **options})


def _text(axes: Axes, x: float, y: float, text: str, *, behind: str = "white", **look: Any) -> Text:
    """A text that stays legible on lines, as it is surrounded by the colour that is ``behind`` it."""
    return axes.text(x, y, text, path_effects=[withStroke(linewidth=1.5, foreground=behind)], **look)


def lead(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A hairline from what is named to its name."""
    look: dict[str, Any] = {"linewidth": 0.45, "alpha": 0.75, "zorder": 2.5, "gid": "leader"}
    axes.plot(*zip(start, end, strict=True), transform=points(axes), color=colour, clip_on=False, **look)


def label_ends(figure: Figure, panels: Sequence[Axes], every: Sequence[Ends], *, height: float, **widths: float) -> None:
    """Name lines to the right of their panel, each from its last point, with a hairline where the name had to move.

    The panels are fitted into the figure, see :func:`flipgrad.plots.style.fit`, at least as tall as the names need.
    """
    texts = [
        [write(axes, name, GAP, LINE, style, transform=points(axes, right=True)) for name, (_, _, style) in ends.items()]
        for axes, ends in zip(panels, every, strict=True)
    ]
    fit(figure, height=max(height, (max(map(len, texts)) + 1) * LINE / 72), **widths)
    for axes, ends, names in zip(panels, every, texts, strict=True):
        width, tall = place(axes, axes.get_xlim()[1], axes.get_ylim()[1])
        starts = [place(axes, x, y) for x, y, _ in ends.values()]
        heights = keep_apart([y for _, y in starts], LINE, LINE / 2, tall - LINE / 2)
        for name, (x, y), moved in zip(names, starts, heights, strict=True):
            name.set_y(moved)
            if abs(moved - y) > LINE / 4 or x < width - GAP:
                lead(axes, (x, y), (width + GAP - 1.5, moved), str(name.get_color()))


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Whether they have an area in common."""
        across = min(self.right, other.right) > max(self.left, other.left)
        return across and min(self.top, other.top) > max(self.bottom, other.bottom)

    def within(self, other: Box) -> bool:
        """Whether it is part of ``other``."""
        return self.left >= other.left and self.bottom >= other.bottom and self.right <= other.right and self.top <= other.top


@dataclass(frozen=True)
class Spot:
    """A point to be named."""

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
        half, tall = text_width(self.name, self.style.weight) / 2 + 1, LINE / 2
        x, y = self.x + (radius + half) * cos(angle), self.y + (radius + tall) * sin(angle)
        return Box(x - half, y - tall, x + half, y + tall)


def label_spots(axes: Axes, spots: Sequence[Spot], area: Box, taken: Iterable[Box], whiskers: Sequence[Box]) -> None:
    """Name points inside ``area``: each name as near as it can be without covering a name, a marker or what is ``taken``."""
    hard = [*(spot.marker for spot in spots), *taken]

    def cost(choice: tuple[float, Box]) -> float:
        """Covering a name or marker is worse than any distance; a whisker may be crossed."""
        radius, box = choice
        return radius + 1000 * sum(map(box.overlaps, hard)) + 6 * sum(map(box.overlaps, whiskers))

    # The crowded first, as they have the least choice.
    for spot in sorted(spots, key=lambda spot: -sum(abs(spot.x - o.x) + abs(spot.y - o.y) < 40 for o in spots)):
        choices = [(radius, spot.label(radius, turn * pi / 8)) for radius in (5, 8, 12, 17, 23, 30, 40) for turn in range(16)]
        radius, box = min([choice for choice in choices if choice[1].within(area)] or choices, key=cost)
        hard.append(box)
        write(axes, spot.name, (box.left + box.right) / 2, (box.bottom + box.top) / 2, spot.style, ha="center")
        if radius > 8:
            end = min(max(spot.x, box.left), box.right), min(max(spot.y, box.bottom), box.top)
            lead(axes, (spot.x, spot.y), end, spot.style.colour)
