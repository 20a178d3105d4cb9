"""Which implementation of the flip product to use: the cheapest one that is accurate enough, by a measured cost model."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import native, separable, triton
from flipgrad.noise import Logistic, Noise

Kernel = Literal["separable", "native", "triton", "vectorized"]

# Seconds, measured on two cores of a server from 2023, but for those of triton; only their ratios decide.
#   of a call of each kernel (for the separable one, to find the plan);
CALL = {"separable": 5e-4, "native": 5e-5, "triton": 3e-4, "vectorized": 3e-4}
#   of a term in each exact kernel, and where weights are above 2 scales in the native one;
TERM = {"native": 7e-11, "triton": 2e-10, "vectorized": 3e-9}
LARGE_TERM, LARGE = 1.3e-10, 2.0
#   of a term in an ordinary product, of which the separable kernel takes as many as its rank;
PRODUCT = 1.7e-11
#   of one function of one pre-activation: in closed form for logistic noise, by the cdf for others.
FUNCTION = {True: 6e-10, False: 6e-9}
# On a GPU all but the calls are taken to be this much of it. That and the numbers of triton are guesses, not measured.
GPU = 0.01

# Pre-activations that are looked at.
SOME = 2**14


class Layer(Protocol):
    """What is asked of a layer: a noise, and a weight with the norm's scale in it."""

    noise: Noise

    def effective_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Choice:
    """A decision for one layer.

    Attributes:
        kernel: the implementation.
        plan: of the separable one, if it was considered.
        seconds: the estimated time of every implementation that could be used.
        reason: why, in words.
    """

    kernel: Kernel
    plan: separable.Plan | None
    seconds: dict[str, float]
    reason: str


def choose(weight: Tensor, noise: Noise, places: int, tolerance: float, *, a: Tensor | None = None) -> Choice:
    """Decide for a layer.

    Args:
        weight: [out, in, ...], of a fully connected layer or a convolution.
        noise: the layer's noise.
        places: output positions, those of all examples together.
        tolerance: the relative L2 error that is allowed; 0 asks for an exact kernel.
        a: the pre-activations, of which the spread is looked at.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance={tolerance}: the tolerance is a relative error from 0 (exact) to below 1, e.g. 1e-3")
    terms, activations = places * weight.numel(), places * weight.shape[0]
    seconds, exact, why = _exact(weight, noise, terms)
    if tolerance == 0:
        return Choice(exact, None, seconds, f"exact was asked for; {why}")
    # The least that the separable kernel takes: one product.
    work = _share(weight) * (terms * PRODUCT + activations * FUNCTION[isinstance(noise, Logistic)])
    least = CALL["separable"] + work
    if seconds[exact] <= least:
        return Choice(exact, None, {**seconds, "separable": least}, f"small enough for the exact kernel; {why}")
    plan = separable.plan(weight, noise, tolerance, spread=math.inf if a is None else spread(a))
    if not plan.reachable:
        weights = f"weights {'above' if plan.estimated_error == math.inf else 'up to'} {plan.limit:.2g}"
        text = f"no separable form within {tolerance:g} for {weights} and {noise}; {why}"
        return Choice(exact, plan, seconds, text)
    rank = plan.rank_e + plan.rank_o
    seconds["separable"] = CALL["separable"] + rank * work
    form = f"the separable form of rank {plan.rank_e} + {plan.rank_o} has an error of {plan.estimated_error:.1e}"
    if seconds["separable"] <= seconds[exact]:
        return Choice("separable", plan, seconds, f"{form}, within {tolerance:g}, and costs {rank} ordinary products")
    return Choice(exact, plan, seconds, f"{form} but costs more than the exact kernel; {why}")


def explain(layer: Layer, *, places: int = 2**14, tolerance: float = 1e-3) -> str:
    """What :class:`flipgrad.PSA` would use for a layer, and why.

    Args:
        layer: a binary layer.
        places: output positions of all examples together: the batch size, times the output's height and width for a
            convolution.
        tolerance: as for PSA; 0 is ``PSA(exact=True)``.

    >>> import flipgrad as fg
    >>> fg.flips.explain(fg.BinaryLinear(4, 4), places=10).split(";")[0].partition(": ")[2]
    'small enough for the exact kernel'
    """
    choice = choose(layer.effective_weight().detach(), layer.noise, places, tolerance)
    times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in sorted(choice.seconds.items(), key=lambda i: i[1]))
    return f"{choice.kernel}: {choice.reason} (estimated: {times})"


def _exact(weight: Tensor, noise: Noise, terms: int) -> tuple[dict[str, float], Kernel, str]:
    """The times of the exact kernels, the best of them, and why it is."""
    seconds = {"vectorized": CALL["vectorized"] + _share(weight) * terms * TERM["vectorized"]}
    if not isinstance(noise, Logistic):
        return seconds, "vectorized", f"the compiled kernel is for logistic noise, this is {noise}"
    if weight.device.type == "cuda":
        if not triton.available():
            return seconds, "vectorized", f"the kernel for GPUs is missing ({triton.reason()})"
        seconds["triton"] = CALL["triton"] + _share(weight) * terms * TERM["triton"]
        return seconds, "triton", "the Triton kernel is taken to be the fastest exact one"
    if weight.device.type != "cpu":
        return seconds, "vectorized", f"the compiled kernel is for the processor, the weight is on {weight.device}"
    if not native.available():
        _say_once()
        return seconds, "vectorized", f"the compiled kernel is missing ({native.reason()})"
    # Looking at the weights is worth it only where much is at stake.
    large = terms * LARGE_TERM > CALL["separable"] and _largest(weight) > LARGE * noise.scale
    seconds["native"] = CALL["native"] + terms * (LARGE_TERM if large else TERM["native"])
    return seconds, "native", "the compiled kernel is the fastest exact one"


@lru_cache(maxsize=1)
def _say_once() -> None:
    logging.getLogger("flipgrad").warning("flips are computed without compiled kernels, and slower: %s", native.reason())


def _share(weight: Tensor) -> float:
    """The time of arithmetic on the weight's device, relative to the processor's."""
    return GPU if weight.device.type == "cuda" else 1.0


def _largest(weight: Tensor) -> float:
    if not weight.numel():
        return 0.0
    largest = float(weight.detach().abs().max())
    return largest if math.isfinite(largest) else math.inf


def spread(a: Tensor) -> float:
    """The root mean square of some of the pre-activations."""
    if a.dtype == torch.float32 and a.is_contiguous() and native.usable(a):
        return math.sqrt(native.moments(a, SOME)[1])
    flat = a.detach().flatten()
    return float(flat[:: max(1, len(flat) // SOME)].float().square().mean().sqrt()) if len(flat) else 0.0


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: the widest of the tensors', at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
