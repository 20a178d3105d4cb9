"""The estimator that CONTRIBUTING.md shows is one that works."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import flipgrad as fg

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def soft_st():
    namespace = {}
    exec(compile(CODE, "CONTRIBUTING.md", "exec"), namespace)
    return namespace["SoftST"]


def gradient(estimator):
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2))
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    losses = net(x, fg.CrossEntropy(y), estimator=estimator, generator=torch.Generator().manual_seed(0))
    losses.mean().backward()
    return net[0].weight.grad


def test_it_is_about_thirty_lines():
    assert len(CODE.splitlines()) <= 35


def test_it_gives_a_gradient_in_sequential_and_in_any_graph(soft_st):
    assert torch.allclose(gradient(soft_st(1.0)), gradient(fg.ST()))
    assert not torch.allclose(gradient(soft_st()), gradient(fg.ST()))
    model = fg.use(nn.Sequential(fg.BinaryLinear(2, 4), nn.Linear(4, 2)), soft_st())
    model(torch.randn(3, 2)).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_it_checks_its_argument(soft_st):
    with pytest.raises(fg.InputError, match="must be positive"):
        soft_st(0.0)
