"""What the upper half is compared with: the paper's algorithms as they are printed, and sums over all joint states.

Clear rather than fast, and sharing nothing with flipgrad but the parameters and the noise's kind and scale. A network is a
list of nodes that see the list ``h`` of everything before them: ``h[0]`` is the input, ``h[k]`` the states of layer k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

import flipgrad as fg

States = list[Tensor]
Gradients = dict[str, Tensor]
Head = Literal["sampled", "enhanced", "linear"]

CDF = {
    fg.Logistic: lambda t: 1 / (1 + torch.exp(-t)),
    fg.Normal: lambda t: (1 + torch.erf(t / 2**0.5)) / 2,
    fg.Laplace: lambda t: (1 + t.sign() * (1 - torch.exp(-t.abs()))) / 2,
    fg.Uniform: lambda t: ((1 + t) / 2).clamp(0, 1),
}


def paper_psa(*, head: str = "sampled", **options) -> fg.PSA:
    """The paper's estimator: a weight sees the sampled states."""
    return fg.PSA(inputs="sampled", head=head, **options)


# The noise of every layer in order; repeated as often as there are layers.
NOISES: dict[str, list[fg.Noise]] = {
    "logistic": [fg.Logistic()],
    "normal": [fg.Normal(1.5)],
    "laplace": [fg.Laplace(0.8)],
    "uniform": [fg.Uniform(4.0)],
    "mixed": [fg.Laplace(), fg.Logistic(0.7), fg.Uniform(3.0), fg.Normal()],
}


@dataclass(frozen=True)
class Node:
    """A binary layer, what it sees, and the layers whose states it sees."""

    layer: fg.BinaryLayer
    source: Callable[[States], Tensor]
    parents: tuple[int, ...]

    def a(self, h: States) -> Tensor:
        before = self.before_norm(h)
        return before if self.layer.norm is None else self.layer.norm(before)

    def before_norm(self, h: States) -> Tensor:
        x, layer = self.source(h), self.layer
        if isinstance(layer, nn.Linear):
            return functional.linear(x, layer.weight, layer.bias)
        rows, columns = layer.padding
        x = functional.pad(x, (columns, columns, rows, rows), value=layer.padding_value)
        return functional.conv2d(x, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)

    def F(self, a: Tensor) -> Tensor:  # noqa: N802
        return CDF[type(self.layer.noise)](a / self.layer.noise.scale)


@dataclass(frozen=True)
class Graph:
    """The nodes in order, the head, and the layers whose states the head sees."""

    nodes: list[Node]
    outputs: Callable[[States], Tensor]
    parents: tuple[int, ...]


def chain(net: fg.Sequential) -> Graph:
    """The graph of a Sequential without Concat."""
    nodes: list[Node] = []
    before: list[nn.Module] = []
    for module in (net[index] for index in range(len(net))):
        if isinstance(module, fg.BinaryLayer):
            k = len(nodes)
            nodes.append(Node(module, through(before, k), (k,) if k else ()))
            before = []
        else:
            before.append(module)
    tail = through(before, len(nodes))
    return Graph(nodes, lambda h: net.head(tail(h)), (len(nodes),))


def through(modules: Sequence[nn.Module], k: int) -> Callable[[States], Tensor]:
    return lambda h: nn.Sequential(*modules)(h[k])


def sample(graph: Graph, x: Tensor, z: Sequence[Tensor]) -> States:
    h = [x]
    for node, z_k in zip(graph.nodes, z, strict=True):
        h.append(states(node.a(h), z_k))
    return h


def states(a: Tensor, z: Tensor) -> Tensor:
    return torch.where(a.detach() >= z, torch.ones_like(a), -torch.ones_like(a))


def noise_like(graph: Graph, x: Tensor, seed: int = 0) -> list[Tensor]:
    """A draw of every layer's noise for the batch ``x``, layer by layer from one generator."""
    generator = Generator().manual_seed(seed)
    h, z = [x.detach()], []
    for node in graph.nodes:
        a = node.a(h).detach()
        z.append(node.layer.noise.sample(a.shape, generator=generator, dtype=a.dtype))
        h.append(states(a, z[-1]))
    return z


