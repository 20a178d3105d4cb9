"""Files are written whole or not at all, folders are not overwritten by accident."""

from __future__ import annotations

import json

import pytest

from flipgrad import files
from flipgrad.errors import InputError


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write_json(path, {"old": 1})

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("flipgrad.files.os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}


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


def test_provenance_tells_command_versions_and_machine():
    facts = files.provenance()
    assert facts.keys() == {"command", "versions", "machine"}
    assert facts["versions"].keys() == {"flipgrad", "torch", "numpy", "python"}
    assert facts["machine"]["cores"] >= 1
