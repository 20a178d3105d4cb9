import itertools

import matplotlib.colors
import numpy as np
import pytest
from figures import clashes, clipped, labels, lines, marked
from synthetic import ESTIMATORS, SAMPLES, TEN, panels, result

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.plots import Panel, cosine, rmse
from flipgrad.plots.accuracy import cosine_figure, rmse_figure
from flipgrad.plots.style import style_of

FIGURES = {"rmse": rmse_figure, "cosine_mean": cosine_figure}
each = pytest.mark.parametrize(("key", "draw"), FIGURES.items())


@each
def test_the_lines_are_the_numbers_of_the_file(tmp_path, key, draw):
    content = result()
    figure = draw(panels(tmp_path, content), estimators=TEN)
    assert [axes.get_title() for axes in figure.axes] == ["Layer 1", "Layer 2", "All"]
    for index, axes in enumerate(figure.axes):
        drawn = lines(axes)
        assert set(drawn) == set(TEN)
        for name, line in drawn.items():
            assert list(line.get_xdata()) == SAMPLES
            assert list(line.get_ydata()) == content["estimators"][name]["layers"][index][key]
            style = style_of(name)
            assert (line.get_color(), line.get_marker(), line.get_linewidth()) == (style.colour, style.marker, style.width)
            assert line.is_dashed() == bool(style.dashes)


@each
@pytest.mark.parametrize(
    ("names", "scale"), [(TEN, 1.0), (None, 1.0), (None, 0.01), (TEN, 8.0)], ids=["ten", "all", "small", "large"]
)
def test_every_line_is_named_in_its_colour_and_no_names_overlap(tmp_path, key, draw, names, scale):
    figure = draw(panels(tmp_path, result(scale=scale)), estimators=names)
    expected = set(names or ESTIMATORS) - ({"Exact"} if key == "rmse" else set())
    for axes in figure.axes:
        assert set(labels(axes)) == expected
        assert clashes(list(labels(axes).values())) == []
        for name, text in labels(axes).items():
            assert text.get_color() == lines(axes)[name].get_color()
            # To the right of this panel, and left of the next.
            assert text.get_window_extent().x0 > axes.bbox.x1
        limits = sorted(axes.get_ylim())
        shown = np.concatenate([line.get_ydata() for line in lines(axes).values()])
        assert limits[0] <= shown.min()
        assert shown.max() <= limits[1]
    for left, right in itertools.pairwise(figure.axes):
        assert max(text.get_window_extent().x1 for text in labels(left).values()) < right.bbox.x0
    assert not clipped(figure)


@each
def test_a_name_that_moved_has_a_leader_from_the_lines_end(tmp_path, key, draw):
    (axes,) = draw(panels(tmp_path, result(), ["layer 1"])).axes
    for name, text in labels(axes).items():
        line = lines(axes)[name]
        end = axes.transData.transform((line.get_xdata()[-1], line.get_ydata()[-1]))
        box = text.get_window_extent()
        leaders = [leader for leader in marked(axes, "leader") if leader.get_color() == line.get_color()]
        if abs(end[1] - (box.y0 + box.y1) / 2) > box.height / 2:
            (leader,) = leaders
            assert leader.get_transform().transform(leader.get_xydata())[0] == pytest.approx(end, abs=0.1)


def test_panels_share_the_axis_of_errors(tmp_path):
    figure = rmse_figure(panels(tmp_path, result()))
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in figure.axes)


def test_the_reference_slope_is_that_of_unbiased_estimators_and_crosses_none(tmp_path):
    for axes in rmse_figure(panels(tmp_path, result()), estimators=TEN).axes:
        (slope,) = marked(axes, "slope")
        x, y = slope.get_data()
        assert y[0] * x[0] ** 0.5 == pytest.approx(y[1] * x[1] ** 0.5)
        for line in lines(axes).values():
            ratios = np.array(line.get_ydata()) * np.sqrt(line.get_xdata()) / (y[0] * x[0] ** 0.5)
            assert not 0.9 < np.abs(ratios).min() < 1.1


def test_an_estimator_without_error_is_not_drawn_but_mentioned(tmp_path):
    (axes,) = rmse_figure(panels(tmp_path, result(), ["all"])).axes
    assert "Exact" not in lines(axes)
    assert [text.get_text() for text in marked(axes, "note")] == ["no error: Exact"]


def test_errors_that_the_reference_cannot_resolve_are_shaded(tmp_path):
    (axes,) = rmse_figure(panels(tmp_path, result(0.03), ["layer 1"]), estimators=TEN).axes
    (band,) = marked(axes, "reference")
    assert band.get_bbox().ymax == 0.03
    assert axes.get_ylim()[0] < 0.03
    (text,) = marked(axes, "note")
    assert text.get_text() == "grey: below the error of\nthe reference (DisARM, 1M draws)"
    (slope,) = marked(axes, "slope")
    assert min(slope.get_ydata()) >= 0.03 * (1 - 1e-9)


