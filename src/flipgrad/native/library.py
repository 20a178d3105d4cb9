"""Calls the functions of the compiled library that take tensors."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.guards import capturing
from flipgrad.native.loading import PORTABLE, load

# The fields of every function's structure in csrc/flipgrad.h, in their order.
_FLIP = (
    "batch groups in_channels out_channels height width out_height out_width kernel stride padding dilation "
    "x_strides a_strides grad_strides weight_strides u_strides largest_weight scale threads portable"
)
_SAMPLE = "count seed offset scale threads portable draws t"
_UNITS = "count scale threads portable"
_FIELDS = {
    "flip": _FLIP,
    "ratio": _FLIP,
    "sample_logistic": _SAMPLE,
    "sample_probability": _SAMPLE,
    "mean_slopes": _SAMPLE,
    "slopes": _UNITS,
    "posterior": _UNITS,
    "join": _UNITS,
    "certainty": "count every threads portable",
    "spread": (
        "batch groups in_channels height width out_height out_width kernel stride padding dilation of_ratio channels_last "
        "threads portable"
    ),
    "features": "images block differences curvatures cosh_steps leads curvature_nodes scale threads portable",
    "log_features": (
        "images block differences curvatures half_steps half_tanhs heights difference_matrix curvature_matrix scale "
        "threads portable"
    ),
    "weights": "count functions odd_powers terms coefficients limit threads portable",
    "product": "batch inputs outputs differences curvatures terms coefficients limit threads portable",
    "rank_one": "images channels groups block of_logs keep_even scale threads portable",
    "flip_rows": "images channels groups block of_logs keep_even scale threads portable",
    "log_rows": "images channels groups block of_logs keep_even scale threads portable",
    "nodes": "outputs inputs groups threads portable",
    "one_product": "batch inputs outputs scale threads portable",
    "moments": "count every threads portable",
    "squares": "outputs inputs powers threads portable",
    "softmax": "batch units outputs threads portable",
    "softmax_gradient": "batch units outputs threads portable",
}
# Their types, if not int64_t.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("seed", "offset"), ctypes.c_uint64),
    **dict.fromkeys(("largest_weight", "scale", "limit", "t"), ctypes.c_double),
    **dict.fromkeys(("kernel", "stride", "padding", "dilation"), ctypes.c_int64 * 2),
    **dict.fromkeys((f"{name}_strides" for name in ("x", "a", "grad", "weight", "u")), ctypes.c_int64 * 4),
    **dict.fromkeys(
        ("cosh_steps", "leads", "half_steps", "half_tanhs", "heights", "coefficients"), ctypes.POINTER(ctypes.c_float)
    ),
    **dict.fromkeys(("difference_matrix", "curvature_matrix"), ctypes.POINTER(ctypes.c_float)),
    "curvature_nodes": ctypes.POINTER(ctypes.c_int64),
}
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}
# Functions that exist for both of these dtypes; the others are for float32.
_OF_BOTH_DTYPES = ("flip", "ratio", "sample_logistic", "sample_probability")

# What a function returns besides 0.
_OUT_OF_MEMORY, WEIGHTS_TOO_LARGE = 1, 2

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _structure(fields: str) -> type[ctypes.Structure]:
    types = [(name, _TYPES.get(name, ctypes.c_int64)) for name in fields.split()]
    return type("Problem", (ctypes.Structure,), {"_fields_": types})


_PROBLEMS = {name: _structure(fields) for name, fields in _FIELDS.items()}


_library, _reason = load(
    f"flipgrad_{name}_{suffix}" for name in _FIELDS for suffix in (_SUFFIXES.values() if name in _OF_BOTH_DTYPES else ("f32",))
)


def available() -> bool:
    """Whether the compiled library is there."""
    return _library is not None


def reason() -> str:
    """Why the library is not :func:`available`, or an empty string."""
    return _reason


def usable(*tensors: Tensor) -> bool:
    """Whether the library may run now: it is there, the tensors are in the processor's memory, and no graph is captured.

    Those that torch batches for ``torch.autograd.grad(..., is_grads_batched=True)`` have no memory that could be read.
    """
    if _library is None or capturing():
        return False
    # A loop, since small layers ask thirty times in a step.
    for t in tensors:  # noqa: SIM110
        if not (t.is_cpu and torch._C._has_storage(t)):
            return False
    return True


def takes(*tensors: Tensor) -> bool:
    """Whether passes over memory are compiled for these tensors: it is :func:`usable`, and they are contiguous float32."""
    if not usable(*tensors):
        return False
    for t in tensors:  # noqa: SIM110
        if t.dtype != torch.float32 or not t.is_contiguous():
            return False
    return True


def takes_alike(*tensors: Tensor) -> bool:
    """Whether passes that treat all numbers alike are compiled: as :func:`takes`, or all of them images with channels last."""
    if not usable(*tensors):
        return False
    memory_format = torch.contiguous_format if tensors[0].is_contiguous() else torch.channels_last
    for t in tensors:  # noqa: SIM110
        if t.dtype != torch.float32 or not t.is_contiguous(memory_format=memory_format):
            return False
    return True


def has_avx512() -> bool:
    """Whether the library's functions run with AVX-512 here, 16 numbers at once."""
    return _library is not None and not PORTABLE and bool(_library.flipgrad_has_avx512())


def has_fast_products() -> bool:
    """Whether the library's matrix product is faster than torch's, which it is where it has the processor's instructions."""
    return _library is not None and bool(_library.flipgrad_has_fast_products())


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


def floats(numbers: Iterable[float]) -> ctypes.Array[ctypes.c_float]:
    """Numbers as a structure points to them."""
    values = tuple(numbers)
    return (ctypes.c_float * len(values))(*values)


def call(name: str, dtype: torch.dtype, *tensors: Tensor, **fields: Any) -> int:
    """Run a function on the memory of ``tensors``, whose sizes must be those that its ``fields`` say; returns its status."""
    if _library is None:
        raise InputError(f"flipgrad's compiled library is not available: {reason()}")
    problem = _PROBLEMS[name](**fields)
    problem.threads, problem.portable = torch.get_num_threads(), PORTABLE
    function = getattr(_library, f"flipgrad_{name}_{_SUFFIXES[dtype]}")
    status: int = function(ctypes.byref(problem), *[ctypes.c_void_p(t.data_ptr()) for t in tensors])
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the tables of a native kernel")
    return status
