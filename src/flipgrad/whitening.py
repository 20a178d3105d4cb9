"""Data-dependent initialisation: layers are rescaled until their pre-activations on a batch have mean 0 and variance 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from flipgrad.contract import LayerCall, Network
from flipgrad.errors import InputError
from flipgrad.layers import BinaryLayer
from flipgrad.norms import Norm, per_channel, whiten
from flipgrad.sampling import Draw


def whiten_layers(net: Network, batch: Tensor, draw: Draw, *, moments: bool) -> None:
    """Whiten every layer in turn, by its norm if it has one, else by its weight and bias; see ``Sequential.initialize``."""
    norms = {layer: layer.norm for layer in net.binary_layers}

    def visit(call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        uncertain = moments and call.binary
        variance = call.affine.variance(1 - call.x.square()) if uncertain else torch.zeros_like(a)
        a = _rescale(call.layer, norms[call.layer], a, variance)
        return call.noise.mean_sign(a) if moments else call.sample(a)

    try:
        # Statistics are those before the norm, so it is put aside while they are taken.
        for layer in norms:
            layer.norm = None
        net.run(net.front(batch), visit, draw)
    finally:
        for layer, norm in norms.items():
            layer.norm = norm


def _rescale(layer: BinaryLayer, norm: Norm | None, a: Tensor, within: Tensor) -> Tensor:
    """Whiten a layer's pre-activations, of means ``a`` and variances ``within``, over the batch; returns the new means."""
    channel = layer.plain().channel_dim % a.dim()
    others = [dim for dim in range(a.dim()) if dim != channel]
    if a.numel() < 2 * a.shape[channel]:
        raise InputError(f"initialize: pre-activations {list(a.shape)} have no variance; use a batch of at least two examples")
    between, mean = torch.var_mean(a, others, correction=0, keepdim=True)
    variance = between + within.mean(others, keepdim=True)
    # A channel is constant if it varies no more than by the rounding of the pre-activations.
    rounding = 4 * torch.finfo(a.dtype).eps * a.abs().max()
    variance = torch.where(variance > rounding**2, variance, 1)
    if norm is not None:
        scale, shift = (t.view_as(mean) for t in whiten(norm, mean.flatten(), variance.flatten()))
        return a * scale + shift
    scale = variance.rsqrt()
    _assign(layer, "weight", per_channel(layer.weight, scale))
    if layer.bias is None:
        mean = torch.zeros_like(mean)
    else:
        _assign(layer, "bias", (layer.bias - mean.flatten()) * scale.flatten())
    return (a - mean) * scale


def _assign(layer: BinaryLayer, name: str, value: Tensor) -> None:
    if parametrize.is_parametrized(layer, name):
        parametrizations: Any = layer.parametrizations
        if not all(hasattr(step, "right_inverse") for step in parametrizations[name]):
            raise InputError(
                f"initialize: the parametrisation of {type(layer).__name__}.{name} has no right_inverse, so it cannot be set; "
                "add one, or initialise before parametrising"
            )
        setattr(layer, name, value)
    elif name in layer._parameters:
        getattr(layer, name).copy_(value)
    else:
        raise InputError(
            f"initialize: the {name} of {type(layer).__name__} is computed by a hook (prune, the old weight_norm), so it "
            "cannot be set; initialise before, or use torch.nn.utils.parametrizations"
        )
