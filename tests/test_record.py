"""What may stand between binary layers in networks written by hand: each entry of an input is one unit, or it is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flipgrad as fg
from flipgrad.record import Record
from reference import Graph, Node, assert_same, batch, gradients, noise_like, paper_psa, psa, randomized

REFUSED = {
    "MaxPool2DWithIndices": [lambda h: functional.max_pool1d(h[:, None], 2)[:, 0].repeat(1, 2), lambda h: nn.MaxPool1d(1)(h)],
    "AdaptiveMaxPool2D": [lambda h: functional.adaptive_max_pool1d(h[:, None], 6)[:, 0]],
    "Amax": [lambda h: torch.cat([h[:, 1:], h.amax(1, keepdim=True)], 1)],
    "Max": [lambda h: torch.cat([h[:, 1:], h.max(1, keepdim=True).values], 1)],
    "Maximum": [lambda h: torch.maximum(h, h.flip(1))],
    "Minimum": [lambda h: torch.minimum(h, h.roll(1, 1))],
    "Sort": [lambda h: h.sort(1).values],
    "Topk": [lambda h: h.topk(6, 1).values],
    "Cummax": [lambda h: h.cummax(1).values],
    "Cumprod": [lambda h: h.cumprod(1)],
    "Prod": [lambda h: torch.cat([h[:, 1:], h.prod(1, keepdim=True)], 1)],
    "Hardtanh": [lambda h: functional.hardtanh(3 * h)],
    "Clamp": [lambda h: (3 * h).clamp(-1, 1)],
    "Sign": [torch.sign],
    "Round": [lambda h: (1.2 * h).round()],
    "Pow": [lambda h: h**3],
    "Relu": [lambda h: 2 * h.relu() - 1],
    "Abs": [lambda h: h.abs()],
    "Where": [lambda h: torch.where(h > 0, h, -torch.ones_like(h))],
    "MaskedFill": [lambda h: h.masked_fill(h[:, :1] > 0, 1.0)],
    "Mul": [lambda h: h * h.flip(1), lambda h: h * h],
    "Div": [lambda h: torch.ones(6, dtype=h.dtype) / h],
    "Gather": [lambda h: h.gather(1, h.argsort(1))],
    "Tanh": [lambda h: (50 * h).tanh()],
    "Min": [lambda h: torch.cat([h[:, 1:], h.min(1, keepdim=True).values], 1)],
    "Median": [lambda h: torch.cat([h[:, 1:], h.median(1, keepdim=True).values], 1)],
    "Mode": [lambda h: torch.cat([h[:, 1:], h.mode(1, keepdim=True).values], 1)],
    "Kthvalue": [lambda h: torch.cat([h[:, 1:], h.kthvalue(2, 1, keepdim=True).values], 1)],
    "Index": [lambda h: h[torch.arange(4)[:, None], h.argsort(1)], lambda h: torch.cat([h[h > 0], h[h <= 0]]).view(4, 6)],
    "MaskedSelect": [lambda h: torch.cat([h.masked_select(h > 0), h.masked_select(h <= 0)]).view(4, 6)],
    "Take": [lambda h: h.take(torch.arange(24).view(4, 6))],
    "Scatter": [lambda h: h.scatter(1, h.argsort(1)[:, :1], 1.0)],
    "IndexPut": [lambda h: _written_where(h)],
    "Mm": [lambda h: h @ torch.eye(6, dtype=h.dtype)],
    "Addmm": [lambda h: functional.linear(h, torch.eye(6, dtype=h.dtype), torch.zeros(6, dtype=h.dtype))],
    "Bmm": [lambda h: torch.einsum("bi,ij->bj", h, torch.eye(6, dtype=h.dtype))],
    "Convolution": [lambda h: functional.conv1d(h[:, None], torch.ones(1, 1, 1, dtype=h.dtype))[:, 0]],
    "UpsampleBilinear2D": [lambda h: functional.interpolate(h.view(4, 1, 2, 3), (2, 3), mode="bilinear").flatten(1)],
    "AvgPool2D": [lambda h: functional.avg_pool1d(h[:, None], 1)[:, 0]],
    "Mean": [lambda h: h[:, :, None].mean(2)],
    "Sum": [lambda h: h[:, :, None].sum(2)],
    "Lerp": [lambda h: torch.lerp(h, h, 0.5)],
    "Copysign": [lambda h: torch.copysign(torch.ones_like(h), h)],
    "Threshold": [lambda h: functional.threshold(h, -5, 0)],
    "LeakyRelu": [lambda h: functional.leaky_relu(h, 1.0)],
    "Bernoulli": [lambda h: torch.bernoulli((h + 1) / 2) * 2 - 1],
    "Custom": [lambda h: Custom.apply(h)],
    # A user's function, whatever its name is.
    "Select": [lambda h: Select.apply(h)],
}

TWICE = {
    "concatenated with itself": lambda h: torch.cat([h[:, :3], h[:, :3]], 1),
    "overlapping slices": lambda h: torch.cat([h[:, :4], h[:, 3:5]], 1),
    "an index twice": lambda h: h[:, torch.tensor([5, 0, 3, 3, 1, 2])],
    "an index_select twice": lambda h: h.index_select(1, torch.tensor([5, 0, 3, 3, 1, 2])),
    "repeated": lambda h: h[:, :3].repeat(1, 2),
    "expanded": lambda h: h[:, :1].expand(4, 6),
    "its opposite too": lambda h: torch.cat([h[:, :3], -h[:, :3]], 1),
    "a sum that happens to be ±1": lambda h: (h + h.detach() * h[:, :1] * h[:, :1].detach()) / 2,
    "written twice": lambda h: _written_twice(h),
}


class Custom(torch.autograd.Function):
    """Identity, by a rule that nobody knows."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Select(torch.autograd.Function):
    """Sorts, under the name of an operation of torch that moves entries."""

    @staticmethod
    def forward(ctx, h):
        return h.sort(1).values

    @staticmethod
    def backward(ctx, grad):
        return grad


