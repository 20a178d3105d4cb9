"""The evaluation as a whole: what it finds, what it says, what it refuses."""

from __future__ import annotations

import json
import math
from typing import final

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.contract import Batch, Network
from flipgrad.data import toy
from flipgrad.estimators import Estimator
from flipgrad.estimators.names import by_name
from flipgrad.network import Sequential
from flipgrad.training.models import fully_connected

OFFSET, SPREAD = 0.03, 0.2


@final
class Synthetic(Estimator):
    """The exact gradient, plus an offset and normal noise in every parameter."""

    unbiased = False
    citation = "none"

    def __init__(self, offset: float = OFFSET, spread: float = SPREAD) -> None:
        self.offset, self.spread = offset, spread

    def passes(self, depth: int) -> int:
        return 1

    def losses(self, net: Network, batch: Batch) -> Tensor:
        losses = fg.exact.expected_loss(net, batch.x, batch.objective)
        for parameter in net.parameters():
            error = self.offset + self.spread * batch.draw(fg.Normal(), parameter.detach())
            losses = losses + ((parameter - parameter.detach()) * error).sum()
        return losses


def problem(widths=(4, 3), points=6) -> tuple[Sequential, Tensor, fg.CrossEntropy]:
    torch.manual_seed(0)
    return (
        fully_connected(2, widths, 2),
        torch.randn(points, 2),
        fg.CrossEntropy(torch.arange(points) % 2),
    )


def test_known_bias_and_variance_are_recovered():
    net, x, objective = problem()
    fg.exact.expected_loss(net, x, objective).mean().backward()
    result = fg.gradeval.evaluate(net, x, objective, [Synthetic()], 4000)
    assert result.reference.kind == "exact"
    for accuracy, layer in zip(result.estimators["Synthetic"].layers[:3], [*net.binary_layers, net.head], strict=True):
        gradient = torch.cat([p.grad.flatten() for p in layer.parameters()])
        size = math.sqrt(gradient.numel()) / gradient.norm().item()
        # Twice the 95 % intervals: about four standard errors.
        assert abs(accuracy.bias - OFFSET * size) <= accuracy.bias_high - accuracy.bias_low
        assert abs(accuracy.std - SPREAD * size) <= accuracy.std_high - accuracy.std_low
        expected = size * math.hypot(OFFSET, SPREAD)
        assert accuracy.rmse[0] == pytest.approx(expected, rel=4 / math.sqrt(2 * 4000 * gradient.numel()))
    assert [layer.name for layer in result.estimators["Synthetic"].layers] == ["layer 1", "layer 2", "head", "all"]


def test_result_is_json_with_the_documented_keys(tmp_path):
    net, x, objective = problem()
    result = fg.gradeval.evaluate(net, x, objective, {"mine": fg.PSA()}, 20, seed=3)
    result.write(tmp_path / "result.json", title="toy")
    stored = json.loads((tmp_path / "result.json").read_text())
    assert {"estimators", "reference", "seed", "versions", "command", "samples", "title"} <= stored.keys()
    assert stored["seed"] == 3
    entry = stored["estimators"]["mine"]
    assert entry["samples_per_second"] > 0
    layer = entry["layers"][0]
    assert layer["name"] == "layer 1"
    assert layer["samples"] == [1, 2]
    curves = ("rmse", "cosine_mean", "cosine_low", "cosine_high")
    assert all(len(layer[key]) == 2 for key in curves)
    assert all(isinstance(layer[key], float) for key in ("bias", "std", "bias_low", "std_high"))


def test_same_seed_same_numbers_whoever_else_is_measured():
    net, x, objective = problem()
    alone = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 50, workers=1)
    among = fg.gradeval.evaluate(net, x, objective, [fg.PSA(), fg.ST()], 50, workers=2)
    assert alone.accuracy("ST") == among.accuracy("ST")
    other = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 50, seed=1)
    assert alone.accuracy("ST").rmse != other.accuracy("ST").rmse


def test_reference_of_draws_agrees_with_the_exact_one_within_its_error():
    net, x, objective = problem()
    exact = fg.gradeval.evaluate(net, x, objective, [fg.Tanh()], 10).reference
    drawn = fg.gradeval.evaluate(net, x, objective, [fg.Tanh()], 10, reference=fg.LEG(), reference_samples=4000).reference
    assert (drawn.kind, drawn.estimator, drawn.draws) == ("draws", "LEG", 4000)
    error = drawn.layers[-1].error * drawn.layers[-1].length
    distance = (drawn.gradient - exact.gradient).norm().item()
    # The squared distance over its mean is about chi-squared over 10 or more degrees of freedom.
    assert 0.1 * error < distance < 3 * error
    assert 0 < drawn.layers[0].error < 0.2


