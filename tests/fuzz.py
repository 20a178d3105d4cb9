"""Explores the property tests at random: ``make fuzz MINUTES=10``.

Round after round, each with a new seed, runs all of them in a new order until the time is up. A test that fails is left out of
the rounds that follow. At the end stand the commands that repeat what was found, and the exit code is 1; beside each failure
above them is the example, and the ``@reproduce_failure`` line that pins it down.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

TESTS = Path(__file__).parent
OPTIONS = ("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:doctest")


class Round:
    """A pytest plugin: shuffles the tests by a seed, stops when the time is up, and collects what failed."""

    def __init__(self, seed: int, end: float) -> None:
        self.seed, self.end = seed, end
        self.failed: list[str] = []
        self.tests = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        Random(self.seed).shuffle(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() >= self.end:
            item.session.shouldstop = "the time is up"


def explore(minutes: float, seed: int, paths: list[str]) -> int:
    """Runs the rounds; returns 0 if nothing failed, 1 if something did, and 2 if there was nothing to run."""
    end = time.monotonic() + 60 * minutes
    found: dict[str, int] = {}
    tests = rounds = 0
    while not rounds or time.monotonic() < end:
        this = Round(seed + rounds, end)
        rounds += 1
        left_out = [f"--deselect={test}" for test in found]
        profile = ("--hypothesis-profile=fuzz", f"--hypothesis-seed={this.seed}")
        code = pytest.main([*OPTIONS, "-o", "addopts=", "-m", "hypothesis", *profile, *left_out, *paths], plugins=[this])
        found.update((test, this.seed) for test in this.failed if test not in found)
        tests += this.tests
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            break
    report = [f"\nfuzz: {tests} property tests in {rounds} rounds, seeds from {seed}; {len(found)} failed"]
    for test, its_seed in found.items():
        command = [sys.executable, "-m", "pytest", test, "--hypothesis-profile=fuzz", f"--hypothesis-seed={its_seed}"]
        report.append(f"repeat: {shlex.join(command)}")
    sys.stdout.write("\n".join(report) + "\n")
    return 1 if found else 0 if tests else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; the last test is finished")
    parser.add_argument("--seed", type=int, help="of the first round; a new one if not given")
    parser.add_argument("paths", nargs="*", help="tests to explore; all if not given")
    options = parser.parse_args()
    if not options.paths:
        options.paths = [str(TESTS)]
        if find_spec("triton") is not None:
            # Before Triton is imported: without a GPU its interpreter runs the kernel.
            os.environ.setdefault("TRITON_INTERPRET", "1")
            options.paths.append(str(TESTS / "flips" / "triton_cases.py"))
    return explore(options.minutes, secrets.randbits(32) if options.seed is None else options.seed, options.paths)


if __name__ == "__main__":
    sys.exit(main())
