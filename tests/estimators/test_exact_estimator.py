import torch
from unbiasedness import exact_gradients, random_net

import flipgrad as fg


def test_is_the_exact_expectation_and_gradient():
    net, x, y = random_net((3, 4), fg.Logistic())
    losses = net(x, fg.CrossEntropy(y), estimator=fg.Exact())
    expected = exact_gradients(net, x, y)
    net.zero_grad()
    losses.mean().backward()
    assert torch.equal(losses, fg.exact.expected_loss(net, x, fg.CrossEntropy(y)))
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in net.named_parameters())
