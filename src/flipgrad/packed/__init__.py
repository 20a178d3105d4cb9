"""Trained networks in bits: one file, evaluated with numpy or compiled code, without torch.

``flipgrad pack RUN --output net.safetensors`` writes such a file, and so does :func:`pack`. To use it:

>>> from flipgrad.packed import load
>>> net = load("net.safetensors")  # doctest: +SKIP
>>> net(x)                         # outputs of the deterministic network  # doctest: +SKIP
>>> net(x, samples=10, seed=0)     # class probabilities, averaged over ten draws of all units  # doctest: +SKIP

States and weights ±1 are bits, sums over them are counts, and norms, biases and noise are folded into an integer threshold or a
table of probabilities for every channel: between the first layer and the head there is no floating point.
"""

from typing import TYPE_CHECKING, Any

from flipgrad.packed.network import Facts, PackedNetwork, load

if TYPE_CHECKING:
    from flipgrad.packed.packing import pack

__all__ = ["Facts", "PackedNetwork", "load", "pack"]


def __getattr__(name: str) -> Any:
    # It needs torch, which nothing else here does.
    if name == "pack":
        from flipgrad.packed.packing import pack

        return pack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
