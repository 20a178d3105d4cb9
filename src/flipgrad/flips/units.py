"""What is computed of the units of a layer one by one: sums of two parts, and posterior means; compiled where that can be."""

import torch
from torch import Tensor

from flipgrad.flips.ordinary import Geometry, has_channels_last, input_gradient
from flipgrad.guards import cannot_look
from flipgrad.native import library


def joined(once: Tensor, twice: Tensor, x: Tensor) -> Tensor:
    """The sums ``x (once + x twice)``; ``twice`` may be written over. A zero in the place of a unit gets 0."""
    if not (_are_compiled(once, twice, x) and once.shape == twice.shape == x.shape):
        return torch.addcmul(once, twice, x).mul_(x)
    library.call("join", torch.float32, once, twice, x, twice, count=x.numel())
    return twice


def spread(
    total: Tensor, kernel: Tensor, share: Tensor, sums: Tensor, x: Tensor, geometry: Geometry, *, of_ratio: bool
) -> Tensor:
    """The sums ``x (spread + x sums)`` of a convolution's units, or of a log ratio ``x (sums + x spread)``.

    ``sums`` may be written over. A zero in the place of a unit gets 0.

    Args:
        total: what is to be spread over the inputs that a place of the output sees, [B, groups, H', W'].
        kernel: how it is spread over the places of the kernel, [groups, kh, kw].
        share: and over the input channels of a group, [groups, channels].
        sums: of every unit, shaped like ``x``.
        x: the units' states, [B, C, H, W].
        geometry: of the convolution.
        of_ratio: whether it is for a log ratio.
    """
    if not (_are_compiled(sums, x) and library.takes(total, kernel, share)):
        shared = input_gradient(total, kernel.unsqueeze(1), x[:, : geometry.groups], geometry)
        parts = (shared.unsqueeze(2) * share[:, :, None, None]).flatten(1, 2)
        once, twice = (sums, parts) if of_ratio else (parts, sums)
        return torch.addcmul(once, twice, x).mul_(x)
    if geometry.groups > 1:
        sums, x = sums.contiguous(), x.contiguous()
    fields = {
        "batch": len(x), "in_channels": share.shape[1], "height": x.shape[2], "width": x.shape[3],
        "out_height": total.shape[2], "out_width": total.shape[3], "kernel": tuple(kernel.shape[1:]),
    }  # fmt: skip
    how = {"of_ratio": of_ratio, "channels_last": has_channels_last(x)}
    library.call("spread", torch.float32, total, kernel, share, x, sums, **how, **fields, **geometry._asdict())
    return sums


def posterior_means(x: Tensor, log_odds: Tensor, ratio: Tensor) -> Tensor:
    """The means of units given the states of the layer behind them.

    Args:
        x: the units' states.
        log_odds: of their being +1, before the layer's states are known.
        ratio: the log of how much likelier the layer's states are with the unit flipped.
    """
    if _are_compiled(x, log_odds, ratio) and x.shape == log_odds.shape == ratio.shape:
        means = torch.empty_like(x)
        library.call("posterior", torch.float32, x, log_odds, ratio, means, count=x.numel())
        return means
    # Torch computes a sigmoid three times as fast as tanh.
    return torch.sigmoid(torch.addcmul(ratio, x, log_odds, value=-1).neg_()).mul_(2).sub_(1).mul_(x)


def _are_compiled(*tensors: Tensor) -> bool:
    return library.takes_alike(*tensors) and not cannot_look()
