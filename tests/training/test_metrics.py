import math

import pytest
import torch
from problems import blobs, small_net
from torch import nn

import flipgrad as fg
from flipgrad import exact
from flipgrad.data import Split
from flipgrad.training import evaluate


def test_evaluation_agrees_with_the_exact_expectation():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 3))
    data = Split(torch.randn(30, 2), torch.randint(3, (30,)))
    samples = 1000
    result = evaluate(net, data, samples, generator=torch.Generator().manual_seed(0), batch_size=16)
    objective = fg.CrossEntropy(data.y)
    truth = exact.expected_loss(net, data.x, objective)
    spread = fg.bounds.sampled_losses(net, data.x, objective, 200).var(0).mean().item()
    # Five standard errors of a mean over 30 * 1000 draws: a false alarm in two million.
    assert abs(result.expected_loss - truth.mean().item()) < 5 * math.sqrt(spread / (30 * samples))
    assert result.marginal_loss == pytest.approx(exact.marginal_loss(net, data.x, objective).mean().item(), abs=0.01)
    assert result.accuracy_n == (exact.predictive(net, data.x).argmax(1) == data.y).double().mean().item()
    assert result.accuracy_deterministic == (net.deterministic(data.x).argmax(1) == data.y).double().mean().item()
    assert 0 < result.accuracy_1 < 1


def test_saturated_units_are_those_that_are_hardly_random():
    net = fg.Sequential(fg.BinaryLinear(2, 4), head=nn.Linear(4, 3))
    with torch.no_grad():
        net[0].weight.zero_()
        # F(5.4) = 0.9955: a mean state of 0.991.
        net[0].bias.copy_(torch.tensor([0.0, 5.0, 5.4, -9.0]))
    result = evaluate(net, Split(torch.randn(7, 2), torch.arange(7) % 3), 1)
    assert result.saturated == {"layer 1": 0.5}


def test_processes_with_parts_of_the_examples_find_the_numbers_of_the_whole():
    net, data = small_net(), blobs().test
    sums = []
    parts = [Split(data.x[k::3], data.y[k::3]) for k in range(3)]
    for part in parts:
        evaluate(net, part, 1, total=lambda own: sums.append(own) or own)
    whole = evaluate(net, data, 1)
    together = evaluate(net, parts[0], 1, total=lambda own: sum(sums))
    assert together.accuracy_deterministic == pytest.approx(whole.accuracy_deterministic)
    assert sum(float(own[5]) for own in sums) == len(data)


def test_evaluation_leaves_the_mode_of_the_network_alone():
    net = small_net().train()
    evaluate(net, blobs().test, 2)
    assert net.training
