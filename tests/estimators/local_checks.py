"""What the tests of local estimators share: draws replayed, convolutions written as matrices, graphs written by hand."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

import flipgrad as fg
import reference
from reference import assert_same, batch, build, gradients, randomized

NAMES = ["fc3", "conv", "groups", "pooled", "tail", "front"]


def seeded(seed: int = 3) -> Generator:
    return Generator().manual_seed(seed)


def literal(graph, x, generator, states):
    """The outputs of a net whose layers' states are ``states(node, a, z, generator)``, given a draw z of their noise."""
    h = [x]
    for node in graph.nodes:
        a = node.a(h)
        z = node.layer.noise.sample(a.shape, generator=generator, dtype=a.dtype)
        h.append(states(node, a, z, generator))
    return graph.outputs(h)


def straight(x: Tensor, slope: Tensor, a: Tensor) -> Tensor:
    """``x`` with the derivative ``slope`` in ``a``."""
    return x + slope.detach() * (a - a.detach())


def assert_is(estimator, net, x, objective, expected: Tensor) -> None:
    """Losses and gradients are those of the ``expected`` losses, made from the draws of :func:`seeded`."""
    losses = net(x, objective, estimator=estimator, generator=seeded())
    assert_same(losses, expected)
    # Different weights on the examples show that each example's gradient is its own.
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    g = gradients(expected @ weights, net, input=x)
    assert all(bool((gradient != 0).any()) for gradient in g.values())
    assert_same(gradients(losses @ weights, net, input=x), g)


def dense(layer: fg.BinaryConv2d, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The matrix [outputs, inputs] of a convolution on images of ``shape``, and its bias, differentiable in both."""
    zero = torch.zeros(1, *shape, dtype=layer.weight.dtype)
    basis = torch.eye(zero.numel(), dtype=zero.dtype).view(-1, *shape)
    bias = nn.Conv2d.forward(layer, zero).flatten()
    return (nn.Conv2d.forward(layer, basis).flatten(1) - bias).t(), bias


def assert_convolution_is_its_matrix(estimator) -> None:
    """A padded and strided convolutional net is the fully connected one with its matrices, for the same draw."""
    conv, x, objective = build("conv", "mixed")
    first, second, _, last = (conv[index] for index in range(4))
    matrices = [dense(first, (2, 5, 4)), dense(second, (3, 5, 4))]
    layers = [fg.BinaryLinear(40, 60, noise=first.noise), fg.BinaryLinear(60, 18, noise=second.noise)]
    for layer, (weight, bias) in zip(layers, matrices, strict=True):
        layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    net = fg.Sequential(*layers, last, head=conv.head)
    losses = conv(x, objective, estimator=estimator, generator=seeded())
    flat = net(x.flatten(1), objective, estimator=estimator, generator=seeded())
    assert_same(losses, flat)
    expected, g = gradients(losses.sum(), conv), gradients(flat.sum(), net)
    for index, layer in enumerate((first, second)):
        pulled = torch.autograd.grad(matrices[index], [layer.weight, layer.bias], [g[f"{index}.weight"], g[f"{index}.bias"]])
        assert_same(pulled, (expected[f"{index}.weight"], expected[f"{index}.bias"]))
    assert_same(g["2.weight"], expected["3.weight"])


class ByHand(nn.Module):
    """The layers of ``concatenated``, wired by hand: a skip and a branch of two layers."""

    def __init__(self, net: fg.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        _, left, right = self.net[1].branches
        h = self.net[0](x)
        joined = torch.cat([h, left(h), right(h)], 1)
        return self.net.head(self.net[2](joined))


def assert_works_in_hand_written_graphs(estimator) -> None:
    """fg.use gives a hand-written graph the outputs and gradients of the Sequential with the same layers and draw."""
    net, _, x, objective = reference.concatenated("mixed")
    fg.use(net, estimator)
    model = ByHand(net)
    whole = objective(net(x, generator=seeded(1)))
    fg.use(model, estimator, generator=seeded(1))
    losses = objective(model(x))
    assert_same(losses, whole)
    g = gradients(losses.sum(), net)
    assert_same(g, gradients(whole.sum(), net))
    assert all(bool((gradient != 0).any()) for gradient in g.values())
    if type(estimator).head is fg.LocalEstimator.head:
        # The head is differentiated in the ordinary way by both.
        fg.use(net, None)
        assert_same(net(x, objective, estimator=estimator, generator=seeded(1)), whole)


def assert_true_derivative(estimator) -> None:
    """The gradient is that of the losses as a function of all parameters and inputs, the draw being fixed."""
    for name, noise in [("fc3", "logistic"), ("fc3", "normal"), ("conv", "logistic"), ("pooled", "normal")]:
        net, x, objective = build(name, noise)
        names = [name for name, _ in net.named_parameters()]

        def losses(x, *values, net=net, objective=objective, names=names):
            call = {"estimator": estimator, "generator": seeded()}
            return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x, objective), call)

        values = [parameter.detach().clone().requires_grad_() for parameter in net.parameters()]
        assert torch.autograd.gradcheck(losses, (x, *values), fast_mode=True)


def assert_finite_when_saturated(estimator) -> None:
    for dtype in (torch.float32, torch.float64):
        for noise in (fg.Logistic(), fg.Normal(), fg.Laplace(), fg.Uniform()):
            net = reference.fully_connected(2, 6, 6, 6, 3, scale=300.0, noise=[noise]).to(dtype)
            x, objective = batch((4, 2))
            g = gradients(net(x.to(dtype), objective, estimator=estimator, generator=seeded(1)).sum(), net)
            assert all(bool(torch.isfinite(gradient).all()) for gradient in g.values())


def assert_empty_batch(estimator) -> None:
    net = randomized(fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), head=nn.Linear(3, 2)))
    x = torch.zeros(0, 2, dtype=torch.float64)
    losses = net(x, fg.CrossEntropy(torch.zeros(0, dtype=torch.long)), estimator=estimator)
    assert losses.shape == (0,)