def at_flips(function: Callable[[States], Tensor], h: States, k: int) -> Tensor:
    """``function`` with one unit of layer k flipped, [B, units of k, ...]."""
    results = []
    for i in range(h[k][0].numel()):
        flipped = h[k].flatten(1).clone()
        flipped[:, i] *= -1
        results.append(function([*h[:k], flipped.view_as(h[k]), *h[k + 1 :]]))
    return torch.stack(results, 1)


def psa(graph: Graph, x: Tensor, z: Sequence[Tensor], objective: Callable[[Tensor], Tensor], head: Head = "sampled") -> Tensor:
    """Algorithm 1: the expression E [B] with its q-variables and discrete Jacobians formed.

    ``head`` is "sampled" for the last line as it is; "enhanced" for that of appendix B.3, with pi_i = 1 - p(x_i) as its lemma
    says; "linear" for df_i = 2 x_i df/dx_i in place of f(x) - f(x with unit i flipped).
    """
    h: States = [x]
    q: States = [torch.zeros(())]
    for node, z_k in zip(graph.nodes, z, strict=True):
        a = node.a(h)
        x_k = states(a, z_k)
        q_k = x_k * node.F(a)
        for i in node.parents:
            moved = at_flips(lambda h, node=node: node.F(node.a(h)), h, i)
            delta = (x_k[:, None] * (node.F(a)[:, None] - moved)).flatten(2).detach()
            q_k = q_k + torch.einsum("bij,bi->bj", delta, q[i].flatten(1)).view_as(q_k)
        q.append(q_k - q_k.detach())
        h.append(x_k)

    def f(h: States) -> Tensor:
        return objective(graph.outputs(h))

    E = f(h)
    for i in graph.parents:
        q_i = q[i].flatten(1)
        if head == "linear":
            leaf = h[i].detach().requires_grad_()
            (slope,) = torch.autograd.grad(f([*h[:i], leaf, *h[i + 1 :]]).sum(), leaf)
            E = E + ((2 * h[i] * slope).flatten(1) * q_i).sum(1)
            continue
        df = f(h)[:, None] - at_flips(f, h, i)
        if head == "enhanced":
            pi = 1 - graph.nodes[i - 1].F(x_k * a).flatten(1).detach()
            E = E + (df * (q_i - pi / pi.shape[1])).sum(1)
        else:
            E = E + (df.detach() * q_i).sum(1)
    return E


def st(graph: Graph, x: Tensor, z: Sequence[Tensor], objective: Callable[[Tensor], Tensor]) -> Tensor:
    """Algorithm 2: the expression E [B]."""
    h = [x]
    for node, z_k in zip(graph.nodes, z, strict=True):
        a = node.a(h)
        tilde = 2 * node.F(a)
        h.append(states(a, z_k) + (tilde - tilde.detach()))
    return objective(graph.outputs(h))


def joint_states(graph: Graph, x: Tensor) -> States:
    """The one example ``x`` [1, ...] beside every joint state of all layers: 2^(number of units) rows."""
    shapes = [t.shape[1:] for t in noise_like(graph, x)]
    units = [shape.numel() for shape in shapes]
    table = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=x.dtype)] * sum(units)).view(-1, sum(units))
    parts = [part.unflatten(1, shape) for part, shape in zip(table.split(units, 1), shapes, strict=True)]
    return [x.expand(len(table), *x.shape[1:]), *parts]


def probability(graph: Graph, h: States) -> Tensor:
    """The probability of every row of joint states, differentiable."""
    p = torch.ones(len(h[0]), dtype=h[0].dtype)
    for node, x_k in zip(graph.nodes, h[1:], strict=True):
        plus = node.F(node.a(h))
        p = p * torch.where(x_k > 0, plus, 1 - plus).flatten(1).prod(1)
    return p


