"""Files are written whole or not at all, folders are not overwritten by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flipgrad import files, tensor_files
from flipgrad.errors import InputError


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write_json(path, {"old": 1})

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("flipgrad.files.os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write_json(path, {"new": 2})
    assert files.read_json(path, missing="", broken="") == {"old": 1}


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "result.json", {"rmse": float("nan")})
    assert not (tmp_path / "result.json").exists()


def test_a_folder_in_use_is_refused_unless_told(tmp_path):
    (tmp_path / "something").write_text("")
    with pytest.raises(InputError, match="exists and is not empty; give another --output, or --overwrite"):
        files.new_folder(tmp_path)
    assert files.new_folder(tmp_path, overwrite=True) == tmp_path
    with pytest.raises(InputError, match="is a file; give a folder"):
        files.new_folder(tmp_path / "something")
    assert files.new_folder(tmp_path / "a/b").is_dir()
    with pytest.raises(InputError, match="cannot write to output folder"):
        files.new_folder(tmp_path / "something/below")


VALUE = {"epoch": 3, "rate": 1e-05, "names": ["ä", "J*"], "deep": {"b": [True, -7], "a": None}}


def flipped(content):
    """The content with one bit flipped: every third, which are two or three of every byte, and all kinds of bits."""
    for place in range(0, 8 * len(content), 3):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def read_all(path):
    return files.read_json_lines(path, missing="find it", broken="mend it")


def read_one(path):
    return files.read_json(path, missing="find it", broken="mend it")


def read_tensors(path):
    tensors, facts = tensor_files.read_tensors(path, "thing 1", missing="find it", broken="mend it")
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}, facts


def write_lines(path):
    for epoch in (1, 2):
        files.append_json(path, {**VALUE, "epoch": epoch})


def write_tensors(path):
    tensors = {"weight": torch.tensor([[1.5, -2.0]]), "count": torch.tensor(3), "none": torch.empty(0, 2)}
    files.write(path, tensor_files.tensors_to_bytes("thing 1", tensors, {"epoch": 3}))


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda path: files.write_json(path, VALUE), read_one),
        (lambda path: files.write_json(path, VALUE, indent=None), read_one),
        (write_lines, read_all),
        (write_tensors, read_tensors),
    ],
    ids=["json", "json on one line", "lines", "tensors"],
)
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path, write, read):
    path = tmp_path / "file"
    write(path)
    before, noticed = read(path), 0
    content = path.read_bytes()
    for damaged in flipped(content):
        path.write_bytes(damaged)
        try:
            # Blanks may be anywhere in JSON, and 1e-05 may be 1E-05.
            assert read(path) == before
        except InputError as error:
            noticed += str(error).endswith("; mend it") and "\n" not in str(error)
    assert noticed > 8 / 3 * 0.8 * len(content)


def test_a_file_that_was_edited_or_has_no_checksum_is_told(tmp_path):
    path = tmp_path / "file"
    for text, fault in {
        json.dumps({**files.with_checksum(VALUE), "epoch": 4}): "was edited or damaged: its checksum is wrong",
        json.dumps(VALUE): "has no checksum: it was written by hand, or by an older version",
        "[1]": "is no file of flipgrad: it must hold fields by name",
        "[" * 100_000: "is not JSON of ours: it is nested too deeply",
        "{": r"is not JSON \(Expecting property name",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=rf"file' {fault}.*; mend it$"):
            read_one(path)
    with pytest.raises(InputError, match=r"gone' cannot be read \(No such file or directory\); find it$"):
        read_one(tmp_path / "gone")
    with pytest.raises(InputError, match=r"' is a folder, expected a file; mend it$"):
        read_one(tmp_path)
    path.write_text(" " * 100)
    with pytest.raises(InputError, match=r"file' has more than 99 bytes, and is no such file of flipgrad; mend it$"):
        files.read_json(path, missing="find it", broken="mend it", most=99)


def test_blanks_and_the_order_of_fields_do_not_count(tmp_path):
    path = tmp_path / "file"
    path.write_text(json.dumps(dict(reversed(files.with_checksum(VALUE).items())), indent=7))
    assert read_one(path) == VALUE


def test_the_beginning_of_a_last_line_is_left_out_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_lines(path)
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content)):
        path.write_bytes(content[:end])
        assert len(read_all(path)) == (2 if end == len(content) - 1 else 1)
    path.write_bytes(content[1:])
    with pytest.raises(InputError, match=r"file', line 1: is not JSON"):
        read_all(path)


def test_the_results_in_the_documentation_can_be_read():
    found = sorted((Path(__file__).parents[1] / "docs/results").rglob("*.json"))
    assert found
    for path in found:
        assert read_one(path)


def test_provenance_tells_command_versions_and_machine():
    facts = files.provenance()
    assert facts.keys() == {"command", "versions", "machine"}
    assert facts["versions"].keys() == {"flipgrad", "torch", "numpy", "python"}
    assert facts["machine"]["cores"] >= 1
