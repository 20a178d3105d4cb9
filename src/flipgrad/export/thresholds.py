r"""States of binary weights by thresholds on their sums, for runtimes that rewrite what they run.

A layer with binary weights gives :math:`\mathrm{sign}(s h + t - Z)` of sums h. Of states as inputs these are whole numbers, and
often exactly :math:`(Z - t) / s`: 0, say, where there is neither noise nor a bias. There the sign depends on rounding, and
rounding is another once a runtime has multiplied the scale s into the weights, as onnxruntime does. Sums of ±1 are exact: the
state is +1 where :math:`h \ge (Z - t) / s`. The threshold is chosen so that at every whole number, and at every multiple of
1/64 (averages of states), the states are those of the layer.
"""

from copy import deepcopy
from typing import final

import torch
from torch import Tensor, nn

from flipgrad.affine import along, per_channel
from flipgrad.export.plain import FixedNet, PlainLayer

# Parts of 1 that averages of states are multiples of, most often.
PARTS = (64, 1)


@final
class ThresholdLayer(nn.Module):
    """A :class:`PlainLayer` with a scale and noise that is a constant: +1 where sums, those of ``map``, reach ``threshold``.

    Where the scale is negative the coefficients have the other sign.
    """

    threshold: Tensor

    def __init__(self, layer: PlainLayer) -> None:
        super().__init__()
        threshold, signs = _threshold(layer)
        self.map = deepcopy(layer.map)
        self.map.scale = self.map.shift = None
        self.map.coefficients = per_channel(self.map.coefficients, signs)
        self.register_buffer("threshold", threshold)

    def forward(self, x: Tensor, *, binary: bool | None = None) -> Tensor:
        """The states; see :class:`PlainLayer`."""
        h: Tensor = self.map(x)
        return torch.where(h >= self.threshold, 1.0, -1.0).to(h.dtype)


@torch.no_grad()
def thresholded(module: FixedNet) -> FixedNet:
    """The same function, with thresholds in all layers of binary weights whose noise is a constant."""
    layers = [part for part in module.modules() if isinstance(part, PlainLayer) and _has_threshold(part)]
    copied: FixedNet = deepcopy(module, {id(layer): ThresholdLayer(layer) for layer in layers})
    return copied


def _has_threshold(layer: PlainLayer) -> bool:
    known = layer.draws is None and layer.map.draws is None
    return known and layer.map.connections is not None and layer.map.scale is not None


def _threshold(layer: PlainLayer) -> tuple[Tensor, Tensor]:
    """The threshold, in a shape that broadcasts to the sums, and the signs of the scales [out]."""
    part = layer.map
    if part.scale is None:
        raise RuntimeError("real weights have no sums that are whole numbers")
    dims = 2 if part.channel_dim == -1 else 4
    # [1, out] or [1, out, 1, 1].
    scale = along(part.scale, dims, part.channel_dim)[None]
    signs = torch.where(scale < 0, -1.0, 1.0).to(scale.dtype)

    def positive(sums: Tensor) -> Tensor:
        return layer.less_noise(part.scaled(signs * sums)) >= 0

    # What is to be compared with the sums, to rounding.
    zero = torch.zeros_like(scale)
    least = (-layer.less_noise(part.scaled(zero)).double() / scale.abs().double()).to(scale.dtype)
    for parts in PARTS:
        at = (least * parts).round() / parts
        up = positive(at)
        least = torch.where(up & (least > at), at, least)
        least = torch.where(~up & (least <= at), torch.nextafter(at, torch.full_like(at, torch.inf)), least)
    # Without a scale nothing depends on the sums.
    always = torch.where(positive(zero), -torch.inf, torch.inf).to(scale.dtype)
    return torch.where(scale == 0, always, least), signs.flatten()
