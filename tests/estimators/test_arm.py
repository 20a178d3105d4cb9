import pytest
from unbiasedness import assert_caught, assert_unbiased, random_conv_net, random_net

import flipgrad as fg
from flipgrad.estimators._paths import PathEstimator

NOISES = pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5)], ids=["logistic", "normal"])


@NOISES
@pytest.mark.parametrize("widths", [(4,), (3, 4), (3, 3, 3)], ids=str)
def test_unbiased(widths, noise):
    assert_unbiased(*random_net(widths, noise), fg.ARM(), draws=4000)


@NOISES
def test_unbiased_with_convolutions(noise):
    assert_unbiased(*random_conv_net(noise), fg.ARM(), draws=4000)


class Broken(PathEstimator):
    """ARM with an error in its gradients."""

    unbiased, citation = True, "none"

    def __init__(self, error):
        self.error = error

    def passes(self, depth):
        return 1 + 2 * depth

    def gradients(self, path):
        gradients = fg.ARM().gradients(path)
        return [self.error(k, g) for k, g in enumerate(gradients)]


@pytest.mark.parametrize(
    "error",
    [lambda k, g: 1.05 * g, lambda k, g: -g if k == 1 else g, lambda k, g: 0 * g if k == 0 else g],
    ids=["a factor", "a wrong sign", "a dropped layer"],
)
def test_a_broken_variant_is_caught(error):
    assert_caught(*random_net((3, 4), fg.Logistic()), Broken(error), draws=4000)
