"""flipgrad pack --to c: what it writes, prints and refuses."""

from __future__ import annotations

import re

import pytest

from command_line import flipgrad

NETWORK = ("pack", "zoo:digits-binary")


def test_it_writes_the_files_and_says_what_they_need(tmp_path, capsys):
    output = tmp_path / "small.c"
    code, out, err = flipgrad(capsys, *NETWORK, "--to", "c", "--output", str(output), "--stochastic", "--main")
    assert (code, err) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"small.c", "small.h", "small_main.c"}
    assert re.search(r"small_main\.c: [\d,]+ bytes of constants, [\d,]+ bytes of buffers", out)
    assert "cc -std=c99 -O2 small.c small_main.c -o small -lm" in out
    header = (tmp_path / "small.h").read_text(encoding="utf-8")
    assert "int small_predict(const uint8_t *image, float *probabilities);" in header
    assert "int small_predict_samples(" in header
    # How it was made, and how good it is.
    assert " * made by flipgrad " in header
    assert " * trained on digits\n * accuracy 1 sample 97.89%, 10 samples 98.61%, deterministic 98.61%\n" in header


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "java"), "--to 'java': choose bits or c"),
        (("--to", "c", "--output", "net.safetensors"), "--output 'net.safetensors' does not end with .c"),
        (("--main",), "--numbers, --stream, --stochastic and --main are about C code: add --to c"),
        (("--to", "c", "--numbers", "half"), "numbers='half': choose 'float', 'double', 'fixed'"),
        (("--to", "c", "--output", "my-net.c"), "the name 'my-net' is none of C"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_refused_with_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = flipgrad(capsys, *NETWORK, *arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert not list(tmp_path.iterdir())
