"""Thresholds on sums give the states of the layer at every sum of states, at averages of these, and elsewhere to rounding."""

from __future__ import annotations

import pytest
import torch
from exported_nets import BINARY, MAKERS, WAYS, trained
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import flipgrad as fg
from flipgrad.export.plain import PlainLayer
from flipgrad.export.thresholds import ThresholdLayer, thresholded


@pytest.mark.parametrize("way", [WAYS["deterministic"], WAYS["member"]], ids=["deterministic", "member"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_function_is_the_same(make, way):
    net, x = trained(make)
    plain, _, own = way(net, x)
    changed = thresholded(plain)
    assert torch.equal(changed(x), own(x))
    binary = [layer for layer in net.binary_layers if layer.weights == "binary" and not isinstance(layer, fg.Residual)]
    several = way is WAYS["member"] and make is MAKERS["by hand, shared"]
    assert sum(isinstance(part, ThresholdLayer) for part in changed.modules()) == (0 if several else len(set(binary)))


def layer_of(inputs: int, outputs: int, kind: str, seed: int) -> fg.Sequential:
    """A layer whose sums of states are often exactly at the threshold."""
    torch.manual_seed(seed)
    norm = {"none": None, "batch": nn.BatchNorm1d(outputs), "scale": fg.ScaleShift(outputs)}[kind]
    layer = fg.BinaryLinear(inputs, outputs, bias=kind == "batch", norm=norm, **BINARY)
    whole = torch.randint(-inputs, inputs + 1, (outputs,)).float()
    with torch.no_grad():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.copy_(whole)
            norm.running_var.uniform_(0.01, 5)
            norm.weight.copy_(torch.randn(outputs))
            layer.bias.copy_(torch.randint(-2, 3, (outputs,)))
        elif isinstance(norm, fg.ScaleShift):
            norm.scale.copy_(torch.randn(outputs) * 10.0 ** torch.randint(-3, 4, (outputs,)))
            norm.shift.copy_(-norm.scale * whole)
        else:
            layer.weight_scale.copy_(torch.randn(outputs))
    return fg.Sequential(layer, head=nn.Identity()).eval()


@given(st.integers(1, 40), st.sampled_from(["none", "batch", "scale"]), st.sampled_from([1, 4, 64]), st.integers(0, 2**20))
def test_at_all_sums_of_states_and_of_their_averages(inputs, kind, parts, seed):
    net = layer_of(inputs, 16, kind, seed)
    # Rows of inputs whose sums are all whole numbers that can be, and multiples of a part of 1.
    x = torch.randint(-parts, parts + 1, (200, inputs)) / parts
    plain = fg.export.deterministic(net)
    changed = thresholded(plain)
    assert any(isinstance(part, ThresholdLayer) for part in changed.modules())
    assert torch.equal(changed(x), net.deterministic(x))


def test_a_scale_of_zero_and_a_negative_one():
    net = layer_of(6, 4, "scale", 0)
    norm = net[0].norm
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([0.0, 0.0, -0.7, 0.7]))
        norm.shift.copy_(torch.tensor([0.0, -0.1, 0.0, 0.0]))
    x = torch.randint(0, 2, (200, 6)) * 2.0 - 1
    changed = thresholded(fg.export.deterministic(net))
    assert torch.equal(changed(x), net.deterministic(x))
    (layer,) = (part for part in changed.modules() if isinstance(part, ThresholdLayer))
    assert layer.threshold.flatten()[:2].tolist() == [-torch.inf, torch.inf]
    assert torch.equal(layer.map.coefficients[2], -net[0].weight.sign()[2])


def test_the_module_itself_stays():
    net, x = trained(MAKERS["convolutions"])
    plain = fg.export.deterministic(net)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    thresholded(plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    assert any(isinstance(part, PlainLayer) for part in plain.modules())
    assert torch.equal(plain(x), net.deterministic(x))
