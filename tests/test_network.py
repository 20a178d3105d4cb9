"""Sequential as a whole: sampling, prediction, members, initialisation, and all that can be handed in wrongly."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import flipgrad as fg
import reference
from flipgrad import exact
from reference import assert_same, batch, build, chain, fully_connected, gradients, noise_like, randomized


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", reference.NETS)
def test_outputs_are_the_heads_of_sampled_states(name):
    net, x, _ = build(name, "mixed")
    graph = chain(net)
    z = noise_like(graph, x, seed=4)
    outputs = net(x, generator=seeded(4))
    assert outputs.shape == (len(x), 3)
    assert_same(outputs, graph.outputs(reference.sample(graph, x, z)))
    assert_same(net(x, noise=z), outputs)


@pytest.mark.parametrize("noise", reference.NOISES)
def test_states_have_their_distribution(noise):
    """Fails by chance less than once in 10^4 seeds: 5 noises x 4 states, 5 standard errors each."""
    corners = torch.tensor([[-1, -1], [-1, 1], [1, -1], [1, 1]], dtype=torch.float64)
    net = fully_connected(2, 2, 2, head=nn.Identity(), noise=reference.NOISES[noise])
    x, _ = batch((1, 2))
    samples = 20_000
    states = net(x.expand(samples, 2), generator=seeded())
    index = (states[:, 0] > 0).long() * 2 + (states[:, 1] > 0).long()
    frequencies = index.bincount(minlength=4) / samples
    expected = reference.expectation(chain(net), x, lambda outputs, _: (outputs[:, None] == corners).all(2).to(x.dtype))[0]
    error = (expected * (1 - expected) / samples).sqrt()
    assert bool(((frequencies - expected).abs() < 5 * error).all())


def test_dtype_is_that_of_parameters_and_input():
    net, x, objective = build("conv")
    z = noise_like(chain(net), x)
    expected = gradients(net(x, objective, noise=z).sum(), net)
    net, x, z = net.float(), x.detach().float(), [t.float() for t in z]
    losses = net(x, objective, noise=z)
    assert losses.dtype == net(x).dtype == net.predict(x, 1).dtype == torch.float32
    assert_same({name: g.double() for name, g in gradients(losses.sum(), net).items()}, expected, 1e-4)


def test_channels_last_gives_the_same():
    net, x, objective = build("groups")
    z = noise_like(chain(net), x)
    expected = gradients(net(x, objective, noise=z).sum(), net)
    x = x.detach().to(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert_same(gradients(net(x, objective, noise=z).sum(), net), expected)
    net.to(memory_format=torch.channels_last)
    assert_same(gradients(net(x, objective, noise=z).sum(), net), expected)


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST(), fg.PSA(inputs="mean"), fg.PSA(inputs="rao-blackwell")], ids=repr)
def test_draws_and_gradients_do_not_depend_on_how_images_lie(estimator):
    torch.manual_seed(0)
    net = fg.Sequential(
        fg.BinaryConv2d(3, 24, 3), fg.BinaryConv2d(24, 24, 3, stride=2, padding=1), fg.BinaryConv2d(24, 16, 3, groups=2),
        nn.Flatten(), head=nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
    x, objective = torch.randn(16, 3, 14, 14), fg.CrossEntropy(torch.arange(16) % 10)
    exact = net.state_dict()
    found = []
    for images in (x, x.to(memory_format=torch.channels_last)):
        losses = net(images, objective, estimator=estimator, generator=torch.Generator().manual_seed(1))
        found.append((losses.detach(), gradients(losses.sum(), net)))
    assert found[0][0].equal(found[1][0])
    for name, gradient in found[0][1].items():
        assert (found[1][1][name] - gradient).norm() <= 1e-5 * gradient.norm()
    # And they are those of float64, with the same states.
    z = noise_like(chain(net), x)
    single = gradients(net(x, objective, estimator=estimator, noise=z).sum(), net)
    net.double().load_state_dict(exact)
    double = gradients(net(x.double(), objective, estimator=estimator, noise=[t.double() for t in z]).sum(), net)
    for name, gradient in double.items():
        assert (single[name] - gradient).norm() <= 5e-3 * gradient.norm()


@pytest.mark.parametrize("name", ["fc3", "conv"])
def test_examples_are_independent(name):
    """A batch of one gives what the example gives within a batch."""
    net, x, objective = build(name)
    z = noise_like(chain(net), x)
    losses = net(x, objective, noise=z)
    alone = net(x[1:2], objective.select(slice(1, 2)), noise=[t[1:2] for t in z])
    assert_same(alone, losses[1:2])
    assert_same(gradients(alone.sum(), net), gradients(losses[1], net))


@pytest.mark.parametrize("head", [None, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))], ids=["linear", "any"])
@pytest.mark.parametrize("estimator", [fg.PSA(), fg.PSA(head="enhanced"), fg.PSA(flip_head=False), fg.ST()])
def test_empty_batch_gives_an_empty_result(estimator, head):
    net, x, _ = build("front", head=head)
    x, labels = x.detach()[:0], torch.zeros(0, dtype=torch.long)
    assert net(x).shape == (0, 3)
    assert net.predict(x).shape == (0, 3)
    losses = net(x, fg.CrossEntropy(labels), estimator=estimator)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_nothing_is_recorded_without_gradients():
    net, x, objective = build("pooled")
    z = noise_like(chain(net), x)
    losses = net(x, objective, noise=z)
    with torch.no_grad():
        outputs, plain = net(x, noise=z), net(x, objective, noise=z)
        enhanced = net(x, objective, estimator=fg.PSA(head="enhanced"), noise=z)
    assert not any(t.requires_grad for t in (outputs, plain, enhanced, net.predict(x, 2), net.member(x).noise[0]))
    assert_same(plain, losses.detach())
    assert_same(enhanced, losses.detach())


def test_gradient_without_an_estimator_is_refused():
    net, x, _ = build("fc3")
    with pytest.raises(RuntimeError, match=r"without an estimator: call net\(x, objective, estimator=fg\.PSA\(\)\)"):
        net(x).sum().backward()


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST()], ids=["psa", "st"])
def test_gradients_accumulate_in_the_front(estimator):
    net, x, objective = build("front")
    z = noise_like(chain(net), x)
    g = gradients(net(x, objective, estimator=estimator, noise=z).sum(), net)
    for _ in range(2):
        net(x, objective, estimator=estimator, noise=z).sum().backward()
    assert_same({name: p.grad for name, p in net.named_parameters()}, {name: 2 * g[name] for name in g})
    assert net[0].weight.grad.abs().max() > 1e-6


def test_default_estimator_is_psa_or_the_one_in_use():
    net, x, objective = build("fc3")
    z = noise_like(chain(net), x)

    def result(**estimator):
        return gradients(net(x, objective, noise=z, **estimator).sum(), net)

    psa, st = result(estimator=fg.PSA()), result(estimator=fg.ST())
    assert_same(result(), psa, 0)
    fg.use(net, fg.ST())
    assert_same(result(), st, 0)
    assert_same(result(estimator=fg.PSA()), psa, 0)
    fg.use(net, None)
    assert_same(result(), psa, 0)


def test_generator_in_use_is_drawn_from():
    net, x, objective = build("fc3")
    expected = net(x, objective, generator=seeded(3))
    fg.use(net, fg.PSA(), generator=seeded(3))
    assert_same(net(x, objective), expected, 0)
    # It moves on.
    assert (net(x, objective) - expected).abs().max() > 1e-6


def test_any_callable_is_an_objective():
    net, x, objective = build("fc3")
    z = noise_like(chain(net), x)
    target = torch.ones(3, 3, dtype=x.dtype)
    for given, same in [
        (lambda out: objective(out), objective),
        (lambda out: (out - target).square().sum(-1), fg.SquaredError(target)),
    ]:
        losses, expected = net(x, given, noise=z), net(x, same, noise=z)
        assert_same(losses, expected)
        assert_same(gradients(losses.sum(), net), gradients(expected.sum(), net))


PROGRAM = """
import torch, flipgrad as fg
torch.manual_seed(0)
net = fg.Sequential(
    torch.nn.Conv2d(1, 2, 2), fg.BinaryConv2d(2, 4, 3, padding=1), torch.nn.AvgPool2d(2), torch.nn.Flatten(),
    fg.BinaryLinear(16, 8, noise=fg.Normal()), head=torch.nn.Linear(8, 3))
