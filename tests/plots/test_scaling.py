"""The figure of the benchmark "scaling"."""

from __future__ import annotations

import pytest
from figures import clipped, lines
from run_files import put

import flipgrad as fg
from flipgrad import plots
from flipgrad.plots.timing import scaling_figure


def growth() -> dict:
    return {"values": [16, 32], "theory": 2, "seconds": {"ST": [0.01, 0.03], "PSA": [0.02, 0.05]}}


def test_times_are_milliseconds_over_every_size(tmp_path):
    put(tmp_path / "scaling.json", {"axes": {"width": growth(), "depth": growth()}})
    figure = scaling_figure(tmp_path / "scaling.json")
    assert [axes.get_xlabel() for axes in figure.axes] == ["channels", "binary layers"]
    for axes in figure.axes:
        assert {name: list(line.get_ydata()) for name, line in lines(axes).items()} == {"ST": [10, 30], "PSA": [20, 50]}
    assert not clipped(figure)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "has no 'axes'; run it again to rewrite it"),
        ({"axes": {"width": {**growth(), "values": [16]}}}, "axes.width: 'seconds' must hold methods with as many times"),
        ({"axes": {"width": {**growth(), "values": [0, 1]}}}, r"axes\.width\.values\[0\]: must be a finite number above 0"),
    ],
)
def test_broken_results_are_refused(tmp_path, value, message):
    put(tmp_path / "scaling.json", value)
    with pytest.raises(fg.InputError, match=message):
        plots.scaling(tmp_path / "scaling.json", tmp_path / "figure")
