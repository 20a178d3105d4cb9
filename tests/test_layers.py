"""Binary layers: torch's arguments and parameters, exact states, what counts as binary, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import flipgrad as fg
from flipgrad.contract import LayerCall
from flipgrad.noise import sign

NOISES = [fg.Logistic(), fg.Normal(2.0), fg.Laplace(0.5), fg.Uniform(1.5)]

# (the layer, the torch layer it stands for, the shape of one input)
LINEAR = (lambda **rest: fg.BinaryLinear(6, 5, **rest), lambda **rest: nn.Linear(6, 5, **rest), (6,))
CONV = (
    lambda **rest: fg.BinaryConv2d(2, 4, (3, 2), stride=2, padding=1, groups=2, **rest),
    lambda **rest: nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, groups=2, **rest),
    (2, 5, 4),
)
both_kinds = pytest.mark.parametrize(("make", "make_torch", "shape"), [LINEAR, CONV], ids=["linear", "conv"])


class Recorder(fg.LocalEstimator):
    """An estimator that notes what the layers tell it; its gradient is straight-through."""

    def passes(self, depth: int) -> int:
        return 1

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def states(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return fg.ST().states(call)


@both_kinds
def test_state_dict_is_torchs(make, make_torch, shape):
    torch_layer, layer = make_torch(), make()
    layer.load_state_dict(torch_layer.state_dict())
    z = torch.zeros(())
    x = torch.randn(3, *shape)
    assert torch.equal(layer(x, noise=z), sign(torch_layer(x)))
    other = make_torch()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), torch_layer(x))


@pytest.mark.parametrize(
    ("kind", "torch_kind", "added"),
    [
        (fg.BinaryLinear, nn.Linear, ["noise", "norm", "weights", "weight_noise", "weight_clip"]),
        (fg.BinaryConv2d, nn.Conv2d, ["noise", "norm", "padding_value", "weights", "weight_noise", "weight_clip"]),
    ],
)
def test_arguments_are_torchs_and_our_own(kind, torch_kind, added):
    ours, theirs = (inspect.signature(k).parameters for k in (kind, torch_kind))
    assert list(ours) == [*theirs, *added]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)
    assert all(ours[name].default == theirs[name].default for name in theirs)


@both_kinds
def test_initialisation_is_torchs(make, make_torch, shape):
    torch.manual_seed(1)
    layer = make()
    torch.manual_seed(1)
    expected = make_torch().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in layer.state_dict().items())


@both_kinds
@pytest.mark.parametrize("noise", NOISES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 7])
def test_states_are_plus_or_minus_one(make, make_torch, shape, noise, dtype, batch):
    layer = make(noise=noise, dtype=dtype)
    x = torch.randn(batch, *shape, dtype=dtype)
    states = layer(x)
    assert states.shape == layer.affine()(x).shape
    assert states.dtype == dtype
    assert bool((states.abs() == 1).all())
    if batch == 7:
        assert set(states.flatten().tolist()) == {-1.0, 1.0}


@both_kinds
def test_sign_of_zero_is_plus_one(make, make_torch, shape):
    layer = make()
    x = torch.randn(3, *shape)
    a = layer.affine()(x).detach()
    assert bool((layer(x, noise=a) == 1).all())
    assert bool((layer(x, noise=a.nextafter(torch.tensor(torch.inf))) == -1).all())


@both_kinds
def test_states_follow_the_handed_in_noise(make, make_torch, shape):
    layer = make()
    x = torch.randn(3, *shape)
    a = layer.affine()(x).detach()
    for z in (torch.randn_like(a), torch.randn_like(a[:1]), torch.randn_like(a[0]), torch.tensor(0.3), torch.randn(1, 1)):
        assert torch.equal(layer(x, noise=z), sign(a - z))
    assert layer(x, noise=torch.zeros(1, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize("shape", [(5,), (2, 1), (7, 2, 4), (0,), (0, 4), (1, 2, 4)])
def test_noise_that_does_not_broadcast_is_refused(shape):
    # Pre-activations [3, 4]: nothing but the noise may be stretched.
    with pytest.raises(fg.InputError, match=r"noise of shape \[.*\] does not broadcast to pre-activations \[3, 4\]"):
        fg.BinaryLinear(6, 4)(torch.randn(3, 6), noise=torch.zeros(shape))


@both_kinds
def test_generator_reproduces(make, make_torch, shape):
    layer = make()
    x = torch.randn(20, *shape)
    first, second, other = (layer(x, generator=Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    fg.use(layer, None, generator=Generator().manual_seed(1))
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    # One for this call goes before the one that is kept.
    assert torch.equal(layer(x, generator=Generator().manual_seed(1)), first)


def test_states_of_other_noise_are_other_states():
    x = torch.zeros(1000, 6)
    wide, narrow = (fg.BinaryLinear(6, 1, noise=fg.Logistic(s)) for s in (100.0, 1e-3))
    narrow.bias.data.fill_(1.0)
    wide.load_state_dict(narrow.state_dict())
    assert narrow(x).mean() == 1
    # The mean is 2F(1/100) - 1 = 0.005, with a standard error of 0.032: six of them, a false alarm of 1e-9.
    assert abs(wide(x).mean().item()) < 0.2


def _written(x):
    result = torch.ones(4, 6)
    result[:, 2:] = x[:, :4]
    return result


STATES_KEPT = {
    "as they are": lambda x: x,
    "reshaped": lambda x: x.reshape(4, -1).reshape(-1, 6),
    "sliced": lambda x: x[1:],
    "selected": lambda x: x[:, torch.tensor([5, 0, 3, 4, 1, 2])],
    "concatenated": lambda x: torch.cat([x[:, :2], x[:, 4:], x[:, 2:4]], 1),
    "stacked": lambda x: torch.stack([x, x]),
    "repeated for more draws": lambda x: x.expand(3, 4, 6).flatten(0, 1),
    "negated": lambda x: -x,
    "multiplied by signs": lambda x: x * torch.tensor([1.0, -1, 1, -1, -1, 1]),
    "written into": _written,
    "cloned": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", STATES_KEPT)
@pytest.mark.parametrize("estimator", [None, fg.ST(), fg.PSA()], ids=["none", "st", "psa"])
def test_moved_states_are_recognised(name, estimator):
    first, second, recorder = fg.BinaryLinear(3, 6), fg.BinaryLinear(6, 2), Recorder()
    second(STATES_KEPT[name](first(torch.randn(4, 3), estimator=estimator)), estimator=recorder)
    assert [call.binary for call in recorder.calls] == [True]


def test_states_are_recognised_when_only_the_graph_remembers_them():
    recorder = Recorder()
    moved = fg.BinaryLinear(3, 6)(torch.randn(4, 3)).clone().clone()
    gc.collect()
    fg.BinaryLinear(6, 2)(moved, estimator=recorder)
    assert [call.binary for call in recorder.calls] == [True]


NOT_STATES = {
    "the input": lambda x: torch.randn(4, 6),
    "an input that is ±1": lambda x: torch.randn(4, 6).sign(),
    "an input that wants a gradient": lambda x: torch.randn(4, 6, requires_grad=True).sign(),
    "real modules": lambda x: nn.Sequential(nn.Linear(6, 6), nn.ReLU())(torch.randn(4, 6)),
    "detached states": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", NOT_STATES)
def test_what_does_not_come_from_states_is_real(name):
    recorder = Recorder()
    x = fg.BinaryLinear(3, 6)(torch.randn(4, 3))
    fg.BinaryLinear(6, 2)(NOT_STATES[name](x), estimator=recorder)
    assert [call.binary for call in recorder.calls] == [False]


def test_without_a_graph_everything_is_real():
    recorder = Recorder()
    with torch.no_grad():
        x = fg.BinaryLinear(3, 6)(torch.randn(4, 3))
        fg.BinaryLinear(6, 2)(x * 0.5, estimator=recorder)
    assert [call.binary for call in recorder.calls] == [False]


STATES_CHANGED = {
    "scaled": (lambda x: 0.5 * x, "0.5"),
    "rectified": (torch.relu, "0"),
    "summed": (lambda x: x + x, "2"),
    "shifted": (lambda x: x.abs() + 0.25, "1.25"),
    "dropped": (lambda x: x * torch.tensor([1.0, 0, 1, 1, 1, 1]), "0"),
    "concatenated with real values": (lambda x: torch.cat([x[:, :5], torch.full((4, 1), 0.125)], 1), "0.125"),
    "in place": (lambda x: x.clone().mul_(3), "3"),
    "through a layer": (lambda x: nn.Linear(6, 6)(x), ""),
    "not a number": (lambda x: x * torch.nan, "nan"),
}


@pytest.mark.parametrize("name", STATES_CHANGED)
@pytest.mark.parametrize("estimator", [None, fg.ST(), fg.PSA()], ids=["none", "st", "psa"])
def test_changed_states_are_refused(name, estimator):
    change, example = STATES_CHANGED[name]
    x = fg.BinaryLinear(3, 6)(torch.randn(4, 3), estimator=estimator)
    message = rf"BinaryLinear was handed hidden states that are not ±1 \(for example -?{example}.*Reshape, slice or concatenate"
    with pytest.raises(fg.InputError, match=message):
        fg.BinaryLinear(6, 2)(change(x), estimator=estimator)


def test_claimed_states_are_checked():
    layer, recorder = fg.BinaryLinear(6, 2), Recorder()
    with pytest.raises(fg.InputError, match=r"not ±1 \(for example 0\.5\)"):
        layer(torch.full((2, 6), 0.5), binary=True)
    layer(torch.ones(2, 6), binary=True, estimator=recorder)
    layer(0.5 * fg.BinaryLinear(3, 6)(torch.randn(2, 3)), binary=False, estimator=recorder)
    assert [call.binary for call in recorder.calls] == [True, False]


@pytest.mark.parametrize("binary", [False, True])
def test_only_states_are_flipped(binary):
    layer = fg.BinaryLinear(6, 3, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64).sign().requires_grad_()
    grad = torch.randn(4, 3, dtype=torch.float64)
    layer(x, binary=binary, estimator=fg.PSA()).backward(grad)
    a = layer.affine()(x).detach()
    flipped = layer.affine().flip_product(x.detach(), a, grad, layer.noise)
    ordinary = ((2 * layer.noise.pdf(a) * grad) @ layer.weight).detach()
    assert not torch.allclose(flipped, ordinary)
    torch.testing.assert_close(x.grad, flipped if binary else ordinary)


@both_kinds
def test_backward_without_estimator_says_what_to_do(make, make_torch, shape):
    layer = make()
    loss = layer(torch.randn(2, *shape)).sum()
    with pytest.raises(RuntimeError, match=r"without an estimator: .*fg\.use\(model, fg\.PSA\(\)\).*torch\.no_grad"):
        loss.backward()
    assert layer.weight.grad is None


class Tanh(nn.Module):
    """A parametrisation that counts how often it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight.tanh()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.atanh()


