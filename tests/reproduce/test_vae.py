"""Trainings of latent-variable models by several estimators: the experiment at its smallest, interruptions, and its claims."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from pieces import place, silent

import flipgrad as fg
from flipgrad.plots.vae import ElboCourse
from flipgrad.reproduce import EXPERIMENTS, Workshop, experiments, keep, vae

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


def test_methods_are_compared_in_the_seeds_that_all_of_them_have():
    assert (
        list(vae.claims([])) == list(vae.claims([course("ST", -110, 50.0)])) == list(vae.claims([course("PSA", -1, 1)])) == []
    )
    seeds = [replace(course("ST", -110, 50.0), seed=0), replace(course("PSA", -100, 1.0), seed=0)]
    # Of another seed there is PSA alone, which is far better there.
    (equal_updates, *_) = vae.claims([*seeds, replace(course("PSA", 0.0, 1.0), seed=1)])
    assert equal_updates.numbers == "after 2 updates: PSA -100.00, ST -110.00"
    assert str(equal_updates).startswith("- Holds in one seed: after equal updates PSA has the highest training ELBO")
    # Two seeds whose differences are 10 and 1 leave it open; two of 10 and 9.9 do not.
    second = [replace(course("ST", -110, 50.0), seed=1), replace(course("PSA", -109, 1.0), seed=1)]
    assert next(vae.claims([*seeds, *second])).holds is None
    second = [replace(course("ST", -110, 50.0), seed=1), replace(course("PSA", -100.1, 1.0), seed=1)]
    assert next(vae.claims([*seeds, *second])).holds is True


def test_what_is_finished_can_be_looked_at_and_kept_and_gone_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(vae.PLANS, "smoke", SMALLEST)
    experiment, out, kept = EXPERIMENTS["vae"], tmp_path / "out", tmp_path / "kept"
    with pytest.raises(fg.InputError, match=r"no training of vae is finished in .*; leave out --finished to train"):
        experiment.reproduce(Workshop(out, "smoke", 0, silent, finished=True))
    shutil.copytree(folder, out, dirs_exist_ok=True)
    shutil.rmtree(out / "cells/vae-nonlinear-RELAX-0")
    assert experiments.done(experiment, "smoke", out) == (10, 11, 1 / 11)
    text = experiment.reproduce(Workshop(out, "smoke", 0, silent, finished=True))
    assert "Not finished: 1 of 11 trainings" in text
    assert "`flipgrad reproduce vae --scale smoke --seed 0 --kept docs/results` goes on with them" in text
    assert "| nonlinear, RELAX | 0 |" in text
    keep(out, kept)
    again = tmp_path / "again"
    taken = experiment.reproduce(Workshop(again, "smoke", 0, silent, kept=kept, finished=True))
    # Numbers that are kept have fewer digits, and the last may differ in a text.
    assert re.sub(r"\d", "0", taken) == re.sub(r"\d", "0", text)
    experiment.reproduce(Workshop(again, "smoke", 0, silent, kept=kept))
    whole, ended = (fg.files.read_json(path / "measured" / "vae.json", missing="", broken="") for path in (folder, again))
    assert ended["pictures"] == whole["pictures"]
    for before, after in zip(whole["courses"], ended["courses"], strict=True):
        for one in (before, after):
            one.pop("seconds")
        assert after in (before, experiments.rounded(before))


def test_trainings_of_another_plan_are_not_taken_over(folder, tmp_path, monkeypatch):
    keep(folder, tmp_path / "kept")
    monkeypatch.setitem(vae.PLANS, "smoke", replace(SMALLEST, steps=6))
    shop = Workshop(tmp_path / "out", "smoke", 0, silent, kept=tmp_path / "kept")
    with pytest.raises(fg.InputError, match="is of trainings of another length or size; leave out --kept"):
        EXPERIMENTS["vae"].reproduce(shop)


def test_mnist_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    with pytest.raises(fg.InputError, match=r"vae needs MNIST: put its four files into a folder mnist .* \$FLIPGRAD_DATA"):
        EXPERIMENTS["vae"].reproduce(Workshop(tmp_path, "small", 0, silent))
