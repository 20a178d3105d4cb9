"""Loads the compiled library and calls its functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.guards import capturing

LIBRARY = Path(__file__).parent.parent / "_native.so"

# Only the instructions that every processor of this architecture has: to test them, and to compare.
PORTABLE = os.environ.get("FLIPGRAD_PORTABLE", "") not in ("", "0")

# The functions of csrc/flipgrad.h.
FUNCTIONS = (
    *(f"{name}_{suffix}" for name in ("flip", "ratio", "sample_logistic", "sample_probability") for suffix in ("f32", "f64")),
    *(f"{name}_f32" for name in ("features", "log_features", "weights", "product", "moments", "mean_slopes")),
)
WEIGHTS_TOO_LARGE = 2
_OUT_OF_MEMORY = 1
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY} does not exist: install the package where there is a C++ compiler (pip install .)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name in FUNCTIONS:
            getattr(library, f"flipgrad_{name}")
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY} cannot be loaded ({error}): install the package anew (pip install .)"
    return library, ""


_library, _reason = load()


def available() -> bool:
    """Whether the compiled library is there."""
    return _library is not None


def reason() -> str:
    """Why the library is not :func:`available`, or an empty string."""
    return _reason


def usable(*tensors: Tensor) -> bool:
    """Whether the library may run now: it is there, the tensors are on the processor, and no graph is captured."""
    return available() and all(t.device.type == "cpu" for t in tensors) and not capturing()


def takes(*tensors: Tensor) -> bool:
    """Whether passes over memory are compiled for these tensors: it is :func:`usable`, and they are contiguous float32."""
    return usable(*tensors) and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def has_fast_products() -> bool:
    """Whether the library's matrix product is faster than torch's: with AVX2 it is, but torch's may use AVX-512."""
    return _library is not None and bool(_library.flipgrad_has_avx2()) and not _library.flipgrad_has_avx512()


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the library computes for tensors of ``dtype``."""
    return dtype if dtype in _SUFFIXES else torch.float32


def check_tensors(**tensors: Tensor) -> None:
    """Refuse tensors that the library does not take, and all if it is missing."""
    if not available():
        raise InputError(f"flipgrad's compiled library is not available: {reason()}")
    for name, t in tensors.items():
        if t.device.type != "cpu":
            raise InputError(f"{name} is on {t.device}: the native kernels need tensors on the CPU, e.g. {name}.cpu()")
    check_dtypes("the native kernels take", **tensors)


def check_dtypes(taker: str, **tensors: Tensor) -> None:
    """Refuse sparse tensors, and those of different dtypes or of those that the kernel, ``taker``, does not take."""
    first, like = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.layout != torch.strided:
            raise InputError(f"{name} is {t.layout}: {taker} dense tensors, e.g. {name}.to_dense()")
        if t.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {t.dtype}: {taker} {', '.join(str(dtype) for dtype in DTYPES)}")
        if t.dtype != like.dtype:
            raise InputError(f"{name} has dtype {t.dtype}, but {first} has {like.dtype}: give them one dtype")


class Problem(ctypes.Structure):
    """A structure of csrc/flipgrad.h: what a function is to compute, but for its tensors."""

    threads: int
    portable: int


def integers(names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """Fields of whole numbers of a :class:`Problem`."""
    return tuple((name, ctypes.c_int64) for name in names.split())


def floats(numbers: Iterable[float]) -> ctypes.Array[ctypes.c_float]:
    """Numbers as a problem points to them."""
    values = tuple(numbers)
    return (ctypes.c_float * len(values))(*values)


def call(name: str, dtype: torch.dtype, problem: Problem, *tensors: Tensor) -> int:
    """Run a function on the memory of ``tensors``, whose sizes must be those of the problem; returns its status."""
    if _library is None:
        raise InputError(f"flipgrad's compiled library is not available: {reason()}")
    problem.threads, problem.portable = torch.get_num_threads(), PORTABLE
    function = getattr(_library, f"flipgrad_{name}_{_SUFFIXES[dtype]}")
    status: int = function(ctypes.byref(problem), *(ctypes.c_void_p(t.data_ptr()) for t in tensors))
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the tables of a native kernel")
    return status
