"""The sdist and the wheel: what is in them, and that the wheel runs in an empty environment."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import flipgrad

ROOT = Path(__file__).parent.parent
FIRST = re.compile(r"^## (\S+)", re.MULTILINE)


def test_the_changelog_begins_with_this_version():
    assert FIRST.search((ROOT / "CHANGELOG.md").read_text())[1] == flipgrad.__version__


def test_workflows_and_templates_are_yaml():
    yaml = pytest.importorskip("yaml")
    paths = sorted((ROOT / ".github").rglob("*.yml"))
    assert {path.stem for path in paths} >= {"tests", "docs", "wheels", "bug", "gradient", "idea"}
    for path in paths:
        content = yaml.safe_load(path.read_text())
        # YAML reads the key "on" as true.
        assert path.parent.name != "workflows" or {"name", True, "jobs"} == set(content)


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with what ``python -m build`` makes."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs build: pip install build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("packaging")
def test_the_wheel_is_for_a_platform_and_every_python(built):
    (wheel,) = built.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flipgrad/_native.so", "flipgrad/py.typed", "flipgrad/plots/page/report.html"} <= set(names)
    assert any(name.startswith("flipgrad/zoo/networks/") for name in names)


@pytest.mark.slow
@pytest.mark.xdist_group("packaging")
def test_the_sdist_has_what_the_library_is_compiled_from(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "src/flipgrad/csrc").iterdir()}
    assert sources <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "setup.py", "pyproject.toml"} <= names
    assert not any(name.endswith(".so") for name in names)


@pytest.mark.slow
@pytest.mark.xdist_group("packaging")
def test_the_wheel_installs_and_runs_in_an_empty_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    quiet = ("--quiet", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *quiet, wheel, env=clean, cwd=tmp_path)
    code = (
        "import torch, flipgrad as fg; from flipgrad.native import library; assert library.available(), library.reason();"
        "net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2));"
        "net(torch.randn(8, 2), fg.CrossEntropy(torch.randint(2, (8,))), estimator=fg.PSA()).mean().backward();"
        "print(fg.__file__)"
    )
    assert str(tmp_path) in run(python, "-c", code, env=clean, cwd=tmp_path)
    assert flipgrad.__version__ in run(tmp_path / "venv" / "bin" / "flipgrad", "--version", env=clean, cwd=tmp_path)
