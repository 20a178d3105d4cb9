"""The compiled library ``_native.so`` of ``csrc``, on the processor, on any number of threads.

Every function has a twin in tensor operations, which is used where the library is missing or does not take the tensors.
``library`` calls it: for the exact sums over flips of ``flipgrad.flips.compiled``, for the passes over memory of
``flipgrad.flips.separable``, and for ``sampling``, states and mean slopes from counter-based random numbers.

The library is called through ctypes and not built as an extension of torch: it needs no headers of torch, only a C++ compiler,
and one binary serves all versions of Python and torch. It is compiled when the package is installed; without a compiler
:func:`available` is False and :func:`reason` says why.
"""

from flipgrad.native.library import available, reason

__all__ = ["available", "reason"]
