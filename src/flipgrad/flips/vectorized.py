r"""Sums over flips in vectorised torch operations, exact for every noise, in chunks of bounded memory.

Each term, which depends on :math:`a_j` and :math:`a_j - s` with :math:`s = 2 A_{ji} x_i`, is formed, at most
:data:`TERMS_AT_ONCE` of them at a time:

- the flip product, of terms :math:`F(a_j) - F(a_j - s)`. By the noise's symmetry the term of a pre-activation on the upper
  tail is mirrored to the lower one, where probabilities are small and their differences keep their relative precision.
  Where the weights are so small that the differences would cancel, they are formed in a wider dtype;
- the entropy product, of terms like the flip product's, with the negative entropy added to F times the gradient;
- the log ratio, of terms :math:`\log p(y_j \mid a_j - s) - \log p(y_j \mid a_j)`;
- the slope product, of terms :math:`p_Z(a_j) - p_Z(a_j - s)`, which are summed over the examples: one number per weight.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.flips.ordinary import Geometry
from flipgrad.noise import Noise

Index = tuple[Any, ...]

# Terms formed at once: 2**18 float32 numbers are 1 MiB, which stays in a core's cache.
TERMS_AT_ONCE = 2**18

# The rounding error that is allowed, relative to the norm of the result.
PRECISION = 1e-5


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.flip_product`, exact for every noise but for a rounding error below :data:`PRECISION`."""
    dtype, wide = x.dtype, _wide_enough(weight, noise)
    x, a, grad, weight = (t.to(wide) for t in (x, a, grad, weight))
    return _per_unit(partial(_grouped_product, noise=noise), x, a, grad, weight, geometry).to(dtype)


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio`, exact for every noise."""
    return _per_unit(partial(_grouped_ratio, noise=noise), x, a, states, weight, geometry)


def entropy_product(
    x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.entropy_product`, exact for every noise but for a rounding error below :data:`PRECISION`."""
    dtype, wide = x.dtype, _wide_enough(weight, noise)
    x, a, grad, weight = (t.to(wide) for t in (x, a, grad, weight))
    return _per_unit(partial(_grouped_entropy, noise=noise), x, a, grad, weight, geometry).to(dtype)


def slope_product(
    x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None
) -> Tensor:
    """:func:`flipgrad.flips.slope_product`, exact for every noise."""
    if geometry is None:
        return _grouped_slope(x[:, None], share[:, None], a[:, None], grad[:, None], weight[None], noise)[0]
    result = torch.empty_like(weight)
    padded, shares = _padded(x, geometry), _padded(share, geometry)
    a_at, grad_at = _by_place(a, geometry.groups), _by_place(grad, geometry.groups)
    for position, seen, kernel in _positions(weight, a, geometry):
        units, parts = (_by_place(t[seen], geometry.groups) for t in (padded, shares))
        result[position] = _grouped_slope(units, parts, a_at, grad_at, kernel, noise).flatten(0, 1)
    return result


def _per_unit(
    of_groups: Callable[..., Tensor], x: Tensor, a: Tensor, given: Tensor, weight: Tensor, geometry: Geometry | None
) -> Tensor:
    """The sum ``of_groups`` of units; for a convolution, the sum of it over the positions of the kernel."""
    if geometry is None:
        return of_groups(x[:, None], a[:, None], given[:, None], weight[None])[:, 0]
    padded = _padded(x, geometry)
    u = torch.zeros_like(padded)
    a_at, given_at = _by_place(a, geometry.groups), _by_place(given, geometry.groups)
    for _, seen, kernel in _positions(weight, a, geometry):
        part = of_groups(_by_place(padded[seen], geometry.groups), a_at, given_at, kernel)
        u[seen] += part.reshape(len(x), *a.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    top, left = geometry.padding
    return u[:, :, top : padded.shape[2] - top, left : padded.shape[3] - left].contiguous()


def _padded(t: Tensor, geometry: Geometry) -> Tensor:
    top, left = geometry.padding
    return functional.pad(t, (left, left, top, top))


def _positions(weight: Tensor, a: Tensor, geometry: Geometry) -> Iterator[tuple[Index, Index, Tensor]]:
    """The index of every position of the kernel, that of the places of the input it sees, and its weights [G, out, in].

    At one position every place of the output plane sees one place of the input: that is a fully connected layer with the
    places as its batch.
    """
    kernels = weight.unflatten(0, (geometry.groups, -1))
    for position in product(*(range(size) for size in weight.shape[2:])):
        axes = zip(position, a.shape[2:], geometry.stride, geometry.dilation, strict=True)
        seen = (slice(k * d, k * d + (size - 1) * s + 1, s) for k, size, s, d in axes)
        yield (..., *position), (..., *seen), kernels[(..., *position)]


def _wide_enough(weight: Tensor, noise: Noise) -> torch.dtype:
    """The narrowest dtype, from the weight's own on, in which the flip product has the allowed rounding error.

    F(a) and F(a - s) are close where s is small: relative to it, their difference has an error of eps * scale / |weight|.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    size = weight.to(dtype).square().mean().sqrt().item() / noise.scale
    return dtype if torch.finfo(dtype).eps <= PRECISION * size else torch.float64


