"""The learning experiments: cells that train, go on and diverge, what their claims say, and the page of everything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pieces import place, silent
from PIL import Image

import flipgrad as fg
from flipgrad.plots.learning import GUESSING, Training
from flipgrad.plots.timing import Method, Times, TimingFile
from flipgrad.reproduce import EXPERIMENTS, SCALES, Workshop, cifar, experiments, keep, learning, timing, toy, write_report
from flipgrad.reproduce.experiments import in_the_papers_order
from flipgrad.reproduce.learning import TrainingPlan, image_folder, train_cell

QUICK = TrainingPlan("digits", 1.0, 64, 32, 32, epochs=2, trials=2, trial_epochs=1, trial_images=32)


def shop(folder: Path) -> Workshop:
    return Workshop(folder / "shop", "smoke", 0, silent)


def test_a_training_cell_that_is_cut_again_and_again_ends_as_one_that_is_not(tmp_path):
    cell = QUICK.cell(shop(tmp_path), "psa", "psa", "flip-crop")
    shares = []
    whole = train_cell(cell.settings, place(tmp_path / "whole", report=shares.append))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    calls = cuts = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        # In both trials of the search, of one update each, and in the first of two epochs of the training.
        return calls in (1, 3, 5)

    result = None
    while result is None:
        try:
            result = train_cell(cell.settings, place(tmp_path / "parts", stop))
        except KeyboardInterrupt:
            cuts += 1
    assert cuts == 3
    for one in (result, whole):
        one["curves"].pop("seconds")
    assert result == whole
    assert whole["diverged"] is None
    assert {len(curve) for curve in whole["curves"].values()} == {2}
    assert len(whole["trials"]) == 2


def test_a_given_rate_is_not_searched(tmp_path):
    cell = QUICK.cell(shop(tmp_path), "st", "st", "none", rate=0.01)
    assert cell.cost == QUICK.epochs
    result = train_cell(cell.settings, place(tmp_path / "cell"))
    assert (result["rate"], result["trials"]) == (0.01, [])


def test_divergence_is_a_result(tmp_path):
    cell = replace(QUICK, epochs=5).cell(shop(tmp_path), "st", "st", "none", rate=1e38)
    result = train_cell(cell.settings, place(tmp_path / "cell"))
    assert "lower the rate" in result["diverged"]
    assert len(result["curves"]["epoch"]) < 5


def test_a_search_in_which_all_rates_diverge_is_a_result(tmp_path, monkeypatch):
    def diverge(self) -> None:
        raise fg.training.DivergenceError("too fast")

    monkeypatch.setattr("flipgrad.training.Trainer.update", diverge)
    cell = QUICK.cell(shop(tmp_path), "st", "st", "none")
    result = train_cell(cell.settings, place(tmp_path / "cell"))
    assert result["rate"] is None
    assert result["curves"] == {}
    assert "all 2 trials of the learning rate diverged" in result["diverged"]


def test_images_are_looked_for_where_they_may_be(tmp_path, monkeypatch):
    assert image_folder(QUICK, None) is None
    plan = cifar.PLANS["small"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    with pytest.raises(fg.InputError, match="this scale trains on CIFAR-10: give the folder of its files with --data"):
        image_folder(plan, None)
    assert image_folder(plan, tmp_path) == tmp_path
    monkeypatch.setenv("FLIPGRAD_DATA", str(tmp_path / "data"))
    assert image_folder(plan, None) == tmp_path / "data/cifar10"


def run(method: str, losses, relaxed=None, *, rate=0.1, diverged=None, accuracy=0.7, held_out=1.0) -> Training:
    n = len(losses)
    curves = {
        "train_loss": losses,
        "objective": losses if relaxed is None else relaxed,
        "accuracy_n": [accuracy] * n,
        "loss": [held_out] * n,
    }
    return Training(method, "flip-crop", True, False, relaxed is not None, rate, [], diverged, curves, 1.0)


def test_claims_about_muprop_follow_the_numbers():
    psa = run("PSA", [1.9, 1.5, 1.2], rate=0.1)
    slow = [run(name, [2.3, 2.25, 2.2], rate=0.001) for name in ("REINFORCE + running", "MuProp + running")]
    broken = run("MuProp + running", [], rate=0.5, diverged="the loss")
    assert [claim.holds for claim in learning.muprop_claims(slow, psa)] == [True, True, True]
    assert next(learning.muprop_claims([*slow, broken], psa)).holds
    quick = [run("REINFORCE + running", [1.0], rate=0.2), run("MuProp + running", [GUESSING], rate=0.2)]
    assert [claim.holds for claim in learning.muprop_claims(quick, psa)] == [False, False, False]
    assert not list(learning.muprop_claims(slow, broken))[2].holds


def test_claims_about_the_toy_training_follow_the_numbers():
    epochs = [1, 10, 100]
    good = {
        "REINFORCE": [0.7, 0.69, 0.3],
        "ARM": [0.7, 0.5, 0.3],
        "PSA": [0.7, 0.5, 0.3],
        "ST": [0.7, 0.55, 0.33],
    }
    bad = {**good, "REINFORCE": [0.7, 0.4, 0.5], "ARM": [0.7, 0.9, 0.6], "ST": [0.6, 0.4, 0.2]}
    for told, holds in ((good, True), (bad, False)):
        assert [claim.holds for claim in toy.training_claims(told, epochs)] == [holds] * 4


def test_claims_about_the_toy_example_follow_the_numbers():
    truth = toy.true_probabilities()
    assert round(toy.TRUTH, 3) == 0.379
    keys = ("probability", "overlap_error", "overlap_spread", "marginal_test_loss", "expected_test_loss")
    sure, unsure = (
        dict(zip(keys, (probability.tolist(), *values), strict=True))
        for probability, values in (((truth > 0.2).double(), (0.3, 0.1, 0.5, 0.52)), (truth, (0.1, 0.3, 0.4, 0.5)))
    )
    assert [claim.holds for claim in toy.example_claims(sure, unsure)] == [True, True]
    assert [claim.holds for claim in toy.example_claims(unsure, sure)] == [False, False]
    # The second network's probabilities are the true ones.
    assert "mean error of the probability 0.000 against" in list(toy.example_claims(sure, unsure))[1].numbers


def test_the_papers_times():
    """Its ratios to Tanh, as the paper's table has them."""
    steps = {name: times.forward + times.backward for name, times in timing.PAPER.items()}
    assert steps["PSA"] / steps["Tanh"] == pytest.approx(0.069 / 0.016)
    assert steps["ST"] == pytest.approx(0.020)
    paper = {name: Method(times, times) for name, times in timing.PAPER.items()}
    slow = {**paper, "PSA": Method(timing.PAPER["PSA"], Times(0.1, 0.1, 500, 14))}
    assert [claim.holds for claim in timing.claims(TimingFile(paper, "Tanh", 1))] == [True, True, True]
    # Slow is PSA, in a step and in an epoch, not ST.
    assert [claim.holds for claim in timing.claims(TimingFile(slow, "Tanh", 1))] == [False, True, False]
    sheet = timing.table(TimingFile(paper, "Tanh", 1))
    assert sheet.rows[0][:3] == ["PSA", "0.013 (2.60)", "0.013 (2.60)"]
    assert str(sheet).splitlines()[2].count("|") == len(sheet.head) + 1