def test_bias_against_a_drawn_reference_is_not_the_references_own_error():
    net, x, objective = problem()
    result = fg.gradeval.evaluate(net, x, objective, [fg.Exact()], 10, reference=fg.DisARM(), reference_samples=2000)
    accuracy, layer = result.accuracy("Exact"), result.reference.layers[-1]
    assert accuracy.rmse[0] > 0.3 * layer.error
    assert accuracy.bias_low == 0
    assert accuracy.bias < accuracy.rmse[0]


def test_wide_networks_get_a_reference_of_draws():
    net, x, objective = problem((30, 30), 4)
    result = fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 20, reference_samples=3000)
    assert (result.reference.kind, result.reference.estimator) == ("draws", "DisARM")


def test_progress_is_reported():
    net, x, objective = problem()
    seen: dict[str, int] = {}

    def report(name: str, new: int) -> None:
        seen[name] = seen.get(name, 0) + new

    fg.gradeval.evaluate(net, x, objective, [fg.ST()], 30, reference=fg.LEG(), reference_samples=900, report=report)
    assert seen == {"reference": 900, "ST": 30}


def test_numbers_are_of_the_size_and_in_the_order_of_the_papers():
    """One draw in layer 1 of a 5-5-5 network near its initialisation, 200 points."""
    data = toy().train
    torch.manual_seed(0)
    net = fully_connected(2, [5, 5, 5], 2).initialize(data.x, moments=True)
    names = ["psa:sampled", "st", "arm", "reinforce", "tanh", "concrete", "concrete:0.1"]
    estimators = by_name(names, lambda: torch.zeros(1))
    result = fg.gradeval.evaluate(net, data.x, fg.CrossEntropy(data.y), estimators, 500)
    rmse = {name: result.accuracy(name, "layer 1").rmse[0] for name in result.estimators}
    assert rmse["PSA"] < 0.5
    assert rmse["ST"] < 0.5
    assert result.accuracy("PSA", "layer 1").bias < result.accuracy("ST", "layer 1").bias
    assert 0.1 < rmse["Tanh"] < 1
    assert 0.3 < rmse["Concrete 1"] < 1
    assert 2 < rmse["ARM"] < rmse["REINFORCE"] < 60
    assert rmse["Concrete 0.1"] > 2
    assert result.accuracy("PSA", "layer 3").bias_low == 0
    assert result.accuracy("ST", "layer 3").bias_low > 0.1
    assert result.accuracy("PSA", "layer 1").cosine_mean[0] > 0.9
    assert 0 < result.accuracy("ARM", "layer 1").cosine_mean[0] < 0.5


@final
class Broken(Estimator):
    unbiased = False
    citation = "none"

    def passes(self, depth: int) -> int:
        return 1

    def losses(self, net: Network, batch: Batch) -> Tensor:
        return fg.ST().losses(net, batch) + (net.binary_layers[1].weight * math.nan).sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples=0: give at least 10"),
        ({"samples": 9}, "samples=9: give at least 10"),
        ({"estimators": []}, "give at least one"),
        ({"estimators": [fg.PSA]}, "^estimators='PSA': pass an object"),
        ({"estimators": ["psa"]}, "pass an object"),
        ({"estimators": [nn.Linear(1, 1)]}, "^estimators: got Linear; give estimators"),
        ({"estimators": [fg.Concrete(), fg.Concrete(0.1)]}, "Concrete is there more than once; name them"),
        ({"estimators": {"mine": Broken()}}, "mine gave a gradient with NaN or infinity in 'layer 2'"),
        ({"reference": fg.ST()}, "reference=ST: .* only with an unbiased estimator"),
        ({"reference": "exactly"}, "reference='exactly': give 'auto'"),
        ({"reference": fg.REINFORCE(), "reference_samples": 10}, "reference of 10 draws of REINFORCE is mostly noise"),
        ({"reference": fg.LEG(), "reference_samples": 0}, "reference_samples=0: give at least 10"),
        ({"x": torch.zeros(0, 2)}, "x is empty"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 10**6}, "workers=1000000: give from 1 to 1024"),
        ({"samples": 10**10}, "samples=10000000000: give at least 10 draws per estimator and at most 1000000000"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 9223372036854775807"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be from 0 to"),
        ({"reference": fg.ARM}, "reference=<class .*: give 'auto', fg.Exact"),
        ({"reference": None}, "reference=None: give 'auto', fg.Exact"),
        ({"net": fg.use(nn.Sequential(fg.BinaryLinear(2, 3), nn.Linear(3, 2)), fg.PSA())}, "takes a flipgrad.Sequential"),
        ({"objective": nn.CrossEntropyLoss()}, "the objective CrossEntropyLoss failed on outputs"),
    ],
)
def test_bad_input_is_named(arguments, message):
    net, x, objective = problem()
    call = {"net": net, "x": x, "objective": objective, "estimators": [fg.ST()], "samples": 20, **arguments}
    with pytest.raises(fg.InputError, match=message):
        fg.gradeval.evaluate(**call)


