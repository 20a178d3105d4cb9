"""Ways to continue a path with the noise it has in the later layers, and uniform variables from its source of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flipgrad.estimators._paths import Path
from flipgrad.noise import Noise, Uniform, sign

# The states (or relaxed states) of a layer from its noise's distribution, its pre-activations and its Z.
Rule = Callable[[Noise, Tensor, Tensor], Tensor]


def continued_with(path: Path, k: int, states: Tensor, rule: Rule) -> Tensor:
    """The losses [B] with layer ``k``'s ``states`` replaced, and later layers by ``rule`` with the noise of the path.

    That noise is independent of layer k's and of all before, so whatever is unbiased for every fixed noise of the later
    layers is unbiased.
    """
    z = iter(path.z[k + 1 :])
    return path.continued(k, states, lambda call: rule(call.noise, call.affine(call.x), next(z)))


def straight_through(noise: Noise, a: Tensor, z: Tensor) -> Tensor:
    """The sampled states with the gradient of their mean."""
    m = noise.mean_sign(a)
    return sign(a.detach() - z) + (m - m.detach())


def uniform(path: Path, like: Tensor) -> Tensor:
    """Independent variables uniform in (0, 1), in the shape of ``like``, from the path's source of noise."""
    u = (path.batch.draw(Uniform(), like.detach()) + 1) / 2
    limits = torch.finfo(u.dtype)
    return u.clamp(limits.tiny, 1 - limits.eps / 2)