@both_kinds
@pytest.mark.parametrize("estimator", [fg.ST(), fg.PSA()], ids=["st", "psa"])
def test_parametrised_weight(make, make_torch, shape, estimator):
    plain, layer = make(dtype=torch.float64), make(dtype=torch.float64)
    layer.load_state_dict(plain.state_dict())
    parametrize.register_parametrization(layer, "weight", Tanh())
    x = torch.randn(3, *shape, dtype=torch.float64).sign().requires_grad_()
    z = layer.noise.sample_like(plain.affine()(x))
    grad = torch.randn_like(z)
    gradients = []
    for each in (plain, layer):
        states = each(x, noise=z, binary=True, estimator=estimator)
        states.backward(grad)
        gradients.append((states.detach(), x.grad, each.bias.grad))
        x.grad = None
    torch.testing.assert_close(gradients[1], gradients[0])
    original = layer.parametrizations.weight.original
    assert bool((original.grad != 0).any())
    torch.testing.assert_close(original.grad, plain.weight.grad * (1 - plain.weight.detach() ** 2))


@both_kinds
@pytest.mark.parametrize("estimator", [None, fg.ST(), fg.PSA()], ids=["none", "st", "psa"])
def test_parametrisation_is_evaluated_once_per_call(make, make_torch, shape, estimator):
    layer = make()
    parametrize.register_parametrization(layer, "weight", Tanh())
    counter = layer.parametrizations.weight[0]
    counter.count = 0
    x = torch.randn(3, *shape).sign().requires_grad_()
    states = layer(x, binary=True, estimator=estimator)
    assert counter.count == 1
    if estimator:
        states.sum().backward()
        assert counter.count == 1
    assert "noise=" in repr(layer)
    assert counter.count == 1