def _written_where(h):
    result = h.clone()
    result[h > 0] = 1.0
    return result


def _written_twice(h):
    result = torch.ones(4, 6, dtype=h.dtype)
    result[:, :3] = h[:, :3]
    result[:, 3:] = h[:, :3]
    return result


def test_what_is_not_known_to_keep_gradients_right_is_refused_by_name():
    first, second = fg.BinaryLinear(3, 6).double(), fg.BinaryLinear(6, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    for rule in (fg.PSA(), paper_psa(), fg.PSA(inputs="mean"), fg.ST(), fg.HardST()):
        for name, operations in REFUSED.items():
            for operation in operations:
                h = operation(first(x, estimator=rule))
                with pytest.raises(
                    fg.InputError,
                    match=rf"went through the operation {name}, .*before the first binary layer.* use fg\.MaxPool2d",
                ):
                    second(h, estimator=rule)


@pytest.mark.parametrize("name", TWICE)
def test_a_unit_that_stands_twice_in_an_input_is_refused(name):
    first, second = fg.BinaryLinear(3, 6).double(), fg.BinaryLinear(6, 2).double()
    h = first(torch.randn(4, 3, dtype=torch.float64), estimator=fg.ST())
    with pytest.raises(fg.InputError, match="not each one unit of another layer"):
        second(TWICE[name](h), estimator=fg.ST())


def test_the_ways_out_of_a_refusal():
    first, second = fg.BinaryLinear(3, 6), fg.BinaryLinear(6, 2)
    h = first(torch.randn(4, 3), estimator=fg.ST()).sort(1).values
    second(h, estimator=fg.ST(), binary=False).sum().backward()
    assert first.weight.grad is not None
    with torch.no_grad():
        second(first(torch.randn(4, 3)).sort(1).values)


MOVED = {
    "sign of some": lambda h: h * torch.tensor([1.0, -1, 1, -1, -1, 1], dtype=h.dtype),
    "negated": lambda h: -h,
    "halved and doubled": lambda h: h / 2 * 2,
    "permuted": lambda h: h[:, torch.tensor([3, 1, 5, 0, 2, 4])],
    "chunks swapped": lambda h: torch.cat(h.chunk(2, 1)[::-1], 1),
    "rolled and flipped": lambda h: h.roll(2, 1).flip(1),
    "through places": lambda h: functional.pixel_shuffle(h[:, :4].reshape(-1, 4, 1, 1), 2).flatten(1).repeat(1, 1),
    "written into ones": lambda h: _written(h),
}


def _written(h):
    result = torch.ones(len(h), 6, dtype=h.dtype)
    result[:, 1:5] = -h[:, 2:]
    return result


class Moved(nn.Module):
    """Two layers, with something between."""

    def __init__(self, move, units):
        super().__init__()
        self.move = move
        self.l1, self.l2, self.head = fg.BinaryLinear(2, 6), fg.BinaryLinear(units, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.l2(self.move(self.l1(x))))

    def graph(self):
        nodes = [Node(self.l1, lambda h: h[0], ()), Node(self.l2, lambda h: self.move(h[1]), (1,))]
        return Graph(nodes, lambda h: self.head(h[2]), (2,))


@pytest.mark.parametrize("name", MOVED)
def test_moved_states_have_the_gradient_of_the_literal_algorithm(name):
    move = MOVED[name]
    model = randomized(Moved(move, move(torch.zeros(1, 6)).shape[1]))
    x, objective = batch((4, 2))
    z = noise_like(model.graph(), x, seed=3)
    expected = gradients(psa(model.graph(), x, z, objective, head="linear").sum(), model)
    fg.use(model, paper_psa(), generator=torch.Generator().manual_seed(3))
    assert_same(gradients(objective(model(x)).sum(), model), expected)


class Skip(nn.Module):
    """A layer that sees the states of two layers, moved, of which one saw the other's."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 3), fg.BinaryLinear(7, 3)
        self.head = nn.Linear(3, 3)

    def joined(self, first, second):
        return torch.cat([first.flip(1), -second], 1)

    def forward(self, x):
        first = self.l1(x)
        return self.head(self.l3(self.joined(first, self.l2(first))))

    def graph(self):
        nodes = [
            Node(self.l1, lambda h: h[0], ()),
            Node(self.l2, lambda h: h[1], (1,)),
            Node(self.l3, lambda h: self.joined(h[1], h[2]), (1, 2)),
        ]
        return Graph(nodes, lambda h: self.head(h[3]), (3,))


def test_states_behind_states_are_moved_alone():
    model = randomized(Skip())
    x, objective = batch((4, 2))
    z = noise_like(model.graph(), x, seed=3)
    expected = gradients(psa(model.graph(), x, z, objective, head="linear").sum(), model)
    fg.use(model, paper_psa(), generator=torch.Generator().manual_seed(3))
    assert_same(gradients(objective(model(x)).sum(), model), expected)


def test_the_means_of_states_behind_states_are_found():
    """Given the states, what a weight of the last layer is multiplied by is the mean of its own unit."""
    model = randomized(Skip())
    fg.use(model, fg.PSA(inputs="mean"), generator=torch.Generator().manual_seed(3))
    x, _ = batch((4, 2))
    found = []
    model.l3.register_forward_pre_hook(lambda layer, inputs: found.append(Record.of(inputs[0]).prior().log_odds()))
    model(x)
    first = model.l1(x, generator=torch.Generator().manual_seed(3))
    a1, a2 = (layer.affine()(t).detach() for layer, t in ((model.l1, x), (model.l2, first)))
    odds = model.joined(model.l1.noise.log_odds(a1), model.l2.noise.log_odds(a2))
    torch.testing.assert_close(found[0], odds, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inputs", ["mean", "posterior", "rao-blackwell"])
def test_the_prior_moves_and_changes_its_sign_with_the_states(inputs):
    """A layer that sees -h is one that sees h with the opposite weight."""
    first, plain, opposite = fg.BinaryLinear(2, 4).double(), fg.BinaryLinear(4, 3).double(), fg.BinaryLinear(4, 3).double()
    opposite.load_state_dict({"weight": -plain.weight, "bias": plain.bias})
    x, rule, noise = torch.randn(5, 2, dtype=torch.float64), fg.PSA(inputs=inputs), torch.zeros(1)
    results = []
    for layer, sign in ((plain, 1), (opposite, -1)):
        h = first(x, estimator=rule, generator=torch.Generator().manual_seed(0))
        loss = layer(sign * h, estimator=rule, noise=noise) @ torch.tensor([1.0, -2, 3], dtype=torch.float64)
        first_weight, weight = torch.autograd.grad(loss.sum(), [first.weight, layer.weight])
        results.append((first_weight, sign * weight))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("estimator", [paper_psa(), fg.PSA(), fg.ADF(), fg.Concrete()], ids=["paper", "psa", "adf", "concrete"])
def test_a_reentrant_checkpoint_hides_states(estimator):
    first, second = fg.BinaryLinear(4, 5), fg.BinaryLinear(5, 3)
    x = torch.randn(6, 4, requires_grad=True)
    hidden = checkpoint(lambda t: first(t, estimator=estimator), x, use_reentrant=True)
    with pytest.raises(fg.InputError, match=r"checkpoint \(use_reentrant=True\) hides .*use_reentrant=False"):
        second(hidden, estimator=estimator)


def test_what_is_behind_an_own_function_must_be_said():
    layer, x = fg.BinaryLinear(5, 3), torch.randn(6, 5, requires_grad=True)
    hidden = Custom.apply(x.sign())
    with pytest.raises(fg.InputError, match="the operation Custom hides"):
        layer(hidden, estimator=fg.ST())
    for binary in (True, False):
        layer(hidden, estimator=fg.ST(), binary=binary).sum().backward()
    # No states: they would be ±1.
    layer(Custom.apply(x), estimator=fg.ST()).sum().backward()


def test_relaxed_states_that_were_shifted_are_refused():
    """ADF would take another variance for theirs; of sampled states the values tell."""
    first, second = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 2)
    h = first(torch.randn(4, 2), estimator=fg.ADF())
    for shifted in (h - 1e-3 * h.detach().sign(), 1e-3 + 0 * h, -1e-3 - 0.5 * h):
        with pytest.raises(fg.InputError, match=r"not each one unit of another layer: .*shifted"):
            second(shifted, estimator=fg.ADF())


def test_a_zero_among_relaxed_states_is_refused():
    """ADF would take it for a unit of mean 0 and variance 1."""
    first, second = fg.BinaryLinear(2, 3), fg.BinaryLinear(5, 2)
    h = first(torch.randn(4, 2), estimator=fg.ADF())
    second(functional.pad(h, (1, 1), value=-1.0), estimator=fg.ADF())
    with pytest.raises(fg.InputError, match="together with 0, which is no unit"):
        second(functional.pad(h, (1, 1)), estimator=fg.ADF())


class Shared(nn.Module):
    """The head sees the units that the second layer sees."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.head = fg.BinaryLinear(2, 3), fg.BinaryLinear(2, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.l1(x)
        return self.head(torch.cat([h, self.l2(h[:, 1:])], 1))


@pytest.mark.parametrize("inputs", ["posterior", "rao-blackwell"])
def test_the_posterior_of_units_that_the_head_sees_too_is_refused(inputs):
    x, objective = batch((3, 2))
    model = fg.use(randomized(Shared()), fg.PSA(inputs=inputs))
    with pytest.raises(fg.InputError, match="the head or another layer was given them too"):
        objective(model(x)).sum().backward()
    # Twice, and alone, it is right.
    chain = fg.use(randomized(Moved(lambda h: h, 6)), fg.PSA(inputs=inputs))
    loss = objective(chain(x)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_what_is_recommended_samples_inputs_in_graphs_written_by_hand():
    x, objective = batch((3, 2))
    model = randomized(Shared())
    results = []
    for rule in (fg.PSA(), paper_psa()):
        fg.use(model, rule, generator=torch.Generator().manual_seed(0))
        results.append(gradients(objective(model(x)).sum(), model))
    assert_same(*results)


def test_nothing_of_a_graph_outlives_it():
    x, objective = batch((3, 2))
    model = fg.use(randomized(Moved(lambda h: -h, 6)), fg.PSA(inputs="posterior"))
    kept = []
    model.l1.register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    objective(model(x)).sum().backward()
    gc.collect()
    assert [reference() for reference in kept] == [None]
