"""Every test starts from one seed and runs on one thread, so that it gives the same numbers alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# The same examples in every run, on machines of any speed.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("fixed")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
