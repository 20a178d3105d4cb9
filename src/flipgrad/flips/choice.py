"""Which implementation of the flip product to use: the cheapest one that is accurate enough, by a measured cost model."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.flips import compiled, one_product, triton
from flipgrad.flips.form import Form, find_form, root_mean_square
from flipgrad.flips.ordinary import NARROW_TIME, narrow_pays
from flipgrad.flips.plan import Plan
from flipgrad.native import library
from flipgrad.noise import Noise

Kernel = Literal["separable", "one product", "native", "triton", "vectorized"]

# Seconds, measured on one core of a server from 2023, but for those of triton; only their ratios decide.
#   of a call of each kernel (for the separable one, to find its form too);
CALL = {"separable": 1.2e-4, "native": 5e-5, "triton": 3e-4, "vectorized": 1e-4}
#   of a term in each exact kernel; of the native one also where weights are above 2 scales, and then of each weight besides;
TERM = {"native": 1.1e-10, "triton": 2e-10, "vectorized": 3e-9}
LARGE_TERM, LARGE_WEIGHT, LARGE = 1.9e-10, 1.2e-8, 2.0
#   of such terms of convolutions where the processor has AVX-512;
WIDE_TERM, WIDE_LARGE_TERM = 6e-11, 1.5e-10
#   that must be at stake before the weights are looked at for that;
LOOK = 5e-4
#   of a term in an ordinary product, of which the separable kernel takes as many as its rank;
PRODUCT = 2.2e-11
#   of one function of one pre-activation: where the noise has a closed form, and by the cdf.
FUNCTION = {True: 6e-10, False: 6e-9}
# Of a log ratio, likewise; a call for one product, of a fully connected layer and of a convolution (True); and the time of an
# exact kernel relative to that of a flip product.
LOG_FUNCTION = {True: 1.5e-9, False: 1.2e-8}
CALL_OF_ONE_PRODUCT = {False: 1e-4, True: 4e-4}
EXACT_RATIO_TIME = 1.4
# On a GPU, a call of the separable kernel, and the time of arithmetic relative to the processor's. They and the numbers of
# triton are guesses, not measured.
GPU_CALL, GPU_FACTOR = 5e-4, 0.01


# Shares of the tolerance of which forms are tried that are made for flip products, where another sum is to be computed.
FINER = (1.0, 1 / 4, 1 / 16)


# What was decided last for the inputs of a layer, see :mod:`flipgrad.flips.averaging`.
decided: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


class Layer(Protocol):
    """What is asked of a layer: a noise, and a weight with the norm's scale in it."""

    noise: Noise
    weights: str

    def effective_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Choice:
    """A decision for one layer.

    Attributes:
        kernel: the implementation.
        form: of the separable one, if it was considered.
        seconds: the estimated time of every implementation that could be used.
        reason: why, in words.
    """

    kernel: Kernel
    form: Form | None
    seconds: dict[str, float]
    reason: str


def choose(
    weight: Tensor, noise: Noise, places: int, tolerance: float, *, a: Tensor | None = None, plan: Plan | None = None
) -> Choice:
    """Decide for a layer.

    Args:
        weight: [out, in, ...], of a fully connected layer or a convolution.
        noise: the layer's noise.
        places: output positions, those of all examples together.
        tolerance: the relative L2 error that is allowed; 0 asks for an exact kernel.
        a: the pre-activations, whose root mean square decides how accurate a separable form is.
        plan: what is known of these tensors already.
    """
    _check_tolerance(tolerance)
    terms, activations = places * weight.numel(), places * weight.shape[0]
    seconds, exact, why = _exact(weight, noise, terms, plan)
    if tolerance == 0:
        return Choice(exact, None, seconds, f"exact was asked for; {why}")
    # The least that the separable kernel takes: one product.
    work = _relative_time(weight) * (terms * PRODUCT + activations * FUNCTION[noise.closed_form])
    call = GPU_CALL if weight.device.type == "cuda" else CALL["separable"]
    least = call + work
    if seconds[exact] <= least:
        return Choice(exact, None, {**seconds, "separable": least}, f"small enough for the exact kernel; {why}")
    form = _form(weight, noise, tolerance, a, plan)
    if not form.reachable:
        weights = f"weights {'above' if form.estimated_error == math.inf else 'up to'} {form.limit:.2g}"
        text = f"no separable form within {tolerance:g} for {weights} and {noise}; {why}"
        return Choice(exact, form, seconds, text)
    pays = form.narrow and narrow_pays(places, weight)
    narrow = (len(form.curvature) + (len(form.leads) if form.narrow_rest else 0)) * pays
    products = form.rank - narrow * (1 - NARROW_TIME)
    seconds["separable"] = call + products * work
    ranks = f"{len(form.difference)} + {len(form.curvature)}"
    text = f"the separable form of rank {ranks} has an error of {form.estimated_error:.1e}"
    if seconds["separable"] <= seconds[exact]:
        cost = f"costs {form.rank} ordinary products" + f", {narrow} of them in bfloat16" * (narrow > 0)
        return Choice("separable", form, seconds, f"{text}, within {tolerance:g}, and {cost}")
    return Choice(exact, form, seconds, f"{text} but costs more than the exact kernel; {why}")


