"""What may stand between binary layers, what is refused, and the steps that a network is evaluated in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.contract import Network
from flipgrad.sampling import fresh
from flipgrad.steps import Apply, Branch, PoolStates, Sample, network


def conv(**rest) -> fg.BinaryConv2d:
    return fg.BinaryConv2d(4, 4, 1, **rest)


def linear() -> fg.BinaryLinear:
    return fg.BinaryLinear(4, 4)


def planned(modules) -> Network:
    return network(modules, nn.Identity())


class Custom(nn.Module):
    """A user's module, with or without a binary layer in it."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Named(nn.Sequential):
    """A subclass may do anything in its forward, so it is not opened."""


REFUSED = [
    (nn.ReLU(), r"ReLU\(\)"),
    (nn.Tanh(), r"Tanh\(\)"),
    (nn.BatchNorm2d(4), r"BatchNorm2d\(4, .*\)"),
    (nn.Dropout(0.25), r"Dropout\(p=0\.25, inplace=False\)"),
    (nn.AdaptiveMaxPool2d(2), r"AdaptiveMaxPool2d\(output_size=2\)"),
    (nn.MaxPool1d(2), r"MaxPool1d\(kernel_size=2, .*\)"),
    (nn.LPPool2d(2, 2), r"LPPool2d\(.*\)"),
    (nn.ReflectionPad2d(1), r"ReflectionPad2d\(\(1, 1, 1, 1\)\)"),
    (nn.Conv2d(4, 4, 1), r"Conv2d\(4, 4, .*\)"),
    (nn.Upsample(scale_factor=2), r"Upsample\(.*\)"),
    (Custom(nn.Linear(4, 4)), "Custom"),
    (Named(nn.Flatten()), "Named"),
]


@pytest.mark.parametrize(("module", "name"), REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("after", [[conv()], []], ids=["between", "at the end"])
def test_refused_between_binary_layers(module, name, after):
    with pytest.raises(fg.InputError, match=rf"^{name} may not stand between binary layers: .*Move it before the first"):
        planned([conv(), module, *after])
    with pytest.raises(fg.InputError, match=rf"^{name} may not stand between binary layers"):
        planned([conv(), nn.Sequential(nn.Identity(), nn.Sequential(module)), *after])
    assert planned([module, conv()]).real == (module,)


@pytest.mark.parametrize("module", [nn.BatchNorm2d(4), nn.BatchNorm1d(4), fg.ScaleShift(4)], ids=str)
def test_a_norm_between_binary_layers_has_its_place_in_the_layer_before(module):
    name = type(module).__name__
    message = rf"^{name}\(4.* may not stand .* before the sign, give it to the binary layer before it: norm={name}\(4"
    with pytest.raises(fg.InputError, match=message):
        planned([conv(), module, conv()])
    with pytest.raises(fg.InputError) as error:
        planned([conv(), nn.ReLU()])
    assert "norm=" not in str(error.value)


@pytest.mark.parametrize("value", [0.5, 2.0, float("nan")])
def test_padding_with_what_is_no_state_is_refused(value):
    with pytest.raises(fg.InputError, match=rf"ConstantPad2d\(.*\) between binary layers pads with {value:g}; pad with 0"):
        planned([conv(), nn.ConstantPad2d(1, value), conv()])


RESHAPING = [
    nn.Identity(),
    nn.Flatten(2),
    nn.Unflatten(1, (2, 2)),
    nn.PixelShuffle(2),
    nn.PixelUnshuffle(2),
    nn.ChannelShuffle(2),
    nn.ZeroPad2d(1),
    nn.ConstantPad2d(1, -1.0),
    nn.ConstantPad2d((1, 0, 2, 0), 1),
]


@pytest.mark.parametrize("module", RESHAPING, ids=str)
def test_allowed_between_and_applied_as_it_is(module):
    first, second = conv(), conv()
    net = planned([first, module, second, module])
    steps, tail = net.steps, net.tail
    assert steps == (Sample(first, (), False), Apply(module), Sample(second, (), True))
    assert tail == (module,)


@pytest.mark.parametrize("module", [nn.MaxPool2d(2), fg.MaxPool2d(2)], ids=["nn", "fg"])
def test_max_pooling_is_a_step_also_before_the_head(module):
    first, second, flatten = conv(), conv(), nn.Flatten()
    net = planned([first, module, second, module, flatten])
    assert net.steps == (Sample(first, (), False), PoolStates(module), Sample(second, (), True), PoolStates(module))
    assert net.tail == (flatten,)
    assert net.steps[1].keeps_units


@pytest.mark.parametrize("module", [nn.AvgPool2d(2), nn.AvgPool2d(3, 1, padding=1), nn.AdaptiveAvgPool2d(1)], ids=str)
def test_pooling_is_folded_into_the_next_layer(module):
    first, second = conv(), conv()
    net = planned([first, module, second, module])
    steps, tail = net.steps, net.tail
    assert steps == (Sample(first, (), False), Sample(second, (module,), True))
    assert tail == (module,)
    maps = []
    x = torch.randn(1, 4, 6, 6)
    for step in steps:
        x, _ = step.run(x, None, lambda call: maps.append(call.affine) or call.sample(call.affine(call.x)), fresh(None))
    assert [affine.views for affine in maps] == [(), (module,)]


def test_pooling_takes_what_follows_it_along():
    pool, flatten, pad, last = nn.AvgPool2d(2), nn.Flatten(), nn.ZeroPad2d(1), linear()
    net = planned([conv(), pad, pool, nn.Identity(), flatten, last, flatten, pool, flatten])
    steps, tail = net.steps, net.tail
    assert steps[1] == Apply(pad)
    assert steps[2].layer is last
    assert [type(module) for module in steps[2].views] == [nn.AvgPool2d, nn.Identity, nn.Flatten]
    assert tail == (flatten, pool, flatten)


@pytest.mark.parametrize("module", [nn.ZeroPad2d(1), nn.PixelShuffle(2), nn.ChannelShuffle(2)], ids=str)
def test_what_does_not_fold_into_a_convolution_is_refused(module):
    message = r"\(.*\) between average pooling and BinaryConv2d does not fold into its kernel; put it before the pooling"
    with pytest.raises(fg.InputError, match=type(module).__name__ + message):
        planned([conv(), nn.AvgPool2d(2), module, conv()])
    assert len(planned([conv(), module, nn.AvgPool2d(2), conv()]).steps) == 3
    assert len(planned([conv(), nn.AvgPool2d(2), module, nn.Flatten(), linear()]).steps) == 2


def test_anything_may_stand_before_the_first_binary_layer():
    real = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), Custom()]
    layer = conv(padding=1, padding_mode="circular")
    net = planned([*real, layer])
    assert (net.real, net.steps, net.tail) == (tuple(real), (Sample(layer, (), False),), ())


