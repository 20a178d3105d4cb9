import pytest
import torch
from torch import nn
from unbiasedness import ERRORS, NOISES, Broken, assert_caught, assert_unbiased, random_conv_net, random_net

import flipgrad as fg


@NOISES
@pytest.mark.parametrize("widths", [(4,), (3, 4), (3, 3, 3)], ids=str)
def test_unbiased(widths, noise):
    assert_unbiased(*random_net(widths, noise), fg.ARM(), draws=4000)


@NOISES
def test_unbiased_with_convolutions(noise):
    assert_unbiased(*random_conv_net(noise), fg.ARM(), draws=4000)


@ERRORS
def test_a_broken_variant_is_caught(error):
    assert_caught(*random_net((3, 4), fg.Logistic()), Broken(fg.ARM(), error), draws=4000)


@pytest.mark.parametrize("estimator", [fg.ARM(), fg.LEG(), fg.BitFlip()], ids=lambda estimator: type(estimator).__name__)
def test_a_head_that_mixes_examples_is_refused_where_it_is_evaluated_again(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    x, objective = torch.randn(4, 2), fg.CrossEntropy(torch.tensor([0, 1, 1, 0]))
    with pytest.raises(fg.InputError, match=r"BatchNorm1d.*in training mode mixes examples"):
        net(x, objective, estimator=estimator)
    net.eval()(x, objective, estimator=estimator).mean().backward()
