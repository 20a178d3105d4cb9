"""The commands that README, CONTRIBUTING and the site show: all are understood, and in ``make test-all`` they run.

Run means: in the order of the page, with fewer epochs and draws, on data sets of a few images, in an empty folder. What is run
elsewhere, or cannot be, is listed in ``ELSEWHERE`` with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command_line import flipgrad
from flipgrad import cli
from flipgrad.benchmarks import BENCHMARKS
from torture.samples import RECORDS, cifar_files, grey, mnist_files, store

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_WRITTEN = {"build", "reference", "results", "tutorials"}
SOURCES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES += sorted(page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in NOT_WRITTEN)
SOURCES += sorted((DOCS / "lessons").glob("lesson_*.py"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

# Commands by their first words, and what runs them.
ELSEWHERE = {
    "make": "sets up environments of its own; the recipe of make demo runs here, those of make test and make docs are tests",
    "pip install": "tests/test_packaging.py",
    "dask scheduler": "tests/reproduce/test_dask.py",
    "flipgrad reproduce cifar": "tests/reproduce/test_dask.py, with a cluster",
    "cc": "tests/test_deploy.py",
    "python": "tests/test_deploy.py",
    "./digits": "tests/test_deploy.py",
}
# Given after a command's own options, so that it does less; --resume takes none.
LESS = {
    "train": ["--epochs", "1", "--eval-samples", "1", "--search-trials", "2", "--search-epochs", "1"],
    "evaluate": ["--samples", "2"],
    "gradeval": ["--samples", "20", "--epochs", "1"],
    "reproduce": ["--scale", "smoke"],
}
NET = """import flipgrad as fg
from torch import nn


def net(data):
    n = data.train.x[0].numel()
    return fg.Sequential(nn.Flatten(), fg.BinaryLinear(n, 8), head=nn.Linear(8, data.classes))
"""


def commands(source: Path) -> list[list[str]]:
    """The commands of a page or a lesson, as words."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".py":
        # Blocks of a comment that follow two colons.
        text = "\n".join(re.findall(r"^#     (.*)$", text, re.MULTILINE))
        blocks = [text]
    else:
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


PAGES = {source.relative_to(ROOT).as_posix(): found for source in SOURCES if (found := commands(source))}


def elsewhere(words: list[str]) -> bool:
    return any(words[: len(start.split())] == start.split() for start in ELSEWHERE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page):
    for words in PAGES[page]:
        if words[0] == "make":
            assert words[1] in TARGETS, words
        elif words[0] in ("flipgrad", "torchrun"):
            name, *arguments = words[words.index("flipgrad") + 1 :]
            assert name in cli.COMMANDS, words
            # It raises for unknown options, and values that are none.
            cli.command(name).make_context(name, list(arguments))
            assert name != "bench" or arguments[0] in BENCHMARKS
        else:
            assert elsewhere(words), f"nothing runs {words}"


def test_reasons_are_of_commands_that_are_shown():
    shown = [words for found in PAGES.values() for words in found]
    for start in ELSEWHERE:
        assert any(words[: len(start.split())] == start.split() for words in shown), start
        for test in re.findall(r"tests/\S+\.py", ELSEWHERE[start]):
            assert (ROOT / test).is_file()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the commands name: data sets of a few images, a picture, an array and a network of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLIPGRAD_DATA", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("flipgrad.data.cifar10"), "RECORDS", RECORDS)
    store(tmp_path / "mnist", mnist_files(zipped=False))
    store(tmp_path / "cifar10", cifar_files(".bin"))
    for number, part in enumerate(("a", "b")):
        (tmp_path / "photos" / part).mkdir(parents=True)
        for i in range(6):
            grey(40 * i + number).save(tmp_path / "photos" / part / f"{i}.png")
    grey(100).save(tmp_path / "photo.png")
    np.save(tmp_path / "array.npy", np.zeros((2, 3, 32, 32), np.float32))
    (tmp_path / "mine.py").write_text(NET, encoding="utf-8")
    return tmp_path


def run(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace("~", str(folder)) for word in words]
    launcher, arguments = words[: words.index("flipgrad") + 1], words[words.index("flipgrad") + 1 :]
    if "--resume" not in arguments:
        arguments += LESS.get(arguments[0], [])
    if arguments[0] == "train" and "--resume" not in arguments:
        # Pages show one training after the other, whose folders have the same name.
        arguments += ["--overwrite", *([] if "--validation" in arguments else ["--validation", "0.5"])]
    if launcher[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *launcher[1:], *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    code, out, err = flipgrad(capsys, *arguments)
    assert code == 0, f"{words}: {err}"
    assert out or (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if not all(map(elsewhere, found))])
def test_every_command_runs(page, folder, capsys):
    for words in PAGES[page]:
        if elsewhere(words) or (words[1] == "export" and importlib.util.find_spec("onnx") is None):
            continue
        run(words, folder, capsys)


@pytest.mark.slow
def test_the_command_of_the_demo_runs(folder, capsys):
    (line,) = re.findall(r"^\t\$\(BIN\)/(flipgrad train .*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    run(shlex.split(line), folder, capsys)
    assert (folder / "runs/demo/report.html").is_file()
    # What the pages say that it is.
    assert f"`make demo` is `{line}`" in (DOCS / "start.md").read_text(encoding="utf-8")
