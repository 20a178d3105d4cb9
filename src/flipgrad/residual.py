"""Residual streams: real numbers h that every block adds to, ``h + branch(sign(norm(h) - Z))``.

What goes from block to block is the stream, real-valued; what weights are multiplied with are states ±1 drawn from it. Deep
binary networks train well that way: Liu, Wu, Luo, Yang, Liu, Cheng. Bi-Real Net: Enhancing the Performance of 1-bit CNNs with
Improved Representational Capability and Advanced Training Algorithm. ECCV 2018.

In :class:`flipgrad.Sequential` :class:`flipgrad.PSA` takes discrete derivatives of a unit in all later layers, to the order 2
or 3, see :mod:`flipgrad.jets`. In a graph written by hand blocks, and ``conv(sign(x))`` with :class:`Sign`, have the ordinary
derivative behind the states: there PSA is :class:`flipgrad.ST`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from flipgrad.affine import per_channel, transpose
from flipgrad.connections import Connections, Convolution, FullConnections, WeightKind
from flipgrad.contract import LayerCall
from flipgrad.errors import InputError
from flipgrad.jets import Added, Jets, Pullback
from flipgrad.layers import BinaryLayer
from flipgrad.noise import Noise
from flipgrad.norms import BatchNorm, Norm, SignMap, check_channels, uses_batch
from flipgrad.sampling import Draw

# Where a block changes the stream's shape: averages and copies of its channels, or a learned linear map.
ShortcutKind = Literal["repeat", "project"]


class OfReal(BinaryLayer):
    """A layer that draws states from real numbers as they are: a ``norm`` of these or nothing, noise, and a sign."""

    def affine(self, views: tuple[nn.Module, ...] = (), weight: Tensor | None = None) -> SignMap:
        """The map to the pre-activations, norm included."""
        # Anew each time: a norm may have been replaced, by torch's converters for instance.
        channels = getattr(self.norm, "num_features", 1)
        check_channels(self.norm, f"{type(self).__name__}(norm={self.norm})", channels, nn.BatchNorm1d, nn.BatchNorm2d)
        return SignMap(self.norm, self.channel_dim)

    def plain(self, views: tuple[nn.Module, ...] = (), weight: Tensor | None = None) -> SignMap:
        """The map before the norm."""
        return SignMap(None, self.channel_dim)

    @property
    def channel_dim(self) -> int:
        """The dimension, 1 or -1, of the input that holds its channels."""
        return 1

    @final
    def _call(self, x: Tensor, draw: Draw, binary: bool | None, found: Callable[[bool], None]) -> LayerCall:
        if binary:
            raise InputError(
                f"{type(self).__name__}(x, binary=True): it takes real numbers; states go to fg.BinaryLinear or fg.BinaryConv2d"
            )
        return LayerCall(self, x, False, (), draw)


@final
class Sign(OfReal):
    """Real numbers become states: sign(x - Z), for graphs written by hand and at the end of a residual stream.

    With ``sign = fg.Sign(fg.Logistic(0.3))`` the residual block of an ordinary module is ``x + conv(sign(x))``, with an
    ordinary ``conv``; :func:`flipgrad.use` gives the states the gradient of an estimator. What follows is differentiated as it
    stands, so that PSA is straight-through in ``conv``, unless that is a binary layer: these take the states and flip them.

    Args:
        noise: logistic by default.
        norm: of the input, before the noise: ``nn.BatchNorm1d`` (inputs [B, channels]), ``nn.BatchNorm2d`` ([B, channels,
            height, width]) or :class:`flipgrad.ScaleShift` (either); none by default.

    >>> sign = Sign()
    >>> sign(torch.randn(3, 4)).abs().sum()
    tensor(12.)
    """

    weights = "real"
    weight_noise = None
    weight_scale = None

    def __init__(self, noise: Noise | None = None, norm: Norm | None = None) -> None:
        super().__init__(noise=noise)
        if norm is not None:
            check_channels(norm, f"Sign(norm={norm})", getattr(norm, "num_features", 1), nn.BatchNorm1d, nn.BatchNorm2d)
        self.norm = norm

    def check_weights(self) -> None:
        """There are none."""

    @property
    def mixes_examples(self) -> bool:
        """Whether the norm takes its statistics from the batch."""
        return uses_batch(self.norm)

    def extra_repr(self) -> str:
        return f"noise={self.noise}"


class Residual(OfReal):
    """What :class:`ResidualLinear` and :class:`ResidualConv2d` share.

    ``norm`` is that of the stream before the sign, ``branch`` the connections from the states to what is added to the stream.
    """

    branch: Connections
    shortcut: Shortcut | Projection
    prelu: nn.PReLU | None

    def __init__(
        self, branch: Connections, shortcut: Shortcut | Projection, noise: Noise | None, norm: Norm | None, prelu: bool
    ) -> None:
        super().__init__(noise=noise)
        self.norm = norm
        self.branch = branch
        self.shortcut = shortcut
        self.prelu = nn.PReLU(branch.weight.shape[0]).to(branch.weight) if prelu else None

    @property
    def weights(self) -> WeightKind:  # type: ignore[override]
        """Whether the branch's weights are "real" or "binary"."""
        return self.branch.weights

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The branch's weight, latent if its weights are binary."""
        return self.branch.weight

    @property
    def weight_noise(self) -> Noise | None:  # type: ignore[override]
        """That of the branch's binary weights."""
        return self.branch.weight_noise

    @property
    def weight_clip(self) -> float | None:
        """That of the branch's binary weights."""
        return self.branch.weight_clip

    @property
    def weight_scale(self) -> nn.Parameter | None:  # type: ignore[override]
        """That of the branch's binary weights, where these have no norm."""
        return self.branch.weight_scale

    def check_weights(self) -> None:
        """Refuse options of the weights that do not go together."""
        self.branch.check_weights()

    def effective_weight(self) -> Tensor:
        """That of the branch."""
        return self.branch.effective_weight()

    @property
    def mixes_examples(self) -> bool:
        """Whether a norm takes its statistics from the batch, so that an example depends on the others."""
        return uses_batch(self.norm) or uses_batch(self.branch.norm)

    def result(self, call: LayerCall, states: Tensor) -> Tensor:
        """The stream behind the block, of the ``states`` drawn from the stream before it; ``call.after`` are its jets."""
        affine = self.branch.before_scale(call.binary_weights())
        sums = affine(states)
        added, scale = (call.branch_rule or Connections.scaled)(self.branch, sums)
        kept = self.shortcut(call.x)
        if kept.shape != added.shape:
            raise InputError(
                f"{type(self).__name__}: the branch gives {list(added.shape)} and the shortcut {list(kept.shape)} for a stream "
                f"{list(call.x.shape)}; choose padding and stride so that both agree (an odd kernel with padding = dilation * "
                "(kernel_size - 1) / 2, and sizes that the stride divides)"
            )
        stream: Tensor = kept + added
        if call.jets is not None and call.order > 1:
            jets = self.shortcut.jets(call.jets, call.x, kept.shape)
            jets = jets.added(states, affine, scale, call.order, kept.shape)
            weight = affine.weight.detach() if scale is None else per_channel(affine.weight.detach(), scale)
            seen = replace(affine, weight=weight, bias=None, binary_weights=False)
            call.after = replace(jets, trail=(*jets.trail, Added(states, seen, self.shortcut.pullback(call.x))))
        if self.prelu is None:
            return stream
        # Behind it only ordinary derivatives are known.
        call.after = None if call.after is None else Jets()
        # It has its channels in dimension 1.
        result: Tensor = self.prelu(stream.transpose(1, self.channel_dim)).transpose(1, self.channel_dim)
        return result

    def extra_repr(self) -> str:
        return f"noise={self.noise}"


