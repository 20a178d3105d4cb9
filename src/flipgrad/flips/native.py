r"""Sums over flips with logistic noise, and sampling, in compiled code: exact, on the processor, on any number of threads.

With :math:`T = \tanh w`, :math:`m = \tanh(a/2)` and :math:`C = g (1 - m^2) / 2` the flip product of the sigmoid is

.. math:: u_i = \sum_j \frac{C_j T_{ji}}{1 - x_i m_j T_{ji}}

where nothing overflows and only the denominator can cancel; ``csrc/flip_kernels.inc`` has the details. Float32 results have a
relative error (in the norm) below 1e-5, float64 ones below 1e-12, and neither depends on the number of threads, which is
``torch.get_num_threads()``. Half precision is computed in float32.

The log ratio of the probabilities of output states y is the logarithm of a product, for weights of any size
(``csrc/ratio_kernels.inc``):

.. math:: \log r_i = -\log \prod_j \big[F(b_j) + F(-b_j)\, e^{2 x_i y_j w_{ji}}\big], \quad b = y a

The library is compiled when the package is installed. Without a compiler the package works without it: :func:`available` is
False and :func:`reason` says why.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flipgrad.capture import capturing
from flipgrad.errors import InputError
from flipgrad.flips import vectorized
from flipgrad.flips._arguments import check_dtypes, fake_per_unit, flat, kernel_operator, memory_format
from flipgrad.flips.ordinary import Geometry
from flipgrad.noise import Logistic, Noise

LIBRARY = Path(__file__).parent.parent / "_native.so"

# Only the instructions that every processor of this architecture has: to test them, and to compare.
PORTABLE = os.environ.get("FLIPGRAD_PORTABLE", "") not in ("", "0")

# ``kBlock`` of csrc/features.cpp.
BLOCK = 256

# Where the fused product is faster than ordinary ones: it computes 16 inputs at once, and with many examples it matters little
# that the functions of the weights need not be written to memory.
LEAST_INPUTS, MOST_EXAMPLES = 32, 384

_OUT_OF_MEMORY, _WEIGHTS_TOO_LARGE = 1, 2
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


class _FlipProblem(ctypes.Structure):
    """``FlipProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "groups", "in_channels", "out_channels")),
        *((name, ctypes.c_int64) for name in ("height", "width", "out_height", "out_width")),
        *((name, ctypes.c_int64 * 2) for name in ("kernel", "stride", "padding", "dilation")),
        *((f"{name}_strides", ctypes.c_int64 * 4) for name in ("x", "a", "grad", "weight", "u")),
        ("largest_weight", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
    )


class _SampleProblem(ctypes.Structure):
    """``SampleProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
        ("draws", ctypes.c_int64),
        ("t", ctypes.c_double),
    )


class _FeatureProblem(ctypes.Structure):
    """``FeatureProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "block", "evens", "odds")),
        ("cosh_steps", ctypes.POINTER(ctypes.c_float)),
        ("odd_nodes", ctypes.POINTER(ctypes.c_int64)),
        ("scale", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
    )


class _LogFeatureProblem(ctypes.Structure):
    """``LogFeatureProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "block", "odds", "evens")),
        *(
            (name, ctypes.POINTER(ctypes.c_float))
            for name in ("half_steps", "half_tanhs", "heights", "odd_matrix", "even_matrix")
        ),
        ("scale", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
    )


class _WeightProblem(ctypes.Structure):
    """``WeightProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "functions", "odd_powers", "terms")),
        ("coefficients", ctypes.POINTER(ctypes.c_float)),
        ("limit", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
    )


