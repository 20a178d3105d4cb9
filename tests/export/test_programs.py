"""torch.export takes the plain module of every kind of network, for batches of any size; saved and loaded it is the same."""

from __future__ import annotations

import io

import pytest
import torch
from exported_nets import MAKERS, WAYS, trained
from torch import nn

import flipgrad as fg

# In one process: the first export of a process takes a second, the others a tenth of that.
pytestmark = pytest.mark.xdist_group("export")


def assert_same(program, plain, x, noise):
    """On all examples, and on batches of other sizes; saved, loaded and run."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for module in (program.module(), torch.export.load(file).module()):
        assert torch.equal(module(x, *noise), plain(x, *noise))
        if not noise:
            assert torch.equal(module(x[:1]), plain(x[:1]))
            assert module(x[:0]).shape == (0, plain(x).shape[1])


# Every network, and every way of one: the graphs differ by their noise alone.
QUICK = {"residual images"}
CASES = [
    pytest.param(make, way, id=f"{name}, {kind}", marks=[] if kind == "sampled" or name in QUICK else pytest.mark.slow)
    for name, make in MAKERS.items()
    for kind, way in WAYS.items()
]


@pytest.mark.parametrize(("make", "way"), CASES)
def test_a_program_gives_the_outputs_of_the_network(make, way):
    net, x = trained(make)
    plain, noise, own = way(net, x)
    state = torch.get_rng_state()
    program = fg.export.program(plain, x[:1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(program.module()(x, *noise), own(x))
    assert_same(program, plain, x, noise)


def test_a_program_is_for_batches_of_any_size_or_for_one():
    """Also where few outputs of many examples are computed in another layout, to rounding."""
    net, _ = trained(MAKERS["fully connected"])
    plain = fg.export.deterministic(net)
    many = torch.randn(500, 5)
    torch.testing.assert_close(fg.export.program(plain, many).module()(many), net.deterministic(many))
    one = fg.export.program(plain, many, batch_size=4).module()
    assert torch.equal(one(many[:4]), plain(many[:4]))
    with pytest.raises(AssertionError, match="Guard failed"):
        one(many[:5])


def test_a_program_of_a_sampled_network_takes_noise_that_is_shared_by_the_batch_if_exported_so():
    net, x = trained(MAKERS["residual images"])
    plain = fg.export.sampled(net)
    noise, weight_noise = plain.draw(x[:4])
    program = fg.export.program(plain, x, batch_size=4).module()
    assert torch.equal(program(x[:4], noise, weight_noise), net(x[:4], noise=noise, weight_noise=weight_noise))


def test_torch_takes_the_modules_as_they_are():
    """Without our help: its own options, tracing, and the compiler."""
    net, x = trained(MAKERS["convolutions"])
    plain = fg.export.deterministic(net)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(plain, (x,), dynamic_shapes={"x": {0: batch}}).module()
    assert torch.equal(exported(x[:7]), plain(x[:7]))
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))


class SizeMatters(nn.Module):
    """Treats small batches in another way."""

    def forward(self, x):
        return x if len(x) < 10 else 2 * x


def test_what_cannot_be_captured_is_refused_with_the_way_out():
    net, x = trained(MAKERS["fully connected"])
    plain = fg.export.deterministic(net)
    for wrong in (net, net.head, net.deterministic):
        with pytest.raises(
            fg.InputError, match=r"fg.export takes a plain module, got \w+: give fg.export.deterministic\(net\)"
        ):
            fg.export.program(wrong, x)
    with pytest.raises(fg.InputError, match=r"needs at least one example \[B, ...\] to know the size of inputs, got \[0, 5\]"):
        fg.export.program(plain, x[:0])
    with pytest.raises(fg.InputError, match="to know the size of inputs, got list"):
        fg.export.program(plain, [1.0])
    with pytest.raises(fg.InputError, match="batch_size=0: give at least 1, or None for batches of any size"):
        fg.export.program(plain, x, batch_size=0)
    odd = fg.Sequential(SizeMatters(), fg.BinaryLinear(5, 3), head=nn.Linear(3, 2)).eval()
    with pytest.raises(fg.InputError, match=r"for batches of other sizes.*give batch_size=, the one it is for"):
        fg.export.program(fg.export.deterministic(odd), x)
    program = fg.export.program(fg.export.deterministic(odd), x, batch_size=20).module()
    assert torch.equal(program(x[:20]), odd.deterministic(x[:20]))


def test_the_refusal_of_a_network_names_the_way_out():
    net, x = trained(MAKERS["fully connected"])
    with pytest.raises(fg.InputError, match=r"export the plain module fg.export.deterministic\(net\), fg.export.member"):
        torch.export.export(net, (x,))


def test_a_network_itself_is_exported_for_batches_of_any_size():
    """Without gradients it samples in the graph; layers with few outputs are no exception."""
    net, x = trained(MAKERS["fully connected"])
    with torch.no_grad():
        program = torch.export.export(net, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}}).module()
    assert program(torch.randn(100, 5)).shape == (100, 3)
