"""The five commands of docs/deploy.md run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "deploy.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_the_five_commands_run(tmp_path):
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 5
    # The command and the Python of this environment, wherever they are installed.
    script = f'flipgrad() {{ "{sys.executable}" -m flipgrad "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\nset -e\n{block}'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()[-5:]
    assert all(re.fullmatch(r"(\d) \1( [01]\.\d{6}){10}", line) for line in answers)
    # The first five digits are 0 to 4, and even two epochs are enough for most.
    assert sum(line.startswith(str(digit)) for digit, line in enumerate(answers)) >= 3
    header = (tmp_path / "digits.h").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```c\n(.*?)```", TEXT, re.DOTALL)
    assert shown in header
