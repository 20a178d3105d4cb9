"""Property tests see the same examples wherever and whenever they run, and ``fuzz.py`` says how to repeat what it finds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

import hypothesis_profiles

TESTS = Path(__file__).parent

PROBE = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("kind", [st.integers(), st.floats(), st.binary()], ids=["int", "float", "bytes"])
@settings(max_examples=200)
@given(st.data())
def test_probe(kind, data):
    with open("examples", "a", encoding="utf-8") as examples:
        print(ascii(data.draw(kind)), file=examples)
"""
OTHER = "import constants\n\ndef test_other():\n    assert constants.NUMBERS"
CONSTANTS = "NUMBERS = [271828, 314159, 1.41421, 1.61803, 'a constant', b'another']"
PLAIN = "from hypothesis import settings\nsettings.register_profile('fixed', derandomize=True)\nsettings.load_profile('fixed')"


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, in an environment that is not that of continuous integration."""
    inherited = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True, timeout=300)


def examples(folder: Path, conftest: str, *files: str, **environment: str) -> str:
    """What the probe draws in a project in the folder, by the given tests of it."""
    folder.mkdir()
    contents = {"conftest.py": conftest, "test_probe.py": PROBE, "test_other.py": OTHER, "constants.py": CONSTANTS}
    for name, text in {**contents, "pytest.ini": "[pytest]"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "examples").read_text(encoding="utf-8")


def test_examples_depend_on_the_test_alone(tmp_path):
    # This very test runs by it.
    assert settings.get_current_profile_name() in ("fixed", "fuzz")
    ours = Path(hypothesis_profiles.__file__).read_text(encoding="utf-8")
    alone = examples(tmp_path / "test", ours, "test_probe.py", CI="1")
    assert alone.count("\n") >= 3 * 200
    assert examples(tmp_path / "other", ours, "test_other.py", "test_probe.py") == alone
    # The probe can tell: without our profiles constants of the other module come in.
    assert "271828" not in alone
    assert "271828" in examples(tmp_path / "plain", PLAIN, "test_other.py", "test_probe.py")


PROPERTIES = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10))
def test_right(number):
    assert number <= 10

@given(st.integers(0, 10**6))
def test_wrong(number):
    assert number % 7 != 3, f"the number is {number}"

def test_no_property():
    raise AssertionError
"""


def test_fuzz_says_how_to_repeat_what_it_finds(tmp_path):
    (tmp_path / "conftest.py").write_text(Path(hypothesis_profiles.__file__).read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    path = tmp_path / "test_properties.py"
    path.write_text(PROPERTIES)
    fuzz = str(TESTS / "fuzz.py")
    done = python(tmp_path, fuzz, "--minutes", "0", f"{path.name}::test_wrong")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "@reproduce_failure" in done.stdout
    assert "1 failed" in done.stdout.splitlines()[-2]
    (command,) = re.findall("^repeat: (.*)$", done.stdout, re.MULTILINE)
    (numbers,) = set(re.findall(r"the number is \d+", done.stdout))
    again = python(tmp_path, *shlex.split(command)[1:])
    assert again.returncode == 1
    assert numbers in again.stdout
    assert python(tmp_path, fuzz, "--minutes", "0", f"{path.name}::test_right").returncode == 0
    assert python(tmp_path, fuzz, "--minutes", "0", f"{path.name}::test_no_property").returncode == 2