def expectation(graph: Graph, x: Tensor, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sum over all joint states of p(states) * value(outputs, rows), one result per example of ``x``.

    ``rows`` [S] repeats the example's index, to select its target.
    """
    results = []
    for index in range(len(x)):
        h = joint_states(graph, x[index : index + 1])
        values = value(graph.outputs(h), torch.full((len(h[0]),), index))
        results.append(torch.tensordot(probability(graph, h), values, 1))
    return torch.stack(results)


def expected_loss(graph: Graph, x: Tensor, objective: fg.CrossEntropy) -> Tensor:
    return expectation(graph, x, lambda outputs, rows: objective.select(rows)(outputs))


def forcing(h: States) -> list[Tensor]:
    """Noise that leads to the given states, whatever the pre-activations are."""
    return [-1e9 * x_k for x_k in h[1:]]


def mean_gradient(
    net: fg.Sequential, graph: Graph, x: Tensor, objective: fg.CrossEntropy, estimator: fg.Estimator
) -> Gradients:
    """The expectation of an estimator's gradient, summed over the examples: a sum over all joint states, no statistics."""
    total = torch.zeros((), dtype=x.dtype)
    for index in range(len(x)):
        h = joint_states(graph, x[index : index + 1])
        rows = torch.full((len(h[0]),), index)
        losses = net(h[0], objective.select(rows), estimator=estimator, noise=forcing(h))
        total = total + losses @ probability(graph, h).detach()
    return gradients(total, net)


def assert_unbiased_by_enumeration(
    net: fg.Sequential, graph: Graph, x: Tensor, objective: fg.CrossEntropy, estimator: fg.Estimator
) -> None:
    """The expectation of the estimator's gradient is the gradient of the expectation, as sums over all joint states."""
    exact = gradients(expected_loss(graph, x, objective).sum(), net)
    assert_same(mean_gradient(net, graph, x, objective, estimator), exact)


def gradients(loss: Tensor, net: nn.Module, **others: Tensor) -> Gradients:
    """The gradient in every parameter, and in ``others``, by name; 0 where the loss does not depend on it."""
    named = dict(net.named_parameters()) | others
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True))


