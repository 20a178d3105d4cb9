"""The figures of latent-variable models: what they show, that nothing is cut off, and what they refuse."""

from __future__ import annotations

import math

import pytest
from figures import clipped, lines
from run_files import put

import flipgrad as fg
from flipgrad.plots.vae import ElboCourse, elbo_figure, pictures_figure


def course(model: str, method: str, seed: int = 0, **more) -> dict:
    rows = {
        "steps": [10, 20, 30], "seconds": [1.0, 2.0, 3.0], "elbos": [-200.0, -120.0, -110.0 - seed],
        "looked": [15, 30], "variances": [10.0, 0.1], "bounds": [-130.0, -100.0], "bound": None,
    }  # fmt: skip
    return {"model": model, "method": method, "seed": seed, **rows, **more}


def picture(level: int) -> list[int]:
    return [level] * 16


def test_every_model_has_a_row(tmp_path):
    courses = [course(model, method, seed) for model in ("linear", "two-layer") for method in ("PSA", "ST") for seed in (0, 1)]
    put(tmp_path / "vae.json", {"courses": courses})
    figure = elbo_figure(tmp_path / "vae.json")
    assert not clipped(figure)
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert list(lines(axes)) == ["PSA 0", "PSA 1", "ST 0", "ST 1"]
    assert list(lines(figure.axes[1])["PSA 1"].get_xdata()) == [1.0, 2.0, 3.0]
    # The beginning, far below, is not shown.
    assert figure.axes[0].get_ylim()[0] > -130
    assert figure.axes[2].get_yscale() == "log"


def test_pictures_stand_in_rows(tmp_path):
    rows = {"data": [picture(0)] * 3, "reconstructions": [picture(100)] * 3, "samples": [picture(200)] * 3}
    put(tmp_path / "vae.json", {"pictures": rows})
    figure = pictures_figure(tmp_path / "vae.json")
    assert not clipped(figure)
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (18, 18)
    assert [shown[2, 2], shown[8, 2], shown[14, 2]] == [0, 100, 200]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"courses": []}, "holds no trainings"),
        ({"courses": [course("linear", "PSA", steps=[1])]}, "as many steps as seconds and ELBOs"),
        ({"courses": [course("linear", "PSA", bounds=[1.0])]}, "as many looks as variances and bounds"),
    ],
)
def test_damaged_courses_are_refused(tmp_path, content, message):
    put(tmp_path / "vae.json", content)
    with pytest.raises(fg.InputError, match=message):
        elbo_figure(tmp_path / "vae.json")


def test_pictures_of_different_numbers_are_refused(tmp_path):
    put(tmp_path / "vae.json", {"pictures": {"data": [picture(0)], "reconstructions": [], "samples": [picture(0)]}})
    with pytest.raises(fg.InputError, match="as many pictures of each kind"):
        pictures_figure(tmp_path / "vae.json")


def test_the_elbo_after_some_time():
    found = ElboCourse(**course("linear", "PSA"))
    assert [found.after(2.5), found.after(3)] == [-120.0, -110.0]
    assert math.isnan(found.after(0.5))