@both_kinds
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"])
def test_torchs_parametrisations_get_gradients(make, make_torch, shape, wrap):
    layer = wrap(make())
    fg.use(layer, fg.PSA())
    states = layer(torch.randn(3, *shape))
    states.backward(torch.randn_like(states))
    assert all(bool((p.grad != 0).any()) for p in layer.parameters())


@pytest.mark.parametrize("estimator", [fg.ST(), fg.PSA()], ids=["st", "psa"])
def test_a_layer_used_twice_adds_its_gradients(estimator):
    first = fg.BinaryLinear(4, 4, dtype=torch.float64)
    x, z, grad = torch.randn(5, 4, dtype=torch.float64), torch.randn(2, 5, 4), torch.randn(5, 4, dtype=torch.float64)

    def gradients(second: fg.BinaryLinear) -> list[Tensor]:
        hidden = first(x, noise=z[0], estimator=estimator)
        weights = list({id(layer.weight): layer.weight for layer in (first, second)}.values())
        return list(torch.autograd.grad(second(hidden, noise=z[1], estimator=estimator), weights, grad))

    (tied,) = gradients(first)
    torch.testing.assert_close(tied, sum(gradients(copy.deepcopy(first))))


@both_kinds
def test_changing_the_weight_before_backward_is_noticed(make, make_torch, shape):
    layer = make()
    x = torch.randn(3, *shape).sign().requires_grad_()
    states = layer(x, binary=True, estimator=fg.PSA())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


