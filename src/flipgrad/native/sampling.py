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
    return _sampled("sample_states_native", a, scale, seed, offset)


def states_from_probability(probability: Tensor, seed: int, offset: int = 0) -> Tensor:
    """States +1 with the given ``probability``, rounded to 2**-32, else -1."""
    _check(seed, offset, probability=probability)
    return _sampled("sample_states_from_probability_native", probability, seed, offset)


def mean_slopes(a: Tensor, x: Tensor, scale: float, t: float, samples: int, seed: int, offset: int = 0) -> Tensor:
    r"""Slopes of concrete units, averaged over logistic noise that leads to their states.

    .. math:: \frac1K \sum_{k=1}^K \frac{\partial}{\partial a} \tanh\Big(\frac{a - Z_k}{2t}\Big), \quad
        Z_k \sim p(Z \mid \mathrm{sign}(a - Z) = x)

    The random number behind :math:`Z_k` is that of :func:`logistic_states` with ``offset`` + k - 1, less its last bit.
    Computed in float32; terms below the smallest normal number have no digits. The number K is ``samples``, ``t`` the
    temperature, and ``scale`` that of the noise Z.
    """
    _check(seed, offset, a=a, x=x)
    return _sampled("mean_slopes_native", x * a, scale, t, samples, seed, offset)


def _check(seed: int, offset: int, **tensors: Tensor) -> None:
    check_tensors(**tensors)
    if not (0 <= seed < 2**63 and 0 <= offset < 2**63):
        raise InputError(f"seed={seed}, offset={offset}: both must be from 0 to 2**63 - 1")


def _sampled(operator: str, t: Tensor, *numbers: object) -> Tensor:
    result: Tensor = getattr(torch.ops.flipgrad, operator)(t, *numbers)
    return result


def _register(name: str, function: str, fields: str, dtype: torch.dtype | None = None) -> None:
    """Make an operator of a ``function`` of the library: of a tensor, computed in ``dtype``, and the numbers in ``fields``."""
    # Of the arguments "float scale, int seed" the names.
    names = fields.replace(",", "").split()[1::2]

    def implementation(t: Tensor, *numbers: Any) -> Tensor:
        wanted = dtype or computed_in(t.dtype)
        # Numbered as they lie in memory, so that no layout is copied but one with gaps.
        out = torch.empty_like(t, dtype=wanted)
        given = t.detach().to(wanted)
        if given.stride() != out.stride():
            given = torch.empty_like(out).copy_(given)
        call(function, wanted, given, out, count=out.numel(), **{"scale": 1.0, **dict(zip(names, numbers, strict=True))})
        return out.to(t.dtype)

    def over_draws(info: object, in_dims: tuple[int | None, ...], t: Tensor, *numbers: object) -> tuple[Tensor, int]:
        """Units are told apart by their index, so that many draws are one large tensor."""
        if in_dims[0] is None:
            raise InputError("sampling under torch.vmap: the draws share their pre-activations; expand these to one for each")
        return _sampled(name, t.movedim(in_dims[0], 0), *numbers), 0

    operator = f"flipgrad::{name}"
    torch.library.define(operator, f"(Tensor given, {fields}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(operator, "cpu", implementation)
    torch.library.register_fake(operator, lambda t, *_: torch.empty_like(t))
    torch.library.register_vmap(operator, over_draws)


_register("sample_states_native", "sample_logistic", "float scale, int seed, int offset")
_register("sample_states_from_probability_native", "sample_probability", "int seed, int offset")
_register("mean_slopes_native", "mean_slopes", "float scale, float t, int draws, int seed, int offset", torch.float32)
