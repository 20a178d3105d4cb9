"""Averaged inputs and heads: estimates from several draws, wide networks, trainings over rates, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pieces import place

import flipgrad as fg
from flipgrad.plots.options import Grid, Net, Trained
from flipgrad.reproduce import Workshop, beyond_networks
from flipgrad.reproduce.beyond import all_claims, all_sheets, long_trainings
from flipgrad.reproduce.beyond_networks import LABELS, SETTINGS, WAYS, LastLayer, of_draws
from flipgrad.reproduce.learning import image_folder


def gradients(net, x, objective, estimator, noise=None) -> torch.Tensor:
    net.zero_grad()
    generator = torch.Generator().manual_seed(3)
    net(x, objective, estimator=estimator, **({"noise": noise} if noise else {"generator": generator})).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def problem(widths, points=6):
    torch.manual_seed(0)
    net = fg.training.fully_connected(3, widths, 2).double()
    return net, torch.randn(points, 3).double(), fg.CrossEntropy(torch.arange(points) % 2)


def test_antithetic_draws_are_one_with_z_and_one_with_minus_z():
    net, x, objective = problem([4, 5])
    noise = [net.binary_layers[0].noise.sample_like(torch.zeros(6, width).double()) for width in (4, 5)]
    pair = gradients(net, x, objective, of_draws("psa", "antithetic", 2), noise)
    both = [gradients(net, x, objective, fg.PSA(), [sign * z for z in noise]) for sign in (1, -1)]
    torch.testing.assert_close(pair, (both[0] + both[1]) / 2)


@pytest.mark.parametrize("head", ["sampled", "rao-blackwell"])
def test_draws_of_the_last_layer_are_whole_ones_where_it_is_the_only_one(head):
    net, x, objective = problem([5])
    rule = fg.PSA(inputs="sampled", head=head)
    generator = torch.Generator().manual_seed(3)
    net.zero_grad()
    for _ in range(3):
        (net(x, objective, estimator=rule, generator=generator).mean() / 3).backward()
    three = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    torch.testing.assert_close(gradients(net, x, objective, LastLayer(rule, 3)), three)


def test_draws_of_the_last_layer_lower_the_variance_behind_others():
    net, x, objective = problem([5, 5])
    generator = torch.Generator().manual_seed(0)

    def spread(rule) -> float:
        rows = []
        for _ in range(60):
            net.zero_grad()
            net(x, objective, estimator=rule, generator=generator).mean().backward()
            rows.append(net.head.weight.grad.flatten().clone())
        return float(torch.stack(rows).var(0).sum())

    rule = fg.PSA(inputs="mean", head="sampled")
    assert spread(LastLayer(rule, 16)) < 0.7 * spread(rule)


def test_every_way_makes_an_estimator():
    net, x, objective = problem([4, 5])
    for way in WAYS.values():
        assert gradients(net, x, objective, of_draws(*way, 2)).isfinite().all()
    assert isinstance(of_draws("psa:mean", "one", 2), fg.PSA)


def test_a_wide_network_is_compared_with_psas_own_expectation(tmp_path):
    setting = SETTINGS["smoke"][0]
    plan = replace(setting.plan, model="6-6-6", images=64)
    shop = Workshop(tmp_path / "shop", "smoke", 0, lambda what, new, total: None)
    config = plan.cell(shop, "cell", "psa:sampled", "none", 0.1).settings
    settings = {**config, "trained": False, "points": 8, "draws": 600}
    told = beyond_networks.reference_cell(settings, place(tmp_path / "reference"))["layers"]
    assert [layer["name"] for layer in told] == ["layer 1", "layer 2", "layer 3", "head", "all"]
    assert all(0 < layer["error"] < 0.3 for layer in told)
    found = {}
    for option in ("psa:sampled", "psa:rao-blackwell", "psa:mean"):
        more = {**settings, "option": option, "way": "one", "option_draws": 200}
        folder = place(tmp_path / option.replace(":", "-"), reference=str(tmp_path / "reference"))
        found[option] = {layer["name"]: layer for layer in beyond_networks.option_cell(more, folder)["layers"]}
    # Both have that expectation: two intervals of 95 % and four layers each, and none may be missed by this seed.
    for option in ("psa:sampled", "psa:rao-blackwell"):
        assert all(layer["bias_low"] == 0 for layer in found[option].values())
    assert found["psa:rao-blackwell"]["layer 2"]["std"] < 0.8 * found["psa:sampled"]["layer 2"]["std"]
    assert found["psa:mean"]["layer 3"]["bias"] > 2 * found["psa:sampled"]["layer 3"]["bias"]


def test_mnist_is_named_by_the_variable(tmp_path, monkeypatch):
    plan = SETTINGS["small"][0].plan
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    with pytest.raises(
        fg.InputError, match=r"this scale trains on MNIST: give the folder of its files as \$FLIPGRAD_DATA/mnist"
    ):
        image_folder(plan, tmp_path)
    monkeypatch.setenv("FLIPGRAD_DATA", str(tmp_path))
    assert image_folder(plan, None) == tmp_path / "mnist"


def net(factor: float, *, bias: float = 0.01, cost: float = 1.5, kind: bool = True) -> Net:
    """A network in which averaging multiplies PSA's errors by a factor, where inputs are binary."""
    layers = ["layer 1", "layer 2", "head", "all"]

    def numbers(label: str, averaged: bool) -> dict[str, list[float]]:
        rmse = [factor if averaged and layer != "layer 1" else 1.0 for layer in layers]
        own = 0.0 if label in ("PSA", "PSA rao-blackwell") else 0.5 if label.startswith("ST") else bias
        cosine = [1 - value / 2 for value in rmse]
        low = [max(0.0, own - 0.005)] * 4
        std = [value * (0.9 if label == "PSA mean" else 1) for value in rmse]
        return {"rmse": rmse, "bias": [own] * 4, "bias_low": low, "bias_high": [own + 0.005] * 4, "std": std, "cosine": cosine}

    options = {label: numbers(label, label not in ("PSA", "ST", "PSA enhanced")) for label in LABELS}
    ways = {label: numbers("PSA mean", True) for label in WAYS}
    for label, values in ways.items():
        share = 0.5 if "Z" in label or "of the last" in label else 0.7
        values["std"] = [share * value for value in values["std"]]
    costs = {**dict.fromkeys(options, cost), "PSA": 1.0, "ST": 0.7, **dict.fromkeys(ways, 2 * cost)}
    return Net("a net", "a net", kind, "draws", layers, options, ways, costs)


