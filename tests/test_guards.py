"""Derivatives of estimates, checkpoints that draw anew, hooks and running statistics: right, or an error."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import flipgrad as fg
from flipgrad.estimators import ESTIMATORS
from reference import assert_same, batch, fully_connected, gradients

ONCE = sorted(name for name, kind in ESTIMATORS.items() if not kind.second_derivatives)
TWICE = sorted(name for name, kind in ESTIMATORS.items() if kind.second_derivatives)


def penalty(losses, net):
    """The squared length of the gradient."""
    parameters = list(net.parameters())
    slopes = torch.autograd.grad(losses.mean(), parameters, create_graph=True, materialize_grads=True)
    return sum(slope.square().sum() for slope in slopes)


@pytest.mark.parametrize("name", ONCE)
def test_an_estimate_cannot_be_differentiated_twice(name):
    net = fully_connected(2, 3, 3, 2)
    x, objective = batch((4, 2), classes=2)
    losses = net(x, objective, estimator=ESTIMATORS[name](), index=torch.arange(4))
    squares = penalty(losses, net)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        squares.backward()


def test_the_exact_estimator_and_relaxations_can_be_differentiated_twice():
    assert TWICE == ["adf", "concrete", "exact", "local-reparam", "tanh"]
    net = fully_connected(2, 3, 3, 2)
    x, objective = batch((4, 2), classes=2)
    parameters = tuple(net.parameters())
    for name in TWICE:

        def squares(*values, name=name):
            named = dict(zip(dict(net.named_parameters()), values, strict=True))
            how = {"estimator": ESTIMATORS[name](), "generator": torch.Generator().manual_seed(0)}
            losses = torch.func.functional_call(net, named, (x, objective), how)
            slopes = torch.autograd.grad(losses.mean(), values, create_graph=True)
            return sum(slope.square().sum() for slope in slopes)

        assert torch.autograd.gradcheck(squares, parameters, fast_mode=True)


@pytest.mark.parametrize("name", ["psa", "st", "hard-st", "zgr", "gumbel-rao"])
def test_neither_can_one_in_a_network_written_by_hand(name):
    net = fg.use(fully_connected(2, 3, 3, 2), ESTIMATORS[name]())
    x, objective = batch((4, 2), classes=2)
    for outputs in (net(x), net.head(net[1](net[0](x)))):
        squares = penalty(objective(outputs), net)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            squares.backward()


def test_transforms_of_torch_see_the_same_gradient():
    net = fully_connected(2, 3, 3, 2)
    x, objective = batch((4, 2), classes=2)
    parameters = dict(net.named_parameters())

    def loss(values):
        how = {"estimator": fg.PSA(), "noise": [torch.zeros(1), torch.zeros(1)]}
        return torch.func.functional_call(net, values, (x, objective), how).sum()

    assert_same(torch.func.grad(loss)(parameters), gradients(loss(parameters), net))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.func.grad(lambda v: sum(g.square().sum() for g in torch.func.grad(loss)(v).values()))(parameters)


class Scaled(nn.Linear):
    """A head that is no linear layer, only looks like one."""

    def forward(self, x):
        return 3 * super().forward(x)


def hooked(head):
    head.register_forward_hook(lambda module, inputs, outputs: 3 * outputs)
    return head


def instance_forward(head):
    plain = head.forward
    head.forward = lambda x: 3 * plain(x)
    return head


@pytest.mark.parametrize("kind", ["subclass", "hook", "instance", "everywhere"])
def test_a_head_that_is_not_exactly_linear_is_evaluated(kind):
    """Its fast flips would be those of another head: 67 % off."""
    plain = fully_connected(2, 3, 3, 3)
    net = copy.deepcopy(plain)
    if kind == "subclass":
        net.head = Scaled(3, 3).double()
        net.head.load_state_dict(plain.head.state_dict())
    elif kind == "hook":
        hooked(net.head)
    elif kind == "instance":
        instance_forward(net.head)
    # The truth: a linear head with three times the weights.
    with torch.no_grad():
        for parameter in plain.head.parameters():
            parameter.mul_(3)
    x, objective = batch((4, 2))
    handle = None
    if kind == "everywhere":
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, outputs: 3 * outputs if module is net.head else None
        )
    try:
        for estimator in (fg.PSA(head="sampled"), fg.ST(), fg.REINFORCE(), fg.Exact(), fg.ARM()):
            results = [
                gradients(each(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(1)).sum(), each)
                for each in (net, plain)
            ]
            for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
                assert_same(results[0][name], results[1][name])
    finally:
        if handle is not None:
            handle.remove()


def test_hooks_of_binary_layers_run_and_see_states():
    net = fully_connected(2, 3, 4, 2)
    seen = []
    for layer in net.binary_layers:
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
        layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    x, objective = batch((5, 2), classes=2)
    net(x)
    assert seen == [(5, 2), (5, 3), (5, 3), (5, 4)]
    for look in (
        lambda: net(x, objective),
        lambda: net.predict(x),
        lambda: net.member(x)(x),
        lambda: net.deterministic(x),
        lambda: net.initialize(x),
        lambda: fg.exact.expected_loss(net, x, objective),
        lambda: fg.bounds.marginal_loss(net, x, objective),
    ):
        seen.clear()
        look()
        assert seen, "hooks did not run"


def test_a_backward_hook_sees_the_gradient():
    net, grads = fully_connected(2, 3, 4, 2), []
    net[1].register_full_backward_hook(lambda module, inputs, outputs: grads.append((inputs[0].shape, outputs[0].shape)))
    x, objective = batch((5, 2), classes=2)
    net(x, objective).sum().backward()
    assert grads == [((5, 3), (5, 4))]


CHANGES = {
    "input": lambda layer: layer.register_forward_pre_hook(lambda module, inputs: (-inputs[0],)),
    "states": lambda layer: layer.register_forward_hook(lambda module, inputs, output: -output),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_hook_that_changes_something_is_refused_by_name(what):
    net = fully_connected(2, 3, 4, 2)
    CHANGES[what](net[1])
    x, objective = batch((5, 2), classes=2)
    for look in (lambda: net(x), lambda: net(x, objective), lambda: fg.exact.expected_loss(net, x, objective)):
        with pytest.raises(fg.InputError, match=f"a hook of BinaryLinear changes its {what}"):
            look()


def test_hooks_of_modules_between_layers_may_look_but_not_change():
    net = fg.Sequential(
        fg.BinaryConv2d(1, 2, 2), nn.AvgPool2d(2), fg.BinaryConv2d(2, 3, 1), nn.Flatten(), head=nn.Linear(12, 2)
    )
    x, objective = batch((3, 1, 5, 5), classes=2)
    net.double()
    plain = gradients(net(x, objective, generator=torch.Generator().manual_seed(0)).sum(), net)
    seen = []
    for module in (net[1], net[3]):
        module.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    assert_same(gradients(net(x, objective, generator=torch.Generator().manual_seed(0)).sum(), net), plain)
    assert set(seen) == {"AvgPool2d", "Flatten"}
    net[3].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(fg.InputError, match="a hook of Flatten changes its result"):
        net(x, objective)


def test_containers_with_hooks_are_not_opened():
    front = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen = []
    front.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    fg.Sequential(front, fg.BinaryLinear(2, 3), head=nn.Linear(3, 2))(torch.randn(4, 2))
    assert seen == [(4, 2)]
    inside = nn.Sequential(fg.BinaryLinear(2, 3))
    inside.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(fg.InputError, match="register them on the modules inside"):
        fg.Sequential(inside, head=nn.Linear(3, 2))
    between = nn.Sequential(nn.Flatten())
    between.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(fg.InputError, match="register them on the modules inside"):
        fg.Sequential(fg.BinaryLinear(2, 3), between, fg.BinaryLinear(3, 3), head=nn.Linear(3, 2))
    parallel = fg.Concat(nn.Identity(), fg.BinaryLinear(3, 2))
    parallel.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(fg.InputError, match="Concat has hooks"):
        fg.Sequential(fg.BinaryLinear(2, 3), parallel, head=nn.Linear(5, 2))


class Crooked(nn.Flatten):
    """Looks like a reshaping, and is none."""

    def forward(self, x):
        return super().forward(x) ** 3


def test_a_subclass_of_what_may_stand_between_layers_is_refused():
    with pytest.raises(fg.InputError, match="may not stand between binary layers"):
        fg.Sequential(fg.BinaryLinear(2, 3), Crooked(), fg.BinaryLinear(3, 3), head=nn.Linear(3, 2))


def old_norm(kind):
    def apply(layer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(nn.utils, kind)(layer, "weight")

    return apply


COMPUTED = {
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "weight_norm": old_norm("weight_norm"),
    "spectral_norm": old_norm("spectral_norm"),
    "parametrised": lambda layer: parametrizations.weight_norm(layer, "weight"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_weights_that_are_computed_are_those_of_now(name):
    nets = []
    for seed in (0, 1):
        net = fully_connected(2, 4, 4, 2, seed=seed)
        COMPUTED[name](net[1])
        nets.append(net.eval())
    first, second = nets
    x, objective = batch((5, 2), classes=2)
    for net in nets:
        net.deterministic(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.deterministic(x), first.deterministic(x))
    second.load_state_dict(first.state_dict())
    assert_same(fg.exact.expected_loss(second, x, objective), fg.exact.expected_loss(first, x, objective))
    # Another step of training.
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.3)
    before = second.deterministic(x)
    assert not torch.equal(before, first.deterministic(x))
    assert torch.equal(before, second.deterministic(x))


@pytest.mark.parametrize("name", ["prune", "weight_norm"])
def test_computed_weights_cannot_be_initialised(name):
    net = fully_connected(2, 4, 4, 2)
    COMPUTED[name](net[1])
    with pytest.raises(fg.InputError, match=r"initialize: the weight of BinaryLinear is computed by a hook.*initialise before"):
        net.initialize(torch.randn(20, 2, dtype=torch.float64))


def normalised():
    return fg.Sequential(
        nn.Linear(2, 3),
        nn.BatchNorm1d(3),
        fg.BinaryLinear(3, 4, norm=nn.BatchNorm1d(4)),
        fg.BinaryLinear(4, 4, norm=nn.BatchNorm1d(4)),
        head=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    )


def test_a_look_changes_no_statistics():
    net = normalised().train()
    x, objective = torch.randn(6, 2), fg.CrossEntropy(torch.randint(2, (6,)))
    front = fg.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), fg.BinaryLinear(3, 4), head=nn.Linear(4, 2)).train()
    looks = {
        "predict": lambda net: net.predict(x),
        "deterministic": lambda net: net.deterministic(x),
        "sampled_losses": lambda net: fg.bounds.sampled_losses(net, x, objective, 2),
        "marginal_loss": lambda net: fg.bounds.marginal_loss(net, x, objective, 2),
    }
    of_front = {
        **looks,
        "member": lambda net: net.member(x)(x),
        "predictive": lambda net: fg.exact.predictive(net, x),
        "gradeval": lambda net: fg.gradeval.evaluate(net, x, objective, [fg.ST()], samples=20, seed=0),
    }
    for each, all_looks in ((net, looks), (front, of_front)):
        before = copy.deepcopy(each.state_dict())
        for name, look in all_looks.items():
            look(each)
            for key, value in each.state_dict().items():
                assert torch.equal(value, before[key]), f"{name} changed {key}"
        # A step of training does change them.
        each(x)
        assert any(not torch.equal(value, before[key]) for key, value in each.state_dict().items())


def test_the_deterministic_network_can_still_be_differentiated_in_its_head():
    net = normalised().train()
    states = net.deterministic(torch.randn(6, 2))
    (slope,) = torch.autograd.grad(states.sum(), [net.head[2].weight])
    assert bool((slope != 0).any())


def draws_again(kind, generator, preserve=True):
    net = fully_connected(2, 6, 6, 3)
    x, objective = batch((8, 2))

    def losses(t):
        if kind == "sequential":
            return net(t, objective, estimator=fg.PSA(), generator=generator)
        h = net[0](t, estimator=fg.ST(), generator=generator)
        return objective(net.head(net[1](h, estimator=fg.ST(), generator=generator)))

    torch.manual_seed(0)
    checkpointed = checkpoint(losses, x, use_reentrant=False, preserve_rng_state=preserve)
    return net, losses, checkpointed, x


@pytest.mark.parametrize("kind", ["sequential", "by hand"])
def test_a_checkpoint_that_draws_anew_is_an_error(kind):
    for generator, preserve in ((torch.Generator(), True), (None, False)):
        _, _, checkpointed, _ = draws_again(kind, generator, preserve)
        with pytest.raises(RuntimeError, match="the checkpoint drew other noise"):
            checkpointed.sum().backward()


@pytest.mark.parametrize("weights", ["real", "binary"])
def test_a_reentrant_checkpoint_that_draws_anew_is_an_error(weights):
    """Of the whole network, whose gradient is right if it is of the same draw."""
    options = {"weights": weights, "weight_noise": fg.Logistic(0.5)} if weights == "binary" else {}
    net = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3, **options), head=nn.Linear(3, 2))
    x, objective = torch.randn(4, 2, requires_grad=True), fg.CrossEntropy(torch.tensor([0, 1, 1, 0]))

    def losses(generator, **more):
        return checkpoint(lambda x: net(x, objective, generator=generator), x, use_reentrant=True, **more)

    for generator, preserve in ((torch.Generator(), True), (None, False)):
        with pytest.raises(fg.InputError, match=r"would draw other noise than before: hand in no generator"):
            losses(generator, preserve_rng_state=preserve).sum().backward()
    torch.manual_seed(0)
    losses(None).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    torch.manual_seed(0)
    assert_same(found, gradients(net(x, objective).sum(), net))


@pytest.mark.parametrize("kind", ["sequential", "by hand"])
def test_a_checkpoint_of_the_same_draw_has_the_same_gradient(kind):
    net, losses, checkpointed, x = draws_again(kind, None)
    actual = gradients(checkpointed.sum(), net)
    torch.manual_seed(0)
    assert_same(actual, gradients(losses(x).sum(), net))


class Centred(nn.Linear):
    """A head whose outputs are relative to the batch's."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs - outputs.mean(0)


