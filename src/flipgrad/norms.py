r"""Normalisation of pre-activations before the sign: :math:`a = s \odot (A x + b) + t`, one s and t per output channel.

A flip of an input unit changes a by :math:`2 s_j A_{ji}`, so the scale belongs to the weight that flips see.

Where s and t do not depend on the states (:class:`ScaleShift`, or ``BatchNorm`` in eval mode, with
:math:`s = \gamma / \sqrt{v + \epsilon}` and :math:`t = \beta - s \mu` of the running mean and variance) they are folded into
weight and bias: what comes out is an ordinary affine map, and every estimator is what it is without a norm.

``BatchNorm`` in training mode takes mean and variance from the batch: see :class:`BatchNormMap`.

Layers are initialised by norms too: :func:`whiten_layers` sets s and t so that pre-activations have mean 0 and variance 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flipgrad.affine import Affine, AffineMap, Signal, along, over_channels, per_channel, transpose
from flipgrad.binary_weights import BinaryWeightMap
from flipgrad.contract import LayerCall, Network
from flipgrad.errors import InputError
from flipgrad.flips.averaging import Averaging
from flipgrad.guards import without_derivative
from flipgrad.noise import Noise
from flipgrad.sampling import Draw


@final
class ScaleShift(nn.Module):
    r"""A learned scale and shift of every channel, :math:`s_c h_c + t_c`: the ``norm`` of a binary layer without statistics.

    It treats examples alone, in training as in eval mode, and ``net.initialize`` sets it so that the layer's pre-activations
    have mean 0 and variance 1 on a batch.

    Args:
        channels: output channels of the layer.
        device: of the parameters.
        dtype: of the parameters.

    >>> import flipgrad as fg
    >>> layer = fg.BinaryLinear(4, 8, bias=False, norm=fg.ScaleShift(8))
    """

    def __init__(self, channels: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if channels < 1:
            raise InputError(f"ScaleShift({channels}): give the layer's number of output channels, at least 1")
        self.num_features = channels
        self.scale = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, channels, ...], scaled and shifted."""
        shape = (-1, *[1] * (x.dim() - 2))
        return x * self.scale.view(shape) + self.shift.view(shape)

    def extra_repr(self) -> str:
        return f"{self.num_features}"


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d
Norm = BatchNorm | ScaleShift


def check_norm(norm: nn.Module | None, affine: Affine) -> None:
    """Refuse what does not normalise the output channels of a layer with this map."""
    layer, kind = ("BinaryLinear", nn.BatchNorm1d) if affine.geometry is None else ("BinaryConv2d", nn.BatchNorm2d)
    check_channels(norm, f"{layer}(norm={norm})", affine.weight.shape[0], kind)


def check_channels(norm: nn.Module | None, where: str, channels: int, *kinds: type[BatchNorm]) -> None:
    """Refuse a ``norm``, given ``where``, that is neither of ``kinds`` nor ``ScaleShift``, or is for other ``channels``."""
    if norm is None:
        return
    # Subclasses may do anything in their forward, which is not what runs.
    if not (type(norm) in kinds or isinstance(norm, ScaleShift)):
        known = " or ".join([f"nn.{kind.__name__}({channels})" for kind in kinds])
        raise InputError(
            f"{where}: a norm must scale and shift every output channel, so that it folds into the weight; use "
            f"{known} or fg.ScaleShift({channels})"
        )
    if norm.num_features != channels:
        raise InputError(
            f"{where}: the norm is for {norm.num_features} channels, the layer has {channels}; use "
            f"{type(norm).__name__}({channels})"
        )


def uses_batch(norm: Norm | None) -> bool:
    """Whether the norm takes statistics from the batch at hand, so that its examples depend on each other."""
    return isinstance(norm, BatchNorm) and (norm.training or norm.running_mean is None)


