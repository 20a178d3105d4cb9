"""Reading a pickle of plain values and byte arrays without running anything that it names."""

import io
import pickle
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from flipgrad.errors import InputError


@final
class Pickled:
    """Stands in for numpy's types and arrays: remembers what it was called with and given, none of it believed yet."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes_of_shape(self, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
        """The array if it is one of bytes and of this shape."""
        match self.state:
            case (_, stored, Pickled(arguments=(b"u1" | "u1", *_)), fortran, bytes(content)):
                if stored == shape and len(content) == np.prod(shape):
                    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        return None


def latin1(text: str, encoding: str) -> bytes:
    """Stands in for ``_codecs.encode``, by which pickles for Python 2 hold bytes."""
    if encoding != "latin1":
        raise InputError(f"holds bytes in the encoding {encoding!r}, which flipgrad refuses to run; expected 'latin1'")
    return text.encode("latin1")


STAND_INS = {
    ("numpy", "dtype"): Pickled,
    ("numpy", "ndarray"): Pickled,
    ("numpy.core.multiarray", "_reconstruct"): Pickled,
    ("numpy._core.multiarray", "_reconstruct"): Pickled,
    ("_codecs", "encode"): latin1,
}


@final
class ArrayUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, numbers, strings and :class:`Pickled`; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise InputError(f"names {module}.{name}, which flipgrad refuses to run")
        return STAND_INS[module, name]


def unpickle(content: bytes, where: str) -> dict[Any, Any]:
    """The dictionary of a pickle, in which strings of Python 2 are bytes and arrays are :class:`Pickled`.

    Errors, as where it names a function or class, begin with ``where``.
    """
    try:
        value = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{where} {error}") from None
    # A damaged pickle fails in as many ways as there are operations in it.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{where} is a damaged pickle, or none: {reason}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} holds a {type(value).__name__}, expected a dictionary")
    return value