def test_a_reference_far_better_than_all_is_only_mentioned(tmp_path):
    (axes,) = rmse_figure(panels(tmp_path, result(1e-5), ["layer 1"]), estimators=TEN).axes
    assert marked(axes, "reference") == []
    assert "its relative error 1e-05" in marked(axes, "note")[0].get_text()
    assert axes.get_ylim()[0] > 1e-3


def test_an_exact_reference_is_not_mentioned(tmp_path):
    (axes,) = rmse_figure(panels(tmp_path, result(), ["layer 1"]), estimators=TEN).axes
    assert marked(axes, "reference") == marked(axes, "note") == []


def test_cosines_have_their_interval_shaded(tmp_path):
    content = result()
    (axes,) = cosine_figure(panels(tmp_path, content, ["layer 1"]), estimators=["PSA", "ARM"]).axes
    for collection, name in zip(axes.collections, ["PSA", "ARM"], strict=True):
        written = content["estimators"][name]["layers"][0]
        corners = {tuple(corner) for corner in collection.get_paths()[0].vertices}
        for edge in ("cosine_low", "cosine_high"):
            assert set(zip(SAMPLES, written[edge], strict=True)) <= corners
        assert tuple(collection.get_facecolor()[0][:3]) == matplotlib.colors.to_rgb(style_of(name).colour)


@pytest.mark.parametrize(("lowest", "floor"), [(0.01, -0.12), (-0.1, -0.25), (-0.8, -1.0)])
def test_zero_is_in_sight_and_explained(tmp_path, lowest, floor):
    figure = cosine_figure(panels(tmp_path, result(scale=100, lowest=lowest)), estimators=["PSA", "ARM", "REINFORCE"])
    for axes in figure.axes:
        assert axes.get_ylim() == (floor, 1.02)
        assert [list(zero.get_ydata()) for zero in marked(axes, "zero")] == [[0, 0]]
        assert "descent direction above" in [text.get_text() for text in axes.texts]


def test_estimators_may_have_different_samples(tmp_path):
    content = result()
    for entry in content["estimators"]["ARM"]["layers"]:
        entry.update({key: entry[key][:4] for key in ("samples", "rmse", "cosine_mean", "cosine_low", "cosine_high")})
    for draw in FIGURES.values():
        (axes,) = draw(panels(tmp_path, content, ["all"]), estimators=["PSA", "ARM"]).axes
        assert list(lines(axes)["ARM"].get_xdata()) == SAMPLES[:4]
        # From where the line ends to the name on the right.
        assert len([leader for leader in marked(axes, "leader") if leader.get_color() == style_of("ARM").colour]) == 1


@each
def test_one_sample_only(tmp_path, key, draw):
    content = result()
    for estimator in content["estimators"].values():
        for entry in estimator["layers"]:
            entry.update({key: entry[key][:1] for key in ("samples", "rmse", "cosine_mean", "cosine_low", "cosine_high")})
    figure = draw(panels(tmp_path, content), estimators=["PSA", "Tanh"])
    assert all(list(line.get_xdata()) == [1] for axes in figure.axes for line in lines(axes).values())


@pytest.mark.parametrize("draw", [rmse, cosine])
def test_files_are_written_and_identical_when_drawn_twice(tmp_path, draw):
    one = panels(tmp_path, result(0.02), ["layer 1"])
    first = draw(one, tmp_path / "first", estimators=TEN, title="A title")
    second = draw(one, tmp_path / "second.pdf", estimators=TEN, title="A title")
    assert [path.name for path in first + second] == ["first.png", "first.pdf", "second.png", "second.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("draw", [rmse, cosine])
def test_an_error_writes_nothing(tmp_path, draw):
    with pytest.raises(InputError, match=r"gone\.json' cannot be read"):
        draw([Panel(tmp_path / "gone.json", "all", "")], tmp_path / "figure")
    assert list(tmp_path.iterdir()) == []


class Measured:
    """A result as it was measured: it can tell what its file would hold."""

    def __init__(self, content):
        self.content = content

    def to_dict(self):
        return self.content


@each
def test_a_result_is_drawn_as_its_file_is(tmp_path, key, draw):
    content = result()
    path = tmp_path / "result.json"
    files.write_json(path, content)
    drawn, of_file = draw(Measured(content), estimators=TEN), draw(path, estimators=TEN)
    # Alone it has a panel for every hidden layer.
    assert [axes.get_title() for axes in drawn.axes] == ["layer 1", "layer 2"]
    for axes, others in zip(drawn.axes, of_file.axes, strict=True):
        assert {name: list(line.get_ydata()) for name, line in lines(axes).items()} == {
            name: list(line.get_ydata()) for name, line in lines(others).items()
        }


def test_what_is_no_result_is_refused():
    with pytest.raises(InputError, match=r"expected what fg\.gradeval\.evaluate gives, or a pathlib\.Path, got dict"):
        rmse_figure({})
    with pytest.raises(InputError, match="the result: estimator 'REINFORCE' has no layer 'layer 9'; choose one of 'layer 1'"):
        rmse_figure([Panel(Measured(result()), "layer 9", "")])