class Noisy(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


@pytest.mark.parametrize("head", [Centred, Noisy])
def test_a_head_that_mixes_examples_or_draws_is_refused(head):
    net = fg.Sequential(fg.BinaryLinear(2, 4), head=head(4, 30))
    x, objective = torch.randn(5, 2), fg.CrossEntropy(torch.tensor([0, 1, 2, 0, 1]))
    for estimator in (fg.PSA(), fg.ARM(), fg.DisARM(), fg.REINFORCE()):
        with pytest.raises(fg.InputError, match="mixes examples or draws at random"):
            net(x, objective, estimator=estimator)
    net(x, objective, estimator=fg.PSA(flip_head=False, head="sampled")).sum().backward()


def test_an_objective_that_mixes_examples_is_refused():
    net = fg.Sequential(fg.BinaryLinear(2, 4), head=nn.Linear(4, 3))
    x = torch.randn(5, 2)

    def relative(outputs):
        return (outputs - outputs.mean(-2, keepdim=True)).square().sum(-1)

    for estimator in (
        fg.PSA(),
        fg.PSA(head="sampled"),
        fg.PSA(head="enhanced"),
        fg.ST(head="rao-blackwell"),
        fg.ARM(),
        fg.LEG(),
    ):
        with pytest.raises(fg.InputError, match="lets examples depend on each other"):
            net(x, relative, estimator=estimator)
    for estimator in (fg.ST(), fg.PSA(flip_head=False, head="sampled"), fg.Tanh()):
        net(x, relative, estimator=estimator).sum().backward()
    net(x, lambda outputs: outputs.square().sum(-1), estimator=fg.PSA()).sum().backward()
