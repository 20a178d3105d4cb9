"""A run that is killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time

import pytest

from flipgrad import cli
from flipgrad.native import library
from torture.runs import difference

OPTIONS = ("--epochs", "2", "--eval-samples", "2", "--checkpoint-minutes", "0.001")


def start(*arguments):
    command = [sys.executable, "-m", "flipgrad", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def killed_once_it_works(process, run, moment):
    """Kill the process some time after it has stored something new; its exit code."""
    file = run / "checkpoint.safetensors"
    before = file.stat().st_mtime_ns if file.exists() else None
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and file.stat().st_mtime_ns != before:
            break
        time.sleep(0.005)
    time.sleep(moment)
    process.kill()
    process.communicate()
    return process.returncode


# A short campaign of tests/torture, which is not slow, kills a run too.
@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "kills"), [("psa", 2), ("reinforce+running", 2)])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, estimator, kills):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("--estimator", estimator, *OPTIONS)
    process = start(*options, "--output", str(parts))
    moments = random.Random(estimator)
    for kill in range(kills):
        code = killed_once_it_works(process, parts, moments.uniform(0, 0.3))
        # Later ones may come too late.
        assert kill or (code == -9 and not (parts / "summary.json").exists())
        process = start("--resume", str(parts), *OPTIONS[-2:])
    with pytest.raises(SystemExit):
        cli.main(["train", *options, "--output", str(whole)])
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0
    # Nothing is said but, once, that compiled kernels are missing, if they are.
    assert err == "" or (not library.available() and re.fullmatch(r"[^\n]*without compiled kernels[^\n]*\n", err))
    assert difference(parts, whole) == ""