class _ProductProblem(ctypes.Structure):
    """``ProductProblem`` of csrc/flipgrad.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "inputs", "outputs", "evens", "odds", "terms")),
        ("coefficients", ctypes.POINTER(ctypes.c_float)),
        ("limit", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("portable", ctypes.c_int64),
    )


class _MomentProblem(ctypes.Structure):
    """``MomentProblem`` of csrc/flipgrad.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("count", "every", "threads", "portable"))


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY} does not exist: install the package where there is a C++ compiler (pip install .)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.flipgrad_features_f32.argtypes = [ctypes.POINTER(_FeatureProblem), *[ctypes.c_void_p] * 4]
        library.flipgrad_log_features_f32.argtypes = [ctypes.POINTER(_LogFeatureProblem), *[ctypes.c_void_p] * 4]
        library.flipgrad_moments_f32.argtypes = [ctypes.POINTER(_MomentProblem), *[ctypes.c_void_p] * 2]
        library.flipgrad_combine_f32.argtypes = [ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        library.flipgrad_weights_f32.argtypes = [ctypes.POINTER(_WeightProblem), *[ctypes.c_void_p] * 2]
        library.flipgrad_product_f32.argtypes = [ctypes.POINTER(_ProductProblem), *[ctypes.c_void_p] * 5]
        library.flipgrad_mean_slopes_f32.argtypes = [ctypes.POINTER(_SampleProblem), *[ctypes.c_void_p] * 2]
        for suffix in _SUFFIX.values():
            for of in ("flip", "ratio"):
                getattr(library, f"flipgrad_{of}_{suffix}").argtypes = [ctypes.POINTER(_FlipProblem), *[ctypes.c_void_p] * 5]
            for of in ("logistic", "probability"):
                function = getattr(library, f"flipgrad_sample_{of}_{suffix}")
                function.argtypes = [ctypes.POINTER(_SampleProblem), *[ctypes.c_void_p] * 2]
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY} cannot be loaded ({error}): install the package anew (pip install .)"
    return library, ""


_library, _reason = _load()


def available() -> bool:
    """Whether the compiled library is there."""
    return _library is not None


def usable(t: Tensor) -> bool:
    """Whether the library is there and takes tensors like ``t`` now: on the processor, and not while a graph is captured."""
    return available() and t.device.type == "cpu" and not capturing()


def reason() -> str:
    """Why the library is not :func:`available`, or an empty string."""
    return _reason