def test_padding_mode_is_checked_where_states_come_in():
    with pytest.raises(fg.InputError, match=r"BinaryConv2d\(padding_mode='circular'\) with binary inputs"):
        planned([conv(), conv(padding=1, padding_mode="circular")])


def test_sequentials_are_opened():
    layers = [linear() for _ in range(4)]
    nested = [nn.Sequential(layers[0], nn.Sequential(nn.Sequential(), layers[1]), nn.Flatten()), nn.Sequential(*layers[2:])]
    flat = [layers[0], layers[1], nested[0][2], layers[2], layers[3]]
    assert planned(nested).steps == planned(flat).steps
    assert planned(nested).binary_layers == layers


@pytest.mark.parametrize("hiding", [Custom, Named, lambda layer: fg.Sequential(layer, head=nn.Identity())])
def test_hidden_binary_layers_are_refused(hiding):
    module = hiding(linear())
    name = type(module).__name__
    with pytest.raises(fg.InputError, match=rf"^{name} hides binary layers: list them in fg\.Sequential .* fg\.use\(model"):
        planned([module, linear()])
    with pytest.raises(fg.InputError, match=f"^{name} may not stand between binary layers"):
        planned([linear(), module])


@pytest.mark.parametrize("modules", [[], [nn.Linear(2, 2), nn.ReLU()], [nn.Sequential()], [fg.Concat(nn.Identity())]])
def test_no_binary_layer_is_refused(modules):
    with pytest.raises(fg.InputError, match=r"the network has no binary layer; add fg\.BinaryLinear or fg\.BinaryConv2d"):
        planned(modules)


def test_a_network_checks_its_steps_when_it_is_made():
    with pytest.raises(fg.InputError, match=r"ReLU\(\) may not stand between binary layers"):
        fg.Sequential(linear(), nn.ReLU(), linear(), head=nn.Linear(4, 2))


