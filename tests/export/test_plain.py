"""Plain modules have the values and the hidden bits of their networks, hold constants alone, and refuse what is not known."""

from __future__ import annotations

import pytest
import torch
from exported_nets import BINARY, DRAWN, MAKERS, WAYS, trained
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.export.plain import ConstantMap, PlainLayer
from flipgrad.layers import BinaryLayer
from flipgrad.sampling import Apart, given


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plain_module_has_the_outputs_of_its_network(make, way):
    net, x = trained(make)
    plain, noise, own = way(net, x)
    assert torch.equal(plain(x, *noise), own(x))
    assert not torch.equal(plain(x, *noise), plain(x.flip(0), *noise))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plain_module_is_made_of_constants(make):
    net, x = trained(make)
    plain = fg.export.deterministic(net)
    before = plain(x)
    assert not any(isinstance(module, BinaryLayer) for module in plain.modules())
    assert not any(tensor.requires_grad for tensor in plain.state_dict(keep_vars=True).values())
    maps = [module for module in plain.modules() if isinstance(module, ConstantMap)]
    binary = [layer for layer in dict.fromkeys(net.binary_layers) if layer.weights == "binary"]
    ones = [part for part in maps if part.connections is not None and bool((part.coefficients.abs() == 1).all())]
    assert len(ones) == len(binary)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.zero_()
    assert torch.equal(plain(x), before)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_hidden_bits_are_those_of_the_network(make):
    net, x = trained(make)
    plain = fg.export.sampled(net)
    noise, weight_noise = plain.draw(x)
    found: list[Tensor] = []
    for module in plain.modules():
        if isinstance(module, PlainLayer):
            module.register_forward_hook(lambda module, inputs, states: found.append(states))
    plain(x, noise, weight_noise)
    own: list[Tensor] = []

    def visit(call):
        own.append(call.sample(call.affine(call.x)))
        return own[-1]

    units, weights = iter(noise), iter(weight_noise)
    draw = Apart(lambda n, a: given(next(units))(n, a), lambda n, a: given(next(weights))(n, a))
    with torch.no_grad():
        net.run(net.front(x), visit, draw)
    assert len(own) == len(net.binary_layers)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, own, strict=True))


def test_sign_of_zero_is_positive():
    layer = fg.BinaryLinear(2, 2, bias=False, weights="binary")
    net = fg.Sequential(layer, head=nn.Identity()).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, -0.5], [-0.5, 0.5]]))
    # Sums of 0, and a latent weight of 0.
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(fg.export.deterministic(net)(x), torch.ones(2, 2))


def test_it_is_the_network_of_eval_mode_whatever_mode_that_is_in():
    net, x = trained(MAKERS["convolutions"])
    expected = net.deterministic(x)
    statistics = {name: tensor.clone() for name, tensor in net.named_buffers()}
    net.train()
    plain = fg.export.deterministic(net)
    assert net.training
    assert not plain.training
    assert torch.equal(plain(x), expected)
    assert all(torch.equal(tensor, statistics[name]) for name, tensor in net.named_buffers())


def test_a_member_whose_weights_are_drawn_once_keeps_no_latent_weights():
    net, x = trained(MAKERS["fully connected"])
    plain = fg.export.member(net.member(x))
    assert not [name for name in plain.state_dict() if "weight_noise" in name]
    assert len([name for name in plain.state_dict() if name.endswith(".noise")]) == len(net.binary_layers)
    shared, x = trained(MAKERS["by hand, shared"])
    assert {"weight_noise_1", "weight_noise_2"} <= fg.export.member(shared.member(x)).state_dict().keys()


def test_double_precision_stays():
    net, x = trained(MAKERS["residual features"])
    net, x = net.double(), x.double()
    plain = fg.export.sampled(net)
    noise, weight_noise = plain.draw(x)
    assert {z.dtype for z in (*noise, *weight_noise)} == {torch.float64}
    assert torch.equal(plain(x, noise, weight_noise), net(x, noise=noise, weight_noise=weight_noise))


def test_half_precision_gives_outputs_in_single_precision():
    net = fg.Sequential(fg.BinaryLinear(3, 4), head=nn.Linear(4, 2)).bfloat16().eval()
    outputs = fg.export.deterministic(net)(torch.randn(5, 3).bfloat16())
    assert outputs.dtype == torch.float32