x, y = torch.randn(6, 1, 5, 5), torch.randint(3, (6,))
net.initialize(x)
loss = net(x, fg.CrossEntropy(y)).mean()
loss.backward()
norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
print(loss.item().hex(), norm.item().hex(), net.predict(x, 3).sum(0)[0].item().hex())
"""


def test_same_seed_gives_the_same_numbers_in_another_process(capsys):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    exec(PROGRAM, {})
    here = capsys.readouterr().out.split()
    assert len(here) == 3
    assert done.stdout.split() == here


def test_copies_and_saved_states_give_the_same():
    net, x, objective = build("groups", "mixed")
    z = noise_like(chain(net), x)
    expected = gradients(net(x, objective, noise=z).sum(), net)
    twin = copy.deepcopy(net)
    other = build("groups", "mixed")[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other.load_state_dict(net.state_dict()).missing_keys == []
    # The copies stand alone.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    for copied in (twin, other):
        assert_same(gradients(copied(x, objective, noise=z).sum(), copied), expected, 0)


class Bounded(nn.Module):
    """A weight 2 tanh(v), which can be set by its inverse."""

    def forward(self, v):
        return 2 * torch.tanh(v)

    def right_inverse(self, weight):
        return torch.atanh(weight / 2)


@pytest.mark.parametrize("name", ["fc3", "conv"])
@pytest.mark.parametrize("head", ["sampled", "enhanced"])
def test_parametrised_weights_get_the_chain_rule(name, head):
    net, x, objective = build(name)
    z = noise_like(chain(net), x)
    with torch.no_grad():
        for layer in (*net.binary_layers, net.head):
            layer.weight.clamp_(-1.9, 1.9)
    plain = gradients(net(x, objective, estimator=fg.PSA(head=head), noise=z).sum(), net)
    values = {key: parameter.detach().clone() for key, parameter in net.named_parameters()}
    for layer in (*net.binary_layers, net.head):
        parametrize.register_parametrization(layer, "weight", Bounded())
    bounded = gradients(net(x, objective, estimator=fg.PSA(head=head), noise=z).sum(), net)
    assert sum(".original" in key for key in bounded) == len(net.binary_layers) + 1
    for key, g in bounded.items():
        layer, _, rest = key.partition(".")
        if ".original" in rest:
            weight = values[f"{layer}.weight"]
            # d(2 tanh v)/dv in terms of the weight.
            assert_same(g, plain[f"{layer}.weight"] * (2 - weight.square() / 2))
        else:
            assert_same(g, plain[key])


def test_prediction_averages_sampled_probabilities():
    net, x, _ = build("conv")
    generator = seeded(2)
    with torch.no_grad():
        expected = torch.stack([net(x, generator=generator).softmax(-1) for _ in range(4)]).mean(0)
        outputs = net(x, generator=seeded(2))
    assert_same(net.predict(x, 4, generator=seeded(2)), expected)
    assert_same(net.predict(x, 1, generator=seeded(2), link=lambda outputs: outputs), outputs)


def test_one_output_is_predicted_by_the_sigmoid():
    net = fully_connected(2, 3, 1)
    x, _ = batch((4, 2))
    with torch.no_grad():
        expected = net(x, generator=seeded()).sigmoid()
    assert_same(net.predict(x, 1, generator=seeded()), expected)


@pytest.mark.parametrize("way", ["predict", "members"])
def test_averages_approach_the_predictive(way):
    """Fails by chance less than once in 10^5 seeds: 2 ways x 6 probabilities, 5 standard errors each."""
    net = fully_connected(2, 3, 3, 3, noise=reference.NOISES["mixed"], scale=1.5)
    x, _ = batch((2, 2))
    samples, generator = 1000, seeded()
    with torch.no_grad():
        expected = exact.predictive(net, x)
        second = reference.expectation(chain(net), x, lambda outputs, _: outputs.softmax(-1).square())
        if way == "predict":
            mean = net.predict(x, samples, generator=generator)
        else:
            mean = sum(net.member(x, generator=generator)(x).softmax(-1) for _ in range(samples)) / samples
    error = ((second - expected.square()) / samples).sqrt()
    assert error.max() < 0.02
    assert bool(((mean - expected).abs() < 5 * error).all())


def test_prediction_needs_samples():
    net, x, _ = build("fc3")
    with pytest.raises(fg.InputError, match=r"predict\(samples=0\): at least one sample is needed"):
        net.predict(x, 0)


@pytest.mark.parametrize("name", ["fc3", "pooled"])
def test_deterministic_net_has_no_noise(name):
    net, x, _ = build(name, "mixed")
    graph = chain(net)
    h = reference.sample(graph, x, [torch.zeros((), dtype=x.dtype)] * len(graph.nodes))
    assert_same(net.deterministic(x), graph.outputs(h))
    assert_same(net.deterministic(x), net.deterministic(x), 0)


@pytest.mark.parametrize("name", ["fc3", "conv"])
def test_member_is_fixed_over_inputs(name):
    net, x, _ = build(name)
    member = net.member(x, generator=seeded(1))
    outputs = member(x)
    assert_same(member(x), outputs, 0)
    assert_same(torch.cat([member(x[i : i + 1]) for i in range(len(x))]), outputs)
    # The draw does not depend on the inputs that tell the shapes, and its units are independent.
    assert_same(net.member(x.flip(0), generator=seeded(1))(x), outputs, 0)
    assert all(len(z) == 1 and len(z.unique()) == z.numel() for z in member.noise)


def test_members_differ():
    net, x, _ = build("conv")
    generator = seeded()
    outputs = torch.stack([net.member(x, generator=generator)(x) for _ in range(5)])
    assert len(outputs.flatten(1).unique(dim=0)) == 5


def test_member_needs_an_example():
    net, x, _ = build("fc3")
    with pytest.raises(fg.InputError, match="needs at least one example"):
        net.member(x[:0])


def preactivations(net, x, seed):
    """Of the pass that draws its noise from this seed."""
    graph = chain(net)
    h, generator, result = [x], seeded(seed), []
    for node in graph.nodes:
        a = node.a(h)
        result.append(a)
        h.append(reference.states(a, node.layer.noise.sample_like(a, generator=generator)))
    return result


def channels(a):
    return a.movedim(1, 0).flatten(1) if a.dim() == 4 else a.t()


@pytest.mark.parametrize("name", ["fc4", "conv", "pooled", "front"])
def test_initialisation_whitens_every_layer(name):
    net, x, _ = build(name, "mixed")
    x = torch.randn(64, *x.shape[1:], dtype=x.dtype, generator=seeded()) * 3 + 1
    front = copy.deepcopy(net[0])
    assert net.initialize(x, generator=seeded(5)) is net
    with torch.no_grad():
        for layer, a in zip(net.binary_layers, preactivations(net, x, 5), strict=True):
            per_channel = channels(a)
            varying = per_channel.var(1, correction=0) > 1e-12
            assert bool(varying.any())
            if layer.bias is not None:
                assert per_channel.mean(1).abs().max() < 1e-9
            assert_same(per_channel[varying].var(1, correction=0), torch.ones_like(per_channel[varying][:, 0]), 1e-9)
    if name == "front":
        assert_same(net[0].weight, front.weight, 0)


def test_initialisation_shifts_a_constant_channel_only():
    net = fully_connected(2, 3, 2)
    x, _ = batch((8, 2))
    with torch.no_grad():
        net[0].weight[1] = 0
    net.initialize(x)
    assert net[0].weight[1].tolist() == [0, 0]
    assert net[0].bias[1].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_initialisation_does_not_blow_up_rounding(seed):
    """The rows of a product with equal rows differ by rounding: that is no variance to rescale by."""
    net = fully_connected(10, 4, 2, seed=seed).float()
    before = net[0].weight.clone()
    x = torch.randn(1, 10, generator=seeded(seed)).expand(33, 10).contiguous()
    net.initialize(x)
    assert_same(net[0].weight, before, 0)
    assert net[0].affine()(x).abs().max() < 1e-5


def test_initialisation_sets_parametrised_weights():
    net = fully_connected(2, 3, 3, 2, scale=0.1)
    x, _ = batch((32, 2))
    # Whitening makes the weights as large as about 1 / std(x): inputs large enough keep them within the bound of 2.
    x = 3 * x
    parametrize.register_parametrization(net[0], "weight", Bounded())
    net.initialize(x, generator=seeded(5))
    for a in preactivations(net, x, 5)[:1]:
        assert_same(a.var(0, correction=0), torch.ones(3, dtype=x.dtype), 1e-9)
        assert a.mean(0).abs().max() < 1e-9


def test_initialisation_refuses_a_weight_that_cannot_be_set():
    net = fully_connected(2, 3, 2)
    parametrize.register_parametrization(net[0], "weight", nn.Softplus())
    before = net[0].bias.clone()
    with pytest.raises(fg.InputError, match=r"parametrisation of \w*BinaryLinear\.weight has no right_inverse"):
        net.initialize(batch((8, 2))[0])
    assert_same(net[0].bias, before, 0)


@pytest.mark.parametrize("size", [0, 1])
def test_initialisation_needs_two_examples(size):
    with pytest.raises(fg.InputError, match=rf"pre-activations \[{size}, 3\] have no variance; .* at least two examples"):
        fully_connected(2, 3, 2).initialize(torch.zeros(size, 2, dtype=torch.float64))


def test_initialisation_of_a_convolution_takes_one_image():
    net, x, _ = build("tail")
    net.initialize(x[:1], generator=seeded(5))
    a = channels(preactivations(net, x[:1], 5)[0])
    assert_same(a.var(1, correction=0), torch.ones(2, dtype=x.dtype), 1e-9)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ([torch.zeros(3, 5)], "1 tensors were handed in for 3 binary layers; give one each"),
        ([torch.zeros(())] * 4, "4 tensors were handed in for 3 binary layers"),
        ([torch.zeros(3, 6), torch.zeros(()), torch.zeros(())], r"noise of shape \[3, 6\] does not broadcast to .*\[3, 5\]"),
        ([torch.zeros(2, 3, 5), torch.zeros(()), torch.zeros(())], r"noise of shape \[2, 3, 5\] does not broadcast"),
    ],
)
def test_refuses_noise_that_does_not_fit(noise, message):
    net, x, objective = build("fc3")
    for arguments in [(), (objective,)]:
        with pytest.raises(fg.InputError, match=message):
            net(x, *arguments, noise=noise)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_inputs_that_are_not_finite(value):
    net, x, objective = build("fc3")
    x = x.detach().clone()
    x[1, 2] = value
    for call in (
        lambda: net(x),
        lambda: net(x, objective),
        lambda: net.predict(x),
        lambda: net.member(x),
        lambda: net.initialize(x),
    ):
        with pytest.raises(fg.InputError, match="input holds NaN or inf"):
            call()


@pytest.mark.parametrize("estimator", [fg.PSA(), fg.ST()], ids=["psa", "st"])
@pytest.mark.parametrize(
    ("objective", "came"),
    [
        (lambda out: out.sum(), r"got shape \[\]"),
        (lambda out: out, r"got shape \[3, 3\]"),
        (lambda out: 1.0, "got float"),
    ],
)
def test_refuses_an_objective_of_another_shape(objective, came, estimator):
    net, x, _ = build("fc3")
    with pytest.raises(fg.InputError, match=rf"to one loss per example, \[3\], {came}: reduce over the last dimension only"):
        net(x, objective, estimator=estimator)


def test_refuses_an_objective_that_mixes_flips():
    """It looks right on outputs [B, K], but not on [flips, B, K]."""
    net, x, _ = build("fc3")
    with pytest.raises(fg.InputError, match=r"to one loss per example, \[3, 3\], got shape"):
        net(x, lambda out: out.flatten(1).sum(1))


def test_refuses_targets_of_another_batch():
    net, x, objective = build("fc3")
    with pytest.raises(fg.InputError, match="CrossEntropy has targets for 2 examples"):
        net(x, objective.select(slice(2)))


def test_refuses_a_head_without_output_dimension():
    net = randomized(fg.Sequential(fg.BinaryLinear(4, 3), head=nn.Flatten(0)))
    with pytest.raises(fg.InputError, match=r"outputs \[batch, K\], it gave \[9\] for \[3, 3\]"):
        net(batch((3, 4))[0])


def test_modules_are_listed_and_can_be_replaced():
    net, x, _ = build("conv")
    assert len(net) == 4
    assert net[3] is net.binary_layers[2]
    setattr(net, "3", randomized(fg.BinaryLinear(18, 4), seed=9))
    assert net.binary_layers[2] is net[3]
    assert net(x).shape == (2, 3)


@pytest.mark.parametrize("estimator", [fg.PSA, "psa"], ids=["class", "name"])
def test_an_estimator_is_an_object(estimator):
    net = fg.Sequential(fg.BinaryLinear(2, 2), head=nn.Linear(2, 2))
    x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    message = r"estimator='\w+': pass an object, e\.g\. fg\.PSA\(\)"
    with pytest.raises(fg.InputError, match=message):
        net(x, objective, estimator=estimator)
    with pytest.raises(fg.InputError, match=message):
        fg.use(net, estimator)
    with pytest.raises(fg.InputError, match=message):
        net[0](x, estimator=estimator)


def test_labels_in_place_of_an_objective_are_refused():
    net = fg.Sequential(fg.BinaryLinear(2, 2), head=nn.Linear(2, 2))
    with pytest.raises(fg.InputError, match=r"must be callable, e\.g\. fg\.CrossEntropy\(labels\), got Tensor"):
        net(torch.randn(3, 2), torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("layer", [fg.BinaryLinear(4, 2), fg.BinaryConv2d(1, 2, 1)], ids=["linear", "conv"])
def test_integer_inputs_are_refused(layer):
    with pytest.raises(fg.InputError, match=r"floating-point inputs, got torch\.uint8: convert them"):
        layer(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))


def test_moments_whiten_over_the_batch_and_the_sampling():
    """Against many sampled passes: mean 0 and variance 1 of every unit, within five standard errors."""
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(3, 40), fg.BinaryLinear(40, 6), head=nn.Linear(6, 2))
    x = torch.randn(50, 3)
    assert net.initialize(x, moments=True) is net
    first = net[0].affine()(x)
    assert torch.allclose(first.mean(0), torch.zeros(40), atol=1e-5)
    assert torch.allclose(first.var(0, correction=0), torch.ones(40), atol=1e-4)
    draws = torch.stack([net[1].affine()(net[0].noise.sample_sign(first)) for _ in range(2000)])
    count = draws.shape[0] * draws.shape[1]
    assert (draws.mean((0, 1)).abs() < 5 / count**0.5).all()
    # Fourth moments of sums of many units are about those of a normal variable.
    assert ((draws.var((0, 1)) - 1).abs() < 5 * (2 / count) ** 0.5).all()


def test_moments_need_no_randomness():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryConv2d(1, 3, 3), fg.BinaryConv2d(3, 3, 2), nn.Flatten(), head=nn.Linear(27, 2))
    again = copy.deepcopy(net)
    x = torch.randn(8, 1, 6, 6)
    state = torch.random.get_rng_state()
    net.initialize(x, moments=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    again.initialize(x, moments=True)
    assert torch.equal(net[1].weight, again[1].weight)
