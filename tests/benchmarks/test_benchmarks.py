"""Benchmarks run, and give no number for a wrong result. They are not timed here."""

from __future__ import annotations

import importlib

import pytest
import torch

import flipgrad as fg
from flipgrad import files, plots
from flipgrad.benchmarks import plain, posterior
from flipgrad.benchmarks.step import memory
from flipgrad.benchmarks.toy import _agrees, _rate
from flipgrad.data import toy
from flipgrad.flips import compiled, heads, rank_one
from flipgrad.gradeval.draws import Problem, Sampler
from flipgrad.native import library
from flipgrad.training.models import cifar_net, fully_connected

# The package's names are those of the benchmarks; these are the modules.
flips, scaling, step = (importlib.import_module(f"flipgrad.benchmarks.{name}") for name in ("flips", "scaling", "step"))


def sampler(estimator: fg.Estimator) -> Sampler:
    data = toy(10).train
    torch.manual_seed(0)
    net = fully_connected(2, [3, 3], 2)
    return Sampler(Problem(net, data.x, fg.CrossEntropy(data.y)), estimator, [0], 1)


def test_right_draws_get_a_rate():
    right = sampler(fg.ST())
    assert _agrees(right)
    assert _rate(right, 50) > 0


def test_wrong_draws_are_noticed(monkeypatch):
    wrong = sampler(fg.ST())
    draws = wrong.draws

    def shifted(samples: int):
        for some in draws(samples):
            yield 2 * some

    monkeypatch.setattr(wrong, "draws", shifted)
    assert not _agrees(wrong)


def test_flip_ratios_are_given_for_right_kernels_only(monkeypatch):
    monkeypatch.setattr(flips, "REPEATS", 1)
    monkeypatch.setattr(flips, "BATCH", 2)
    layer = flips.Layer(6, 5, 3, 2, 9)
    row = flips._measure(layer)
    assert row["separable_over_gradient"] is None or row["separable_over_gradient"] > 0
    if library.available():
        assert row["native_over_gradient"] > 0
        flip_product = compiled.flip_product
        monkeypatch.setattr(compiled, "flip_product", lambda *arguments: 1.001 * flip_product(*arguments))
        assert flips._measure(layer)["native_over_gradient"] is None


def test_flips_of_a_likelihood_are_measured_if_they_are_right(monkeypatch):
    monkeypatch.setattr(flips, "REPEATS", 1)
    row = flips._bernoulli_head(1)
    assert (row["units"], row["outputs"], row["batch"]) == (200, 784, 50)
    assert row["flips_over_gradient"] > 0
    assert row["error"] < 1e-3
    assert row["way"].startswith("expansion")
    sound = heads.bernoulli
    monkeypatch.setattr(heads, "bernoulli", lambda *tensors, tolerance: 1.01 * sound(*tensors, tolerance=tolerance))
    assert flips._bernoulli_head(1)["flips_over_gradient"] is None


def test_the_layers_are_those_of_the_papers_network():
    assert flips._convolutions() == [
        (96, 96, 3, 1, 30),
        (96, 96, 3, 2, 28),
        (96, 192, 3, 1, 13),
        (192, 192, 3, 1, 11),
        (192, 192, 3, 2, 9),
        (192, 192, 3, 1, 4),
        (192, 192, 1, 1, 2),
    ]
    net = cifar_net(0.1)
    assert [layer.weight.shape[2] for layer in net.binary_layers] == [3, 3, 3, 3, 3, 3, 3, 1]
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_a_step_is_measured_with_its_error(monkeypatch):
    monkeypatch.setattr(step, "BATCH", 2)
    monkeypatch.setattr(step, "REPEATS", 1)
    monkeypatch.setattr(step, "cifar_net", lambda: cifar_net(0.05))
    numbers = step._measure(1)
    for name in ("psa", "psa_mean"):
        assert numbers[f"{name}_relative_error"] <= 3e-3
    assert min(numbers[f"{name}_over_st"] for name in ("psa", "psa_mean", "psa_rb", "psa_exact")) > 0
    assert abs(numbers["psa_rb_rmse_growth"]) < 0.01
    assert 0 <= numbers["psa_rb_bias_growth"] < 0.01
    monkeypatch.setattr(step, "LARGEST_ERROR", -1.0)
    monkeypatch.setattr(step, "LARGEST_GROWTH", -1.0)
    wrong = step._measure(1)
    assert wrong["psa_over_st"] is None
    assert wrong["psa_rb_over_st"] is None


def test_a_step_is_compared_with_that_of_networks_in_torch_alone(monkeypatch):
    monkeypatch.setattr(step, "BATCH", 2)
    monkeypatch.setattr(step, "REPEATS", 1)
    monkeypatch.setattr(step, "cifar_net", lambda: cifar_net(0.05))
    numbers = step._measure_plain()
    assert numbers.keys() == {"psa_rb_over_st", "relu_over_st", "sign_over_st", "bernoulli_over_st", "seconds"}
    assert min(numbers["seconds"].values()) > 0


