"""What baselines guess, how they learn, what they refuse, and that they are modules like others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators.baselines import Baseline
from flipgrad.sampling import fresh
from reference import assert_same, batch, chain, fully_connected, gradients, noise_like

F64 = torch.float64


def examples(n, index=None):
    x, objective = batch((n, 2))
    return Batch(x, objective, fresh(None), None if index is None else torch.tensor(index))


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def test_a_constant_is_given_once_per_example_or_per_data_point():
    assert_same(fg.ConstantBaseline(0.5)(examples(3)), torch.full((3,), 0.5))
    values = tensor(1, 2, 3)
    assert_same(fg.ConstantBaseline(values)(examples(3)), values)
    assert_same(fg.ConstantBaseline(values)(examples(4, [2, 0, 0, 1])), tensor(3, 1, 1, 2))


def test_a_constant_is_a_copy_without_gradient():
    values = tensor(1, 2).requires_grad_()
    baseline = fg.ConstantBaseline(values)
    with torch.no_grad():
        values.add_(1)
    assert_same(baseline.values, tensor(1, 2))
    assert not baseline.values.requires_grad


def test_running_averages_are_per_data_point():
    baseline = fg.RunningBaseline(5, momentum=0.75).double()
    first = examples(2, [3, 1])
    # Nothing was seen: 0.
    assert_same(baseline(first), tensor(0, 0))
    assert baseline.learn(first, tensor(8, 2)) is None
    # Point 4 was not seen: the mean of the others.
    assert_same(baseline(examples(3, [1, 3, 4])), tensor(2, 8, 5))
    baseline.learn(examples(1, [3]), tensor(4))
    assert_same(baseline(examples(3, [1, 3, 0])), tensor(2, 7, 4.5))


def test_running_averages_count_a_repeated_data_point_once_with_its_mean():
    baseline = fg.RunningBaseline(3, momentum=0.5).double()
    baseline.learn(examples(3, [1, 0, 1]), tensor(2, 5, 4))
    assert_same(baseline.average, tensor(5, 3, 0))
    baseline.learn(examples(4, [1, 1, 1, 0]), tensor(6, 6, 9, 5))
    assert_same(baseline.average, tensor(5, 5, 0))
    assert baseline.seen.tolist() == [True, True, False]


def test_a_running_average_guesses_before_it_learns():
    net = fully_connected(2, 3, 3)
    x, objective = batch((2, 2))
    z, index = noise_like(chain(net), x), torch.tensor([0, 1])
    estimator = fg.REINFORCE(fg.RunningBaseline(2).double())
    losses = net(x, objective, estimator=estimator, noise=z, index=index)
    plain = net(x, objective, estimator=fg.REINFORCE(), noise=z)
    # The first guess is 0, in spite of what was learned since.
    assert_same(gradients(losses.sum(), net), gradients(plain.sum(), net))
    assert_same(estimator.baseline.average, losses.detach())
    again = net(x, objective, estimator=estimator, noise=z, index=index)
    assert_same(gradients(again.sum(), net)["0.weight"], 0 * net[0].weight)


def test_running_averages_rest_in_evaluation_mode():
    baseline = fg.RunningBaseline(2).eval()
    baseline.learn(examples(1, [0]), tensor(3))
    assert not baseline.seen.any()


def test_running_averages_converge_to_the_expected_losses():
    """Within 5 standard deviations of an exponential average of 40 losses a step: (1 - 0.98) / (1 + 0.98) of their variance."""
    net = fully_connected(2, 3, 3, 3)
    x, objective = batch((3, 2))
    index = torch.arange(3).repeat(40)
    baseline = fg.RunningBaseline(3, momentum=0.98).double()
    generator = torch.Generator().manual_seed(0)
    spread = []
    for _ in range(400):
        problem = x[index], objective.select(index)
        losses = net(*problem, estimator=fg.REINFORCE(baseline), generator=generator, index=index).detach()
        spread.append(losses.view(40, 3).var(0))
    deviation = (torch.stack(spread).mean(0) / 40 * 0.02 / 1.98).sqrt()
    exact = fg.exact.expected_loss(net, x, objective)
    assert bool(((baseline.average - exact).abs() < 5 * deviation).all())
    assert bool((5 * deviation < 0.1 * exact).all())


def test_a_learned_baseline_is_trained_by_the_same_backward_pass():
    net = fully_connected(2, 3, 3)
    x, objective = batch((4, 2))
    x.requires_grad_()
    z = noise_like(chain(net), x)
    baseline = fg.LearnedBaseline(network())
    losses = net(x, objective, estimator=fg.REINFORCE(baseline), noise=z)
    # Its value is that of the sampled loss.
    assert_same(losses.detach(), net(x, objective, noise=z).detach())
    both = gradients(losses.mean(), net, input=x, **dict(baseline.named_parameters()))
    guesses = baseline.network(x.detach()).squeeze(1)
    squared = gradients((losses.detach() - guesses).square().mean(), baseline)
    assert all(bool((g != 0).any()) for g in squared.values())
    assert_same({name: both[name] for name in squared}, squared)
    # The network's gradient is that of a constant of the same value, as if nothing were trained besides.
    constant = net(x, objective, estimator=fg.REINFORCE(fg.ConstantBaseline(guesses)), noise=z)
    alone = gradients(constant.mean(), net, input=x)
    assert_same({name: both[name] for name in alone}, alone)


def test_a_learned_baseline_learns_the_expected_losses():
    net = fully_connected(2, 3, 3)
    x, objective = batch((2, 2))
    index = torch.arange(2).repeat(200)
    estimator = fg.REINFORCE(fg.LearnedBaseline(network()))
    optimizer = torch.optim.Adam(estimator.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        net(x[index], objective.select(index), estimator=estimator).mean().backward()
        optimizer.step()
    exact = fg.exact.expected_loss(net, x, objective)
    guesses = estimator.baseline.network(x).squeeze(1)
    assert_same(guesses.detach(), exact.detach(), 0.1)


@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
def test_a_learned_baseline_may_give_either_shape(shape):
    inner = nn.Linear(2, 1).double()
    squeezed = inner if shape == "[B, 1]" else nn.Sequential(inner, nn.Flatten(0))
    assert fg.LearnedBaseline(squeezed)(examples(3)).shape == (3,)


@pytest.mark.parametrize("kind", [fg.REINFORCE, fg.MuProp])
def test_state_is_saved_loaded_and_moved_with_the_estimator(kind):
    def build():
        torch.manual_seed(torch.seed())
        return [fg.ConstantBaseline(torch.rand(3)), fg.RunningBaseline(3), fg.LearnedBaseline(network())]

    for baseline, other in zip(build(), build(), strict=True):
        estimator = kind(baseline)
        baseline.learn(examples(2, [0, 2]), tensor(1, 2))
        assert estimator.state_dict()
        twin = kind(other)
        twin.load_state_dict(estimator.state_dict())
        assert_same(dict(twin.state_dict()), dict(estimator.state_dict()), 0)
        assert_same(twin.double().baseline(examples(2, [1, 2])), estimator.double().baseline(examples(2, [1, 2])), 0)
        assert all(t.dtype in (F64, torch.bool) for t in twin.state_dict().values())
        moved = copy.deepcopy(twin).to("meta")
        assert all(t.device.type == "meta" for t in moved.state_dict().values())
    assert not kind().state_dict()


def test_the_losses_keep_their_precision():
    net = fully_connected(2, 3, 3).float()
    x, objective = batch((2, 2))
    losses = net(x.float(), objective, estimator=fg.REINFORCE(fg.ConstantBaseline(tensor(1, 2))))
    assert losses.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.ConstantBaseline(torch.zeros(2, 1)), r"a finite number, or one per example \[B\]; got shape \[2, 1\]"),
        (lambda: fg.ConstantBaseline(float("nan")), "ConstantBaseline takes a finite number"),
        (lambda: fg.RunningBaseline(0), r"RunningBaseline\(size=0\): give the number of data points, at least 1"),
        (lambda: fg.RunningBaseline(3, momentum=1.0), r"RunningBaseline\(momentum=1.0\): the momentum must be in \[0, 1\)"),
        (lambda: fg.MuProp(torch.zeros(2)), r"MuProp\(baseline=tensor.*such as fg.ConstantBaseline"),
    ],
)
def test_refuses_bad_settings(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("baseline", "index", "message"),
    [
        (fg.ConstantBaseline(torch.zeros(3)), None, r"3 values for a batch of 2 examples: .* net\(..., index=...\)"),
        (fg.ConstantBaseline(torch.zeros(3)), [0, 3], r"ConstantBaseline holds 3 data points, .* index goes from 0 to 3"),
        (fg.RunningBaseline(3), None, r"RunningBaseline knows data points by .* net\(..., index=...\), one per example"),
        (fg.RunningBaseline(3), [-1, 0], "numbered from 0, and index goes from -1 to 0"),
        (fg.RunningBaseline(3), [0, 1, 2], r"index must be whole numbers of shape \[2\].* of shape \[3\]"),
        (fg.RunningBaseline(3), [0.0, 1.0], r"index must be whole numbers of shape \[2\], .* got torch.float32"),
        (fg.LearnedBaseline(nn.Linear(2, 2).double()), None, r"inputs \[2, 2\] to one number per .*; it gave \[2, 2\]"),
    ],
)
def test_refuses_a_batch_that_does_not_fit(baseline, index, message):
    net = fully_connected(2, 3, 3)
    x, objective = batch((2, 2))
    with pytest.raises(fg.InputError, match=message):
        net(x, objective, estimator=fg.REINFORCE(baseline), index=None if index is None else torch.tensor(index))


def test_an_own_baseline_is_a_small_class():
    class Uniform(Baseline):
        """The loss of guessing at random among three classes."""

        def forward(self, batch):
            return torch.full((len(batch.x),), 3.0, dtype=batch.x.dtype).log()

        def learn(self, batch, losses):
            return None

    net = fully_connected(2, 3, 3)
    net(*batch((2, 2)), estimator=fg.MuProp(Uniform())).mean().backward()
