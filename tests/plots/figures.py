"""What a drawn figure shows."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text


def lines(axes: Axes) -> dict[str, Line2D]:
    """The lines that show data, by estimator."""
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def marked(axes: Axes, gid: str) -> list:
    """The artists of a kind."""
    return axes.findobj(lambda artist: artist.get_gid() == gid)


def labels(axes: Axes) -> dict[str, Text]:
    """The estimators' names on the axes."""
    return {text.get_text(): text for text in marked(axes, "label")}


def clashes(texts: list[Text]) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other; a pixel of the boxes' padding may be shared."""
    boxes = {text.get_text(): text.get_window_extent().padded(-0.5) for text in texts}
    return [(a, b) for a, b in itertools.combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]


def clipped(figure: Figure) -> bool:
    """Whether anything sticks out of the figure."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
