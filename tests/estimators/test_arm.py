import pytest
import torch
from torch import nn

import flipgrad as fg


@pytest.mark.parametrize("estimator", [fg.ARM(), fg.LEG(), fg.BitFlip()], ids=lambda estimator: type(estimator).__name__)
def test_a_head_that_mixes_examples_is_refused_where_it_is_evaluated_again(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    x, objective = torch.randn(4, 2), fg.CrossEntropy(torch.tensor([0, 1, 1, 0]))
    with pytest.raises(fg.InputError, match=r"BatchNorm1d.*in training mode mixes examples"):
        net(x, objective, estimator=estimator)
    net.eval()(x, objective, estimator=estimator).mean().backward()