def normalised(affine: Affine, norm: Norm | None, weight_scale: Tensor | None = None) -> AffineMap:
    """The map to a layer's pre-activations after the ``norm``; binary weights without one have a ``weight_scale`` [out]."""
    if isinstance(norm, BatchNorm) and uses_batch(norm):
        return BatchNormMap(affine, norm, norm.weight, norm.bias)
    if norm is not None:
        scale, shift = scale_and_shift(norm)
        bias: Tensor | None = shift if affine.bias is None else torch.addcmul(shift, affine.bias, scale)
    elif not affine.binary_weights:
        return affine
    elif weight_scale is None:
        raise InputError(
            "binary weights need a scale for every output channel, and this layer has neither a norm nor a weight_scale: its "
            "norm was taken away; give it one again, e.g. layer.norm = fg.ScaleShift(channels), or make the layer without norm="
        )
    else:
        scale, bias = weight_scale, affine.bias
    if affine.binary_weights:
        return BinaryWeightMap(replace(affine, bias=None), scale, bias)
    return replace(affine, weight=per_channel(affine.weight, scale), bias=bias)


class Statistics(NamedTuple):
    """What a batch was normalised with: its map's values before that, and every channel's mean and 1 / standard deviation."""

    h: Tensor
    mean: Tensor
    inverse: Tensor


