"""The learning study: what its trainings say of the paper's claims, parts of it that are finished, and what is kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pieces import silent

import flipgrad as fg
from command_line import flipgrad
from flipgrad.cli import reproduce as command
from flipgrad.plots.learning import GUESSING, Training
from flipgrad.reproduce import EXPERIMENTS, Workshop, cifar, experiments, keep
from flipgrad.reproduce._cells import RESULT
from flipgrad.reproduce._workshop import Claim
from flipgrad.reproduce.learning import TrainingPlan
from pictures import render_nothing, render_roughly

FALLING = [2.0, 1.8, 1.5, 1.2, 1.0, 0.9, 0.8, 0.75, 0.7, 0.69]
STALLING = [2.0, 1.7, 1.5, 1.4, 1.4, 1.4, 1.4, 1.4, 1.45, 1.5]


def run(
    method: str, losses, relaxed=None, *, rate=0.1, diverged=None, accuracy=0.7, held_out=1.0, seed=0, augment="none"
) -> Training:
    curves = {
        "train_loss": losses,
        "objective": losses if relaxed is None else relaxed,
        "accuracy_n": [accuracy] * len(losses),
        "loss": [held_out] * len(losses),
    }
    return Training(method, augment, True, False, relaxed is not None, rate, [], diverged, curves, 1.0, seed)


def as_in_the_paper(seed: int = 0) -> dict[str, Training]:
    relaxed = {name: run(name, STALLING, FALLING, seed=seed) for name in ("Tanh", "Concrete 1", "LocalReparam")}
    return {
        "PSA": run("PSA", FALLING, seed=seed),
        "ST": run("ST", [(1.01 + 0.001 * seed) * loss for loss in FALLING], seed=seed),
        "HardST": run("HardST", STALLING[:4], diverged="the loss is no longer finite", rate=0.02 + 0.001 * seed, seed=seed),
        **relaxed,
        "ADF": run("ADF", STALLING, FALLING, accuracy=0.72 + 0.001 * seed, held_out=1.5 + 0.01 * seed, seed=seed),
        "REINFORCE": run("REINFORCE", [GUESSING] * 10, rate=1e-4, seed=seed),
    }


def claims_of(*seeds: dict[str, Training]) -> dict[str, Claim]:
    return {claim.about: claim for claim in cifar.cifar_claims([run for seed in seeds for run in seed.values()])}


@pytest.mark.parametrize("count", [1, 3])
def test_claims_hold_where_the_curves_are_the_papers(count):
    found = claims_of(*map(as_in_the_paper, range(count)))
    assert [claim.about for claim in found.values() if not claim.holds] == []
    assert len(found) == 2 + 3 + 2 + 1 + 2 * 4
    assert {claim.seeds for claim in found.values()} == {count}
    told = found["PSA and ST train alike"]
    assert ("over 3 seeds" if count == 3 else "(one seed)") in told.numbers
    assert str(told).startswith("- Holds: PSA" if count == 3 else "- Holds in one seed: PSA")
    assert "(no augmentation; training losses within 5% of each other at the end)" in told.text
    assert "in every epoch" in told.numbers


@pytest.mark.parametrize(
    ("changed", "about"),
    [
        ({"ST": run("ST", [2.0] * 10)}, "PSA and ST train alike"),
        ({"PSA": run("PSA", [2.0, 0.5, 0.5, 0.69, 0.69])}, "PSA and ST are stable"),
        ({"PSA": run("PSA", [0.69] * 10, diverged="at last")}, "PSA and ST are stable"),
        ({"Tanh": run("Tanh", [2.0, 1.0, 0.7], [2.0, 1.0, 0.68])}, "the relaxed objective of Tanh parts from the true loss"),
        (
            {"Tanh": run("Tanh", [2.0] * 5 + [1.0] * 5, [1.0] * 5 + [0.5] * 5)},
            "while the relaxed objective of Tanh is optimised, the true loss stalls or grows",
        ),
        ({"HardST": run("HardST", [0.7] * 10)}, "HardST performs worse than ST"),
        ({"HardST": run("HardST", [0.7] * 10)}, "HardST diverges"),
        ({"HardST": run("HardST", [0.7] * 10, rate=0.2)}, "HardST has a smaller learning rate than ST"),
        ({"REINFORCE": run("REINFORCE", [1.5] * 10, rate=1e-4)}, "REINFORCE makes no progress"),
        ({"REINFORCE": run("REINFORCE", [GUESSING] * 10, rate=0.1)}, "REINFORCE needs a very small learning rate"),
        (
            {"ADF": run("ADF", [1.4] * 10, [0.7] * 10, accuracy=0.5, held_out=1.5)},
            "ADF reaches a good validation accuracy despite its loss",
        ),
        (
            {"ADF": run("ADF", [1.4] * 10, [0.7] * 10, accuracy=0.7, held_out=0.5)},
            "ADF reaches a good validation accuracy despite its loss",
        ),
    ],
)
def test_a_claim_can_fail(changed, about):
    assert claims_of({**as_in_the_paper(), **changed})[about].holds is False


def test_a_loss_that_falls_to_the_end_is_stable():
    steep = {name: run(name, [2.2 - 0.2 * epoch for epoch in range(10)]) for name in ("PSA", "ST")}
    stable = claims_of(steep)["PSA and ST are stable"]
    assert stable.holds is True
    assert "PSA ends +0.0% (one seed) above its lowest" in stable.numbers


def test_seeds_that_contradict_each_other_leave_a_claim_open():
    worse = run("HardST", STALLING, seed=1)
    better = run("HardST", [0.9 * loss for loss in FALLING], seed=0)
    seeds = [as_in_the_paper(seed) | {"HardST": hard} for seed, hard in enumerate([better, worse])]
    found = claims_of(*seeds)
    assert found["HardST performs worse than ST"].holds is None
    assert "over 2 seeds" in found["HardST performs worse than ST"].numbers
    one_lost = claims_of(as_in_the_paper(0) | {"HardST": better}, as_in_the_paper(1))
    assert one_lost["HardST performs worse than ST"].holds is None
    assert one_lost["HardST diverges"].holds is None
    assert "1 of 2 diverged" in one_lost["HardST diverges"].numbers


def test_trainings_that_came_to_nothing_leave_claims_open():
    lost = {name: run(name, [], rate=None, diverged="all") for name in ("REINFORCE", "ADF")}
    found = claims_of({**as_in_the_paper(), **lost})
    assert found["REINFORCE needs a very small learning rate"].holds is None
    assert found["ADF reaches a good validation accuracy despite its loss"].holds is None


def late(method: str, epochs: int, *, seed: int = 0) -> Training:
    """It learns nothing for some epochs, and then as fast as others."""
    return run(method, ([2.34] * epochs + FALLING)[:10], seed=seed)


def test_trainings_that_learn_late_are_compared_from_there():
    found = claims_of({"PSA": late("PSA", 2), "ST": late("ST", 5), "HardST": late("HardST", 10)})
    alike = found["PSA and ST train alike"]
    assert alike.holds is False
    told = "; epochs at the loss of guessing: PSA 2, ST 5; with epochs counted from there PSA's training loss over ST's +0.0%"
    assert told in alike.numbers
    worse = found["HardST performs worse than ST"]
    assert worse.holds is True
    assert "epochs at the loss of guessing: HardST all 10, ST 5" in worse.numbers
    assert "counted from there" not in worse.numbers


def test_trainings_that_have_not_learnt_yet_leave_claims_open():
    nothing = {name: late(name, 10) for name in ("PSA", "ST", "HardST")}
    found = claims_of(nothing)
    assert len(found) == 5
    assert {about for about, claim in found.items() if claim.holds is None} == {
        *("PSA and ST train alike", "PSA and ST are stable", "HardST performs worse than ST")
    }
    assert claims_of({**nothing, "HardST": run("HardST", FALLING)})["HardST performs worse than ST"].holds is False


def test_rates_that_were_not_searched_for_are_no_claim():
    runs = [replace(run, searched=False) for run in as_in_the_paper().values()]
    found = claims_of({run.method: run for run in runs})
    assert not [about for about in found if "learning rate" in about]


def test_divergence_is_no_claim_of_the_paper_for_flip_and_crop():
    runs = [run(name, FALLING, augment="flip-crop") for name in ("ST", "HardST")]
    assert "HardST diverges" not in {claim.about for claim in cifar.cifar_claims(runs)}


def test_the_table_of_ends_has_means_and_ranges():
    runs = [run("ST", [1.0, 2.0 + seed], seed=seed, diverged="late" if seed else None) for seed in (0, 1)]
    sheet = cifar.ends([*runs, run("HardST", [], rate=None, diverged="all")])
    same = ["1.000 (1.000 to 1.000)", "70.0% (70.0% to 70.0%)"]
    assert sheet.rows == [
        ["ST, no augmentation", "2; 1 diverged", "0.1, 0.1", "0, all 2", "2.500 (2.000 to 3.000)", "", *same],
        ["HardST, no augmentation", "1; 1 diverged", "none", "none", "none", "", "none", "none"],
    ]


def test_every_scale_has_its_trainings():
    small = list(cifar.parts("small"))
    assert len(small) == len(set(small)) == 25
    assert small[:2] == ["cifar-flip-crop-psa:sampled", "cifar-flip-crop-st"]
    assert "cifar-flip-crop-tanh-seed-2" in small
    assert "cifar-affine-hard-st" in small
    assert list(cifar.parts("medium")) == [f"cifar-flip-crop-{name}" for name in ("psa:sampled", "st", "hard-st", "adf:states")]
    assert cifar.PLANS["medium"].cost == 30
    for scale, (_, cells) in EXPERIMENTS["cifar"].efforts().items():
        assert len(cifar.parts(scale)) == cells


@pytest.fixture
def quick(monkeypatch):
    """Two methods, one of them with two seeds, on few images."""
    plan = TrainingPlan("digits", 1.0, 64, 32, 32, epochs=2, trials=2, trial_epochs=1, trial_images=32)
    study = (cifar.Part(("st", "hard-st")), cifar.Part(("st",), seeds=(1,)), cifar.Part(("st",), ("none",)))
    for scale in ("smoke", "medium"):
        monkeypatch.setitem(cifar.PLANS, scale, plan)
        monkeypatch.setitem(cifar.STUDIES, scale, study)


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_what_is_finished_can_be_looked_at_and_kept_and_gone_on_with(tmp_path, quick, monkeypatch):
    monkeypatch.setattr("flipgrad.plots.cifar", lambda *_: [])
    experiment, out, kept = EXPERIMENTS["cifar"], tmp_path / "out", tmp_path / "kept"
    with pytest.raises(fg.InputError, match=r"no training of cifar is finished in .*; leave out --finished to train"):
        experiment.reproduce(Workshop(out, "smoke", 0, silent, finished=True))
    text = experiment.reproduce(Workshop(out, "smoke", 0, silent))
    assert "Not finished" not in text
    whole = result(out / "measured", "cifar")["runs"]
    assert [(run["method"], run["augment"], run["seed"]) for run in whole] == [
        *(("ST", "flip-crop", 0), ("HardST", "flip-crop", 0), ("ST", "flip-crop", 1), ("ST", "none", 0)),
    ]
    assert experiments.done(experiment, "smoke", out) == (4, 4, 0.0)
    shutil.rmtree(out / "cells/cifar-flip-crop-st-seed-1")
    assert experiments.done(experiment, "smoke", out) == (3, 4, 0.25)
    text = experiment.reproduce(Workshop(out, "smoke", 0, silent, finished=True))
    assert "Not finished: 1 of 4 trainings" in text
    assert "`flipgrad reproduce cifar --scale smoke --seed 0 --kept docs/results` goes on with them" in text
    assert "| ST, flip & crop | 1 |" in text
    keep(out, kept)
    assert result(kept, "cifar")["seconds"] == pytest.approx(sum(run["seconds"] for run in whole if run["seed"] == 0), rel=1e-6)

    def refuse(*_):
        raise AssertionError("trained again")

    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr("flipgrad.training.train", refuse)
        taken = experiment.reproduce(Workshop(again, "smoke", 0, silent, kept=kept, finished=True))
    assert taken.splitlines()[2:] == text.splitlines()[2:]
    experiment.reproduce(Workshop(again, "smoke", 0, silent, kept=kept))
    for before, after in zip(whole, result(again / "measured", "cifar")["runs"], strict=True):
        for one in (before, after):
            one["curves"].pop("seconds")
        assert after["curves"] == experiments.rounded(before["curves"]) or after["curves"] == before["curves"]


def test_trainings_of_another_plan_are_not_taken_over(tmp_path, quick, monkeypatch):
    render_nothing(monkeypatch)
    with pytest.raises(
        fg.InputError, match=r"no trainings of this scale are kept: there is no .*cifar.json'; leave out --kept"
    ):
        EXPERIMENTS["cifar"].reproduce(Workshop(tmp_path / "out", "smoke", 0, silent, kept=tmp_path))
    (tmp_path / "measured").mkdir()
    plan = asdict(cifar.PLANS["smoke"]) | {"epochs": 3}
    fg.files.write_json(tmp_path / "measured/cifar.json", {"plan": plan, "runs": [], "seed": 0})
    with pytest.raises(fg.InputError, match="is of trainings of another length or size; leave out --kept"):
        EXPERIMENTS["cifar"].reproduce(Workshop(tmp_path / "out", "smoke", 0, silent, kept=tmp_path))


@pytest.mark.parametrize(
    ("rate", "message"), [("auto", "no training of cifar is finished"), (0.1, "of another length or size")]
)
def test_plans_that_were_kept_without_a_rate_searched_for_it(tmp_path, quick, monkeypatch, rate, message):
    monkeypatch.setitem(cifar.PLANS, "smoke", replace(cifar.PLANS["smoke"], rate=rate))
    plan = asdict(cifar.PLANS["smoke"])
    del plan["rate"]
    (tmp_path / "measured").mkdir()
    fg.files.write_json(tmp_path / "measured/cifar.json", {"plan": plan, "runs": [], "seed": 0})
    fg.files.write_json(tmp_path / "cifar.json", {"versions": {}, "machine": {}})
    with pytest.raises(fg.InputError, match=message):
        EXPERIMENTS["cifar"].reproduce(Workshop(tmp_path / "out", "smoke", 0, silent, kept=tmp_path, finished=True))


def test_the_medium_scale_stands_beside_the_small_one(tmp_path, quick, monkeypatch):
    render_roughly(monkeypatch)
    out, kept = tmp_path / "out", tmp_path / "kept"
    text = EXPERIMENTS["cifar"].reproduce(Workshop(out, "medium", 0, silent))
    assert (out / "cifar-medium.md").read_text() == text
    assert {path.name for path in out.glob("*.png")} == {"cifar-medium.png", "cifar-medium-extra.png"}
    small = {"about": "HardST performs worse than ST", "where": "flip & crop", "seeds": 3, "text": "worse", "holds": None}
    record = {"title": "Figure 4: learning", "claims": [{**small, "numbers": "1"}], "scale": "small", "sheets": []}
    kept.mkdir()
    fg.files.write_json(kept / "cifar.json", record)
    keep(kept, kept)
    (table,) = result(kept, "cifar")["sheets"]
    assert table["head"][2] == "medium (not run: flipgrad reproduce cifar --scale medium)"
    fg.files.write_json(kept / "cifar-medium.json", {"title": "Figure 4", "claims": [], "scale": "medium", "sheets": []})
    keep(kept, kept)
    (table,) = result(kept, "cifar")["sheets"]
    assert table["head"][2] == "medium (no claim can be judged yet: flipgrad reproduce cifar --scale medium)"
    for _ in range(2):
        page = keep(out, kept).read_text()
    table = result(kept, "cifar")["sheets"]
    assert [sheet["caption"] for sheet in table] == [experiments.BY_SCALE]
    assert table[0]["head"] == ["claim", "small, flip & crop", "medium, flip & crop"]
    (row,) = [row for row in table[0]["rows"] if row[0] == small["about"]]
    assert row[1] == "undecided (3 seeds)"
    assert row[2].endswith(" in one seed")
    assert "| HardST performs worse than ST | undecided (3 seeds) |" in (kept / "cifar.md").read_text()
    assert 'id="cifar-medium"' in page
    assert "? undecided" in page
    assert "are undecided" in page


def test_claims_without_places_have_no_table():
    assert experiments.claims_by_scale([{"scale": "small", "claims": [{"text": "so", "holds": True, "numbers": ""}]}]) is None


def test_what_a_scale_or_an_experiment_does_not_have_is_refused(tmp_path, quick):
    def shop(scale: str, **options) -> Workshop:
        return Workshop(tmp_path / scale, scale, 0, silent, overwrite=True, **options)

    with pytest.raises(fg.InputError, match="rmse has no scale 'medium': choose smoke, small, paper"):
        EXPERIMENTS["rmse"].reproduce(shop("medium"))
    for options in ({"finished": True}, {"kept": tmp_path}):
        with pytest.raises(fg.InputError, match=r"rmse cannot be made of parts .*: leave out --finished and --kept"):
            EXPERIMENTS["rmse"].reproduce(shop("smoke", **options))
    with pytest.raises(fg.InputError, match="augmentation 'blur': choose none, affine, flip-crop"):
        EXPERIMENTS["cifar"].reproduce(shop("smoke", augmentations=["blur"]))
    with pytest.raises(fg.InputError, match="the scale 'smoke' of cifar has no training with affine; leave out --augment"):
        EXPERIMENTS["cifar"].reproduce(shop("smoke", augmentations=["affine"]))


def test_the_list_says_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "probe", lambda: command.PROBE)
    monkeypatch.setenv("COLUMNS", "250")
    Workshop(tmp_path, "small", 0, silent)
    folder = tmp_path / "cells/cifar-flip-crop-psa-sampled"
    folder.mkdir(parents=True)
    (folder / RESULT).write_text("{}")
    options = ["--list", "--output", str(tmp_path), "--workers", "1"]
    code, text, _ = flipgrad(capsys, "reproduce", *options)
    assert code == 0
    (line,) = [line for line in text.splitlines() if "cifar " in line]
    assert "≈ 8.8 h left of ≈ 9.2 h, 1 of 25 done" in line
    # The folder is of one scale, and the trainings of others are called alike.
    assert line.count("left") == 1
    (line,) = [line for line in text.splitlines() if "rmse " in line and "Figure 2" in line]
    assert "–" in line
