"""How right flips of rank one are, in layers with binary weights: no speed is given for wrong ones."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flipgrad.affine import Signal, per_channel
from flipgrad.binary_weights import BinaryWeightMap
from flipgrad.flips import naive
from flipgrad.network import Sequential
from flipgrad.noise import Noise, sign

# Examples, channels and pixels of the layers that are compared: their definition takes every flip for itself.
BATCH, CHANNELS, SIZE = 2, 12, 9


def errors(net: Sequential) -> dict[str, float]:
    """The largest relative errors, in any layer with binary weights, of flips of units, of weights, and of log ratios.

    Some channels of it, as they are, see random states. What a step computes in float32 is compared with the definitions in
    float64, by which the layer is evaluated anew for every flip.
    """
    largest = dict.fromkeys(("units", "weights", "log_ratio"), 0.0)
    for layer in net.binary_layers:
        if layer.weights == "real":
            continue
        part = _some_channels(layer.affine())
        x = sign(torch.randn(BATCH, part.inner.weight.shape[1], SIZE, SIZE))
        a = part(x)
        grad, states = torch.randn_like(a), sign(torch.randn_like(a))
        units, weights, *_ = part.gradients(Signal(x, x, a, grad, layer.noise), of_x=True, of_parameters=True)
        found: dict[str, Any] = {"units": units, "weights": weights, "log_ratio": part.log_ratio(x, a, states, layer.noise)}
        for name, exact in _by_definition(part, x, grad, states, layer.noise).items():
            largest[name] = max(largest[name], float((found[name] - exact).norm() / exact.norm()))
    return largest


def _some_channels(whole: Any) -> BinaryWeightMap:
    """The first channels of a layer, with a larger scale for fewer inputs: its units are as undecided as before."""
    signs = whole.inner.weight.detach()[:CHANNELS, :CHANNELS].contiguous()
    scale = whole.scale.detach()[:CHANNELS] * (whole.inner.weight.shape[1] / signs.shape[1]) ** 0.5
    return BinaryWeightMap(replace(whole.inner, weight=signs), scale, whole.bias.detach()[:CHANNELS])


def _by_definition(part: BinaryWeightMap, x: Tensor, grad: Tensor, states: Tensor, noise: Noise) -> dict[str, Tensor]:
    signs, scale, bias, x, grad = (t.double() for t in (part.inner.weight, part.scale, part.bias, x, grad))  # type: ignore[union-attr]
    layer, geometry = (per_channel(signs, scale), bias), part.inner.geometry

    def probabilities(signs: Tensor) -> Tensor:
        return noise.cdf(BinaryWeightMap(replace(part.inner, weight=signs), scale, bias)(x))

    kept, weights = probabilities(signs), torch.zeros_like(signs)
    for index in range(signs.numel()):
        flipped = signs.clone()
        flipped.view(-1)[index] *= -1
        weights.view(-1)[index] = signs.view(-1)[index] * ((kept - probabilities(flipped)) * grad).sum()
    units = naive.flip_product(x, *layer, grad, noise, geometry)
    return {"units": units, "weights": weights, "log_ratio": naive.log_ratio(x, *layer, states, noise, geometry)}