def test_the_network_in_torch_alone_is_the_same():
    """Its layers are those of the network, and its activations have states and slopes as they say."""
    torch.manual_seed(0)
    x, _ = step.photographs(4)
    net = cifar_net(0.05).initialize(x)
    twin = plain.Plain(net, torch.tanh)
    expected = x
    for layer in net.binary_layers:
        expected = torch.tanh(layer.affine()(expected))
    torch.testing.assert_close(twin(x), net.head(expected.flatten(1)))
    a = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], requires_grad=True)
    for activation, slope in ((plain.clipped_sign, torch.tensor([0.0, 1, 1, 1, 0])), (plain.straight_through, None)):
        states = activation(a)
        assert states.detach().abs().round(decimals=5).eq(1).all()
        (found,) = torch.autograd.grad(states.sum(), a)
        p = torch.sigmoid(a.detach())
        torch.testing.assert_close(found, 2 * p * (1 - p) if slope is None else slope)


def test_growth_tells_errors_that_are_a_bias_from_those_that_are_not():
    """Of an estimator whose gradients are twice the exact ones, the bias is as long as their mean, and the RMSE doubles."""
    torch.manual_seed(0)
    x, objective = step.photographs(8)
    net = cifar_net(0.05).initialize(x)
    same = posterior.growth(net, x, objective, step.DEFAULT, step.DEFAULT)
    assert same == {"rmse": 0.0, "bias": 0.0}

    class Twice(fg.Estimator):
        unbiased, citation = False, ""

        def passes(self, depth):
            return 1

        def losses(self, net, batch):
            return 2 * step.DEFAULT.losses(net, batch)

    wrong = posterior.growth(net, x, objective, Twice(), step.DEFAULT)
    assert wrong["rmse"] == pytest.approx(1.0, abs=0.7)
    assert wrong["bias"] > 0.1


def test_a_step_with_binary_weights_is_measured_if_its_flips_are_right(monkeypatch):
    monkeypatch.setattr(step, "BATCH", 2)
    monkeypatch.setattr(step, "REPEATS", 1)
    monkeypatch.setattr(step, "cifar_net", lambda **options: cifar_net(0.1, **options))
    monkeypatch.setattr(step.rank_one, "CHANNELS", 5)
    numbers = step._measure_binary()
    for name in ("units", "weights", "log_ratio"):
        assert 0 < numbers[f"{name}_relative_error"] <= 1e-5
    assert numbers["psa_over_st"] > 0
    assert numbers["psa_rb_over_st"] > 0
    right = rank_one.over_units
    monkeypatch.setattr(rank_one, "over_units", lambda *arguments, **options: 1.001 * right(*arguments, **options))
    numbers = step._measure_binary()
    assert numbers["units_relative_error"] > 5e-4
    assert numbers["psa_over_st"] is None
    assert numbers["psa_rb_over_st"] is None


@pytest.mark.slow
def test_psa_needs_hardly_more_memory_than_st():
    assert memory()["psa_over_st"] <= 1.3


def test_scaling_is_drawn_from_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "AXES", {"width": ([2, 4], 2.0), "batch": ([1, 2], 1.0)})
    monkeypatch.setattr(scaling, "REPEATS", 1)
    monkeypatch.setattr(scaling, "SIZE", 4)
    # Width, depth and batch where they are not varied.
    monkeypatch.setattr(scaling._step_seconds, "__defaults__", (3, 2, 2))
    result = scaling.scaling()
    assert result["axes"].keys() == {"width", "batch", "cores"}
    assert len(result["axes"]["width"]["seconds"]["PSA exact"]) == 2
    path = tmp_path / "scaling.json"
    files.write_json(path, result)
    assert [file.name for file in plots.scaling(path, tmp_path / "scaling")] == ["scaling.png", "scaling.pdf"]
    files.write_json(path, {})
    with pytest.raises(fg.InputError, match="has no 'axes'; run it again to rewrite it"):
        plots.scaling(path, tmp_path / "scaling")


def test_the_cost_of_the_loop_is_measured(monkeypatch):
    module = importlib.import_module("flipgrad.benchmarks.loop")
    monkeypatch.setattr(module, "UPDATES", 2)
    monkeypatch.setattr(module, "REPEATS", 1)
    small = module._measure(module.TrainConfig(lr=module.RATE, model="10"), module.load_data(module.TrainConfig()))
    assert small["loop_over_bare_step"].keys() == {"psa", "st"}
    assert small["psa_over_st"] > 0
    assert module._photographs().train.x.shape[1:] == (3, 32, 32)