def flip_product(x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.flip_product` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    The result has the memory format of ``x``.
    """
    _check(noise, x=x, a=a, grad=grad, weight=weight)
    u: Tensor = torch.ops.flipgrad.flip_product_native(x, a, grad, weight, noise.scale, flat(geometry))
    return u


def log_ratio(x: Tensor, a: Tensor, states: Tensor, weight: Tensor, noise: Noise, geometry: Geometry | None = None) -> Tensor:
    """:func:`flipgrad.flips.log_ratio` of :class:`~flipgrad.noise.Logistic` noise, for states -1 and +1, and 0 for no unit.

    An output state that is 0 adds nothing. Weights may be of any size. In float32 the error is about 3e-7 times the root of
    the number of terms, or 1e-6 of the sum of the terms' absolute values where that is more. The result has the memory format
    of ``x``.
    """
    _check(noise, x=x, a=a, states=states, weight=weight)
    ratio: Tensor = torch.ops.flipgrad.log_ratio_native(x, a, states, weight, noise.scale, flat(geometry))
    return ratio


def sample_states(a: Tensor, noise: Noise, seed: int, offset: int = 0) -> Tensor:
    """States +1 with probability F(a), else -1, from counter-based random numbers.

    A state depends on the seed, the offset, its place in memory and its pre-activation alone. Take another offset for every
    draw of one seed. A uniform number of 32 bits is compared with the probability, so that probabilities are rounded to
    2**-32; the smaller one of F(a) and F(-a) has, besides, a relative error of about 2e-7 (logistic noise computes it in
    float32).

    Args:
        a: pre-activations of any shape.
        noise: any noise; logistic noise is computed in the same pass.
        seed: from 0 to 2**63 - 1.
        offset: from 0 to 2**63 - 1.

    Returns:
        The states, with the shape, dtype and layout of ``a``.
    """
    _check_tensors(a=a)
    _check_not_negative(seed=seed, offset=offset)
    if isinstance(noise, Logistic):
        states: Tensor = torch.ops.flipgrad.sample_states_native(a, noise.scale, seed, offset)
    else:
        states = torch.ops.flipgrad.sample_states_from_probability_native(noise.cdf(a), seed, offset)
    return states


def sample_states_from_probability(probability: Tensor, seed: int, offset: int = 0) -> Tensor:
    """States +1 with the given ``probability``, else -1: :func:`sample_states` where F(a) is known."""
    _check_tensors(probability=probability)
    _check_not_negative(seed=seed, offset=offset)
    states: Tensor = torch.ops.flipgrad.sample_states_from_probability_native(probability, seed, offset)
    return states


def mean_slopes(a: Tensor, x: Tensor, noise: Logistic, t: float, samples: int, seed: int, offset: int = 0) -> Tensor:
    r"""Slopes of concrete units, averaged over noise that leads to their states.

    .. math:: \frac1K \sum_{k=1}^K \frac{\partial}{\partial a} \tanh\Big(\frac{a - Z_k}{2t}\Big), \quad
        Z_k \sim p(Z \mid \mathrm{sign}(a - Z) = x)

    The random number behind :math:`Z_k` is that of :func:`sample_states` with ``offset`` + k - 1, less its last bit.
    Computed in float32; terms below the smallest normal number have no digits.

    Args:
        a: pre-activations of any shape.
        x: their states.
        noise: of Z.
        t: the temperature.
        samples: the number K.
        seed: from 0 to 2**63 - 1.
        offset: likewise; the call takes ``samples`` of them.

    Returns:
        The slopes, with the shape, dtype and layout of ``a``.
    """
    _check(noise, a=a, x=x)
    _check_not_negative(seed=seed, offset=offset)
    slopes: Tensor = torch.ops.flipgrad.mean_slopes_native(x * a, noise.scale, t, samples, seed, offset)
    return slopes


def logistic_features(
    a: Tensor, grad: Tensor, scale: float, steps: Sequence[float], odd_nodes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the separable flip product, in one pass; see ``_basis.features``.

    Args:
        a: pre-activations [B, C, ...], contiguous, float32.
        grad: what to multiply by, likewise.
        scale: of the noise.
        steps: the nodes.
        odd_nodes: those among them for which the function of O is wanted too.

    Returns:
        The functions of E [B, len(steps) C, ...] and of O [B, len(odd_nodes) C, ...], node after node.
    """
    batch, channels, *places = a.shape
    even = a.new_empty(batch, len(steps) * channels, *places)
    odd = a.new_empty(batch, len(odd_nodes) * channels, *places)
    problem = _FeatureProblem(
        images=batch,
        block=a[0].numel() if batch else 0,
        evens=len(steps),
        odds=len(odd_nodes),
        cosh_steps=(ctypes.c_float * len(steps))(*map(math.cosh, steps)),
        odd_nodes=(ctypes.c_int64 * len(odd_nodes))(*odd_nodes),
        scale=scale,
        threads=torch.get_num_threads(),
        portable=PORTABLE,
    )
    pointers = (t.data_ptr() for t in (a, grad, even, odd))
    _check_memory(_function("features", torch.float32)(ctypes.byref(problem), *pointers))
    return even, odd


Matrix = Sequence[Sequence[float]]


def logistic_log_features(
    a: Tensor, states: Tensor, scale: float, odd: tuple[Sequence[float], Matrix], even: tuple[Sequence[float], Matrix]
) -> tuple[Tensor, Tensor]:
    """The functions of the pre-activations in the separable log ratio, in one pass; see ``interpolated``.

    Args:
        a: pre-activations [B, C, ...], contiguous, float32.
        states: the output states, likewise.
        scale: of the noise.
        odd: the nodes of the part that is odd in the weight, and the matrix that their values are multiplied by.
        even: those of the even part.

    Returns:
        The functions of the odd part [B, nodes C, ...] and of the even one, one after the other.
    """
    batch, channels, *places = a.shape
    results = [a.new_empty(batch, len(nodes) * channels, *places) for nodes, _ in (odd, even)]
    problem = _LogFeatureProblem(
        images=batch,
        block=a[0].numel() if batch else 0,
        odds=len(odd[0]),
        evens=len(even[0]),
        half_steps=_floats(step / 2 for step in odd[0]),
        half_tanhs=_floats(math.tanh(step / 2) for step in odd[0]),
        heights=_floats(math.sinh(step / 2) ** 2 for step in even[0]),
        odd_matrix=_floats(number for row in odd[1] for number in row),
        even_matrix=_floats(number for row in even[1] for number in row),
        scale=scale,
        threads=torch.get_num_threads(),
        portable=PORTABLE,
    )
    pointers = (t.data_ptr() for t in (a, states, *results))
    _check_memory(_function("log_features", torch.float32)(ctypes.byref(problem), *pointers))
    return results[0], results[1]


def _floats(numbers: Iterable[float]) -> ctypes.Array[ctypes.c_float]:
    values = tuple(numbers)
    return (ctypes.c_float * len(values))(*values)


def weight_functions(
    weight: Tensor, even: Sequence[Sequence[float]], odd: Sequence[Sequence[float]], limit: float
) -> tuple[Tensor, Tensor]:
    """The functions of the weights in the separable flip product, in one pass.

    Args:
        weight: [out, ...], contiguous, float32.
        even: coefficients of the polynomials in 2 (w / limit)^2 - 1, lowest power first, that are multiplied by w.
        odd: of those that are multiplied by w^2.
        limit: the largest weight.

    Returns:
        The functions [len(even) out, ...] and [len(odd) out, ...].
    """
    terms, coefficients = _padded([*even, *odd])
    out = weight.new_empty(len(even) + len(odd), *weight.shape)
    problem = _WeightProblem(
        count=weight.numel(),
        functions=len(out),
        odd_powers=len(even),
        terms=terms,
        coefficients=coefficients,
        limit=limit,
        threads=torch.get_num_threads(),
        portable=PORTABLE,
    )
    _check_memory(_function("weights", torch.float32)(ctypes.byref(problem), weight.data_ptr(), out.data_ptr()))
    return out[: len(even)].flatten(0, 1), out[len(even) :].flatten(0, 1)


def product_pays(examples: int, inputs: int) -> bool:
    """Whether :func:`product` is faster than ordinary products of this size: those use AVX-512 where there is such a thing."""
    return (
        inputs >= LEAST_INPUTS
        and examples <= MOST_EXAMPLES
        and _library is not None
        and bool(_library.flipgrad_has_avx2())
        and not _library.flipgrad_has_avx512()
    )


def product(
    x: Tensor,
    features_even: Tensor,
    features_odd: Tensor,
    weight: Tensor,
    even: Sequence[Sequence[float]],
    odd: Sequence[Sequence[float]],
    limit: float,
) -> Tensor:
    """x (x ``features_even`` v + ``features_odd`` q), with the functions v and q of the weights of :func:`weight_functions`.

    All tensors are contiguous, float32. The result does not depend on the number of threads.

    Args:
        x: states [B, in].
        features_even: functions of the pre-activations [B, len(even) out].
        features_odd: likewise [B, len(odd) out].
        weight: [out, in].
        even: as for :func:`weight_functions`, like ``odd`` and ``limit``; at least one.

    Returns:
        The flip product [B, in].
    """
    terms, coefficients = _padded([*even, *odd])
    u = torch.empty_like(x)
    problem = _ProductProblem(
        batch=len(x),
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        evens=len(even),
        odds=len(odd),
        terms=terms,
        coefficients=coefficients,
        limit=limit,
        threads=torch.get_num_threads(),
        portable=PORTABLE,
    )
    pointers = (t.data_ptr() for t in (features_even, features_odd, weight, x, u))
    _check_memory(_function("product", torch.float32)(ctypes.byref(problem), *pointers))
    return u


def _padded(rows: Sequence[Sequence[float]]) -> tuple[int, ctypes.Array[ctypes.c_float]]:
    """The length of the longest row, and all rows one after the other, filled with zeros to that length."""
    length = max(map(len, rows))
    numbers = [number for row in rows for number in (*row, *[0.0] * (length - len(row)))]
    return length, (ctypes.c_float * len(numbers))(*numbers)


def moments(t: Tensor, most: int) -> tuple[float, float, float]:
    """The largest square, the mean square and the mean fourth power of a contiguous float32 tensor, in one pass.

    Of more than ``most`` elements only so many are looked at, in blocks that are evenly spread.
    """
    count = t.numel()
    every = max(1, count // most)
    sums = (ctypes.c_double * 3)()
    problem = _MomentProblem(count, every, torch.get_num_threads(), PORTABLE)
    _check_memory(_function("moments", torch.float32)(ctypes.byref(problem), t.data_ptr(), sums))
    blocks = -(-count // (every * BLOCK))
    looked_at = blocks * BLOCK - max(0, (blocks - 1) * every * BLOCK + BLOCK - count)
    return sums[0], sums[1] / max(1, looked_at), sums[2] / max(1, looked_at)


def combine(even: Tensor, odd: Tensor, x: Tensor) -> Tensor:
    """``even`` becomes x (x even + odd), in one pass; three float32 tensors of one shape, contiguous."""
    pointers = (t.data_ptr() for t in (x, odd, even))
    _check_memory(_function("combine", torch.float32)(even.numel(), torch.get_num_threads(), *pointers))
    return even


def _check(noise: Noise, **tensors: Tensor) -> None:
    if not isinstance(noise, Logistic):
        raise InputError(f"noise={noise!r}: the native flip product is for Logistic noise; use flipgrad.flips for the others")
    _check_tensors(**tensors)


def _check_tensors(**tensors: Tensor) -> None:
    if not available():
        raise InputError(f"flipgrad's compiled library is not available: {reason()}")
    for name, t in tensors.items():
        if t.device.type != "cpu":
            raise InputError(f"{name} is on {t.device}: the native kernels need tensors on the CPU, e.g. {name}.cpu()")
    check_dtypes("the native kernels take", **tensors)


def _check_not_negative(**numbers: int) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 2**63:
            raise InputError(f"{name}={value}: must be from 0 to 2**63 - 1")


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _SUFFIX else torch.float32


def _sum(function: str, x: Tensor, a: Tensor, grad: Tensor, weight: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """A sum over flips in a convolution whose shapes are right; ``grad`` is what it is given for every output."""
    dtype = _computed_in(x.dtype)
    u = torch.empty(x.shape, dtype=dtype, memory_format=memory_format(x))
    if u.numel() == 0:
        return u.to(x.dtype)
    tensors = [t.detach().to(dtype) for t in (x, a, grad, weight)]
    names = ("x", "a", "grad", "weight", "u")
    stride, padding, dilation, groups = geometry
    problem = _FlipProblem(
        batch=x.shape[0],
        groups=groups,
        in_channels=weight.shape[1],
        out_channels=weight.shape[0] // groups,
        height=x.shape[2],
        width=x.shape[3],
        out_height=a.shape[2],
        out_width=a.shape[3],
        largest_weight=_largest(tensors[3]),
        scale=scale,
        threads=torch.get_num_threads(),
        portable=PORTABLE,
        **{
            name: (ctypes.c_int64 * 2)(*pair)
            for name, pair in (("kernel", weight.shape[2:]), ("stride", stride), ("padding", padding), ("dilation", dilation))
        },
        **{f"{name}_strides": (ctypes.c_int64 * 4)(*t.stride()) for name, t in zip(names, [*tensors, u], strict=True)},
    )
    status = _function(function, dtype)(ctypes.byref(problem), *(t.data_ptr() for t in [*tensors, u]))
    if status == _WEIGHTS_TOO_LARGE:
        return vectorized.flip_product(x, a, grad, weight, Logistic(scale), geometry)
    _check_memory(status)
    return u.to(x.dtype)


def _largest(t: Tensor) -> float:
    """The largest absolute value; infinite where one is NaN, which says nothing about the others."""
    if t.numel() == 0:
        return 0.0
    low, high = torch.aminmax(t)
    return math.inf if low.isnan() else max(-low.item(), high.item())


def _sample(
    function: str, given: Tensor, dtype: torch.dtype, scale: float, seed: int, offset: int, draws: int = 1, t: float = 1.0
) -> Tensor:
    # Numbered as they lie in memory, so that no layout is copied but one with gaps.
    out = torch.empty_like(given, dtype=dtype)
    numbers = given.detach().to(dtype)
    if numbers.stride() != out.stride():
        numbers = torch.empty_like(out).copy_(numbers)
    problem = _SampleProblem(out.numel(), seed, offset, scale, torch.get_num_threads(), PORTABLE, draws, t)
    _check_memory(_function(function, dtype)(ctypes.byref(problem), numbers.data_ptr(), out.data_ptr()))
    return out.to(given.dtype)


def _sample_logistic(a: Tensor, scale: float, seed: int, offset: int) -> Tensor:
    return _sample("sample_logistic", a, _computed_in(a.dtype), scale, seed, offset)


def _sample_probability(probability: Tensor, seed: int, offset: int) -> Tensor:
    return _sample("sample_probability", probability, _computed_in(probability.dtype), 1.0, seed, offset)


def _mean_slopes(xa: Tensor, scale: float, t: float, samples: int, seed: int, offset: int) -> Tensor:
    return _sample("mean_slopes", xa, torch.float32, scale, seed, offset, samples, t)


def _function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    if _library is None:
        raise InputError(f"flipgrad's compiled library is not available: {reason()}")
    function: ctypes._NamedFuncPointer = getattr(_library, f"flipgrad_{name}_{_SUFFIX[dtype]}")
    return function


def _check_memory(status: int) -> None:
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the tables of a native kernel")


def _fake_alike(t: Tensor, *_: object) -> Tensor:
    return torch.empty_like(t)


_FLIP = "Tensor x, Tensor a, Tensor grad, Tensor weight, float scale, int[] shape"
_RATIO = "Tensor x, Tensor a, Tensor states, Tensor weight, float scale, int[] shape"
_OPERATORS = (
    ("flip_product_native", f"({_FLIP}) -> Tensor", kernel_operator(partial(_sum, "flip"), "grad"), fake_per_unit),
    ("log_ratio_native", f"({_RATIO}) -> Tensor", kernel_operator(partial(_sum, "ratio"), "states"), fake_per_unit),
    ("sample_states_native", "(Tensor a, float scale, int seed, int offset) -> Tensor", _sample_logistic, _fake_alike),
    (
        "sample_states_from_probability_native",
        "(Tensor probability, int seed, int offset) -> Tensor",
        _sample_probability,
        _fake_alike,
    ),
    (
        "mean_slopes_native",
        "(Tensor xa, float scale, float t, int samples, int seed, int offset) -> Tensor",
        _mean_slopes,
        _fake_alike,
    ),
)
for _name, _schema, _implementation, _fake in _OPERATORS:
    torch.library.define(f"flipgrad::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flipgrad::{_name}", "cpu", _implementation)
    torch.library.register_fake(f"flipgrad::{_name}", _fake)


def _vmap(name: str) -> None:
    """Elements of a draw are told apart by their index, so that many draws are one large tensor."""
    operator = getattr(torch.ops.flipgrad, name)

    def rule(info: object, in_dims: tuple[int | None, ...], t: Tensor, *arguments: object) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise InputError("sampling under torch.vmap: the draws share their pre-activations; expand these to one for each")
        return operator(t.movedim(in_dims[0], 0), *arguments), 0

    torch.library.register_vmap(f"flipgrad::{name}", rule)


_vmap("sample_states_native")
_vmap("sample_states_from_probability_native")
_vmap("mean_slopes_native")
