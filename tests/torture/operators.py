"""Odd tensors given to the operators of :mod:`flipgrad.flips` and to the compiled kernels behind them.

Every result is compared with that of tensor operations in float64, and small ones with the definition, too; or the tensors are
refused. Kernels read memory by address: what must never happen is a crash, or numbers from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import torch
from torch import Generator, Tensor
from torch.nn import functional

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import Geometry, compiled, naive, vectorized
from flipgrad.native import library, sampling
from flipgrad.noise import Laplace, Logistic, Noise, Normal, Uniform
from torture.attack import ACCEPTED, REFUSED, Attack, FaultError, Outcome

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Of a whole result, in its norm: the kernels' own error, and that of rounding the result to the dtype.
ERRORS = {torch.float32: 1e-5, torch.float64: 1e-11, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Logistic noise twice: it has kernels of its own.
NOISES: tuple[Callable[[float], Noise], ...] = (Logistic, Logistic, Normal, Laplace, Uniform)
WRONG_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.int8, torch.uint8)
# Pre-activations are not as large as all numbers can be: beside those a flip is rounded away, in the reference first.
ODD_ACTIVATIONS = (float("nan"), 1e4, -1e4, 1e-40, -0.0)
ODD_NUMBERS = (*ODD_ACTIVATIONS, float("inf"), float("-inf"), 1e30, -1e30, 65504.0)


@final
@dataclass
class Layer:
    """A layer with its states, pre-activations and what is given for every output."""

    x: Tensor
    a: Tensor
    given: Tensor
    weight: Tensor
    bias: Tensor
    geometry: Geometry | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.a, self.given, self.weight]


def draw_layer(random: Random, *, ratio: bool) -> Layer:
    """A fully connected layer or a convolution in float64, of any size, some of them empty."""
    numbers = Generator().manual_seed(random.randrange(2**31))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    def few(*counts: int) -> int:
        return 0 if random.random() < 0.02 else random.choice(counts)

    size, scale = random.choice([1e-4, 1e-2, 0.3, 2.0, 20.0, 300.0]), random.choice([1.0, 0.7, 5.0])
    batch, geometry = few(1, 2, 5, 17), None
    if random.random() < 0.5:
        inputs, outputs = few(1, 3, 16, 33, 70), few(1, 2, 7, 20, 65)
        x, weight = normal(batch, inputs).sign(), normal(outputs, inputs)
    else:
        groups = random.choice([1, 1, 2, 3])
        channels, outputs = groups * random.choice([1, 2, 5]), groups * random.choice([1, 3, 9])
        kernel = random.choice([1, 2, 3]), random.choice([1, 2, 3])
        dilation = random.choice([1, 1, 2]), random.choice([1, 2])
        padding = random.choice([0, 1, 2]), random.choice([0, 1])
        height, width = (d * (k - 1) + random.choice([1, 2, 5]) for d, k in zip(dilation, kernel, strict=True))
        stride = random.choice([1, 2, 3]), random.choice([1, 2])
        geometry = Geometry(stride, padding, dilation, groups)
        x, weight = normal(batch, channels, height, width).sign(), normal(outputs, channels // groups, *kernel)
    weight = size * weight.clamp(-1, 1)
    if random.random() < 0.3:
        x[normal(*x.shape) > 1] = 0
    bias = size * normal(len(weight))
    a = functional.linear(x, weight, bias) if geometry is None else functional.conv2d(x, weight, bias, *geometry)
    given = normal(*a.shape)
    if ratio:
        given = (4 * given + a / scale).sign()
    return Layer(x, a, given, weight, bias, geometry, scale)


def layout(t: Tensor, random: Random) -> Tensor:
    """The same numbers, elsewhere in memory: with gaps, in another order, or from the middle of a larger tensor."""
    how = random.randrange(6)
    if how == 0 and t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    if how == 1 and t.dim() >= 2:
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if how == 2 and t.dim():
        return t.repeat_interleave(2, dim=-1)[..., ::2]
    if how == 3 and t.dim():
        return functional.pad(t, (3, 2), value=float("nan"))[..., 3 : 3 + t.shape[-1]]
    if how == 4 and t.dim():
        return torch.cat([torch.full_like(t[:1], float("nan")), t])[1:] if len(t) else t
    return t


def assert_close(actual: Tensor, expected: Tensor, error: float, size: Tensor, what: str) -> None:
    """Compare with a reference in float64: what is NaN or infinite there must be so here, and nothing else.

    Args:
        actual: the result.
        expected: the reference.
        error: relative to the norm of the reference.
        size: that rounding errors of the reference and of the terms may have.
        what: the operator and its layer, for the finding.
    """
    if actual.shape != expected.shape:
        raise FaultError("difference", f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    largest = torch.finfo(actual.dtype).max
    actual = actual.double()
    # What is near the largest number may be rounded to it, or beyond.
    near = (expected.abs() / largest - 1).abs() <= max(error, torch.finfo(torch.float16).eps)
    finite = (expected.abs() < largest) & ~near
    wrong = (actual.isfinite() != finite) & ~near
    if bool(wrong.any()):
        raise FaultError("difference", f"{what}: {int(wrong.sum())} of {wrong.numel()} are no numbers, or should be none")
    off = (actual - expected)[finite]
    allowed = error * float(expected[finite].norm()) + float(size)
    if float(off.norm()) > allowed:
        raise FaultError("difference", f"{what}: off by {float(off.norm()):.3g}, allowed {allowed:.3g}")


class SumAttack(Attack):
    """Flip products and log ratios: the kernels themselves, and what chooses between them."""

    part, name, title = "inputs", "operators-sums", "operators: sums over flips"

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def prepare(self, shared: Path, scratch: Path) -> None:
        super().prepare(shared, scratch)
        # Fills every torch.empty with NaN, so that an element that is not written shows.
        torch.use_deterministic_algorithms(True)

    def attempt(self, number: int, random: Random) -> Outcome:
        ratio = random.random() < 0.4
        layer = draw_layer(random, ratio=ratio)
        library.PORTABLE = random.random() < 0.3
        torch.set_num_threads(2 if random.random() < 0.1 else 1)
        dtype = random.choice(DTYPES)
        odd = random.random() < 0.3
        x, a, given, weight = layer.tensors
        if odd:
            a, weight = sprinkled(a, random, ODD_ACTIVATIONS), sprinkled(weight, random)
            # The states of a log ratio are +1, -1 or 0.
            given = given if ratio else sprinkled(given, random)
        x, a, given, weight = (layout(t.to(dtype), random) for t in (x, a, given, weight))
        direct = library.available() and random.random() < 0.6
        noise: Noise = Logistic(layer.scale)
        tolerance = 0.0
        if not direct:
            noise = random.choice(NOISES)(layer.scale)
            tolerance = random.choice([0.0, 1e-3, 0.1])
        function = "log_ratio" if ratio else "flip_product"
        what = f"{function}{' native' * direct} {dtype} {noise} {layer.geometry} {tuple(x.shape)}{' odd' * odd}"
        arguments = (x, a, given, weight, noise, layer.geometry)
        actual = getattr(compiled if direct else flips, function)(*arguments, **({} if direct else {"tolerance": tolerance}))
        if actual.dtype != dtype:
            raise FaultError("difference", f"{what}: {actual.dtype}")
        if actual.shape != x.shape:
            raise FaultError("difference", f"{what}: shape {tuple(actual.shape)} instead of {tuple(x.shape)}")
        if ratio and (tolerance or isinstance(noise, Uniform)):
            # The error of a separable log ratio is relative to something else, and an impossible state has the logarithm of
            # the smallest number of the dtype.
            return ACCEPTED
        reference = [t.double() for t in (x, a, given, weight)]
        expected = getattr(vectorized, function)(*reference, noise, layer.geometry)
        terms = self._terms(layer, ratio=ratio)
        if odd:
            # What is no unit needs no number where others have none.
            actual, expected = actual.where(x != 0, 0.0), expected.where(x != 0, 0.0)
            # Weights of which one is huge are judged by that one: the others' terms are rounded as the dtype is.
            # A term has a few roundings.
            terms = terms + 4 * torch.finfo(dtype).eps / 1e-15 * given.double().nan_to_num(0, 0, 0).abs().sum()
        error = max(ERRORS[dtype], tolerance)
        smallest = torch.finfo(dtype).smallest_normal * x.numel() ** 0.5
        assert_close(actual, expected, error, (ERRORS[dtype] if ratio else 1e-15) * terms + smallest, what)
        if dtype == torch.float64 and not tolerance and not odd and x.numel() < 200:
            defined = getattr(naive, function)(layer.x, layer.weight, layer.bias, layer.given, noise, layer.geometry)
            assert_close(actual, defined, 1e-9, 1e-9 * terms, f"{what} against its definition")
        return ACCEPTED

    def _terms(self, layer: Layer, *, ratio: bool) -> Tensor:
        """The size of what is summed: differences of probabilities near 1, or of logarithms as large as pre-activations."""
        largest = 2 * layer.weight.abs().max() if layer.weight.numel() else torch.zeros(())
        each = (layer.a.abs() + largest) / layer.scale + 1 if ratio else torch.ones_like(layer.a)
        return (each * layer.given.abs()).sum() * (layer.x.numel() / max(1, len(layer.x)) if ratio else 1)


def sprinkled(t: Tensor, random: Random, numbers: Sequence[float] = ODD_NUMBERS) -> Tensor:
    """The tensor, mostly with some numbers that are none, or at the end of their range."""
    t = t.clone()
    if t.numel() and random.random() < 0.6:
        places = torch.tensor([random.randrange(t.numel()) for _ in range(random.choice([1, 3]))])
        t.view(-1)[places] = random.choice(numbers)
    return t


class SampleAttack(Attack):
    """Sampling of states, and slopes of concrete units."""

    part, name, title = "inputs", "operators-sampling", "operators: sampling"

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def attempt(self, number: int, random: Random) -> Outcome:
        if not library.available():
            return REFUSED
        library.PORTABLE = random.random() < 0.3
        numbers = Generator().manual_seed(random.randrange(2**31))
        shape = [random.choice([0, 1, 3, 7, 16, 33]) for _ in range(random.randrange(5))]
        dtype = random.choice(DTYPES)
        reach = random.choice([1.0, 30.0, 1e4])
        drawn = reach * torch.randn(shape, generator=numbers, dtype=torch.float64)
        a = layout((sprinkled(drawn, random) if random.random() < 0.2 else drawn).to(dtype), random)
        seed, offset = (random.choice([0, 1, 2**32, 2**63 - 1, random.randrange(2**63)]) for _ in range(2))
        noise = random.choice(NOISES)(random.choice([1.0, 0.3, 1e-30, 1e30]))
        torch.set_num_threads(1)
        if random.random() < 0.7:
            function: Callable[[], Tensor] = lambda: noise.compiled_sign(a, seed, offset)  # noqa: E731
            what = f"sample_states {noise} {tuple(a.shape)} {dtype}"
        else:
            x = torch.where(torch.rand(shape, generator=numbers) < 0.5, 1.0, -1.0).to(dtype)
            t, samples = random.choice([0.1, 1.0, 10.0]), random.choice([1, 2, 10])
            offset = min(offset, 2**63 - 1 - samples)
            scale = random.choice([1.0, 0.3])
            function = lambda: sampling.mean_slopes(a, x, scale, t, samples, seed, offset)  # noqa: E731
            what = f"mean_slopes {tuple(a.shape)} {dtype} t={t}"
        first = function()
        torch.set_num_threads(2)
        second = function()
        if not torch.equal(first.nan_to_num(7), second.nan_to_num(7)):
            raise FaultError("difference", f"{what}: two threads give other numbers than one")
        if first.shape != a.shape or first.dtype != dtype:
            raise FaultError("difference", f"{what}: {first.dtype} {tuple(first.shape)}")
        if what.startswith("sample") and not bool((first.abs() == 1).all()):
            raise FaultError("difference", f"{what}: states that are not +1 or -1")
        if what.startswith("sample"):
            self._likely(first, noise.cdf(a.double()), what)
        return ACCEPTED

    def _likely(self, states: Tensor, probability: Tensor, what: str) -> None:
        """Certain states are as they must be, and the sum of the others is not beyond 7 standard errors."""
        known = probability.isfinite()
        p, up = probability[known], (states[known] > 0).double()
        if bool(((p == 1) & (up == 0) | (p == 0) & (up == 1)).any()):
            raise FaultError("difference", f"{what}: an impossible state")
        deviation = float((up - p).sum().abs())
        if deviation > 7 * float((p * (1 - p)).sum().sqrt()) + 5:
            raise FaultError("difference", f"{what}: {deviation:.1f} states too many or too few")


class WrongTensorAttack(Attack):
    """Tensors that do not belong together, of wrong kinds, and numbers out of range: all of it has to be refused."""

    part, name, title = "inputs", "operators-wrong", "operators: wrong arguments"

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def attempt(self, number: int, random: Random) -> Outcome:
        torch.set_num_threads(1)
        ratio = random.random() < 0.4
        layer = draw_layer(random, ratio=ratio)
        tensors: list[Any] = [t.float() for t in layer.tensors]
        geometry = layer.geometry
        which = random.randrange(4)
        action = random.randrange(6)
        if action == 0:
            tensors[which] = tensors[which].to(random.choice(WRONG_DTYPES))
        elif action == 1:
            tensors[which] = wrong_shape(tensors[which], random)
        elif action == 2:
            tensors[which] = tensors[which].to("meta")
        elif action == 3:
            tensors[which] = tensors[which].to_sparse()
        elif action == 4 and geometry is not None:
            fields: list[Any] = list(geometry)
            field = random.randrange(4)
            value = random.choice([0, -1, 2**31, 2**62, -(2**62), 5])
            fields[field] = value if field == 3 else (value, random.choice([1, value]))
            geometry = Geometry(*fields)
        else:
            geometry = None if geometry is not None else Geometry(groups=random.choice([1, 2]))
        functions: list[Callable[..., Tensor]] = [flips.log_ratio if ratio else flips.flip_product]
        if library.available():
            functions.append(compiled.log_ratio if ratio else compiled.flip_product)
        what = f"action {action} on {['x', 'a', 'given', 'weight'][which]}, {geometry}, {[tuple(t.shape) for t in tensors]}"
        for function in functions:
            try:
                actual = function(*tensors, Logistic(layer.scale), geometry)
            except InputError as error:
                if "\n" in str(error):
                    raise FaultError("message", f"more than one line: {error}") from None
                continue
            # A tensor without numbers asks for the shape alone.
            if actual.is_meta:
                continue
            if actual.shape != tensors[0].shape or not belong_together(tensors, geometry):
                raise FaultError("difference", f"{function.__module__}: {what}: accepted, shape {tuple(actual.shape)}")
        return REFUSED


def belong_together(tensors: Sequence[Tensor], geometry: Geometry | None) -> bool:
    """Whether the tensors are those of a layer after all: a kernel may be smaller, and its output as large as before."""
    x, a, given, weight = tensors
    try:
        made = functional.linear(x, weight) if geometry is None else functional.conv2d(x, weight, None, *geometry)
    except RuntimeError:
        return x.numel() == 0
    return made.shape == a.shape == given.shape and made.device == a.device == given.device


def wrong_shape(t: Tensor, random: Random) -> Tensor:
    """A tensor with a dimension too many, too few, too long or too short."""
    axis = random.randrange(t.dim())
    action = random.randrange(4)
    if action == 0:
        return t[None]
    if action == 1:
        return t.sum(axis)
    if action == 2 and t.shape[axis]:
        return t.narrow(axis, 0, t.shape[axis] - 1)
    return torch.cat([t, t.new_zeros([1 if i == axis else n for i, n in enumerate(t.shape)])], axis)
