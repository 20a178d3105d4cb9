"""Flips of a linear head whose loss adds up over the outputs, against their definition: every unit flipped in turn."""

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.flips import heads
from flipgrad.native import library
from flipgrad.noise import sign

OBJECTIVES = {
    "bits": lambda t: fg.BernoulliLikelihood((t > 0).to(t.dtype)),
    "probabilities": lambda t: fg.BernoulliLikelihood(torch.sigmoid(t)),
    "normal": lambda t: fg.GaussianLikelihood(t, scale=0.3),
    "normal with scales": lambda t: fg.GaussianLikelihood(t, scale=torch.rand(t.shape[1], dtype=t.dtype) + 0.5),
    "squares": fg.SquaredError,
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def problem(examples: int, units: int, outputs: int, scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """States, a weight, the outputs and what targets are made of."""
    x = sign(torch.randn(examples, units, dtype=dtype))
    weight, bias = scale * torch.randn(outputs, units, dtype=dtype), torch.randn(outputs, dtype=dtype)
    return x, weight, x @ weight.t() + bias, torch.randn(examples, outputs, dtype=dtype)


def by_definition(objective, x: Tensor, outputs: Tensor, weight: Tensor) -> Tensor:
    columns = []
    for i in range(x.shape[1]):
        flipped = outputs - 2 * x[:, i : i + 1] * weight[:, i]
        columns.append(x[:, i] * (objective(outputs) - objective(flipped)) / 2)
    return torch.stack(columns, 1)


@every_objective
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_derivative_is_that_of_flips(name, scale):
    x, weight, outputs, t = problem(5, 7, 11, scale)
    objective = OBJECTIVES[name](t)
    found = objective.discrete_derivative(x, outputs, weight, 0.0)
    torch.testing.assert_close(found, by_definition(objective, x, outputs, weight), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("scale", "expanded"), [(0.01, True), (0.03, True), (0.05, True), (0.25, False), (0.5, False)])
@pytest.mark.parametrize("name", ["bits", "probabilities"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_tolerance_holds_by_either_way(name, scale, expanded, fused, monkeypatch):
    monkeypatch.setattr(heads, "fused_product_pays", lambda x: fused and x.dtype == torch.float32 and library.available())
    x, _, _, t = problem(20, 128, 512, 1.0, torch.float32)
    weight = scale * 3**0.5 * (2 * torch.rand(512, 128) - 1)
    outputs = x @ weight.t() - 1
    objective = OBJECTIVES[name](t)
    way = heads._expanded(x, outputs, objective.targets, weight, 1e-3)
    assert (way is not None) == expanded
    found = objective.discrete_derivative(x, outputs, weight, 1e-3).double()
    double = type(objective)(objective.targets.double())
    expected = by_definition(double, x.double(), outputs.double(), weight.double())
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.skipif(not library.available(), reason="no compiled library")
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (700, 200), (3, 1001), (4, 0), (0, 4)])
def test_compiled_powers_are_those_of_tensor_operations(shape, portable, monkeypatch):
    monkeypatch.setattr(library, "PORTABLE", portable)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    powers, largest, moments = heads._powers(weight)
    wanted, most, expected = heads._powers(weight.double())
    torch.testing.assert_close(powers.double(), wanted, rtol=1e-6, atol=0)
    assert largest == pytest.approx(most, rel=1e-6)
    assert moments == pytest.approx(expected, rel=1e-5)
    assert heads._powers(weight, wanted=False) == (None, largest, moments)


@pytest.mark.skipif(not library.available(), reason="no compiled library")
def test_compiled_orders_are_those_of_tensor_operations(monkeypatch):
    for scale in (0.01, 0.05):
        x, weight, outputs, t = problem(20, 128, 512, scale, torch.float32)
        found = []
        for fused in (False, True):
            monkeypatch.setattr(heads, "fused_product_pays", lambda x, fused=fused: fused)
            found.append(heads._expanded(x, outputs, (t > 0).float(), weight, 3e-3))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * float(found[0].abs().mean()))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_the_largest(wrong):
    weight = torch.zeros(40, 9)
    weight[17, 4] = wrong
    for given in (weight, weight.double()):
        assert not heads._powers(given)[1] <= heads.LARGEST_EXPANDED_WEIGHT


def test_one_large_weight_is_never_expanded():
    x, weight, outputs, t = problem(20, 128, 512, 0.01, torch.float32)
    weight[3, 5] = 0.6
    assert heads._expanded(x, outputs, (t > 0).float(), weight, 1e-3) is None


# Bernoulli likelihoods take the sampled gradient.
HEADS = [
    (name, head)
    for name in OBJECTIVES
    for head in ("sampled", "rao-blackwell")
    if head == "sampled" or name not in ("bits", "probabilities")
]


@pytest.mark.parametrize(("name", "head"), HEADS)
@pytest.mark.parametrize("tail", [(), (nn.Unflatten(1, (2, 2, 2)), nn.AvgPool2d(2), nn.Flatten())], ids=["plain", "pooled"])
def test_the_gradient_of_a_network_is_that_of_flips_one_by_one(name, head, tail):
    """The same objective as a function, of which it is not known that it adds up, is evaluated at every flip."""
    torch.manual_seed(3)
    net = fg.Sequential(fg.BinaryLinear(3, 8), *tail, head=nn.Linear(2 if tail else 8, 6)).double()
    x, objective = torch.randn(4, 3).double(), OBJECTIVES[name](torch.randn(4, 6).double())
    noise = [fg.Logistic().sample_like(torch.zeros(4, 8).double())]
    for estimator in (fg.PSA(inputs="sampled", head=head, exact=True), fg.ST(head=head)):
        gradients = [
            torch.autograd.grad(net(x, f, estimator=estimator, noise=noise).mean(), list(net.parameters()))
            for f in (objective, lambda outputs: objective(outputs))
        ]
        for fast, slow in zip(*gradients, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-11)


def test_a_learned_scale_gets_its_gradient():
    net = fg.Sequential(fg.BinaryLinear(3, 8), head=nn.Linear(8, 6)).double()
    x, t = torch.randn(4, 3).double(), torch.randn(4, 6).double()
    scale = torch.rand(6).double().requires_grad_()
    noise = [fg.Logistic().sample_like(torch.zeros(4, 8).double())]
    objective = fg.GaussianLikelihood(t, scale)
    (found,) = torch.autograd.grad(net(x, objective, estimator=fg.PSA(), noise=noise).sum(), scale)
    (expected,) = torch.autograd.grad(objective(net(x, noise=noise).detach()).sum(), scale)
    torch.testing.assert_close(found, expected)


def test_nothing_is_as_large_as_outputs_times_flips():
    """The tensors of the largest sizes are the weight and its square."""
    x, weight, outputs, t = problem(50, 200, 784, 0.3, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        fg.BernoulliLikelihood((t > 0).float()).discrete_derivative(x, outputs, weight, 1e-3)
    assert 0 < largest <= 4 * weight.numel()


@pytest.mark.parametrize(
    ("weight", "tolerance", "told"),
    [
        (torch.full((784, 200), 0.01), 1e-3, "expansion: two or four ordinary products where the data show"),
        (torch.full((784, 200), 0.6), 1e-3, "weights up to 0.6 are too large for an expansion in them"),
        (torch.full((7, 2), 0.01), 1e-3, "too small for an expansion to pay"),
        (torch.full((784, 200), 0.01), 0.0, "exact was asked for"),
    ],
)
def test_the_way_is_explained(weight, tolerance, told):
    assert told in heads.explain(weight, tolerance=tolerance)


def test_no_weight_of_a_head_is_refused():
    with pytest.raises(fg.InputError, match=r"weight \[K, n\] of a linear head, got shape \[3\]"):
        heads.explain(torch.ones(3))
