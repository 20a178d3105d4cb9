import numpy as np
import pytest
from figures import clashes, clipped, labels, lines, marked
from synthetic import ESTIMATORS, panels, result

from flipgrad.plots import bias_and_spread
from flipgrad.plots.bias import Span, bias_and_spread_figure


def point(axes, name):
    (x,), (y,) = lines(axes)[name].get_data()
    return x, y


def zones(axes):
    """Where the zones for zero end: the positions of the rules."""
    rules = [line for line in axes.lines if len(set(line.get_xdata())) == 1 or len(set(line.get_ydata())) == 1]
    vertical = [line.get_xdata()[0] for line in rules if list(line.get_ydata()) == [0, 1]]
    horizontal = [line.get_ydata()[0] for line in rules if list(line.get_xdata()) == [0, 1]]
    return (vertical or [axes.get_xlim()[0]])[0], (horizontal or [axes.get_ylim()[0]])[0]


def test_an_axis_with_a_zone_for_zero():
    span = Span(0.1, 10.0, 100.0, 20.0)
    assert span.points(0.1) == pytest.approx(20)
    assert span.points(10.0) == pytest.approx(100)
    assert span.at(60.0) == pytest.approx(1.0)
    assert span.at(0.0) == span.start


def test_points_are_the_numbers_of_the_file_or_in_the_zone_of_zero(tmp_path):
    content = result()
    figure = bias_and_spread_figure(panels(tmp_path, content))
    assert len(figure.axes) == 3
    for index, axes in enumerate(figure.axes):
        right, top = zones(axes)
        for name, estimator in content["estimators"].items():
            written, (x, y) = estimator["layers"][index], point(axes, name)
            assert x == pytest.approx(written["std"]) if written["std"] else axes.get_xlim()[0] < x < right
            assert y == pytest.approx(written["bias"]) if written["bias_low"] else axes.get_ylim()[0] < y < top


def test_the_claim_shows_in_the_marker(tmp_path):
    (axes,) = bias_and_spread_figure(panels(tmp_path, result(), ["all"])).axes
    hollow = {name for name, line in lines(axes).items() if line.get_markerfacecolor() == "white"}
    assert hollow == {name for name, (unbiased, _, _) in ESTIMATORS.items() if unbiased}


def test_a_claim_that_fails_is_seen_outside_the_zone(tmp_path):
    content = result()
    content["estimators"]["ARM"]["layers"][0].update(bias=0.5, bias_low=0.4, bias_high=0.6)
    (axes,) = bias_and_spread_figure(panels(tmp_path, content, ["layer 1"])).axes
    assert point(axes, "ARM")[1] == 0.5
    assert lines(axes)["ARM"].get_markerfacecolor() == "white"


def test_whiskers_are_the_confidence_intervals(tmp_path):
    content = result()
    (axes,) = bias_and_spread_figure(panels(tmp_path, content, ["layer 1"]), estimators=["ST", "ARM"]).axes
    drawn = [tuple(map(tuple, line.get_data())) for line in marked(axes, "whisker")]
    for name in ("ST", "ARM"):
        written, (x, y) = content["estimators"][name]["layers"][0], point(axes, name)
        assert ((written["std_low"], written["std_high"]), (y, y)) in drawn
        # From zero, an interval is drawn from the zone upwards.
        bottom = written["bias_low"] or zones(axes)[1]
        if written["bias_high"] > bottom:
            assert ((x, x), (pytest.approx(bottom), written["bias_high"])) in drawn
    assert len(drawn) >= 3


def test_curves_of_equal_error(tmp_path):
    (axes,) = bias_and_spread_figure(panels(tmp_path, result(), ["layer 1"])).axes
    values = {text.get_text() for text in marked(axes, "note") if text.get_text().startswith("RMSE")}
    assert {"RMSE 0.1", "RMSE 1", "RMSE 10"} <= values
    for curve in marked(axes, "iso"):
        # The ends run straight through the zones.
        lengths = np.hypot(*np.array(curve.get_data())[:, 1:-1])
        assert lengths.max() == pytest.approx(lengths.min())


@pytest.mark.parametrize(("scale", "reference"), [(1.0, 0.03), (0.1, None), (5.0, 0.03)])
def test_every_point_is_named_and_nothing_overlaps(tmp_path, scale, reference):
    figure = bias_and_spread_figure(panels(tmp_path, result(reference, scale=scale)), title="A title")
    for axes in figure.axes:
        assert set(labels(axes)) == set(ESTIMATORS)
        texts = [*labels(axes).values(), *marked(axes, "note")]
        assert clashes(texts) == []
        for name in ESTIMATORS:
            x, y = axes.transData.transform(point(axes, name))
            covering = [other for other, text in labels(axes).items() if text.get_window_extent().contains(x, y)]
            assert covering == []
    assert not clipped(figure)


def test_a_reference_that_is_not_exact_is_shaded_and_mentioned(tmp_path):
    (axes,) = bias_and_spread_figure(panels(tmp_path, result(0.05), ["layer 1"])).axes
    (band,) = marked(axes, "reference")
    assert band.get_bbox().ymax == 0.05
    assert band.get_bbox().ymin == pytest.approx(zones(axes)[1])
    assert any("below the reference's own error 0.05 (DisARM, 1M draws)" in text.get_text() for text in marked(axes, "note"))


@pytest.mark.parametrize("names", [["PSA", "ST"], ["Tanh"], ["ARM"], ["Exact"]])
def test_any_choice_of_estimators_can_be_drawn(tmp_path, names):
    figure = bias_and_spread_figure(panels(tmp_path, result()), estimators=names)
    assert all(set(lines(axes)) == set(names) for axes in figure.axes)
    assert not clipped(figure)


def test_files_are_written_and_identical_when_drawn_twice(tmp_path):
    one = panels(tmp_path, result(0.02), ["layer 1"])
    first, second = (bias_and_spread(one, tmp_path / name) for name in ("first", "second"))
    assert [path.name for path in first] == ["first.png", "first.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
