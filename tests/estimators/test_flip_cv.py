import pytest
import torch
from torch import nn
from unbiasedness import assert_less_variance, assert_unbiased, random_net

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators._paths import Path
from flipgrad.sampling import fresh


def test_unbiased_with_several_flips():
    assert_unbiased(*random_net((3, 4), fg.Logistic()), fg.FlipCV(3), draws=1200)


@pytest.mark.parametrize("noise", [fg.Laplace(), fg.Uniform(1.5)], ids=["laplace", "uniform"])
def test_unbiased_with_other_noise(noise):
    assert_unbiased(*random_net((3, 4), noise), fg.FlipCV(), draws=2000)


def test_less_variance_than_one_flip_alone():
    net, x, y = random_net((4, 4), fg.Logistic())
    assert_less_variance(net, x, y, fg.FlipCV(), fg.BitFlip(), ratio=0.8)
    assert_less_variance(net, x, y, fg.FlipCV(4), fg.FlipCV(1))


def path_of(net, x, objective, draws):
    return Path.sample(net.network(), Batch(x.expand(draws, 2), objective, fresh(torch.Generator().manual_seed(0))))


def test_a_linear_loss_has_no_variance():
    net, x, _ = random_net((4,), fg.Normal(1.5))
    path = path_of(net, x, lambda outputs: outputs.sum(-1), 100)
    (g,) = fg.FlipCV().gradients(path)
    expected = 2 * fg.Normal(1.5).pdf(path.a[0]) * net.head.weight.sum(0)
    assert torch.allclose(g, expected.detach())


def test_a_loss_that_adds_up_is_learned():
    """Squares of units' own outputs have a slope of 2w(wx + c) and a difference of 2wc: the curvature is 2w^2, whatever x."""
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 3)).double()
    with torch.no_grad():
        net.head.weight.copy_(torch.diag(torch.tensor([0.5, 1.0, 2.0])))
    x, rule = torch.randn(1, 2).double(), fg.FlipCV()
    objective = lambda outputs: outputs.square().sum(-1)  # noqa: E731
    rule.gradients(path_of(net, x, objective, 1000))
    torch.testing.assert_close(rule.sums_0 / rule.counts_0, torch.tensor([0.5, 2.0, 8.0]))
    path = path_of(net, x, objective, 100)
    (g,) = rule.gradients(path)
    expected = 2 * fg.Logistic().pdf(path.a[0]) * 2 * net.head.weight.diag() * net.head.bias
    torch.testing.assert_close(g, expected.detach(), rtol=1e-5, atol=1e-6)


def test_averages_are_kept_saved_and_left_alone_in_evaluation():
    net, x, y = random_net((4,), fg.Logistic())
    rule = fg.FlipCV()
    net(x.expand(9, 2), fg.CrossEntropy(y.expand(9)), estimator=rule).mean().backward()
    assert float(rule.counts_0.sum()) == 9
    other = fg.FlipCV()
    other.load_state_dict(rule.state_dict())
    torch.testing.assert_close(other.sums_0, rule.sums_0)
    other.eval()
    net(x, fg.CrossEntropy(y), estimator=other)
    torch.testing.assert_close(other.counts_0, rule.counts_0)


def test_what_is_wrong_is_refused():
    with pytest.raises(fg.InputError, match=r"FlipCV\(flips=0\): give the number of units to flip, at least 1"):
        fg.FlipCV(0)
    rule = fg.FlipCV()
    net, x, y = random_net((4,), fg.Logistic())
    net(x, fg.CrossEntropy(y), estimator=rule)
    wider, x, y = random_net((5,), fg.Logistic())
    with pytest.raises(fg.InputError, match="knows layer 1 with 4 units, and here it has 5: use an estimator of its own"):
        wider(x, fg.CrossEntropy(y), estimator=rule)
