"""Sums over flips of many draws, by ``torch.vmap``, against a loop over the draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Generator, Tensor

import flipgrad as fg
from flipgrad import flips
from flipgrad.flips import Geometry

DRAWS, BATCH = 3, 4
GEOMETRIES = [None, Geometry(), Geometry((2, 1), (1, 0), (1, 2)), Geometry(padding=(1, 1), groups=2)]


@dataclass(frozen=True)
class Cauchy(fg.noise.Noise):
    """A noise of a user, which no operator knows."""

    def _cdf(self, t):
        return 0.5 + torch.atan(t) / torch.pi

    def _log_cdf(self, t):
        return torch.log(self._cdf(t))

    def _pdf(self, t, order):
        return 1 / (torch.pi * (1 + t * t))

    def _icdf(self, u):
        return torch.tan(torch.pi * (u - 0.5))

    def _mean_sign(self, t):
        return 2 * torch.atan(t) / torch.pi

    def _variance(self):
        return float("inf")


NOISES = [fg.Logistic(0.8), fg.Normal(), Cauchy()]
SUMS = ["flip_product", "log_ratio", "slope_product"]

each_noise = pytest.mark.parametrize("noise", NOISES, ids=repr)
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
each_sum = pytest.mark.parametrize("name", SUMS)


def tensors(name: str, geometry: Geometry | None) -> list[Tensor]:
    """What a sum takes, of all draws: these in the first dimension, the weight last."""
    generator = Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(DRAWS, *shape, generator=generator, dtype=torch.float64)

    if geometry is None:
        x, weight = normal(BATCH, 5).sign(), normal(6, 5)
        a = x @ weight.mT
    else:
        x, weight = normal(BATCH, 4, 5, 5).sign(), normal(6, 4 // geometry.groups, 3, 2)
        a = torch.stack([torch.nn.functional.conv2d(*draw, None, *geometry) for draw in zip(x, weight, strict=True)])
    outputs = normal(*a.shape[1:])
    if name == "slope_product":
        return [x, normal(*x.shape[1:]).sigmoid(), a, outputs, weight]
    return [x, a, outputs if name == "flip_product" else outputs.sign(), weight]


def assert_like_a_loop(name, noise, geometry, given, in_dims, tolerance=0.0) -> None:
    function = getattr(flips, name)

    def one(*tensors: Tensor) -> Tensor:
        return function(*tensors, noise, geometry, tolerance=tolerance)

    each = [[t if dim is None else t.select(dim, n) for t, dim in zip(given, in_dims, strict=True)] for n in range(DRAWS)]
    expected = torch.stack([one(*draw) for draw in each])
    torch.testing.assert_close(torch.vmap(one, in_dims)(*given), expected, rtol=1e-9, atol=1e-9)


@each_noise
@each_geometry
@each_sum
def test_draws_are_evaluated_as_one_by_one(name, geometry, noise):
    every = tensors(name, geometry)
    for in_dims in product((None, 0), repeat=len(every)):
        if any(dim is not None for dim in in_dims):
            given = [t[0] if dim is None else t for t, dim in zip(every, in_dims, strict=True)]
            assert_like_a_loop(name, noise, geometry, given, in_dims)


@each_noise
@each_geometry
@each_sum
def test_draws_may_be_in_any_dimension(name, geometry, noise):
    every = tensors(name, geometry)
    for dim in range(1, every[0].dim()):
        given = [t.movedim(0, min(dim, t.dim() - 1)) for t in every]
        in_dims = tuple(min(dim, t.dim() - 1) for t in every)
        assert_like_a_loop(name, noise, geometry, given, in_dims)
        # Examples side by side in memory, and an expanded weight.
        given[:-1] = [t.mT.contiguous().mT for t in every[:-1]]
        given[-1] = every[-1][0].expand_as(every[-1])
        assert_like_a_loop(name, noise, geometry, given, (0,) * len(given))


@each_sum
def test_draws_within_draws(name):
    every = tensors(name, None)
    function = getattr(flips, name)
    pairs = [torch.stack([t, t.flip(0)]) for t in every]

    def one(*tensors: Tensor) -> Tensor:
        return function(*tensors, fg.Logistic())

    expected = torch.stack([torch.stack([one(*(t[n, m] for t in pairs)) for m in range(DRAWS)]) for n in range(2)])
    torch.testing.assert_close(torch.vmap(torch.vmap(one))(*pairs), expected, rtol=1e-9, atol=1e-9)


@each_sum
def test_draws_of_one_weight_are_one_call(name, monkeypatch):
    """The rule asks for one sum of all draws: equal weights are not multiplied out, but for one number per weight.

    They are equal without draws, expanded, or by their numbers, as those computed from expanded parameters.
    """
    sizes, compute = [], flips._compute
    monkeypatch.setattr(flips, "_compute", lambda *args: (sizes.append(args[-2][-1].shape), compute(*args))[1])
    *units, weight = tensors(name, None)
    expanded = weight[0].expand_as(weight)
    for given, dim in ((weight[0], None), (expanded, 0), (2 * expanded, 0)):
        torch.vmap(lambda *t: getattr(flips, name)(*t, Cauchy()), (*[0] * len(units), dim))(*units, given)
    groups = (DRAWS * 6, 5, 1, 1)
    assert sizes == [groups if name == "slope_product" else (6, 5)] * 3
