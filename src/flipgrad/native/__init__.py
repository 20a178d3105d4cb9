"""The compiled library ``_native.so`` of ``csrc``, on the processor, on any number of threads.

Every function has a twin in tensor operations, which is used where the library is missing or does not take the tensors:

- ``flips``: exact sums over flips of logistic noise, whose twin is ``flipgrad.flips.vectorized``;
- ``separable``: the passes over memory of separable sums, whose twins are in ``flipgrad.flips.passes``;
- ``sampling``: states and mean slopes from counter-based random numbers, for ``flipgrad.sampling``.

The library is called through ctypes and not built as an extension of torch: it needs no headers of torch, only a C++ compiler,
and one binary serves all versions of Python and torch. It is compiled when the package is installed; without a compiler
:func:`available` is False and :func:`reason` says why.
"""

from __future__ import annotations

from flipgrad.native.library import available, reason

__all__ = ["available", "reason"]
