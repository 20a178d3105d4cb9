"""The Triton kernel: its cases in Triton's interpreter and on a GPU, that it compiles for one, and when it is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flipgrad import flips
from flipgrad.errors import InputError
from flipgrad.flips import triton
from flipgrad.flips.form import find_form
from flipgrad.noise import Logistic, Normal

CASES = Path(__file__).parent / "triton_cases.py"

installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


def run(*command: str, **environment: str) -> None:
    """Runs Python in a process of its own, one thread, and shows what it wrote if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@installed
@pytest.mark.parametrize("where", ["interpreter", "gpu"])
def test_kernel(where):
    if where == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest_options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    run("-m", "pytest", *pytest_options, str(CASES), TRITON_INTERPRET="1" if where == "interpreter" else "0")


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flipgrad.flips._triton_kernel import flip_kernel

geometry = (2, 3, 3, 2, 1, 1, 1, 1, 2)
for dtype, tile, ratio in (("fp32", (32, 32, 4), False), ("fp64", (256, 4, 4), True)):
    constants = dict(zip(flip_kernel.arg_names[-13:], (*geometry, *tile, ratio), strict=True))
    types = [f"*{dtype}"] * 6 + ["i32"] * (len(flip_kernel.arg_names) - 6)
    signature = dict(zip(flip_kernel.arg_names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    kernel = compile(ASTSource(flip_kernel, signature, constexprs=constants), target=GPUTarget("cuda", 80, 32))
    assert "flip_kernel" in kernel.asm["ptx"]
"""


@installed
def test_kernel_compiles_for_a_gpu(tmp_path):
    run("-W", "ignore", "-c", COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


WITHOUT = """
import sys
sys.modules["triton"] = None
import torch, flipgrad
from flipgrad.flips import triton
assert not triton.available()
assert "triton is not installed" in triton.reason()
net = flipgrad.Sequential(flipgrad.BinaryLinear(2, 3), flipgrad.BinaryLinear(3, 3), head=torch.nn.Linear(3, 2))
net(torch.ones(2, 2), flipgrad.CrossEntropy(torch.zeros(2, dtype=torch.long))).mean().backward()
"""


def test_package_works_without_triton():
    run("-c", WITHOUT, TRITON_INTERPRET="1")


def test_missing_parts_are_explained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for found, text in ((None, "triton is not installed"), (object(), "torch sees no GPU")):
        monkeypatch.setattr(triton, "find_spec", lambda _, found=found: found)
        assert not triton.available()
        assert text in triton.reason()
        with pytest.raises(InputError, match=text):
            triton.flip_product(*(torch.ones(2, 2) for _ in range(4)), Logistic())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.available()


def weight_on_a_gpu() -> Tensor:
    with FakeTensorMode():
        return torch.empty(256, 256, device="cuda")


def test_exact_kernel_of_a_gpu(monkeypatch):
    monkeypatch.setattr(triton, "reason", lambda: "")
    assert flips.choose(weight_on_a_gpu(), Logistic(), 100, 0.0).kernel == "triton"
    assert flips.choose(weight_on_a_gpu(), Logistic(), 1, 1e-3).kernel == "triton"
    assert flips.choose(weight_on_a_gpu(), Normal(), 100, 0.0).kernel == "vectorized"
    monkeypatch.setattr(triton, "reason", lambda: "no reason")
    choice = flips.choose(weight_on_a_gpu(), Logistic(), 100, 0.0)
    assert choice.kernel == "vectorized"
    assert "no reason" in choice.reason


def test_separable_form_is_preferred_on_a_gpu_where_it_is_cheaper(monkeypatch):
    monkeypatch.setattr(triton, "reason", lambda: "")
    forms = {size: find_form(torch.linspace(-size, size, 100), Logistic(), 1e-3) for size in (0.1, 20.0)}
    for size, kernel in ((0.1, "separable"), (20.0, "triton")):
        monkeypatch.setattr(flips.choice, "find_form", lambda *_, size=size, **__: forms[size])
        assert flips.choose(weight_on_a_gpu(), Logistic(), 10**7, 1e-3).kernel == kernel