@both_kinds
def test_memory_layout_does_not_matter(make, make_torch, shape):
    layer = make(dtype=torch.float64)
    x = torch.randn(3, *shape, dtype=torch.float64).sign()
    z = layer.noise.sample_like(layer.affine()(x))
    grad = torch.randn_like(z)
    results = []
    last = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.t().contiguous().t()
    assert not last.is_contiguous()
    for t in (x, last):
        leaf = t.detach().requires_grad_()
        states = layer(leaf, noise=z, binary=True, estimator=fg.PSA())
        results.append((states.detach(), *torch.autograd.grad(states, [leaf, *layer.parameters()], grad)))
    torch.testing.assert_close(results[1], results[0])


@both_kinds
@pytest.mark.parametrize("estimator", [fg.ST(), fg.PSA()], ids=["st", "psa"])
def test_empty_batch_has_zero_gradients(make, make_torch, shape, estimator):
    layer = make()
    x = torch.zeros(0, *shape, requires_grad=True)
    layer(x, binary=True, estimator=estimator).sum().backward()
    assert x.grad.shape == x.shape
    assert not any(p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (fg.BinaryLinear(4, 2), (3, 5), r"takes inputs \[\.\.\., 4\], got \[3, 5\]"),
        (fg.BinaryConv2d(3, 2, 3), (3, 1, 9, 9), r"takes inputs \[batch, 3, height, width\], got \[3, 1, 9, 9\]"),
        (fg.BinaryConv2d(1, 2, 5), (3, 1, 4, 9), "kernel spans 5x5 needs at least that many pixels, got 4x9"),
    ],
)
def test_wrong_input_shape_is_refused(layer, shape, message):
    with pytest.raises(fg.InputError, match=message):
        layer(torch.randn(shape))


@pytest.mark.parametrize("value", [2, 0.5, float("nan")])
def test_padding_value_must_be_a_state_or_zero(value):
    with pytest.raises(fg.InputError, match=rf"padding_value={value}: choose 0 \(no unit there\), or the state -1 or 1"):
        fg.BinaryConv2d(1, 1, 3, padding=1, padding_value=value)