def grid(ours: float, theirs: float, *, diverged: bool = False, cost: float = 1.0) -> Grid:
    trouble = "the loss" if diverged else None
    runs = [
        *(Trained(method, 0.1, [2.0, 1.0], None) for method in ("ST", "PSA", "PSA auto")),
        Trained("ST", 0.3, [2.0, theirs], None),
        Trained("PSA", 0.3, [2.0, theirs], None),
        Trained("PSA auto", 0.3, [2.0, ours], trouble),
    ]
    return Grid("a net", "few images", [0.1, 0.3], 2, runs, {"ST": 0.5, "PSA": 1.0, "PSA auto": cost})


def test_claims_follow_the_numbers():
    good = [net(0.4, kind=False), net(0.4)]
    found = all_claims(good, [grid(0.4, 0.6, cost=0.4)])
    # Layer 1 is never better at a higher cost, and neither is the whole of a network where that counts most.
    assert [claim.text[:60] for claim in found if not claim.holds] == [
        "at equal cost PSA auto is more accurate than PSA in every la",
        "at equal cost PSA mean is more accurate than PSA in every la",
        "at equal cost two antithetic draws of the upper half are mor",
    ]
    bad = [net(1.3, bias=0.6, kind=False), net(1.3, bias=0.6)]
    failed = [claim for claim in all_claims(bad, [grid(0.8, 0.6, diverged=True)]) if not claim.holds]
    for words in (
        "PSA posterior has a lower error",
        "one draw of PSA rao-blackwell is worth 3",
        "less biased than ST",
        "points in a better direction",
        "has nearly PSA's expectation",
        "bears rates as large",
        "in the same epochs",
        "in the same time",
    ):
        assert any(words in claim.text for claim in failed), words
    (told,) = [claim for claim in failed if claim.text.startswith("PSA posterior has a lower error") and "wide" in claim.text]
    assert "0 of 2 places, not: 1.30 in layer 2 of a net, 1.30 in head of a net" in told.numbers


