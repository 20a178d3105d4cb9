"""What would not fit into memory is refused, and errors that mean so are told from others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from flipgrad import memory
from flipgrad.errors import InputError


def test_refuses_more_than_the_machine_has(monkeypatch):
    monkeypatch.setattr("flipgrad.memory.installed", lambda: 3 * 2**30)
    memory.check_fits(3 * 2**30, "the weights", "make them fewer")
    with pytest.raises(InputError, match=r"^the weights need 4.0 GiB, more than this machine's 3.0 GiB; make them fewer$"):
        memory.check_fits(2**32, "the weights", "make them fewer")


def test_where_the_system_does_not_tell_nothing_is_refused(monkeypatch):
    assert memory.installed() is None or memory.installed() > 2**20
    monkeypatch.delattr("flipgrad.memory.os.sysconf", raising=False)
    assert memory.installed() is None
    memory.check_fits(10**30, "the weights", "make them fewer")


@pytest.mark.parametrize("shape", [(10**9, 10**9), (2**62, 4), (2**62, 2**62)])
def test_torchs_own_errors_are_known(shape):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(shape)
    assert memory.ran_out(caught.value)


def test_other_errors_are_others():
    assert memory.ran_out(MemoryError())
    assert not memory.ran_out(ValueError("can't allocate memory"))
    assert not memory.ran_out(RuntimeError("The size of tensor a (3) must match the size of tensor b (9)"))


# How often the system had to find a page for 64 MiB that are allocated, written and freed: as usual, and when memory is kept.
FAULTS = """
import ctypes, json, resource
from flipgrad.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([[faults() for _ in range(3)], keep_freed_memory(), [faults() for _ in range(3)]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the C library of Linux")
def test_freed_memory_is_kept():
    run = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    usual, kept, afterwards = json.loads(run.stdout)
    if not kept:
        pytest.skip("this C library is not glibc")
    # The first block is new in both ways.
    assert max(afterwards[1:]) < min(usual[1:]) / 4


def test_where_the_c_library_has_no_such_choice_nothing_happens(monkeypatch):
    asked = []
    library = type("Library", (), {"mallopt": staticmethod(lambda what, value: asked.append((what, value)) or 1)})
    monkeypatch.setattr("flipgrad.memory.ctypes.CDLL", lambda name: library)
    monkeypatch.setattr("flipgrad.memory.installed", lambda: 2**32)
    assert memory.keep_freed_memory()
    # No more than an eighth of what there is.
    assert asked == [(-1, 2**29), (-4, 0)]
    monkeypatch.setattr("flipgrad.memory.ctypes.CDLL", lambda name: object())
    assert not memory.keep_freed_memory()
