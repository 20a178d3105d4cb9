"""A test gives the same numbers alone and among others, in any folder: one seed, one thread, the same examples."""

from __future__ import annotations

import os

import pytest
import torch

import hypothesis_profiles  # noqa: F401
from flipgrad.flips import form

torch.set_num_threads(1)
# And for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# What a test writes is to outlive its processes, not the machine: nothing waits for the disk.
os.fsync = lambda descriptor: None


@pytest.fixture(autouse=True)
def _from_the_start():
    torch.manual_seed(0)
    # A form serves all weights that are nearly alike, and depends on those that came first.
    form._forms.clear()
