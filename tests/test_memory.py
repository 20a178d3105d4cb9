"""What would not fit into memory is refused, and errors that mean so are told from others."""

from __future__ import annotations

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