def test_trainings_are_compared_after_equal_epochs_and_equal_time():
    both = grid(0.4, 0.6)
    assert both.largest_stable("PSA auto") == 0.3
    assert grid(0.4, 0.6, diverged=True).largest_stable("PSA auto") == 0.1
    assert grid(2.5, 0.6).largest_stable("PSA auto") == 0.1
    assert (both.best("PSA"), both.best("PSA auto")) == (0.6, 0.4)
    # ST has two epochs in the time in which those who cost twice as much have one.
    assert (both.equal_time("ST"), both.equal_time("PSA")) == (0.6, 2.0)
    assert grid(0.4, 0.6, cost=2 / 3).equal_time("PSA auto") == pytest.approx(1.2)
    assert math.isnan(Trained("PSA", 0.1, [1.0], "diverged").after(1))


def several_seeds() -> Grid:
    ends = {"ST": ((0.9, 1.1), (0.5, None)), "PSA": ((0.8, 1.2), (3.0, 0.2)), "PSA auto": ((0.7, 0.9), (0.7, 0.5))}
    runs = [
        Trained(method, rate, [2.0, 2.0 if end is None else end], "the loss" if end is None else None, seed)
        for method, by_rate in ends.items()
        for rate, by_seed in zip((0.1, 0.3), by_rate, strict=True)
        for seed, end in enumerate(by_seed)
    ]
    return Grid("a net", "few images", [0.1, 0.3], 2, runs, {"ST": 0.5, "PSA": 1.0, "PSA auto": 1.0})


def test_trainings_of_several_seeds_are_compared_by_their_means_with_the_spread():
    trainings = several_seeds()
    # One seed that diverges, or one that ends above guessing, spoils a rate.
    assert [trainings.largest_stable(method) for method in trainings.methods] == [0.1, 0.1, 0.3]
    assert [trainings.best_rate(method) for method in trainings.methods] == [0.1, 0.1, 0.3]
    assert trainings.best("PSA auto") == pytest.approx(0.6)
    assert trainings.told("PSA auto", 0.3) == "0.600 ± 0.141"
    assert trainings.told("ST", 0.3) == trainings.told("ST", 0.7) == "—"
    sheet = all_sheets([net(0.4, kind=False), net(0.4)], [trainings], "")[-1]
    assert sheet.rows[0] == ["a net, ST", "1.000 ± 0.141", "—", "0.1", "1.000 ± 0.141", "1.000 ± 0.141"]
    (claim,) = [claim for claim in all_claims([net(0.4, kind=False), net(0.4)], [trainings]) if "same epochs" in claim.text]
    assert claim.holds
    assert claim.numbers == "ST 1.000 ± 0.141, PSA 1.000 ± 0.283, PSA auto 0.600 ± 0.141"


def test_every_repeat_of_a_training_has_another_seed_and_every_revision_another_cell(tmp_path):
    shop = Workshop(tmp_path, "smoke", 5, lambda what, new, total: None)
    first, second = (SETTINGS["smoke"][0].cell(shop, "psa:posterior", 0.1, repeat) for repeat in (0, 1))
    assert first.name == "beyond-fc-4-psa:posterior-revision-1-0.1"
    assert second.name == f"{first.name}-seed-6"
    assert {**first.settings["config"], "seed": 6} == second.settings["config"]
    assert SETTINGS["smoke"][0].cell(shop, "st:sampled", 0.1).name == "beyond-fc-4-st:sampled-0.1"
    assert beyond_networks.SEEDS["small"] == 3