def order_for(branch: Connections, noise: Noise, tolerance: float) -> int:
    r"""The order, 2 or 3, of discrete derivatives of units that a ``branch`` adds to a stream, for a relative error.

    The terms of order 3 have the size :math:`\tfrac23 \sqrt{\overline{w^6} / \overline{w^2}}` times that of the ratio
    :math:`F^{(3)} / F^{(1)}` at usual pre-activations, relative to those of order 1: all have random signs. By batch
    normalisation what is added has a standard deviation of gamma, so that there w is the weight over its own norm, times gamma.
    """
    weight = branch.plain().weight.detach().double().flatten(1)
    scale: Tensor | None = branch.weight_scale
    if isinstance(branch.norm, BatchNorm):
        weight = weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-300)
        scale = branch.norm.weight
    elif branch.norm is not None:
        scale = branch.norm.scale
    squares = (weight if scale is None else per_channel(weight, scale.detach().double())).square()
    third = 2 / 3 * (squares.pow(3).mean() / squares.mean().clamp(min=1e-300)).sqrt()
    a = torch.linspace(-2, 2, 41, dtype=torch.float64)
    ratio = noise.pdf_derivative(a, 2).square().mean().sqrt() / noise.pdf(a).square().mean().sqrt()
    return 2 if float(third * ratio) <= tolerance else 3


