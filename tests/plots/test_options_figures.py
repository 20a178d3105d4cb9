"""The figures of options: what they show, that nothing clashes or is cut off, and what they refuse."""

from __future__ import annotations

import pytest
from figures import clipped, lines
from run_files import put

import flipgrad as fg
from flipgrad.plots.options import by_layer_figure, over_rates_figure

OPTIONS = ["PSA", "PSA posterior", "PSA mean", "ST"]
LAYERS = ["layer 1", "layer 2", "head", "all"]


def net(name: str) -> dict:
    numbers = {"rmse": [0.2, 1.0, 0.5, 0.4], "bias": [0.1, 0.0, 0.2, 0.1], "bias_low": [0.05, 0, 0, 0.01]}
    numbers |= dict.fromkeys(("bias_high", "std", "cosine"), [0.3] * 4)
    cost = {option: 1 + 0.2 * k for k, option in enumerate(OPTIONS)}
    return {
        "name": name,
        "title": f"{name},\ntrained",
        "wide": False,
        "reference": "the exact gradient",
        "layers": LAYERS,
        "draws": {},
        "options": dict.fromkeys(OPTIONS, numbers),
        "cost": cost,
    }


def grid(title: str) -> dict:
    runs = [
        {"method": method, "rate": rate, "losses": [2.0, 1.0 + 0.1 * k], "diverged": "the loss" if rate > 0.5 and k else None}
        for k, method in enumerate(OPTIONS)
        for rate in (0.1, 0.2, 0.6)
    ]
    cost = {option: 1 + 0.2 * k for k, option in enumerate(OPTIONS)}
    return {"title": title, "words": "few images", "rates": [0.1, 0.2, 0.6], "epochs": 2, "runs": runs, "cost": cost}


@pytest.fixture
def result(tmp_path):
    path = tmp_path / "beyond.json"
    put(path, {"nets": [net("first"), net("second")], "grids": [grid("one"), grid("two"), grid("three")]})
    return path


def test_every_option_is_drawn_in_every_layer(result):
    figure = by_layer_figure(result, ["first", "second"])
    assert not clipped(figure)
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert list(lines(axes)) == OPTIONS
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()] == ["1", "2", "head", "all"]
    # At equal cost PSA is 1.
    assert list(lines(figure.axes[-1])["PSA"].get_ydata()) == [1, 1, 1, 1]
    # A bias that is told from 0 is filled, one that is not is hollow, and none is not there.
    filled, hollow = [line for line in figure.axes[2].lines if line.get_label() == "_"][:2]
    assert [y == y for y in filled.get_ydata()] == [True, False, False, True]
    assert [y == y for y in hollow.get_ydata()] == [False, False, True, False]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*OPTIONS, "not told from 0"]


def test_trainings_are_drawn_over_rates_and_time(result):
    figure = over_rates_figure(result)
    assert not clipped(figure)
    assert len(figure.axes) == 6
    above, below = figure.axes[0], figure.axes[3]
    assert len(lines(above)["PSA"].get_ydata()) == 3
    # One rate diverged: it is a cross.
    assert len(lines(above)["ST"].get_ydata()) == 2
    assert len([line for line in above.lines if line.get_marker() == "x"]) == 3
    assert list(lines(below)["PSA mean"].get_xdata()) == pytest.approx([1.4, 2.8])


def test_what_is_not_there_is_refused(result, tmp_path):
    with pytest.raises(fg.InputError, match="no network third; choose from first, second"):
        by_layer_figure(result, ["third"])
    with pytest.raises(fg.InputError, match="no network was asked for"):
        by_layer_figure(result, [])
    path, broken = tmp_path / "broken.json", net("first")
    short = {**net("first"), "options": {"PSA": {"rmse": [0.2]}}}
    broken["options"] = {"PSA": {"rmse": ["much"], "bias": [0], "bias_low": [0]}}
    for nets, message in (
        ({}, "nets: must be a list"),
        ([short], "'options': 'PSA' must have 4 numbers of each kind, one per layer"),
        ([broken], r"nets\[0\]\.options\.PSA\.rmse\[0\]: must be a finite number"),
    ):
        put(path, {"nets": nets, "grids": []})
        with pytest.raises(fg.InputError, match=message):
            by_layer_figure(path, ["first"])
    for grids, message in (({}, "grids: must be a list"), ([], "holds no trainings"), ([{}], r"grids\[0\]: has no 'title'")):
        put(path, {"nets": [], "grids": grids})
        with pytest.raises(fg.InputError, match=message):
            over_rates_figure(path)
