"""Every figure at smoke scale: what is written, what is said, and that nothing is computed twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pieces import silent

import flipgrad as fg
from flipgrad import reproduce
from flipgrad.plots.accuracy import Measurement
from flipgrad.reproduce import EXPERIMENTS, SCALES, Claim, Workshop, beyond_networks, vae, weights
from flipgrad.reproduce._workshop import ToyNet
from flipgrad.reproduce.accuracy import advantage_grows, cosine_claims, read, rmse_claims
from pictures import render_nothing, render_roughly

# In one process: all of them need the figures, which take half a minute.
pytestmark = pytest.mark.xdist_group("reproduce")


# Draws per estimator: half of those of the scale, which is as few as its smallest share allows.
SAMPLES = 50


@pytest.fixture(autouse=True, scope="module")
def _few_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "smoke", replace(SCALES["smoke"], samples=SAMPLES))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All figures, made once."""
    path = tmp_path_factory.mktemp("figures") / "smoke"
    # One of three augmentations, which are trained and drawn alike.
    shop = Workshop(path, "smoke", 0, silent, augmentations=["flip-crop"])
    with pytest.MonkeyPatch.context() as patch:
        # Of ten networks of each size, which serve the claims, two: here nobody reads them.
        patch.setattr("flipgrad.reproduce.accuracy.NETWORKS", 2)
        patch.setitem(vae.PLANS, "smoke", replace(vae.PLANS["smoke"], steps=6, every=3, unseen=8, at_the_end=16))
        patch.setitem(beyond_networks.EFFORTS, "smoke", {"fc": (4, 12, 4), "conv": (2, 12, 4)})
        short = (replace(plan, images=64, held_out=20, watched=20, epochs=1) for plan in weights.PLANS["smoke"])
        patch.setitem(weights.PLANS, "smoke", tuple(short))
        for experiment in EXPERIMENTS.values():
            experiment.reproduce(shop)
            # Only the first figure is written as it is by default.
            render_roughly(patch)
    return path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_has_numbers_pictures_and_a_text(folder, name):
    for suffix in ("json", "png", "pdf", "md"):
        assert (folder / f"{name}.{suffix}").stat().st_size > 100
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["title"] == EXPERIMENTS[name].title
    assert {"seed", "versions", "command"} <= record.keys()
    text = (folder / f"{name}.md").read_text()
    for claim in record["claims"]:
        assert claim["text"] in text
        assert claim["numbers"] in text


def test_the_papers_estimators_are_measured(folder):
    stored = json.loads((folder / f"measured/5-5-5-epoch-1-{SAMPLES}.json").read_text())
    main = {"REINFORCE", "ARM", "Concrete 0.1", "Concrete 1", "Tanh", "ST", "PSA", "ADF", "LocalReparam", "HardST"}
    assert main <= stored["estimators"].keys()
    assert stored["samples"] == SAMPLES
    everything = json.loads((folder / f"measured/5-5-5-epoch-2-{SAMPLES}.json").read_text())["estimators"]
    assert len(everything) == len(fg.estimators.ESTIMATORS) - 1 + 3