def test_padding_value_and_mode_exclude_each_other():
    with pytest.raises(fg.InputError, match="padding_value=1 with padding_mode='reflect': give only one of them"):
        fg.BinaryConv2d(1, 1, 3, padding=1, padding_value=1, padding_mode="reflect")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_repeats_units_is_for_real_inputs(mode):
    x = torch.randn(2, 1, 4, 4)
    layer = fg.BinaryConv2d(1, 1, 3, padding=1, padding_mode=mode)
    assert layer(x).shape == x.shape
    with pytest.raises(fg.InputError, match=rf"BinaryConv2d\(padding_mode='{mode}'\) with binary inputs: it repeats units"):
        layer(x.sign(), binary=True)
    unpadded = fg.BinaryConv2d(1, 1, 3, padding_mode=mode)
    assert unpadded(x.sign(), binary=True).shape == (2, 1, 2, 2)


class Residual(nn.Module):
    """A hand-written graph: two branches, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = fg.BinaryLinear(3, 4), fg.BinaryLinear(4, 4), nn.ModuleList([fg.BinaryLinear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.right[0](torch.cat([h, self.left(h)], 1))


def test_use_reaches_every_layer_and_takes_away():
    model, estimator, generator = Residual(), fg.PSA(), Generator().manual_seed(1)
    layers = [module for module in model.modules() if isinstance(module, fg.BinaryLayer)]
    assert len(layers) == 3
    assert fg.use(model, estimator, generator=generator) is model
    assert all(layer.estimator is estimator and layer.generator is generator for layer in layers)
    model(torch.randn(5, 3)).sum().backward()
    assert all(bool((p.grad != 0).any()) for p in model.parameters())
    fg.use(model, None)
    assert all(layer.estimator is None and layer.generator is None for layer in layers)
    with pytest.raises(RuntimeError, match="without an estimator"):
        model(torch.randn(5, 3)).sum().backward()


def test_estimator_of_a_call_goes_before_the_attached_one():
    layer, recorder = fg.use(fg.BinaryLinear(3, 2), fg.ST()), Recorder()
    layer(torch.randn(1, 3), estimator=recorder)
    assert len(recorder.calls) == 1
    assert recorder.calls[0].layer is layer
    assert recorder.calls[0].noise is layer.noise


def test_use_without_binary_layers_is_refused():
    with pytest.raises(fg.InputError, match=r"fg\.use: Sequential has no binary layer; build it with fg\.BinaryLinear"):
        fg.use(nn.Sequential(nn.Linear(2, 2)), fg.PSA())


def test_use_of_an_estimator_of_whole_networks_is_refused():
    class Whole(fg.Estimator):
        def passes(self, depth): ...

        def losses(self, net, batch): ...

    layer = fg.BinaryLinear(2, 2)
    with pytest.raises(fg.InputError, match=r"fg\.use: Whole needs the whole network; pass it to fg\.Sequential"):
        fg.use(layer, Whole())
    assert layer.estimator is None
    with pytest.raises(fg.InputError, match=r"BinaryLinear: Whole needs the whole network; pass it to fg\.Sequential"):
        layer(torch.zeros(1, 2), estimator=Whole())


@both_kinds
@pytest.mark.parametrize("generator", [None, Generator()])
def test_copies_are_equal_and_independent(make, make_torch, shape, generator):
    layer = fg.use(make(noise=fg.Normal(0.5)), fg.PSA(), generator=generator)
    clone = copy.deepcopy(layer)
    x, z = torch.randn(4, *shape), torch.tensor(0.1)
    assert clone.noise == layer.noise
    assert isinstance(clone.estimator, fg.PSA)
    assert torch.equal(clone(x, noise=z), layer(x, noise=z))
    with torch.no_grad():
        clone.bias += 100
    assert bool((clone(x, noise=z) == 1).all())
    assert not bool((layer(x, noise=z) == 1).all())


def test_repr_names_the_noise_and_the_padding():
    assert repr(fg.BinaryLinear(3, 2, noise=fg.Normal(2.0))) == (
        "BinaryLinear(in_features=3, out_features=2, bias=True, noise=Normal(scale=2.0))"
    )
    text = repr(fg.BinaryConv2d(1, 2, 3, padding=1, padding_value=-1))
    assert "padding_value=-1, noise=Logistic(scale=1.0)" in text
    assert "padding_value" not in repr(fg.BinaryConv2d(1, 2, 3, padding=1))