def test_generators_and_estimators_of_layers_are_left_behind():
    net, x = trained(MAKERS["by hand"])
    fg.use(net, fg.PSA(), generator=torch.Generator())
    plain = fg.export.deterministic(net)
    assert torch.equal(plain(x), net.deterministic(x))


def test_draws_are_those_of_the_noise_and_take_no_random_number_of_torch():
    net, x = trained(MAKERS["fully connected"])
    plain = fg.export.sampled(net)
    state = torch.get_rng_state()
    first, again = (plain.draw(x, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [tuple(z.shape) for z in first[0]] == [(40, n) for n in (20, 11, 9, 9, 8, 7)]
    assert [tuple(z.shape) for z in first[1]] == [(8, 9)]


def test_noise_that_does_not_fit_is_refused():
    net, x = trained(MAKERS["fully connected"])
    plain = fg.export.sampled(net)
    noise, weight_noise = plain.draw(x)
    with pytest.raises(fg.InputError, match="noise: 5 tensors were handed in for 6 binary layers; give one each"):
        plain(x, noise[1:], weight_noise)
    with pytest.raises(fg.InputError, match="weight_noise: 0 tensors were handed in for 1 layers that draw their weights"):
        plain(x, noise)
    with pytest.raises(fg.InputError, match="does not broadcast to pre-activations"):
        plain(x, noise[::-1], weight_noise)


class Odd(fg.BinaryLayer):
    """A layer of a user's own."""

    weights, weight_noise, norm, mixes_examples = "real", None, None, False

    def check_weights(self):
        pass

    def affine(self, views=(), weight=None):
        return fg.Sign().affine()

    def _call(self, x, draw, binary, found):
        return fg.Sign._call(self, x, draw, binary, found)


def test_what_is_not_known_is_refused_by_name():
    net, x = trained(MAKERS["fully connected"])
    with pytest.raises(
        fg.InputError, match=r"fg.export.deterministic takes a flipgrad.Sequential or a flipgrad.Graph, got Linear"
    ):
        fg.export.deterministic(nn.Linear(2, 2))
    with pytest.raises(fg.InputError, match=r"fg.export.sampled takes a flipgrad.Sequential or a flipgrad.Graph, got Linear"):
        fg.export.sampled(nn.Linear(2, 2))
    with pytest.raises(fg.InputError, match=r"fg.export.member takes a member of a network, net.member\(x\), got Sequential"):
        fg.export.member(net)
    odd = fg.Graph(nn.Sequential(Odd(noise=fg.Logistic()), nn.Linear(5, 2)), x)
    with pytest.raises(
        fg.InputError, match=r"fg.export.deterministic: Odd is not known to be right there; known are fg.BinaryLin"
    ):
        fg.export.deterministic(odd)
    batch = fg.Sequential(fg.BinaryLinear(5, 3, norm=nn.BatchNorm1d(3, track_running_stats=False)), head=nn.Linear(3, 2))
    with pytest.raises(fg.InputError, match=r"fg.export.deterministic: BatchNorm1d.* takes its statistics from the batch"):
        fg.export.deterministic(batch)


def test_a_model_that_uses_the_weight_of_a_layer_itself_is_no_silent_error():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = fg.BinaryLinear(4, 4, **BINARY), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.first(x) @ self.first.weight)

    x = torch.randn(3, 4)
    plain = fg.export.deterministic(fg.Graph(Tied(), x))
    with pytest.raises(AttributeError, match="'PlainLayer' object has no attribute 'weight'"):
        plain(x)


def test_a_layer_that_stands_twice_in_a_chain():
    torch.manual_seed(0)
    twice = fg.BinaryLinear(4, 4, **DRAWN)
    net = fg.Sequential(twice, twice, fg.BinaryLinear(4, 3, **DRAWN), head=nn.Linear(3, 2)).eval()
    x = torch.randn(20, 4)
    for way in WAYS.values():
        plain, noise, own = way(net, x)
        assert torch.equal(plain(x, *noise), own(x))


def test_parametrised_weights_are_exported_as_they_are_now():
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(fg.BinaryLinear(4, 3))
    net = fg.Sequential(layer, head=torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))).eval()
    x = torch.randn(20, 4)
    assert torch.equal(fg.export.deterministic(net)(x), net.deterministic(x))


def test_printed_it_tells_its_constants():
    net, _ = trained(MAKERS["fully connected"])
    assert "(map): ConstantMap([9, 11], scale=True, shift=True)" in str(fg.export.deterministic(net))
