"""The compiled library ``_native.so`` of ``csrc``, on the processor, on any number of threads.

Every function has a twin in tensor operations, which is used where the library is missing or does not take the tensors.
``loading`` finds and loads it, without torch, for each module that calls functions of it. ``library`` calls those that take
tensors: for the exact sums over flips of ``flipgrad.flips.compiled``, for the passes over memory of
``flipgrad.flips.separable``, and for ``sampling``, states and mean slopes from counter-based random numbers.

The library is called through ctypes and not built as an extension of torch: it needs no headers of torch, only a C++ compiler,
and one binary serves all versions of Python and torch. It is compiled when the package is installed; without a compiler
``library.available()`` is False and ``library.reason()`` says why.
"""
