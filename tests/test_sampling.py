"""Sources of noise: reproducible, distributed as they should be, and fast where they can be."""

from __future__ import annotations

import math

import pytest
import torch

import flipgrad as fg
from flipgrad import sampling
from flipgrad.native import library
from flipgrad.sampling import LEAST_COMPILED_DRAWS, Fresh, Mirrored, Stream, compiled_draws, fresh, given, states

NOISES = [fg.Logistic(), fg.Logistic(0.5), fg.Normal(), fg.Laplace(), fg.Uniform(3.0)]


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("source", ["fresh", "stream"])
@pytest.mark.parametrize("compiled", [True, False])
def test_states_have_their_probabilities(noise, source, compiled, monkeypatch):
    """Five standard errors, for 7 pre-activations each."""
    if not compiled:
        monkeypatch.setattr(library, "_library", None)
    count = 20_000
    a = torch.linspace(-3, 3, 7).expand(count, 7).contiguous()
    draw = Fresh(torch.Generator().manual_seed(0)) if source == "fresh" else Stream(0)
    assert a.numel() >= LEAST_COMPILED_DRAWS
    x = states(draw, noise, a)
    assert bool((x.abs() == 1).all())
    p = noise.cdf(a[0].double())
    error = (p * (1 - p) / count).sqrt()
    assert bool((((x.double().mean(0) + 1) / 2 - p).abs() <= 5 * error + 1e-9).all())


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_mirrored_noise_is_the_opposite_in_the_second_half(noise, compiled, monkeypatch):
    """sign(a - Z) and sign(a + Z): opposite states for opposite pre-activations, and each half has its own probabilities."""
    if not compiled:
        monkeypatch.setattr(library, "_library", None)
    count = 20_000
    a = torch.linspace(-3, 3, 7).expand(count, 7).contiguous()
    draw = Mirrored(Fresh(torch.Generator().manual_seed(0)))
    opposite = states(draw, noise, torch.cat([a, -a])).chunk(2)
    assert torch.equal(opposite[0], -opposite[1])
    p = noise.cdf(a[0].double())
    error = (p * (1 - p) / count).sqrt()
    for half in states(draw, noise, torch.cat([a, a])).chunk(2):
        assert bool((((half.double().mean(0) + 1) / 2 - p).abs() <= 5 * error + 1e-9).all())


def test_the_same_generator_gives_the_same_states():
    a = torch.zeros(2, LEAST_COMPILED_DRAWS)
    one, same, other = (states(fresh(torch.Generator().manual_seed(s)), fg.Logistic(), a) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    generator = torch.Generator().manual_seed(1)
    first, second = (states(fresh(generator), fg.Logistic(), a) for _ in range(2))
    assert torch.equal(first, one)
    assert not torch.equal(first, second)


def test_a_stream_goes_on():
    a = torch.zeros(1000)
    stream = Stream(3)
    first, second = states(stream, fg.Logistic(), a), states(stream, fg.Logistic(), a)
    assert not torch.equal(first, second)
    assert torch.equal(states(Stream(3), fg.Logistic(), a), first)


def test_a_stream_gives_every_vectorised_draw_its_own_states():
    def one(a: torch.Tensor) -> torch.Tensor:
        return states(Stream(5), fg.Logistic(), a)

    x = torch.vmap(one, randomness="different")(torch.zeros(8, 500))
    assert len(x.unique(dim=0)) == 8
    # Neighbouring draws agree in half their units, within five standard errors.
    agreement = (x[1:] == x[:-1]).double().mean()
    assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(7 * 500)


def test_draws_of_a_stream_do_not_overlap():
    if not library.available():
        pytest.skip(f"no compiled library: {library.reason()}")
    a, stream, used = torch.zeros(3), Stream(7), []
    for count in (1, 10, 1, 3):
        seed, first = compiled_draws(stream, a, count)
        assert seed == 7
        used += range(first, first + count)
    assert len(set(used)) == len(used)


def test_compiled_code_draws_where_it_is_worth_it_and_noise_is_new(monkeypatch):
    a = torch.zeros(LEAST_COMPILED_DRAWS // 4)
    assert compiled_draws(fresh(None), a, 3) is None
    assert compiled_draws(given(a), a, 4) is None
    assert (compiled_draws(fresh(None), a, 4) is not None) == library.available()
    monkeypatch.setattr(library, "_library", None)
    assert compiled_draws(fresh(None), a, 4) is None
    assert compiled_draws(Stream(0), a, 4) is None


@pytest.mark.parametrize(("randomness", "different"), [("different", 3), ("same", 1)])
def test_a_generator_under_vmap_obeys_its_rule_of_randomness(randomness, different):
    a = torch.zeros(3, LEAST_COMPILED_DRAWS)
    x = torch.vmap(lambda a: states(fresh(None), fg.Logistic(), a), randomness=randomness)(a)
    assert len(x.unique(dim=0)) == different


def test_handed_in_noise_decides():
    z = torch.tensor([0.5, -0.5, 0.0])
    assert torch.equal(states(given(z), fg.Logistic(), torch.zeros(3)), torch.tensor([-1.0, 1.0, 1.0]))
    with pytest.raises(fg.InputError, match="does not broadcast"):
        given(torch.zeros(2))(fg.Logistic(), torch.zeros(3))


def test_states_carry_no_gradient():
    a = torch.zeros(LEAST_COMPILED_DRAWS, requires_grad=True)
    assert not states(fresh(None), fg.Logistic(), a).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_has_no_bias_from_ties(dtype):
    """At p = 1/2, where a rounded Z would often equal a: five standard errors of 2^20 units."""
    if not library.available():
        pytest.skip(f"no compiled library: {library.reason()}")
    x = states(fresh(torch.Generator().manual_seed(0)), fg.Logistic(), torch.zeros(2**20, dtype=dtype))
    assert x.dtype == dtype
    assert abs(x.double().mean().item()) < 5 / 2**10


def test_units_below_the_threshold_take_noise_from_the_generator():
    a = torch.zeros(10)
    z = fg.Logistic().sample_like(a, generator=torch.Generator().manual_seed(4))
    x = states(fresh(torch.Generator().manual_seed(4)), fg.Logistic(), a)
    assert torch.equal(x, sampling.sign(a - z))
