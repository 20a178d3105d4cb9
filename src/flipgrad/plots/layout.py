"""The panels of a figure: constrained layout finds the room around them, so that no figure computes margins."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from flipgrad.plots.style import FONT, SMALL, tidy

# Inches: the width of a page, and of what :func:`grid` begins with, where any decoration of a panel has room.
PAGE, AMPLE = 7.2, 4.0


def grid(rows: int, columns: int, *, count: int | None = None, title: str = "", **options: Any) -> tuple[Figure, list[Axes]]:
    """Tidy panels, ``count`` or all of ``rows`` times ``columns``, row by row; ``options`` are those of ``subplots``.

    When all that stands beside the panels is drawn, :func:`fit` must find their places.
    """
    engine = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.07, wspace=0, hspace=0)
    figure = Figure(figsize=(columns * AMPLE, rows * AMPLE), layout=engine)
    places = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    panels = places[:count]
    for panel in panels:
        tidy(panel)
    for panel in places[len(panels) :]:
        panel.remove()
    if title:
        figure.suptitle(title, ha="left", fontsize=FONT + 1, fontweight="bold")
    return figure, panels


def fit(figure: Figure, *, height: float, narrowest: float = 0.0, widest: float = inf) -> None:
    """Choose the figure's size, and keep the panels where they then are.

    A panel is ``height`` inches tall, and as wide as the page allows, between ``narrowest`` and ``widest``.
    """
    engine = cast("ConstrainedLayoutEngine", figure.get_layout_engine())
    rows, columns = cast("GridSpec", figure.axes[0].get_gridspec()).get_geometry()
    engine.execute(figure)
    across, up = figure.get_size_inches()
    boxes = [axes.get_position() for axes in figure.axes[:columns]]
    beside = across * (1 - sum(box.width for box in boxes))
    above = up * (1 - rows * boxes[0].height)
    width = min(max((PAGE - beside) / columns, narrowest), widest)
    figure.set_size_inches(beside + columns * width, above + rows * height)
    engine.execute(figure)
    figure.set_layout_engine("none")
    for title in figure.texts:
        title.set_x(figure.axes[0].get_position().x0)


def legend(figure: Figure, handles: Sequence[Line2D], *, columns: int = 2, **options: Any) -> None:
    """A legend of the whole figure, outside the panels."""
    look: dict[str, Any] = {"loc": "outside lower right", "frameon": False, "fontsize": SMALL, "borderaxespad": 0.2}
    figure.legend(handles=handles, ncols=columns, **{**look, **options})
