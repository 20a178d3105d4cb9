"""Vectorised draws are the sequential ones: the same noise gives the same gradients, for every estimator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.estimators import ESTIMATORS
from flipgrad.gradeval.draws import Problem, Sampler, one_by_one, vectorised
from flipgrad.sampling import fresh

DRAWS = 3


def small(noise: fg.Noise) -> Problem:
    torch.manual_seed(0)
    layers = [fg.BinaryLinear(2, 4, noise=noise), fg.BinaryLinear(4, 3, noise=noise), fg.BinaryLinear(3, 4, noise=noise)]
    net = fg.Sequential(*layers, head=nn.Linear(4, 2)).double()
    return Problem(net, torch.randn(6, 2, dtype=torch.float64), fg.CrossEntropy(torch.arange(6) % 2))


def convolutional() -> Problem:
    torch.manual_seed(1)
    net = fg.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        fg.BinaryConv2d(2, 3, 3, stride=2, padding=1, padding_value=1),
        fg.BinaryConv2d(3, 4, 2, groups=1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        fg.BinaryLinear(4, 3),
        head=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    ).double()
    return Problem(net, torch.randn(4, 1, 6, 6, dtype=torch.float64), fg.CrossEntropy(torch.arange(4) % 2))


def binary_weights() -> Problem:
    torch.manual_seed(2)
    options = {"weights": "binary", "weight_noise": fg.Normal(0.8)}
    net = fg.Sequential(
        fg.BinaryConv2d(1, 2, 2, **options),
        nn.Flatten(),
        fg.BinaryLinear(8, 3, norm=fg.ScaleShift(3), **options),
        fg.BinaryLinear(3, 4),
        head=nn.Linear(4, 2),
    ).double()
    return Problem(net, torch.randn(5, 1, 3, 3, dtype=torch.float64), fg.CrossEntropy(torch.arange(5) % 2))


def recorded_noise(problem: Problem, estimator: fg.Estimator) -> list[torch.Tensor]:
    """Values for everything that an estimate asks of its source of noise, for several draws."""
    generator, noise = torch.Generator().manual_seed(5), []

    def record(distribution: fg.Noise, a: torch.Tensor) -> torch.Tensor:
        noise.append(distribution.sample((DRAWS, *a.shape), generator=generator, dtype=a.dtype))
        return noise[-1][0]

    one_by_one(problem, estimator, 1, record)
    return noise


def refuse(distribution: fg.Noise, a: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("more noise was asked for than was recorded")


def frozen(name: str) -> fg.Estimator:
    estimator = ESTIMATORS[name]()
    if isinstance(estimator, nn.Module):
        # What it learns from one draw must not count in the next.
        estimator.requires_grad_(False).eval()
    return estimator


def assert_equal_draws(problem: Problem, estimator: fg.Estimator) -> None:
    noise = recorded_noise(problem, estimator)
    if isinstance(estimator, nn.Module):
        estimator.requires_grad_(False)
    expected = one_by_one(problem, estimator, DRAWS, refuse, noise)
    actual = vectorised(problem, estimator, DRAWS, refuse, noise)
    if noise:
        assert not torch.equal(expected[0], expected[1])
    assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.3)], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_vectorised_draws_equal_sequential_ones(name, noise):
    assert_equal_draws(small(noise), frozen(name))


@pytest.mark.parametrize("name", ["psa", "st", "tanh", "concrete", "reinforce", "arm", "disarm", "leg", "muprop", "zgr"])
def test_vectorised_draws_equal_sequential_ones_in_a_convolutional_net(name):
    assert_equal_draws(convolutional(), frozen(name))


@pytest.mark.parametrize("name", ["reinforce", "arm", "disarm", "arms", "bitflip", "leg"])
def test_vectorised_draws_equal_sequential_ones_with_binary_weights(name):
    assert_equal_draws(binary_weights(), frozen(name))


@pytest.mark.parametrize(
    "estimator", [fg.PSA(head="enhanced"), fg.PSA(flip_head=False), fg.REINFORCE(fg.ConstantBaseline(torch.rand(6)))]
)
def test_options_are_vectorised_too(estimator):
    assert_equal_draws(small(fg.Logistic()), estimator)


class Bounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh()


def test_parametrised_weights_are_vectorised():
    problem = small(fg.Logistic())
    nn.utils.parametrize.register_parametrization(problem.net[1], "weight", Bounded())
    assert_equal_draws(problem, fg.PSA())


def test_a_draw_is_the_gradient_of_the_mean_loss():
    problem = small(fg.Logistic())
    z = [torch.randn(6, n, dtype=torch.float64) for n in (4, 3, 4)]
    problem.net(problem.x, problem.objective, estimator=fg.PSA(), noise=z).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in problem.net.parameters()])
    assert torch.allclose(vectorised(problem, fg.PSA(), 1, refuse, [t[None] for t in z])[0], expected)


def test_layers_name_the_parts_of_the_gradient():
    problem = convolutional()
    layers = problem.layers()
    assert list(layers) == ["front", "layer 1", "layer 2", "layer 3", "head", "all"]
    sizes = [part.stop - part.start for part in layers.values()]
    assert sizes == [20, 57, 52, 15, 32, 176]
    problem.net[0].requires_grad_(False)
    assert list(problem.layers()) == ["layer 1", "layer 2", "layer 3", "head", "all"]


def test_shared_parameters_belong_to_the_first_layer():
    problem = small(fg.Logistic())
    net = fg.Sequential(problem.net[0], fg.BinaryLinear(4, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2)).double()
    net[2].weight = net[1].weight
    layers = Problem(net, problem.x, problem.objective).layers()
    assert {name: part.stop - part.start for name, part in layers.items()} == {
        "layer 1": 12,
        "layer 2": 20,
        "layer 3": 4,
        "head": 10,
        "all": 46,
    }
    assert_equal_draws(Problem(net, problem.x, problem.objective), fg.PSA())


@pytest.mark.parametrize("estimator", [fg.ST(), fg.REINFORCE(fg.RunningBaseline(6))], ids=["vectorised", "one by one"])
def test_draws_do_not_depend_on_the_workers(estimator, monkeypatch):
    # Chunks of a few draws, so that there are many.
    monkeypatch.setattr("flipgrad.gradeval.draws.PREACTIVATIONS_AT_ONCE", 6 * 11 * 4)
    problem = small(fg.Logistic())
    one, two = (torch.cat(list(Sampler(problem, estimator, [3], workers).draws(18))) for workers in (1, 2))
    assert one.shape == (18, problem.layers()["all"].stop)
    assert torch.equal(one, two)
    assert len(one.unique(dim=0)) == 18
    other = torch.cat(list(Sampler(problem, estimator, [4], 1).draws(18)))
    assert not torch.equal(one, other)


def test_an_estimator_that_remembers_draws_is_not_vectorised():
    sampler = Sampler(small(fg.Logistic()), fg.REINFORCE(fg.RunningBaseline(6)), [0], 2)
    assert not sampler.vectorised
    assert Sampler(small(fg.Logistic()), fg.REINFORCE(), [0], 2).vectorised


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_can_be_vectorised(name):
    assert Sampler(small(fg.Logistic()), ESTIMATORS[name](), [0], 1).vectorised


def test_the_network_and_the_estimator_are_left_alone():
    problem, estimator = small(fg.Logistic()), fg.RELAX()
    before = {name: value.clone() for name, value in problem.net.state_dict().items()}
    list(Sampler(problem, estimator, [0], 2).draws(5))
    assert not estimator.surrogates
    assert all(torch.equal(value, before[name]) for name, value in problem.net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in problem.net.parameters())


def test_threads_are_given_back():
    threads = torch.get_num_threads()
    draws = Sampler(small(fg.Logistic()), fg.ST(), [0], 2).draws(5)
    next(draws)
    draws.close()
    assert torch.get_num_threads() == threads


def test_memory_is_bounded_by_chunks(monkeypatch):
    monkeypatch.setattr("flipgrad.gradeval.draws.PREACTIVATIONS_AT_ONCE", 6 * 11 * 2)
    chunks = list(Sampler(small(fg.Logistic()), fg.ST(), [0], 1).draws(17))
    assert [len(chunk) for chunk in chunks] == [2] * 8 + [1]
    monkeypatch.setattr("flipgrad.gradeval.draws.GRADIENT_ENTRIES_AT_ONCE", 1)
    assert [len(chunk) for chunk in Sampler(small(fg.Logistic()), fg.ST(), [0], 1).draws(3)] == [1, 1, 1]


def test_replayed_noise_is_used_before_fresh_noise():
    problem = small(fg.Logistic())
    z = [torch.randn(1, 6, n, dtype=torch.float64) for n in (4, 3)]
    one = vectorised(problem, fg.ST(), 1, fresh(torch.Generator().manual_seed(0)), z)
    same = one_by_one(problem, fg.ST(), 1, fresh(torch.Generator().manual_seed(0)), z)
    assert torch.allclose(one, same)