def test_concat_concatenates():
    x = torch.randn(2, 3, 4)
    double, flip = Custom(), nn.Flatten()
    assert torch.equal(fg.Concat(double, nn.Identity())(x), torch.cat([x, x], 1))
    assert torch.equal(fg.Concat(double, nn.Identity(), dim=2)(x), torch.cat([x, x], 2))
    assert torch.equal(fg.Concat(flip)(x), x.flatten(1))
    assert "dim=2" in repr(fg.Concat(double, dim=2))


def test_branches_are_chains_of_their_own():
    first, left, right, last = (linear() for _ in range(4))
    keep, flatten = nn.Identity(), nn.Flatten()
    concat = fg.Concat(keep, left, nn.Sequential(flatten, right), dim=-1)
    net = planned([first, concat, last])
    steps, tail = net.steps, net.tail
    chains = ((Apply(keep),), (Sample(left, (), True),), (Apply(flatten), Sample(right, (), True)))
    assert steps == (Sample(first, (), False), Branch(chains, -1), Sample(last, (), True))
    assert tail == ()
    assert planned([first, concat, last]).binary_layers == [first, left, right, last]


def test_branches_on_real_inputs_see_real_values():
    left, right, inner = linear(), linear(), linear()
    relu = nn.ReLU()
    steps = planned([nn.Linear(4, 4), fg.Concat(left, nn.Sequential(relu, right, fg.Concat(nn.Identity(), inner)))]).steps
    branch = steps[-1]
    assert branch.chains[0] == (Sample(left, (), False),)
    assert branch.chains[1][:2] == (Apply(relu), Sample(right, (), False))
    assert branch.chains[1][2].chains[1] == (Sample(inner, (), True),)


def test_states_may_be_handed_on_once():
    inner = fg.Concat(nn.Sequential(conv(), nn.Identity()), conv())
    assert len(planned([conv(), fg.Concat(nn.Flatten(), inner), fg.Concat(nn.Identity())]).binary_layers) == 3


def test_concat_of_real_modules_is_a_real_module():
    concat = fg.Concat(nn.Identity(), nn.ReLU())
    assert planned([concat, linear()]).real == (concat,)


def test_poolings_in_branches_are_folded():
    pool, layer = nn.AvgPool2d(2), conv()
    steps = planned([conv(), fg.Concat(nn.Sequential(pool, layer))]).steps
    assert steps[1] == Branch(((Sample(layer, (pool,), True),),), 1)


CONCAT_ERRORS = [
    ([conv(), nn.AvgPool2d(2), fg.Concat(conv())], r"AvgPool2d\(.*\) before Concat: pool inside the branches, each before its"),
    ([conv(), fg.Concat(conv(), nn.AvgPool2d(2))], r"Concat: the branch ending with AvgPool2d\(.*\) does not give ±1 states"),
    ([fg.Concat(conv(), nn.Identity())], r"Concat: the branch ending with Identity\(\) does not give ±1 states; end it with"),
    ([fg.Concat(conv(), nn.Sequential(nn.ReLU(), Custom()))], "Concat: the branch ending with Sequential does not give ±1"),
    ([conv(), fg.Concat(nn.Identity(), nn.Flatten())], "Concat: more than one branch hands the same states on"),
    ([conv(), fg.Concat(nn.Identity(), fg.Concat(nn.Identity(), conv()))], "more than one branch hands the same states on"),
    ([conv(), fg.Concat(conv(), nn.ReLU())], r"ReLU\(\) may not stand between binary layers"),
    ([conv(), fg.Concat(conv(), Custom(conv()))], "Custom may not stand between binary layers"),
]


@pytest.mark.parametrize(("modules", "message"), CONCAT_ERRORS)
def test_concat_refuses(modules, message):
    with pytest.raises(fg.InputError, match=message):
        planned(modules)


def test_concat_needs_a_branch():
    with pytest.raises(fg.InputError, match=r"Concat\(\) needs at least one branch"):
        fg.Concat()


def test_a_concat_of_one_branch_shares_no_states():
    """However often it is nested, the posterior of the states before it is known."""
    first, second, head = fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 4), nn.Linear(4, 2)
    x, objective = torch.randn(5, 2), fg.CrossEntropy(torch.tensor([0, 1, 1, 0, 1]))
    results = []
    for between in ([second], [fg.Concat(nn.Identity()), fg.Concat(nn.Sequential(nn.Identity(), fg.Concat(second)))]):
        net = fg.Sequential(first, *between, head=head)
        rule = fg.PSA(inputs="posterior", head="sampled")
        losses = net(x, objective, estimator=rule, generator=torch.Generator().manual_seed(0))
        results.append(torch.autograd.grad(losses.sum(), [first.weight, second.weight]))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
