"""Panels get the size that is asked for, and all that stands beside them has room."""

from __future__ import annotations

import pytest
from figures import clipped

from flipgrad.plots.style import PAGE, defaults, fit, grid, legend


def sizes(figure, axes):
    """Width and height of the axes in inches."""
    across, up = figure.get_size_inches()
    return axes.get_position().width * across, axes.get_position().height * up


@defaults()
def drawn(rows, columns, *, limits=None, **options):
    figure, panels = grid(rows, columns, **options)
    for panel in panels:
        panel.set(title="Two\nlines", xlabel="x", ylabel="y", ylim=(0, 1000))
        panel.text(1, 0.5, "beside the panel", transform=panel.transAxes)
    legend(figure, {"one": {}, "two": {}})
    fit(figure, height=1.5, **limits or {})
    return figure, panels


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_panels_have_the_height_and_fill_the_page(rows, columns):
    figure, panels = drawn(rows, columns, title="Title")
    assert len(panels) == rows * columns
    assert figure.get_size_inches()[0] == pytest.approx(PAGE)
    for panel in panels:
        assert sizes(figure, panel)[1] == pytest.approx(1.5, abs=0.03)
    assert len({round(sizes(figure, panel)[0], 2) for panel in panels}) == 1
    assert not clipped(figure)


@pytest.mark.parametrize(("columns", "limits"), [(1, {"widest": 2.0}), (8, {"narrowest": 1.3})])
def test_the_page_gives_way_to_the_limits_of_a_width(columns, limits):
    figure, panels = drawn(1, columns, limits=limits)
    for panel in panels:
        assert sizes(figure, panel)[0] == pytest.approx(next(iter(limits.values())), abs=0.03)
    assert not clipped(figure)


def test_places_without_a_panel_stay_empty():
    figure, panels = drawn(2, 2, count=3)
    assert figure.axes == panels
    assert len(panels) == 3


def test_widths_may_differ():
    figure, (left, right) = drawn(1, 2, width_ratios=[1, 2])
    assert sizes(figure, right)[0] == pytest.approx(2 * sizes(figure, left)[0], rel=0.02)


def test_the_title_begins_where_the_panels_do():
    figure, panels = drawn(1, 1, title="Title")
    (title,) = figure.texts
    assert title.get_position()[0] == panels[0].get_position().x0
