"""Sources of noise: new noise from a generator or a numbered stream, or noise that is handed in.

A source gives Z for a layer's pre-activations. Where only the states sign(a - Z) are wanted it may give these directly,
without ever making Z: on the processor, compiled code compares counter-based random numbers with the probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as brief
from typing import final

import torch
from torch import Generator, Tensor

from flipgrad.errors import InputError
from flipgrad.guards import check_not_redrawn
from flipgrad.native import library
from flipgrad.noise import Noise, sign

# The largest seed that torch's generators and compiled code both take.
LARGEST_SEED = 2**63 - 1
# With fewer draws compiled sampling is not worth its call.
LEAST_COMPILED_DRAWS = 2**13

# A source of noise: gives Z for the pre-activations of a layer with that noise, to be broadcast over them.
Draw = Callable[[Noise, Tensor], Tensor]


def check_seed(seed: int) -> None:
    """Refuse a seed that a generator would not take."""
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"seed is {brief(seed)}; it must be from 0 to {LARGEST_SEED}")


def states(draw: Draw, noise: Noise, a: Tensor) -> Tensor:
    """States sign(a - Z) with the source's noise, without a gradient."""
    a = a.detach()
    if isinstance(draw, Mirrored):
        first, second = a.tensor_split(2)
        numbers = compiled_draws(draw.source, first)
        if numbers is not None:
            # sign(a + Z) from the random numbers that gave Z.
            opposite = noise.compiled_sign(-second, *numbers).neg_()
            return torch.cat([noise.compiled_sign(first, *numbers), opposite])
    else:
        numbers = compiled_draws(draw, a)
        if numbers is not None:
            return noise.compiled_sign(a, *numbers)
    return sign(a - draw(noise, a))


def compiled_draws(draw: Draw, a: Tensor, count: int = 1) -> tuple[int, int] | None:
    """A seed, and the first of ``count`` offsets of it, for compiled code to draw for units like ``a``.

    None where torch is to draw: from noise that is handed in, and where compiled code cannot or need not.
    """
    if not library.usable(a):
        return None
    # Under torch.func transforms the generator gives no number but a tensor for all draws, by their rules of randomness.
    transformed = torch._C._are_functorch_transforms_active()
    if isinstance(draw, Apart):
        draw = draw.units
    if isinstance(draw, Stream):
        if transformed and not torch._C._functorch.is_batchedtensor(a):
            # The same for all draws so far, as behind parameters that are frozen: compiled code would make one of them.
            return None
        draw.count += count
        return draw.seed, draw.count - count + 1
    if not isinstance(draw, Fresh) or transformed or a.numel() * count < LEAST_COMPILED_DRAWS:
        return None
    return int(torch.randint(2**62, (), generator=draw.generator)), 0


@final
@dataclass(frozen=True)
class Fresh:
    """New noise from a torch generator: the same state of it gives the same noise."""

    generator: Generator | None

    def __call__(self, noise: Noise, a: Tensor) -> Tensor:
        return noise.sample_like(a, generator=self.generator)


def fresh(generator: Generator | None) -> Fresh:
    """A source of new noise."""
    check_not_redrawn(generator)
    return Fresh(generator)


@final
class Stream:
    """New noise from a seed, in an order of its own: independent of torch's generators, and of how draws are vectorised.

    Under ``torch.vmap`` every draw gets noise of its own.

    Args:
        seed: from 0 to ``LARGEST_SEED``.
        device: of the pre-activations.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        # How many draws compiled code has made.
        self.count = 0

    def __call__(self, noise: Noise, a: Tensor) -> Tensor:
        return noise.sample_like(a, generator=self.generator)


@final
@dataclass(frozen=True)
class Mirrored:
    """A source's noise for the first half of a batch, and the opposite of it for the second.

    Noise is symmetric, so that each half alone has ordinary noise: antithetic variables (Hammersley, Morton 1956).
    """

    source: Draw

    def __call__(self, noise: Noise, a: Tensor) -> Tensor:
        z = self.source(noise, a[: len(a) // 2])
        return torch.cat([z, -z])


@final
@dataclass(frozen=True)
class Apart:
    """Two sources: one of the units' noise, and one of the noise of binary weights."""

    units: Draw
    weights: Draw

    def __call__(self, noise: Noise, a: Tensor) -> Tensor:
        return self.units(noise, a)


def for_weights(draw: Draw) -> Draw:
    """The source of the noise of binary weights, which the examples of a batch share: no half of it has the opposite one."""
    if isinstance(draw, Mirrored):
        return for_weights(draw.source)
    return draw.weights if isinstance(draw, Apart) else draw


def unmirrored(draw: Draw) -> Draw:
    """The source of the units' noise without halves of opposite noise, for numbers that belong to no example."""
    if isinstance(draw, Mirrored):
        return unmirrored(draw.source)
    return draw.units if isinstance(draw, Apart) else draw


def given(z: Tensor, to: str = "pre-activations") -> Draw:
    """A source that returns the noise ``z``, if it broadcasts ``to`` what it is for."""

    def draw(noise: Noise, a: Tensor) -> Tensor:
        sizes = zip(reversed(z.shape), reversed(a.shape), strict=False)
        if z.dim() > a.dim() or any(n not in (1, m) for n, m in sizes):
            raise InputError(f"noise of shape {list(z.shape)} does not broadcast to {to} {list(a.shape)}")
        return z.to(a.dtype)

    return draw