@pytest.fixture
def timed(monkeypatch):
    """How often times were taken, which is replaced: what counts here is when they are taken again."""
    taken, now = [], {"load": 3.0}

    def take(shop, settings):
        taken.append(1)
        found = {"seconds": {"net": {"PSA": 2.0, "ST": 1.0}}, "timed": beyond_networks._timed(), **now}
        shop.store(beyond_networks.COSTS, found)
        return found

    monkeypatch.setattr(beyond_networks, "_take_times", take)
    monkeypatch.setattr(beyond_networks.machine, "load", lambda: now["load"])
    return taken, now


def test_costs_taken_beside_other_work_are_taken_again_when_the_machine_is_quiet(tmp_path, timed, monkeypatch):
    taken, now = timed
    shop = Workshop(tmp_path, "smoke", 0, lambda what, new, total: None)
    for _ in range(2):
        assert beyond_networks.measure_costs(shop, ()) == (
            {"net": {"PSA": 1.0, "ST": 0.5}},
            "beside other work (a load of 3.0)",
        )
    assert len(taken) == 1
    now["load"] = 0.2
    for _ in range(2):
        assert beyond_networks.measure_costs(shop, ())[1] == "with nothing else at work"
    assert len(taken) == 2
    now["load"] = None
    monkeypatch.setattr(beyond_networks, "REVISIONS", {"psa:posterior": 99})
    assert beyond_networks.measure_costs(shop, ())[1] == "beside what is not known"
    assert len(taken) == 3


def test_tables_have_a_row_for_every_layer_and_training():
    accuracy, wider, costs, equal, several, trained = all_sheets(
        [net(0.4, kind=False), net(0.4)], [grid(0.4, 0.6)], "with nothing else at work"
    )
    assert accuracy.head == ["network, layer", *LABELS]
    assert accuracy.rows[1][:2] == ["a net, layer 2", "1 / (0.00) / 0.50"]
    assert len(wider.rows) == len(equal.rows) / 2 == len(several.rows) == 4
    # A gradient of the default costs 1.5 of PSA's here, an update 1.
    assert costs.head[1:] == ["a net", "a net, an update"]
    assert ["PSA auto", "1.50", "1.00"] in costs.rows
    assert ["PSA posterior", "1.50"] in [row[:2] for row in costs.rows]
    assert equal.rows[1][2] == f"{0.4 * 1.5**0.5:.2f}"
    assert trained.rows[2] == ["a net, PSA auto", "1.000", "0.400", "≥ 0.3", "0.400", "2.000"]
    assert "in turns, with nothing else at work. In small" in costs.caption
    for sheet in (accuracy, wider, costs, equal, several, trained):
        assert {len(row) for row in sheet.rows} == {len(sheet.head)}


def test_long_trainings_are_compared_network_by_network():
    methods = {
        label: {"epochs": [1, 50, 100], "runs": [{"expected": [0.7, 0.6, end]} for end in ends]}
        for label, ends in {"PSA": (0.5, 0.52), "PSA auto": (0.49, 0.51), "PSA mean": (0.48, 0.53)}.items()
    }
    posterior, mean, sheet = long_trainings(methods)
    assert posterior.holds
    assert "PSA 0.5100, PSA auto 0.5000" in posterior.numbers
    # Lower on average, but not in both.
    assert not mean.holds
    assert sheet.head == ["option", "epoch 1", "epoch 1", "epoch 50", "end, network 1", "end, network 2"]
    assert sheet.rows[1] == ["PSA auto", "0.7000", "0.7000", "0.6000", "0.4900", "0.5100"]