def assert_same(actual: object, expected: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randomized(net: nn.Module, scale: float = 0.7, seed: int = 0) -> nn.Module:
    """The net in float64 with normal parameters, large enough for F to be far from linear over a flip."""
    generator = Generator().manual_seed(seed)
    for parameter in net.double().parameters():
        nn.init.normal_(parameter, std=scale, generator=generator)
    return net


def fully_connected(
    *widths: int, noise: Sequence[fg.Noise] = (fg.Logistic(),), head: nn.Module | None = None, scale: float = 0.7, seed: int = 0
) -> fg.Sequential:
    """A random net with ``widths`` of the input, the layers and (unless ``head`` is given) the head's outputs."""
    inner = widths if head else widths[:-1]
    layers = [fg.BinaryLinear(inner[k], inner[k + 1], noise=noise[k % len(noise)]) for k in range(len(inner) - 1)]
    return randomized(fg.Sequential(*layers, head=head or nn.Linear(widths[-2], widths[-1])), scale, seed)


def batch(shape: Sequence[int], classes: int = 3, seed: int = 1) -> tuple[Tensor, fg.CrossEntropy]:
    """Random inputs of ``shape`` [B, ...] and an objective for them."""
    generator = Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x, fg.CrossEntropy(torch.randint(classes, shape[:1], generator=generator))


class LinearLoss:
    """An objective linear in the outputs, the same for every example."""

    def __call__(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0] - 2 * outputs[..., 1]

    def select(self, index: slice | Tensor) -> LinearLoss:
        return self


Build = Callable[..., list[nn.Module]]

# name: (shape of the batch, the modules but the head given a source of noises, how many units the head sees)
NETS: dict[str, tuple[tuple[int, ...], Build, int]] = {
    "fc3": ((3, 4), lambda z: [fg.BinaryLinear(4, 5, **z()), fg.BinaryLinear(5, 4, **z()), fg.BinaryLinear(4, 3, **z())], 3),
    "fc4": (
        (2, 3),
        lambda z: [
            fg.BinaryLinear(3, 4, **z()),
            fg.BinaryLinear(4, 3, bias=False, **z()),
            fg.BinaryLinear(3, 5, **z()),
            fg.BinaryLinear(5, 4, **z()),
        ],
        4,
    ),
    "conv": (
        (2, 2, 5, 4),
        lambda z: [
            fg.BinaryConv2d(2, 3, 3, padding=1, **z()),
            fg.BinaryConv2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0), **z()),
            nn.Flatten(),
            fg.BinaryLinear(18, 4, **z()),
        ],
        4,
    ),
    "groups": (
        (2, 2, 5, 5),
        lambda z: [
            fg.BinaryConv2d(2, 4, 2, groups=2, **z()),
            fg.BinaryConv2d(4, 4, 2, padding=1, dilation=2, groups=2, padding_value=-1, **z()),
            fg.BinaryConv2d(4, 2, 2, stride=2, groups=2, **z()),
            fg.BinaryConv2d(2, 3, 1, **z()),
            nn.Flatten(),
        ],
        12,
    ),
    "pooled": (
        (2, 1, 6, 6),
        lambda z: [
            fg.BinaryConv2d(1, 2, 3, padding=1, **z()),
            nn.AvgPool2d(2),
            fg.BinaryConv2d(2, 3, 2, padding=1, **z()),
            nn.AvgPool2d(2, stride=1),
            nn.Flatten(),
            fg.BinaryLinear(27, 4, **z()),
        ],
        4,
    ),
    "tail": (
        (2, 1, 5, 5),
        lambda z: [
            fg.BinaryConv2d(1, 2, 2, **z()),
            fg.BinaryConv2d(2, 3, 3, padding=1, **z()),
            fg.BinaryConv2d(3, 3, 1, **z()),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ],
        12,
    ),
    "front": (
        (2, 1, 6, 6),
        lambda z: [
            nn.Conv2d(1, 3, 3),
            nn.ReLU(),
            fg.BinaryConv2d(3, 2, 2, **z()),
            fg.BinaryConv2d(2, 3, 2, **z()),
            nn.Flatten(),
            fg.BinaryLinear(12, 3, **z()),
        ],
        3,
    ),
}


def build(name: str, noise: str = "logistic", head: nn.Module | None = None) -> tuple[fg.Sequential, Tensor, fg.CrossEntropy]:
    """One of ``NETS`` with random parameters, a batch whose gradient is wanted too, and an objective."""
    shape, modules, units = NETS[name]
    remaining = iter(NOISES[noise] * 8)
    net = fg.Sequential(*modules(lambda: {"noise": next(remaining)}), head=head or nn.Linear(units, 3))
    x, objective = batch(shape)
    return randomized(net), x.requires_grad_(), objective


def concatenated(noise: str = "logistic", then: bool = True) -> tuple[fg.Sequential, Graph, Tensor, fg.CrossEntropy]:
    """A net with an identity branch, a layer and two layers side by side; ``then`` a layer, or the head right away."""
    kinds = NOISES[noise] * 5
    first, second, third, fourth, last = (
        fg.BinaryLinear(n, m, noise=kind) for (n, m), kind in zip([(2, 2), (2, 1), (2, 2), (2, 1), (4, 2)], kinds, strict=False)
    )
    middle = fg.Concat(nn.Identity(), second, nn.Sequential(third, fourth))
    net = randomized(fg.Sequential(first, middle, *[last] * then, head=nn.Linear(2 if then else 4, 3)))

    def joined(h: States) -> Tensor:
        return torch.cat([h[1], h[2], h[4]], 1)

    nodes = [
        Node(first, lambda h: h[0], ()),
        Node(second, lambda h: h[1], (1,)),
        Node(third, lambda h: h[1], (1,)),
        Node(fourth, lambda h: h[3], (3,)),
    ]
    if then:
        graph = Graph([*nodes, Node(last, joined, (1, 2, 4))], lambda h: net.head(h[5]), (5,))
    else:
        graph = Graph(nodes, lambda h: net.head(joined(h)), (1, 2, 4))
    return net, graph, *batch((2, 2))