def test_every_experiment_has_its_place_in_the_page_and_its_cost():
    order = [experiment.name for experiment in in_the_papers_order()]
    assert order == [
        *("rmse", "cosine", "cifar", "toy-example", "toy-training", "rmse-unbiased", "cosine-unbiased", "width", "depth"),
        *("muprop", "timing", "estimators", "beyond", "weights", "vae"),
    ]
    for experiment in EXPERIMENTS.values():
        assert experiment.words.endswith(".")
        assert {"smoke", "small", "paper"} <= experiment.efforts().keys() <= SCALES.keys()


def test_costs_are_measured_where_it_was_run_and_estimated_elsewhere(tmp_path):
    images, rmse = EXPERIMENTS["cifar"], EXPERIMENTS["rmse"]
    assert experiments.cost(images, "small", tmp_path, 2.0, workers=2) == (images.seconds[1], False)
    assert experiments.cost(images, "medium", tmp_path, 1.0, workers=8) == (images.medium[0] / 4, False)
    assert experiments.cost(rmse, "small", tmp_path, 2.0, workers=2)[0] == 2 * rmse.seconds[1]
    record = {"scale": "small", "seconds": 12.5, **fg.files.provenance()}
    fg.files.write_json(tmp_path / "cifar.json", record)
    assert experiments.cost(images, "small", tmp_path, 2.0) == (12.5, True)
    assert not experiments.cost(images, "paper", tmp_path, 2.0)[1]
    fg.files.write_json(tmp_path / "cifar.json", {**record, "machine": {**record["machine"], "cores": 1000}})
    assert not experiments.cost(images, "small", tmp_path, 2.0)[1]
    assert 0 < experiments.probe() < 10


