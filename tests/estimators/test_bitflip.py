import pytest
import torch
from torch import nn
from unbiasedness import assert_unbiased, random_net

import flipgrad as fg
from flipgrad.contract import Batch
from flipgrad.estimators._paths import Path
from flipgrad.sampling import fresh


@pytest.mark.parametrize("noise", [fg.Laplace(), fg.Uniform(1.5)], ids=["laplace", "uniform"])
def test_unbiased_with_other_noise(noise):
    assert_unbiased(*random_net((3, 4), noise), fg.BitFlip(), draws=2000)


def test_is_its_formula_for_one_layer():
    net, x, y = random_net((4,), fg.Normal(1.5))
    objective = fg.CrossEntropy(y.expand(400))
    path = Path.sample(net.network(), Batch(x.expand(400, 2), objective, fresh(torch.Generator().manual_seed(0))))
    (g,) = fg.BitFlip().gradients(path)
    met = set()
    for i in range(400):
        (unit,) = g[i].nonzero().flatten().tolist()
        met.add(unit)
        up, down = path.states[0][i].clone(), path.states[0][i].clone()
        up[unit], down[unit] = 1, -1
        f = fg.CrossEntropy(y.expand(2))(net.head(torch.stack([up, down])))
        expected = 4 * fg.Normal(1.5).pdf(path.a[0][i, unit]) * (f[0] - f[1])
        assert torch.allclose(g[i, unit], expected)
    assert met == {0, 1, 2, 3}


def test_an_empty_batch_gives_an_empty_result():
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 2))
    losses = net(torch.zeros(0, 2), fg.CrossEntropy(torch.zeros(0, dtype=torch.long)), estimator=fg.BitFlip())
    assert losses.shape == (0,)


def test_facts():
    assert fg.BitFlip.unbiased
    assert fg.BitFlip().passes(3) == 4
