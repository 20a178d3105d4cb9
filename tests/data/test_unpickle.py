"""A pickle can hold arrays, and can do nothing."""

from __future__ import annotations

import builtins
import os
import pickle

import numpy as np
import pytest

from flipgrad.data._unpickle import Pickled, unpickle
from flipgrad.errors import InputError


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_come_as_they_were_pickled(protocol, order):
    array = np.arange(256, dtype=np.uint8).reshape(2, 128).copy(order=order)
    value = unpickle(pickle.dumps({b"data": array, b"labels": [1, 2]}, protocol), "x")
    assert np.array_equal(value[b"data"].bytes_of_shape((2, 128)), array)
    assert value[b"labels"] == [1, 2]


def test_a_pickle_of_python_2():
    # {"data": numpy.array([[1, 200]], "uint8")} as Python 2 writes it with protocol 2: its strings are bytes.
    content = (
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01K\x02\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x02\x01\xc8tbs."
    )
    assert unpickle(content, "x")[b"data"].bytes_of_shape((1, 2)).tolist() == [[1, 200]]


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int8), np.zeros((3, 2), np.uint8), np.zeros((2, 3), object)])
def test_other_arrays_are_not_taken(array):
    value = unpickle(pickle.dumps({b"data": array}, 2), "x")[b"data"]
    assert isinstance(value, Pickled)
    assert value.bytes_of_shape((2, 3)) is None


@pytest.mark.parametrize("protocol", range(5))
def test_a_call_is_refused_and_not_run(tmp_path, protocol):
    target = tmp_path / "made"
    for function, arguments in ((os.mkdir, (str(target),)), (builtins.open, (str(target), "w")), (builtins.eval, ("1",))):
        content = pickle.dumps({b"data": Call(function, *arguments)}, protocol)
        with pytest.raises(InputError, match=rf"^it names \w+\.{function.__name__}, which flipgrad refuses to run"):
            unpickle(content, "it")
        assert not target.exists()
    # The same pickle does run where it is trusted: the test would notice.
    pickle.loads(pickle.dumps(Call(os.mkdir, str(target)), protocol))
    assert target.exists()


def test_a_name_inside_an_allowed_one_is_refused():
    # Protocol 4 follows dots: numpy's "dtype.mro" or "ndarray.tofile" are other names.
    with pytest.raises(InputError, match=r"names numpy\.ndarray\.tofile, which flipgrad refuses to run"):
        unpickle(b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "it")


def test_only_latin1_is_decoded():
    with pytest.raises(InputError, match=r"^it holds bytes in the encoding 'zlib'.* refuses to run"):
        unpickle(pickle.dumps(Call(__import__("_codecs").encode, "x", "zlib"), 2).replace(b"latin1", b"zlib"), "it")


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps({b"data": np.zeros(9, np.uint8)}, 2)[:-9], b"\x80\x02Pid\n."]
)
def test_a_damaged_pickle_is_named(content):
    with pytest.raises(InputError, match=r"^it is a damaged pickle, or none: ."):
        unpickle(content, "it")


def test_something_else_than_a_dictionary_is_named():
    with pytest.raises(InputError, match=r"^it holds a list, expected a dictionary"):
        unpickle(pickle.dumps([1]), "it")