class Shortcut(nn.Module):
    """The stream past a block: averaged over windows of the block's ``stride``, its channels repeated ``times``."""

    def __init__(self, times: int, stride: tuple[int, int], channel_dim: int) -> None:
        super().__init__()
        self.times, self.stride, self.channel_dim = times, stride, channel_dim

    def forward(self, x: Tensor) -> Tensor:
        if self.stride != (1, 1):
            x = functional.avg_pool2d(x, self.stride)
        return x if self.times == 1 else torch.cat([x] * self.times, self.channel_dim)

    def jets(self, jets: Jets, x: Tensor, shape: torch.Size) -> Jets:
        """Those of the stream past the block, of that ``shape``."""
        if self.times == 1 and self.stride == (1, 1):
            return jets
        like = x.detach()
        return jets.through(shape, lambda grad, order: self._back(grad, order, like))

    def pullback(self, x: Tensor) -> Pullback:
        """The way back of a gradient from past the block to a stream like ``x``."""
        like = x.detach()[:1]
        return lambda grad: self._back(grad, 1, like.expand(len(grad), *like.shape[1:]))

    def _back(self, grad: Tensor, order: int, like: Tensor) -> Tensor:
        """The sums over what each entry of the stream goes to, with its coefficients to the power ``order``."""
        if self.times > 1:
            grad = grad.unflatten(self.channel_dim, (self.times, -1)).sum(self.channel_dim % grad.dim())
        if self.stride == (1, 1):
            return grad
        divisor = (self.stride[0] * self.stride[1]) ** order
        result: Tensor = torch.ops.aten.avg_pool2d_backward(
            grad.contiguous(), like, self.stride, self.stride, (0, 0), False, True, divisor
        )
        return result

    def extra_repr(self) -> str:
        return f"times={self.times}, stride={self.stride}"


class Projection(nn.Module):
    """The stream past a block, averaged over windows of its ``stride``, then through a learned ``linear`` map of its channels.

    Beyond that map flips of earlier blocks have ordinary derivatives only, as powers of a sum do not separate.
    """

    def __init__(self, linear: nn.Linear | nn.Conv2d, stride: tuple[int, int]) -> None:
        super().__init__()
        self.linear, self.stride = linear, stride

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x if self.stride == (1, 1) else functional.avg_pool2d(x, self.stride))
        return result

    def jets(self, jets: Jets, x: Tensor, shape: torch.Size) -> Jets:
        """Only the trail goes on: the loss of a linear head is still known at every flip."""
        return Jets(trail=jets.trail)

    def pullback(self, x: Tensor) -> Pullback:
        """The way back of a gradient from past the block to a stream like ``x``."""
        like = x.detach()[:1]
        return lambda grad: transpose(self, like.expand(len(grad), *like.shape[1:]), grad)