def test_insisting_on_the_exact_gradient_of_a_wide_network_is_refused():
    net, x, objective = problem((30, 30), 4)
    with pytest.raises(fg.InputError, match="over the budget"):
        fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 20, reference=fg.Exact())


def test_networks_without_gradient_are_refused():
    net, x, objective = problem()
    net.requires_grad_(False)
    with pytest.raises(fg.InputError, match="no parameter with requires_grad=True"):
        fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 20)
    net.requires_grad_(True)
    nn.init.zeros_(net.head.weight)
    with pytest.raises(fg.InputError, match="true gradient of 'layer 1' is zero"):
        fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 20)


def test_unknown_parts_of_a_result_are_named():
    net, x, objective = problem()
    result = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 10)
    with pytest.raises(fg.InputError, match="no estimator 'PSA' in this result; there are ST"):
        result.accuracy("PSA")
    with pytest.raises(fg.InputError, match="no layer 'layer 9' in this result; there are layer 1"):
        result.accuracy("ST", "layer 9")


def test_names_make_estimators():
    mean = torch.tensor([0.5, 0.25])
    named = by_name(
        ["PSA", "psa:sampled", " concrete:0.1", "concrete", "arms:8", "reinforce+mean", "muprop+mean"], lambda: mean
    )
    assert list(named) == ["PSA auto", "PSA", "Concrete 0.1", "Concrete 1", "ARMS 8", "REINFORCE + mean", "MuProp + mean"]
    assert named["Concrete 0.1"].t == 0.1
    assert named["ARMS 8"].samples == 8
    assert torch.equal(named["MuProp + mean"].baseline.values, mean)


@pytest.mark.parametrize("name", ["", "pza", "psa:3", "concrete:x", "arms:1.5", "psa+mean", "reinforce+", "concrete:"])
def test_unknown_names_are_refused(name):
    with pytest.raises(fg.InputError, match=r"unknown estimator .* one of adf, arm"):
        by_name([name], lambda: torch.zeros(1))


def test_a_name_twice_is_refused():
    with pytest.raises(fg.InputError, match="more than once"):
        by_name(["psa", "PSA"], lambda: torch.zeros(1))


def test_a_result_is_written_to_a_path_or_its_name(tmp_path):
    net, x, objective = problem()
    result = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 10)
    result.write(str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text())["samples"] == 10


def test_a_network_that_was_given_an_estimator_and_a_generator_is_measured_as_any():
    net, x, objective = problem()
    plain = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 10)
    used = fg.use(net, fg.PSA(), generator=torch.Generator().manual_seed(3))
    assert fg.gradeval.evaluate(used, x, objective, [fg.ST()], 10).accuracy("ST") == plain.accuracy("ST")


def test_an_objective_that_cannot_be_vectorised_is_measured_one_by_one():
    net, x, objective = problem()
    result = fg.gradeval.evaluate(net, x, lambda outputs: objective(outputs) + 0 * outputs.sum().item(), [fg.ARM()], 10)
    assert not result.estimators["ARM"].vectorised


@pytest.mark.parametrize("noise", [None, fg.Logistic()])
def test_binary_weights_that_are_too_many_are_refused_by_what_would_fit(noise):
    net = fully_connected(2, [30, 30], 2, weights="binary", weight_noise=noise)
    x, objective = torch.randn(4, 2), fg.CrossEntropy(torch.arange(4) % 2)
    with pytest.raises(fg.InputError, match=r"exact: .*fit") as error:
        fg.gradeval.evaluate(net, x, objective, [fg.PSA()], 10)
    assert ("reference=fg.LEG()" in str(error.value)) == (noise is not None)


def test_a_reference_is_drawn_for_binary_weights_that_are_drawn():
    net = fully_connected(1, [2, 2], 2, weights="binary", weight_noise=fg.Logistic()).double()
    x, objective = torch.randn(3, 1).double(), fg.CrossEntropy(torch.arange(3) % 2)
    exact = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 10).reference
    drawn = fg.gradeval.evaluate(net, x, objective, [fg.ST()], 10, reference=fg.LEG(), reference_samples=20_000).reference
    assert (exact.kind, drawn.kind, drawn.estimator) == ("exact", "draws", "LEG")
    for layer, other in zip(exact.layers, drawn.layers, strict=True):
        assert abs(other.length - layer.length) < 5 * other.error * layer.length < layer.length, layer.name
