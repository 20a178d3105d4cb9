"""States and mean slopes of units from counter-based random numbers, as operators of torch.

A random number depends on the seed, the offset and the unit's place in memory alone. Take another offset for every draw of one
seed; both are from 0 to 2**63 - 1. Results have the shape, dtype and layout of the tensor that is given.
"""

from typing import Any

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.native.library import call, check_tensors, computed_in


def logistic_states(a: Tensor, scale: float, seed: int, offset: int = 0) -> Tensor:
    """States +1 with the probability F(a) of logistic noise, else -1.

    A uniform number of 32 bits is compared with the probability, so that probabilities are rounded to 2**-32; the smaller one
    of F(a) and F(-a), computed in float32, has a relative error of about 2e-7 besides.
    """
    _check(seed, offset, a=a)
    states: Tensor = torch.ops.flipgrad.sample_states_native(a, scale, seed, offset)
    return states


def states_from_probability(probability: Tensor, seed: int, offset: int = 0) -> Tensor:
    """States +1 with the given ``probability``, rounded to 2**-32, else -1."""
    _check(seed, offset, probability=probability)
    states: Tensor = torch.ops.flipgrad.sample_states_from_probability_native(probability, seed, offset)
    return states


def mean_slopes(a: Tensor, x: Tensor, scale: float, t: float, samples: int, seed: int, offset: int = 0) -> Tensor:
    r"""Slopes of concrete units, averaged over logistic noise that leads to their states.

    .. math:: \frac1K \sum_{k=1}^K \frac{\partial}{\partial a} \tanh\Big(\frac{a - Z_k}{2t}\Big), \quad
        Z_k \sim p(Z \mid \mathrm{sign}(a - Z) = x)

    The random number behind :math:`Z_k` is that of :func:`logistic_states` with ``offset`` + k - 1, less its last bit.
    Computed in float32; terms below the smallest normal number have no digits. The number K is ``samples``, ``t`` the
    temperature, and ``scale`` that of the noise Z.
    """
    _check(seed, offset, a=a, x=x)
    slopes: Tensor = torch.ops.flipgrad.mean_slopes_native(x * a, scale, t, samples, seed, offset)
    return slopes


def _check(seed: int, offset: int, **tensors: Tensor) -> None:
    check_tensors(**tensors)
    if not (0 <= seed < 2**63 and 0 <= offset < 2**63):
        raise InputError(f"seed={seed}, offset={offset}: both must be from 0 to 2**63 - 1")


def _sample(function: str, given: Tensor, dtype: torch.dtype, **fields: Any) -> Tensor:
    # Numbered as they lie in memory, so that no layout is copied but one with gaps.
    out = torch.empty_like(given, dtype=dtype)
    numbers = given.detach().to(dtype)
    if numbers.stride() != out.stride():
        numbers = torch.empty_like(out).copy_(numbers)
    call(function, dtype, numbers, out, count=out.numel(), **fields)
    return out.to(given.dtype)


def _sample_logistic(a: Tensor, scale: float, seed: int, offset: int) -> Tensor:
    return _sample("sample_logistic", a, computed_in(a.dtype), scale=scale, seed=seed, offset=offset)


def _sample_probability(probability: Tensor, seed: int, offset: int) -> Tensor:
    return _sample("sample_probability", probability, computed_in(probability.dtype), scale=1.0, seed=seed, offset=offset)


def _mean_slopes(xa: Tensor, scale: float, t: float, samples: int, seed: int, offset: int) -> Tensor:
    return _sample("mean_slopes", xa, torch.float32, scale=scale, seed=seed, offset=offset, draws=samples, t=t)


def _register(name: str, arguments: str, implementation: Any) -> None:
    """An operator of a tensor and numbers, under ``torch.vmap`` too."""
    torch.library.define(f"flipgrad::{name}", f"({arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flipgrad::{name}", "cpu", implementation)
    torch.library.register_fake(f"flipgrad::{name}", lambda t, *_: torch.empty_like(t))

    def over_draws(info: object, in_dims: tuple[int | None, ...], t: Tensor, *numbers: object) -> tuple[Tensor, int]:
        """Units are told apart by their index, so that many draws are one large tensor."""
        if in_dims[0] is None:
            raise InputError("sampling under torch.vmap: the draws share their pre-activations; expand these to one for each")
        return getattr(torch.ops.flipgrad, name)(t.movedim(in_dims[0], 0), *numbers), 0

    torch.library.register_vmap(f"flipgrad::{name}", over_draws)


_register("sample_states_native", "Tensor a, float scale, int seed, int offset", _sample_logistic)
_register("sample_states_from_probability_native", "Tensor probability, int seed, int offset", _sample_probability)
_register("mean_slopes_native", "Tensor xa, float scale, float t, int samples, int seed, int offset", _mean_slopes)
