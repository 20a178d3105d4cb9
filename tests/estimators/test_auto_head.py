"""PSA's default gradient in the head's parameters: averaged, but not where that would cost many steps."""

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.estimators import _sample_analytic

EXAMPLES = 10


def head_gradient(net: fg.Sequential, objective: object, estimator: fg.Estimator) -> Tensor:
    x = torch.randn(EXAMPLES, 3, generator=torch.Generator().manual_seed(0))
    loss = net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(1)).mean()
    return torch.autograd.grad(loss, net.head.weight)[0]


def network(units: int, outputs: int) -> fg.Sequential:
    torch.manual_seed(0)
    return fg.Sequential(fg.BinaryLinear(3, units), head=nn.Linear(units, outputs))


def distances(outputs: Tensor) -> Tensor:
    return outputs.abs().sum(-1)


@pytest.mark.parametrize(("units", "averages"), [(4, True), (40, True), (41, False), (300, False)])
def test_an_objective_that_must_be_evaluated_is_averaged_over_few_flips_only(units, averages, monkeypatch):
    monkeypatch.setattr(_sample_analytic, "MOST_AVERAGED_OUTPUTS", EXAMPLES * 40 * 2)
    net = network(units, 2)
    averaged, sampled = (head_gradient(net, distances, fg.PSA(head=head)) for head in ("rao-blackwell", "sampled"))
    assert not torch.allclose(averaged, sampled)
    assert torch.equal(head_gradient(net, distances, fg.PSA()), averaged if averages else sampled)


def test_objectives_that_know_their_flips_are_averaged_however_many_outputs_there_are():
    net = network(600, 20)
    assert EXAMPLES * 600 * 20 > _sample_analytic.MOST_AVERAGED_OUTPUTS
    for objective in (fg.CrossEntropy(torch.arange(EXAMPLES)), fg.SquaredError(torch.zeros(EXAMPLES, 20))):
        expected = head_gradient(net, objective, fg.PSA(head="rao-blackwell"))
        assert torch.equal(head_gradient(net, objective, fg.PSA()), expected)


def test_a_head_that_is_not_linear_is_sampled():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(3, 4), head=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(EXAMPLES, 3)
    gradients = []
    for estimator in (fg.PSA(), fg.PSA(head="sampled")):
        loss = net(x, distances, estimator=estimator, generator=torch.Generator().manual_seed(1)).mean()
        gradients.append(torch.autograd.grad(loss, net.head[0].weight)[0])
    assert torch.equal(*gradients)


def test_many_outputs_are_flipped_in_chunks_of_the_same_result(monkeypatch):
    net = network(60, 30)

    def slopes(size: int) -> Tensor:
        monkeypatch.setattr("flipgrad.estimators._head.NUMBERS_AT_ONCE", size)
        x = torch.randn(EXAMPLES, 3, generator=torch.Generator().manual_seed(0))
        loss = net(x, distances, estimator=fg.PSA(), generator=torch.Generator().manual_seed(1)).mean()
        return torch.autograd.grad(loss, net.binary_layers[0].weight)[0]

    torch.testing.assert_close(slopes(EXAMPLES * 30 * 7), slopes(2**20))
