import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_examples_and_is_short():
    assert len(EXAMPLES) == 2
    # What a visitor needs; the rest is on the site.
    assert len((ROOT / "README.md").read_bytes()) <= 8192


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[2][:30])
def test_every_example_of_the_readme_runs(code, tmp_path, monkeypatch):
    # One writes a file.
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})


def test_the_first_example_has_ten_lines():
    code = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(code) <= 10


def test_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_repository_names_no_machine_paths():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(work|home|root)/", text.replace("/(work|home|root)/", "")), path