@final
@dataclass
class BatchNormMap(AffineMap):
    r"""A map followed by batch normalisation with the statistics of the batch at hand: ``BatchNorm`` in training mode.

    Ioffe, Szegedy. Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift. ICML 2015.
    With :math:`h = A x + b`, and the mean :math:`\mu` and the variance :math:`v` of every channel of h over the batch (and
    space),

    .. math:: a = s \odot (h - \mu) + \beta, \quad s = \gamma / \sqrt{v + \epsilon}.

    In the parameters and in real-valued inputs the derivative is the ordinary one, also through the statistics. A flip of one
    unit of one example acts in two ways. It moves that example's own pre-activations, by :math:`2 s_j A_{ji}`, which is large:
    that part is the flip product with the weight :math:`s \odot A`, the statistics being held. And it moves the statistics, by
    O(1/N) where a channel has N pre-activations in the batch. That moves each of the N by very little, but all of them
    together as much as the first part does, so it must not be left out. The N changes being small, the loss is linear in them;
    the statistics are not in x, but have discrete derivatives in closed form. With u' the gradient in the next states,

    .. math::
        u_i = \sum_j u'_j\, D_i m_j \big|_{\mu, v} + \sum_c
        \Big(D_i \mu_c \frac{\partial}{\partial \mu_c} + D_i v_c \frac{\partial}{\partial v_c}\Big) \sum_j u'_j\, m_j ,

    .. math::
        D_i \mu_c = \frac1N \sum_{j \in c} A_{ji}, \quad
        D_i v_c = \frac2N \sum_{j \in c} A_{ji} (h_j - \mu_c - A_{ji} x_i) ,

    the discrete derivative of the whole batch's loss up to O(1/N). (The ordinary derivative of v lacks the last term.)

    The statistics are taken, and the running ones updated, in the first evaluation of a map; later ones of the same map use
    the same statistics.

    ``inner`` is the map before the ``norm``; ``gamma`` and ``beta`` are its parameters as they were when the map was made.
    """

    inner: Affine
    norm: BatchNorm
    gamma: Tensor | None
    beta: Tensor | None
    _first: Statistics | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        h, mean, inverse = self._statistics()
        return *self.inner.tensors, self.gamma, self.beta, h.detach(), mean, inverse

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> BatchNormMap:
        weight, bias, gamma, beta, *statistics = tensors
        return BatchNormMap(self.inner.with_tensors((weight, bias)), self.norm, gamma, beta, Statistics(*statistics))  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self._normalise(h) if self._first is None else self._apply(self._first, h)

    def gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        if back.share is not None:
            raise self._posterior_unknown()
        slopes = back.slopes()
        h, mean, inverse = self._statistics()
        rows = _rows(self.norm, h)
        if not rows.numel():
            grad_h, grad_gamma, grad_beta = torch.zeros_like(h), torch.zeros_like(mean), torch.zeros_like(mean)
        else:
            arguments = (
                _rows(self.norm, slopes).contiguous(),
                rows,
                self.gamma,
                None,
                None,
                mean,
                inverse,
                True,
                self.norm.eps,
            )
            grad_h, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(*arguments, [True, True, True])
            grad_h = grad_h.view_as(h)
        through_statistics = grad_h - slopes * self._over_channels(self._scale(inverse))
        grad_x = None
        if of_x and back.flips_units:
            grad_x = self.flip_product(back.x, back.a, back.grad, back.noise, back.tolerance)
            grad_x = grad_x + self._through_statistics(back.x, through_statistics, grad_gamma)
        elif of_x:
            grad_x = self.inner.transposed(grad_h, back.x)
        if not of_parameters:
            return grad_x, *[None] * 7
        held = self._held()
        if isinstance(held, BinaryWeightMap) and back.flips:
            grad_weight = held.weight_gradient(back, slopes, through_statistics)
        else:
            grad_weight = self.inner.weight_gradient(back.inputs, grad_h)
        learned = (None if self.gamma is None else grad_gamma, None if self.beta is None else grad_beta)
        return grad_x, grad_weight, self.inner.bias_gradient(grad_h), *learned, None, None, None

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        return self._held().flip_product(x, a, grad, noise, tolerance)

    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        """That of the flipped unit's own example, the statistics being held: an approximation."""
        return self._held().log_ratio(x, a, states, noise, tolerance)

    def averaging(self, x: Tensor, a: Tensor, noise: Noise, log_odds: Tensor, tolerance: float) -> Averaging | Tensor | None:
        return self._held().averaging(x, a, noise, log_odds, tolerance)

    def slope_product(self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        raise self._posterior_unknown()

    def variance(self, v: Tensor) -> Tensor:
        first = self._statistics()
        # Anew from h: here the derivative through the statistics is wanted too.
        channels = _rows(self.norm, first.h).transpose(0, 1).flatten(1)
        inverse = torch.rsqrt(channels.var(1, correction=0) + self.norm.eps)
        return self.inner.variance(v) * self._over_channels(self._scale(inverse).square())

    def _posterior_unknown(self) -> InputError:
        return InputError(
            f"{self.norm} takes its statistics from the batch, so that a unit moves the pre-activations of all examples, and "
            "its posterior is not known exactly; use inputs='posterior', net.eval(), or norm=fg.ScaleShift(channels)"
        )

    def _through_statistics(self, x: Tensor, grad: Tensor, grad_gamma: Tensor) -> Tensor:
        """The part of the discrete gradient in the states ``x`` that goes through the statistics, as far as ``grad`` tells."""
        h, _, inverse = self._statistics()
        if not h.numel():
            return torch.zeros_like(x)
        scale = self._scale(inverse)
        # Under autocast states have half the digits.
        x = x.to(self.inner.weight.dtype)
        ordinary = self.inner.transposed(grad, x)
        # 2/N times the derivative in every channel's variance, the same for all examples.
        factor = -scale * inverse * grad_gamma * (len(inverse) / h.numel())
        squares = transpose(self.inner.variance, x[:1], self._over_channels(factor).expand_as(h[:1]))
        return torch.addcmul(ordinary, x, squares, value=-1)

    def _held(self) -> Affine | BinaryWeightMap:
        """The map of one example, the statistics being held, as far as flips see it."""
        scale = self._scale(self._statistics().inverse)
        if self.inner.binary_weights:
            return BinaryWeightMap(replace(self.inner, bias=None), scale, None)
        return replace(self.inner, weight=per_channel(self.inner.weight, scale))

    def _normalise(self, h: Tensor) -> Tensor:
        """Normalise ``h`` with its own statistics, keep these, and update the running ones as the module would."""
        norm, rows = self.norm, _rows(self.norm, h)
        if not rows.numel():
            # Nothing has no statistics, and needs none.
            self._first = Statistics(h, rows.new_zeros(rows.shape[1]), rows.new_ones(rows.shape[1]))
            return self._apply(self._first, h)
        a, mean, inverse = _by_batch(norm, rows, self.gamma, self.beta)
        self._first = Statistics(h, mean.detach(), inverse.detach())
        return a.view_as(h)

    def _apply(self, statistics: Statistics, h: Tensor) -> Tensor:
        scale, shift = _normalisation(self.gamma, self.beta, statistics.mean, statistics.inverse)
        return h * self._over_channels(scale) + self._over_channels(shift)

    def _scale(self, inverse: Tensor) -> Tensor:
        return inverse if self.gamma is None else self.gamma * inverse

    def _over_channels(self, values: Tensor) -> Tensor:
        """``values`` [channels] in a shape that broadcasts over pre-activations."""
        return over_channels(values, self.inner)

    def _statistics(self) -> Statistics:
        if self._first is None:
            raise RuntimeError("the statistics of a batch are known once its pre-activations were evaluated")
        return self._first


def scale_and_shift(norm: Norm) -> tuple[Tensor, Tensor]:
    """The scale and the shift [channels] of a norm that does not look at the batch; of ``BatchNorm``, those of eval mode."""
    if isinstance(norm, ScaleShift):
        return norm.scale, norm.shift
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise InputError(f"{norm} keeps no running statistics, so its scale is that of a batch; use track_running_stats=True")
    return _normalisation(norm.weight, norm.bias, mean, torch.rsqrt(variance + norm.eps))


def _normalisation(gamma: Tensor | None, beta: Tensor | None, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the shift [channels] of a normalisation by a mean and 1 / standard deviation, then by gamma and beta."""
    scale = inverse if gamma is None else gamma * inverse
    return scale, -mean * scale if beta is None else beta - mean * scale


def _momentum(norm: BatchNorm) -> float:
    """The weight of this batch in the running statistics, which it counts: without a momentum they are plain averages."""
    if not norm.training or norm.num_batches_tracked is None:
        return 0.0
    norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _by_batch(norm: BatchNorm, rows: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``rows`` [N, channels, ...] by their own mean and 1 / standard deviation, and these; running ones are updated."""
    if rows.numel() == rows.shape[1]:
        raise InputError(
            f"{norm} in training mode: pre-activations {list(rows.shape)} have one value per channel and no variance; use "
            "more examples, or net.eval()"
        )
    running = (norm.running_mean, norm.running_var)
    result: tuple[Tensor, Tensor, Tensor] = torch.native_batch_norm(
        rows, gamma, beta, *running, True, _momentum(norm), norm.eps
    )
    return result


def normalise(norm: Norm | None, h: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None]:
    """What a ``norm`` makes of ``h``, whose channels are in dimension 1 or -1, and its scale of every channel.

    Differentiable in the ordinary way, also through the statistics of a batch; the scale has no gradient.
    """
    if norm is None:
        return h, None
    if isinstance(norm, BatchNorm) and uses_batch(norm) and h.numel():
        a, _, inverse = _by_batch(norm, _rows(norm, h), norm.weight, norm.bias)
        return a.view_as(h), (inverse if norm.weight is None else norm.weight * inverse).detach()
    scale, shift = scale_and_shift(norm)
    wide, offset = (along(t, h.dim(), channel_dim) for t in (scale, shift))
    return torch.addcmul(offset, h, wide), scale.detach()


@final
@dataclass
class SignMap(AffineMap):
    """The map of a layer without weights to its pre-activations: a ``norm`` of its real-valued input, or that as it is.

    There are no units to flip in the input, so that nobody asks for sums over flips. ``channel_dim`` is 1 or -1;
    ``scale`` is that of the norm in the last evaluation, of every channel, and None without a norm.
    """

    norm: Norm | None
    channel_dim: int
    scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return ()

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> SignMap:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        a, self.scale = normalise(self.norm, x, self.channel_dim)
        return a

    def gradients(self, back: Signal, *, of_x: bool, of_parameters: bool) -> tuple[Tensor | None, ...]:
        raise self._no_units()

    def flip_product(self, x: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        raise self._no_units()

    def log_ratio(self, x: Tensor, a: Tensor, states: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        raise self._no_units()

    def slope_product(self, x: Tensor, share: Tensor, a: Tensor, grad: Tensor, noise: Noise, tolerance: float = 0.0) -> Tensor:
        raise self._no_units()

    def variance(self, v: Tensor) -> Tensor:
        raise self._no_units()

    def _no_units(self) -> RuntimeError:
        return RuntimeError("the input of a sign is real-valued: it has an ordinary derivative, and no units to flip")


def _rows(norm: BatchNorm, h: Tensor) -> Tensor:
    """Pre-activations with their channels in dimension 1."""
    return h if isinstance(norm, nn.BatchNorm2d) else h.reshape(-1, h.shape[-1])


def whiten_layers(net: Network, batch: Tensor, draw: Draw, *, moments: bool) -> None:
    """Whiten every layer in turn, by its norm if it has one, else by its weight and bias; see ``Sequential.initialize``."""

    def visit(call: LayerCall) -> Tensor:
        if moments and call.check is not None:
            call.check(True)
        with torch.no_grad():
            # Statistics are those before the norm.
            affine = call.affine if call.layer.norm is None else call.before_norm
            a = affine(call.x)
            uncertain = moments and call.binary
            variance = affine.variance(1 - call.x.square()) if uncertain else torch.zeros_like(a)
            a = _rescale(call.layer, a, variance)
            call.branch_rule = _whitened_branch
            states = call.noise.mean_sign(a) if moments else call.sample(a)
        return without_derivative(a.requires_grad_(), states) if moments else states

    # In a graph written by hand, autograd's record tells which inputs have means and variances.
    with torch.set_grad_enabled(moments):
        net.run(net.front(batch), visit, draw)


@torch.no_grad()
def _whitened_branch(branch: Any, sums: Tensor) -> tuple[Tensor, None]:
    """What connections to a stream make of their sums, whitened."""
    return _rescale(branch, sums, torch.zeros_like(sums)), None


def _rescale(layer: Any, a: Tensor, within: Tensor) -> Tensor:
    """Whiten a layer's pre-activations, of means ``a`` and variances ``within``, over the batch; returns the new means."""
    channel, norm = layer.plain().channel_dim % a.dim(), layer.norm
    others = [dim for dim in range(a.dim()) if dim != channel]
    if a.numel() < 2 * a.shape[channel]:
        raise InputError(f"initialize: pre-activations {list(a.shape)} have no variance; use a batch of at least two examples")
    between, mean = torch.var_mean(a, others, correction=0, keepdim=True)
    variance = between + within.mean(others, keepdim=True)
    # A channel is constant if it varies no more than by the rounding of the pre-activations.
    rounding = 4 * torch.finfo(a.dtype).eps * a.abs().max()
    variance = torch.where(variance > rounding**2, variance, 1)
    if norm is not None:
        scale, shift = (t.view_as(mean) for t in _set_to_whiten(norm, mean.flatten(), variance.flatten()))
        return a * scale + shift
    if isinstance(layer.plain(), SignMap):
        return a
    scale = variance.rsqrt()
    if layer.weights == "binary":
        layer.weight_scale.mul_(scale.flatten())
    else:
        _assign(layer, "weight", per_channel(layer.weight, scale))
    if layer.bias is None:
        mean = torch.zeros_like(mean)
    else:
        _assign(layer, "bias", (layer.bias - mean.flatten()) * scale.flatten())
    return (a - mean) * scale


def _set_to_whiten(norm: Norm, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Make a ``norm`` whiten channels of that ``mean`` and ``variance`` [channels]; the scale and the shift that it then has.

    :class:`ScaleShift` takes the scale and the shift for its own; ``BatchNorm`` takes the statistics for its running ones,
    and keeps its parameters.
    """
    if isinstance(norm, ScaleShift):
        norm.scale.copy_(variance.rsqrt())
        norm.shift.copy_(-mean * norm.scale)
        return norm.scale, norm.shift
    if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.num_batches_tracked.fill_(1)
    return _normalisation(norm.weight, norm.bias, mean, torch.rsqrt(variance + norm.eps))


def _assign(layer: Any, name: str, value: Tensor) -> None:
    if parametrize.is_parametrized(layer, name):
        if not all(hasattr(step, "right_inverse") for step in layer.parametrizations[name]):
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