def test_nothing_is_computed_twice(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("measured or trained again")

    monkeypatch.setattr("flipgrad.gradeval.evaluate", refuse)
    monkeypatch.setattr("flipgrad.reproduce._workshop.reference_training", refuse)
    before = (folder / "rmse.png").read_bytes()
    text = EXPERIMENTS["rmse"].reproduce(Workshop(folder, "smoke", 0, silent))
    assert text == (folder / "rmse.md").read_text()
    assert (folder / "rmse.png").read_bytes() == before


def test_an_interruption_loses_one_estimator_at_most(tmp_path, folder, monkeypatch):
    render_nothing(monkeypatch)
    seen = []

    def stop(what: str, new: int, total: int) -> None:
        seen.append(what)
        if "ARM" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EXPERIMENTS["rmse"].reproduce(Workshop(tmp_path / "cut", "smoke", 0, stop))
    kept = json.loads((tmp_path / f"cut/measured/5-5-5-epoch-1-{SAMPLES}.json").read_text())["estimators"]
    assert list(kept) == ["REINFORCE"]
    EXPERIMENTS["rmse"].reproduce(Workshop(tmp_path / "cut", "smoke", 0, silent))
    whole = read(folder / f"measured/5-5-5-epoch-1-{SAMPLES}.json")
    resumed = read(tmp_path / f"cut/measured/5-5-5-epoch-1-{SAMPLES}.json")
    for name in ("REINFORCE", "ARM", "PSA"):
        assert whole["layer 1"][name] == resumed["layer 1"][name]


def test_other_settings_in_the_folder_are_refused(folder, tmp_path):
    with pytest.raises(fg.InputError, match="holds results of scale 'smoke' and seed 0; give another"):
        Workshop(folder, "smoke", 1, silent)
    with pytest.raises(fg.InputError, match="scale 'large': choose smoke, small, medium, paper"):
        Workshop(folder, "large", 0, silent)
    (tmp_path / "theirs.txt").write_text("")
    with pytest.raises(fg.InputError, match="exists and is not empty"):
        Workshop(tmp_path, "smoke", 0, silent)


def test_overwriting_forgets_the_old_results(tmp_path):
    shop = Workshop(tmp_path, "smoke", 0, silent)
    shop.network(ToyNet((3,)))
    assert len(list((tmp_path / "networks").iterdir())) == 1
    Workshop(tmp_path, "smoke", 1, silent, overwrite=True)
    assert not list((tmp_path / "networks").iterdir())


@pytest.mark.parametrize("content", [b"", b"not a network", b'{"estimators": '])
def test_damaged_files_are_named(tmp_path, content):
    shop = Workshop(tmp_path, "smoke", 0, silent)
    shop.network(ToyNet((3,)))
    (tmp_path / "networks/3-epoch-1.safetensors").write_bytes(content)
    with pytest.raises(fg.InputError, match="delete it, it is made again"):
        shop.network(ToyNet((3,)))
    (tmp_path / "networks/3-epoch-1.safetensors").unlink()
    (tmp_path / "measured/3-epoch-1-10.json").write_bytes(content)
    with pytest.raises(fg.InputError, match="delete it, it is made again"):
        shop.measure(ToyNet((3,)), ["st"], 10)


def test_scales_grow_to_the_papers():
    assert SCALES["smoke"].samples < SCALES["small"].samples < SCALES["paper"].samples == 10_000
    assert SCALES["paper"].epochs == SCALES["small"].epochs == (1, 100, 2000)


def entry(rmse: float, bias: float, low: float, cosine: float = 0.5) -> Measurement:
    cosines = {key: [cosine, cosine] for key in ("cosine_mean", "cosine_low", "cosine_high")}
    spread = dict.fromkeys(("std", "std_low", "std_high"), rmse)
    biases = {"bias": bias, "bias_low": low, "bias_high": 2 * bias}
    return Measurement("layer", [1, 1000], [rmse, bias], **cosines, **biases, **spread, unbiased=low == 0)


def table(**estimators: Measurement) -> dict:
    """The same in every layer."""
    return {f"layer {k}": estimators for k in (1, 2, 3)}


def test_claims_follow_the_numbers():
    good = table(PSA=entry(0.1, 0.02, 0), ST=entry(0.2, 0.1, 0.09), ARM=entry(9, 0.3, 0))
    bad = table(PSA=entry(0.4, 0.02, 0.01), ST=entry(0.2, 0.1, 0.09), ARM=entry(9, 0.3, 0, -0.1))
    assert [claim.holds for claim in rmse_claims(good)] == [True, True, True]
    assert [claim.holds for claim in rmse_claims(bad)] == [False, False, False]
    assert [claim.holds for claim in cosine_claims({1: good})] == [True, False]
    _, found = cosine_claims({1: good, 100: bad})
    assert found.holds
    assert "after 100: ARM with 1 draw; even with many on average ARM" in found.numbers


def test_growing_advantage_needs_every_step():
    tables = {}
    for name, arm in (("small", 1.0), ("middle", 3.0), ("large", 2.0)):
        tables[name] = [table(PSA=entry(0.1, 0.02, 0), ARM=entry(factor * arm, 0.3, 0)) for factor in (0.5, 2.0)]
    claim = advantage_grows(tables, "PSA", "width")
    assert not claim.holds
    assert "10 (5 to 20) for small, 30 (15 to 60) for middle, 20 (10 to 40) for large" in claim.numbers
    del tables["large"]
    assert advantage_grows(tables, "PSA", "width").holds


def test_claims_are_readable():
    assert str(Claim("it is so", True, "1 < 2")) == "- Holds: it is so\n  1 < 2"
    assert str(Claim("it is so", False, "1 > 2")).startswith("- DOES NOT HOLD: it is so")
    assert str(Claim("it is so", None, "1 or 2")).startswith("- UNDECIDED: it is so")
    assert reproduce.EXPERIMENTS.keys() == {
        *("rmse", "cosine", "rmse-unbiased", "cosine-unbiased", "width", "depth", "estimators"),
        *("toy-training", "toy-example", "cifar", "muprop", "timing", "beyond", "weights", "vae"),
    }
