"""The benchmark of packed networks gives ratios for right results only. It is not timed here."""

from __future__ import annotations

import importlib
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.packed import compiled, plain
from flipgrad.packed.packing import pack
from flipgrad.training.models import cifar_net

# The package's name of it is that of the function.
packed = importlib.import_module("flipgrad.benchmarks.packed")

pytestmark = pytest.mark.skipif(not compiled.best_instructions(), reason="the compiled library is missing")
RATIOS = ("batch1_over_torch", "batch2_over_torch", "ensemble10_over_one_float")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few channels, images and repetitions, and no other runtime."""
    monkeypatch.setattr(packed, "LAYERS", {"17": (17, 5)})
    monkeypatch.setattr(packed, "BATCH", 2)
    monkeypatch.setattr(packed, "REPEATS", {"convolutions": 1, "batch1": 1, "batch2": 1})
    monkeypatch.setattr(packed, "cifar_net", partial(cifar_net, width=0.1))
    monkeypatch.setattr(packed, "find_spec", lambda name: None)


def test_right_results_get_ratios() -> None:
    result = packed.packed()
    assert all(result[name] > 0 for name in ("convolution_17_over_torch", *RATIOS))
    assert 0 < result["file_over_float32"] < 1
    # The worse one of one image and of a batch.
    assert result["ensemble10_over_one_float"] == min(result[f"batch{n}_ensemble10_over_one_float"] for n in (1, 2))
    assert "pip install" in result["onnxruntime"]
    assert "over_onnxruntime" not in result


def test_wrong_results_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = plain.outputs
    monkeypatch.setattr(plain, "outputs", lambda *arguments: -outputs(*arguments))
    result = packed.packed()
    assert [result[name] for name in ("convolution_17_over_torch", *RATIOS)] == [None] * 4


def test_a_network_that_differs_from_pytorch_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    deterministic = fg.Sequential.deterministic
    monkeypatch.setattr(fg.Sequential, "deterministic", lambda net, x: 1 + deterministic(net, x))
    result = packed.packed()
    assert result["convolution_17_over_torch"] > 0
    assert [result[name] for name in RATIOS] == [None] * 3


def test_the_float_twin_is_the_deterministic_network() -> None:
    x = torch.randn(3, 3, 32, 32)
    net = cifar_net(0.1, norm="batch", weights="binary").initialize(x).eval()
    # Means of few states are such that sums are exactly at the threshold, where products with real weights round.
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean += torch.rand(len(module.running_mean))
    small_net = pack(net, x[:1])
    found = packed.float_twin(small_net.program)(x.double())
    np.testing.assert_allclose(found.detach().numpy(), net.deterministic(x).detach().numpy(), atol=1e-5)


def test_without_the_compiled_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_library", None)
    monkeypatch.setattr(compiled, "_reason", "it is missing")
    result = packed.packed()
    assert result["reason"] == "it is missing"
    assert result["instructions"] == ""
