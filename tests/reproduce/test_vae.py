"""Trainings of latent-variable models by several estimators: the experiment at its smallest, interruptions, and its claims."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pieces import place, silent

import flipgrad as fg
from flipgrad.plots.vae import ElboCourse
from flipgrad.reproduce import EXPERIMENTS, Workshop, vae

SMALLEST = replace(
    vae.PLANS["smoke"], units=3, seeds={"linear": 1, "nonlinear": 1}, steps=4, every=2, looks=2, unseen=4, at_the_end=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setitem(vae.PLANS, "smoke", SMALLEST)
    path = tmp_path_factory.mktemp("vae")
    EXPERIMENTS["vae"].reproduce(Workshop(path, "smoke", 0, silent))
    patch.undo()
    return path


def test_the_experiment_writes_numbers_pictures_and_a_text(folder):
    for name in ("vae.json", "vae.md", "vae.png", "vae.pdf", "vae-pictures.png", "vae-pictures.pdf", "measured/vae.json"):
        assert (folder / name).stat().st_size > 500
    text = (folder / "vae.md").read_text()
    assert "after equal time PSA has the highest training ELBO, nonlinear model" in text
    stored = fg.files.read_json(folder / "measured" / "vae.json", missing="", broken="")
    assert [(row["model"], row["method"]) for row in stored["courses"]] == [
        (model, method) for model in ("linear", "nonlinear") for method in vae.methods_of(model)
    ]
    for row in stored["courses"]:
        assert (row["steps"], row["looked"]) == ([2, 4], [2, 4])
        assert row["bound"] < 0


SETTINGS = {
    "data": "digits", "model": "linear", "method": "REINFORCE + learned", "units": 3, "seed": 1, "steps": 6, "every": 2,
    "looks": 3, "unseen": 4, "at_the_end": 6,
}  # fmt: skip


def test_a_training_that_was_interrupted_ends_as_another(tmp_path):
    whole = vae.train(SETTINGS, place(tmp_path / "whole"))
    told = []
    cut = place(tmp_path / "cut", stop=lambda: len(told) == 1, report=told.append)
    with pytest.raises(KeyboardInterrupt):
        vae.train(SETTINGS, cut)
    ended = vae.train(SETTINGS, place(tmp_path / "cut"))
    assert {**ended, "seconds": None} == {**whole, "seconds": None}
    assert len(ended["seconds"]) == 3


def course(method: str, elbo: float, variance: float, seconds: float = 2.0) -> ElboCourse:
    return ElboCourse("linear", method, 0, [1, 2], [1.0, seconds], [-150.0, elbo], [2], [variance], [elbo + 5], elbo + 5)


def test_what_is_claimed_follows_from_the_numbers():
    others = [course(method, -110, 50.0) for method in vae.methods_of("linear") if method != "PSA"]
    good = list(vae.claims([course("PSA", -100, 1.0), *others]))
    assert [claim.holds for claim in good] == [True, True, True, True]
    assert "after 2 updates: PSA -100.00, ST -110.00" in good[0].numbers
    slow = list(vae.claims([course("PSA", -100, 1.0, seconds=9.0), *others]))
    assert [claim.holds for claim in slow] == [True, False, True, True]
    noisy = list(vae.claims([course("PSA", -120, 10.0), *others]))
    assert [claim.holds for claim in noisy] == [False, False, False, False]


def test_mnist_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    with pytest.raises(fg.InputError, match=r"vae needs MNIST: put its four files into a folder mnist .* \$FLIPGRAD_DATA"):
        EXPERIMENTS["vae"].reproduce(Workshop(tmp_path, "small", 0, silent))