def claims_file(folder: Path, name: str, title: str) -> None:
    record = {
        "title": title,
        "claims": [{"text": "1 < 2", "holds": True, "numbers": "<b>1</b>"}],
        "scale": "smoke",
        "seconds": 3.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    more = {"sheet": None, "seed": 0, "command": ["--output", "here"]}
    fg.files.write_json(folder / f"{name}.json", {**record, **more})


def test_the_page_says_what_is_there_and_what_is_not(tmp_path):
    with pytest.raises(fg.InputError, match="holds no results; make some first"):
        write_report(tmp_path)
    claims_file(tmp_path, "rmse", "Figure 2: errors")
    (tmp_path / "rmse.png").write_bytes(b"picture")
    text = write_report(tmp_path).read_text()
    assert "Figure 2: errors" in text
    assert '<img src="rmse.png"' in text
    assert "&lt;b&gt;1&lt;/b&gt;" in text
    assert "1 of 1 claims hold in the 1 experiments" in text
    assert text.count("Not made yet") == len(EXPERIMENTS) - 1
    fg.files.write_json(tmp_path / "cosine.json", {})
    with pytest.raises(fg.InputError, match=r"cosine.json' is damaged"):
        write_report(tmp_path)
    (tmp_path / "cosine.json").write_text("{}")
    with pytest.raises(fg.InputError, match=r"cosine.json' has no checksum: .*; delete it, it is made again"):
        write_report(tmp_path)


@pytest.mark.parametrize("key", ["sheet", "sheets"])
def test_the_page_has_all_tables_of_new_and_old_result_files(tmp_path, key):
    claims_file(tmp_path, "timing", "Times: of everything")
    record = json.loads((tmp_path / "timing.json").read_text())
    record.pop("sheet")
    sheets = [{"caption": f"caption {k}", "head": ["who", "what"], "rows": [["PSA", f"<{k}>"]]} for k in (1, 2)]
    fg.files.write_json(tmp_path / "timing.json", {**record, key: sheets if key == "sheets" else sheets[0]})
    text = write_report(tmp_path).read_text()
    assert text.count("<table") == (2 if key == "sheets" else 1)
    assert "caption 1" in text
    assert "&lt;1&gt;" in text


def test_what_is_kept_is_small_and_leaves_the_rest(tmp_path):
    source, target = tmp_path / "results", tmp_path / "docs"
    claims_file(source, "cifar", "Figure 4: learning")
    shades = Image.effect_mandelbrot((120, 80), (-2, -1.5, 1, 1.5), 60).convert("RGBA")
    for file in ("cifar.png", "cifar-extra.png", "cifar.pdf", "measured/cifar.json", "cells/x/run/checkpoint.safetensors"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(b"content")
    for name in ("cifar", "cifar-extra"):
        shades.save(source / f"{name}.png")
    fg.files.write_json(source / "measured/cifar.json", {"loss": [1 / 3] * 100})
    claims_file(target, "rmse", "Figure 2: errors")
    page = keep(source, target)
    kept = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    texts = {"rmse.json", "rmse.md", "cifar.json", "cifar.md", "report.html"}
    assert kept == texts | {"cifar.png", "cifar-extra.png", "measured/cifar.json"}
    assert json.loads((target / "measured/cifar.json").read_text())["loss"][0] == 0.33333
    picture = (target / "cifar.png").read_bytes()
    with Image.open(target / "cifar.png") as image:
        assert image.mode == "P"
        assert image.size == shades.size
    assert "command" not in json.loads((target / "cifar.json").read_text())
    assert "Figure 2: errors" in page.read_text()
    assert "Validation losses and training accuracies." in page.read_text()
    # What was kept can be kept again, also where it is.
    keep(target, target)
    assert (target / "cifar.png").read_bytes() == picture
    (source / "cifar.png").write_bytes(b"nothing")
    with pytest.raises(fg.InputError, match=r"cifar.png' is no picture .*; delete it, it is made again"):
        keep(source, target)


def test_an_interrupted_experiment_counts_all_its_time(tmp_path):
    shop = Workshop(tmp_path / "out", "smoke", 0, silent)
    with pytest.raises(KeyboardInterrupt), shop.timed("rmse"):
        raise KeyboardInterrupt
    first = shop.spent()["rmse"]
    with shop.timed("rmse"):
        pass
    assert 0 < first < shop.spent()["rmse"]
    assert Workshop(tmp_path / "out", "smoke", 1, silent, overwrite=True).spent() == {}