def choose_ratio(
    weight: Tensor, noise: Noise, places: int, tolerance: float, *, error: float, a: Tensor, plan: Plan | None = None
) -> Choice:
    """Decide for a log ratio, whose relative error may be ``error``: one product where that will do, else as :func:`choose`."""
    _check_tolerance(tolerance)
    terms = places * weight.numel()
    if tolerance != 0:
        seconds, exact, why = _exact(weight, noise, terms, plan)
        product = PRODUCT * (NARROW_TIME if narrow_pays(places, weight) else 1.0)
        work = terms * product + places * weight.shape[0] * LOG_FUNCTION[noise.closed_form]
        seconds = {name: EXACT_RATIO_TIME * time for name, time in seconds.items()}
        seconds["one product"] = CALL_OF_ONE_PRODUCT[weight.dim() > 2] + _relative_time(weight) * work
        if seconds[exact] <= seconds["one product"]:
            return Choice(exact, None, seconds, f"small enough for the exact kernel; {why}")
        found = one_product.error(weight, noise, None if plan is None else plan.moments(weight))
        if found <= error:
            return Choice("one product", None, seconds, f"one product has an error of {found:.1e}, within {error:g}")
    return choose(weight, noise, places, tolerance, a=a, plan=plan)


def choose_without_kernel(
    weight: Tensor,
    noise: Noise,
    places: int,
    tolerance: float,
    *,
    enough: Callable[[Form], bool],
    a: Tensor,
    plan: Plan | None = None,
) -> Choice:
    """Decide for a sum that no compiled kernel knows, a slope product or one of entropies: separable, or vectorized.

    A form is made for flip products; whether it is accurate ``enough`` for this sum is asked, also of finer ones.
    """
    _check_tolerance(tolerance)
    if tolerance != 0 and places * weight.numel() * TERM["vectorized"] > CALL["separable"]:
        for share in FINER:
            form = _form(weight, noise, share * tolerance, a, plan)
            if form.reachable and enough(form):
                return Choice("separable", form, {}, "")
    return Choice("vectorized", None, {}, "")


def _form(weight: Tensor, noise: Noise, tolerance: float, a: Tensor | None, plan: Plan | None) -> Form:
    """The form for a layer, of what is known of its tensors or is read from them."""
    rms = math.inf if a is None else root_mean_square(a) if plan is None else plan.root_mean_square(a)
    known = None if plan is None or not weight.numel() else plan.moments(weight)
    return find_form(weight, noise, tolerance, activation_rms=rms, known=known)


def _check_tolerance(tolerance: float) -> None:
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance={tolerance}: the tolerance is a relative error from 0 (exact) to below 1, e.g. 1e-3")


def explain(layer: Layer, *, places: int = 2**14, tolerance: float = 1e-3) -> str:
    """What :class:`flipgrad.PSA` would use for a layer, and why.

    If ``PSA(inputs="auto")`` has evaluated the layer and had a choice, it says besides whether the inputs of its weights were
    averaged the last time, and why.

    Args:
        layer: a binary layer.
        places: output positions of all examples together: the batch size, times the output's height and width for a
            convolution.
        tolerance: as for PSA; 0 is ``PSA(exact=True)``.

    >>> import flipgrad as fg
    >>> fg.flips.explain(fg.BinaryLinear(4, 4), places=10).split(";")[0].partition(": ")[2]
    'small enough for the exact kernel'
    """
    inputs = f"; {decided[layer]}" if layer in decided else ""
    if layer.weights == "binary":
        return f"rank one: binary weights make it exact, at the price of one ordinary product{inputs}"
    choice = choose(layer.effective_weight().detach(), layer.noise, places, tolerance)
    times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in sorted(choice.seconds.items(), key=lambda i: i[1]))
    return f"{choice.kernel}: {choice.reason} (estimated: {times}){inputs}"


def _exact(weight: Tensor, noise: Noise, terms: int, plan: Plan | None) -> tuple[dict[str, float], Kernel, str]:
    """The times of the exact kernels, the best of them, and why it is."""
    seconds = {"vectorized": CALL["vectorized"] + _relative_time(weight) * terms * TERM["vectorized"]}
    if not noise.compiled:
        return seconds, "vectorized", f"the compiled kernel is for logistic noise, this is {noise}"
    if weight.device.type == "cuda":
        if not triton.available():
            return seconds, "vectorized", f"the kernel for GPUs is missing ({triton.reason()})"
        seconds["triton"] = CALL["triton"] + _relative_time(weight) * terms * TERM["triton"]
        return seconds, "triton", "the Triton kernel is taken to be the fastest exact one"
    if weight.device.type != "cpu":
        return seconds, "vectorized", f"the compiled kernel is for the processor, the weight is on {weight.device}"
    if not library.available():
        _warn_once()
        return seconds, "vectorized", f"the compiled kernel is missing ({library.reason()})"
    wide = weight.dim() > 2 and library.has_avx512()
    if_small = terms * (WIDE_TERM if wide else TERM["native"])
    if_large = terms * (WIDE_LARGE_TERM if wide else LARGE_TERM) + weight.numel() * LARGE_WEIGHT
    # Looking at the weights is worth it only where much is at stake.
    large = if_large > LOOK and _largest(weight, plan) > LARGE * noise.scale
    seconds["native"] = CALL["native"] + (if_large if large else if_small)
    return seconds, "native", "the compiled kernel is the fastest exact one"


def _largest(weight: Tensor, plan: Plan | None) -> float:
    """The largest absolute value of the weights; infinite where one is NaN."""
    if plan is None:
        return compiled.largest(weight.detach())
    largest = math.sqrt(plan.moments(weight)[0])
    return math.inf if math.isnan(largest) else largest


@lru_cache(maxsize=1)
def _warn_once() -> None:
    logging.getLogger("flipgrad").warning("flips are computed without compiled kernels, and slower: %s", library.reason())


def _relative_time(weight: Tensor) -> float:
    """The time of arithmetic on the weight's device, relative to the processor's."""
    return GPU_FACTOR if weight.device.type == "cuda" else 1.0