def _by_place(t: Tensor, groups: int) -> Tensor:
    """[B, C, H, W] as [B * H * W, groups, C / groups]."""
    return t.permute(0, 2, 3, 1).reshape(-1, groups, t.shape[1] // groups)


def _grouped_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise) -> Tensor:
    """The flip product of groups of units: ``x`` [N, G, in], ``a`` and ``grad`` [N, G, out], ``weight`` [G, out, in]."""
    # By symmetry F(a) - F(a - s) = m [F(-|a|) - F(-|a| - m s)] with m = -1 where a > 0, else 1.
    mirror = 1 - 2 * (a > 0).to(a.dtype)
    a, grad = -a.abs(), grad * mirror
    kept = noise.cdf(a)
    u = torch.empty_like(x)
    for here, some, step in _steps(x, a, weight):
        moved = noise.cdf(torch.addcmul(a[here, :, :, None], step, mirror[here, :, :, None], value=-1))
        # The difference of every term, not of the sums: those are large where the terms are small.
        change = torch.sub(kept[here, :, :, None], moved, out=moved)
        torch.mul((grad[here, :, None] @ change)[:, :, 0], x[here, :, some], out=u[here, :, some])
    return u


def _grouped_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise) -> Tensor:
    """The log ratio of groups of units: like :func:`_grouped_product`, with output ``states`` [N, G, out]."""
    kept = noise.log_prob(states, a)
    ratio = torch.empty_like(x)
    for here, some, step in _steps(x, a, weight):
        moved = noise.log_prob(states[here, :, :, None], a[here, :, :, None] - step)
        torch.sum(moved - kept[here, :, :, None], 2, out=ratio[here, :, some])
    return ratio


def _grouped_entropy(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise) -> Tensor:
    """The sum of changes of g F(a) - H(F(a)) of groups of units: like :func:`_grouped_product`."""

    def function(a: Tensor, grad: Tensor) -> Tensor:
        return torch.addcmul(noise.negative_entropy(a), noise.cdf(a), grad)

    kept, u = function(a, grad), torch.empty_like(x)
    for here, some, step in _steps(x, a, weight):
        moved = function(a[here, :, :, None] - step, grad[here, :, :, None])
        torch.mul((kept[here, :, :, None] - moved).sum(2), x[here, :, some], out=u[here, :, some])
    return u


def _grouped_slope(x: Tensor, share: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise) -> Tensor:
    """The slope product of groups of units, like ``weight`` [G, out, in]; ``share`` is like ``x``."""
    kept, share = noise.pdf(a), share * x
    result = torch.zeros_like(weight)
    for here, some, step in _steps(x, a, weight):
        change = kept[here, :, :, None] - noise.pdf(a[here, :, :, None] - step)
        factors = grad[here, :, :, None] * share[here, :, None, some]
        result[:, :, some] += change.mul_(factors).sum(0)
    return result


def _steps(x: Tensor, a: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some examples and some inputs at a time, and the steps s [examples, G, out, inputs] of their flips."""
    doubled, per_input = 2 * weight, a[:1].numel()
    inputs = max(1, min(x.shape[2], TERMS_AT_ONCE // max(1, per_input)))
    rows = max(1, TERMS_AT_ONCE // max(1, inputs * per_input))
    for n in range(0, x.shape[0], rows):
        here = slice(n, n + rows)
        for i in range(0, x.shape[2], inputs):
            some = slice(i, i + inputs)
            yield here, some, doubled[:, :, some] * x[here, :, None, some]