@final
class ResidualLinear(Residual):
    """A fully connected residual block: the stream [..., n], plus ``nn.Linear`` of states drawn from it.

    ``h + branch_norm(linear(sign(norm(h) - Z)))``. For :class:`flipgrad.Sequential`, behind real-valued modules or other
    blocks, and for graphs written by hand.

    Args:
        in_features: of the stream that comes in.
        out_features: of the stream that goes out.
        bias: whether the linear map has one; not needed with a ``branch_norm``.
        device, dtype: of the parameters.
        noise: of the units, logistic by default.
        norm: of the stream before the sign, ``nn.BatchNorm1d(in_features)`` or :class:`flipgrad.ScaleShift`; none by default.
        branch_norm: of what is added to the stream, likewise.
        weights, weight_noise, weight_clip: of the linear map, as for :class:`flipgrad.BinaryLinear`.
        shortcut: where the stream changes its size, "repeat" copies its channels (so ``out_features`` is a multiple of
            ``in_features``), "project" learns a linear map, behind which discrete derivatives are ordinary ones.
        prelu: whether a ``nn.PReLU`` of every channel follows on the stream. Behind it discrete derivatives are ordinary ones.

    >>> import flipgrad as fg
    >>> blocks = [ResidualLinear(8, 8, norm=fg.ScaleShift(8)) for _ in range(3)]
    >>> net = fg.Sequential(nn.Linear(2, 8), *blocks, head=nn.Linear(8, 3))
    >>> net(torch.randn(5, 2), fg.CrossEntropy(torch.zeros(5, dtype=torch.long))).mean().backward()
    """

    input_dims = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noise | None = None,
        norm: Norm | None = None,
        branch_norm: Norm | None = None,
        weights: WeightKind = "real",
        weight_noise: Noise | None = None,
        weight_clip: float | None = None,
        shortcut: ShortcutKind = "repeat",
        prelu: bool = False,
    ) -> None:
        options: dict[str, Any] = {"weights": weights, "weight_noise": weight_noise, "weight_clip": weight_clip}
        branch = FullConnections(in_features, out_features, bias, device, dtype, norm=branch_norm, **options)
        past: Shortcut | Projection
        if _projects(shortcut, "ResidualLinear", in_features, out_features):
            past = Projection(nn.Linear(in_features, out_features, False, device, dtype), (1, 1))
        else:
            past = Shortcut(out_features // in_features, (1, 1), -1)
        check_channels(norm, f"ResidualLinear(norm={norm})", in_features, nn.BatchNorm1d)
        super().__init__(branch, past, noise, norm, prelu)

    @property
    def channel_dim(self) -> int:
        return -1


@final
class ResidualConv2d(Residual):
    """A convolutional residual block: the stream [B, C, H, W], plus ``nn.Conv2d`` of states drawn from it.

    ``h + branch_norm(conv(sign(norm(h) - Z)))``, as :class:`ResidualLinear`. With a ``stride`` the stream is averaged over
    windows of that size, which must divide its height and width.

    Args:
        in_channels, out_channels: of the stream that comes in, and of the one that goes out.
        kernel_size, stride, padding, dilation, groups, bias, device, dtype: of the convolution, as for ``nn.Conv2d``; by
            default the padding keeps the size of the images.
        padding_value: as for :class:`flipgrad.BinaryConv2d`.
        noise, norm, branch_norm, weights, weight_noise, weight_clip, shortcut, prelu: as for :class:`ResidualLinear`, with
            ``nn.BatchNorm2d``; a projecting shortcut is a convolution with kernel 1.

    >>> ResidualConv2d(4, 8, stride=2)(torch.randn(2, 4, 6, 6)).shape
    torch.Size([2, 8, 3, 3])
    """

    input_dims = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | None = None,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noise | None = None,
        norm: Norm | None = None,
        branch_norm: Norm | None = None,
        padding_value: float = 0,
        weights: WeightKind = "real",
        weight_noise: Noise | None = None,
        weight_clip: float | None = None,
        shortcut: ShortcutKind = "repeat",
        prelu: bool = False,
    ) -> None:
        kernel, step, apart = (_pair(value) for value in (kernel_size, stride, dilation))
        if padding is None:
            padding = (apart[0] * (kernel[0] - 1) // 2, apart[1] * (kernel[1] - 1) // 2)
        arguments = (in_channels, out_channels, kernel, step, padding, apart, groups, bias, "zeros", device, dtype)
        options: dict[str, Any] = {"weights": weights, "weight_noise": weight_noise, "weight_clip": weight_clip}
        branch = Convolution(*arguments, norm=branch_norm, padding_value=padding_value, **options)
        past: Shortcut | Projection
        if _projects(shortcut, "ResidualConv2d", in_channels, out_channels):
            past = Projection(nn.Conv2d(in_channels, out_channels, 1, bias=False, device=device, dtype=dtype), step)
        else:
            past = Shortcut(out_channels // in_channels, step, 1)
        check_channels(norm, f"ResidualConv2d(norm={norm})", in_channels, nn.BatchNorm2d)
        super().__init__(branch, past, noise, norm, prelu)


def _projects(shortcut: str, name: str, channels: int, wanted: int) -> bool:
    """Whether the shortcut is a projection; refuses one that cannot be."""
    if shortcut not in get_args(ShortcutKind):
        raise InputError(f"{name}(shortcut={shortcut!r}): choose 'repeat' or 'project'")
    if shortcut == "repeat" and wanted % channels:
        raise InputError(
            f"{name}: a stream of {channels} channels does not become one of {wanted} by repeating them; give a multiple of "
            f"{channels}, or shortcut='project'"
        )
    return shortcut == "project"


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second
