import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_files import LAYERS, config, epoch, evaluation, example, put, put_lines, scores, write_run

from flipgrad.errors import InputError
from flipgrad.plots.runs import Epoch, Scores, read_metrics, read_run


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(write_run(tmp_path))
    assert run.config == config()["config"]
    assert run.command == config()["command"]
    assert (run.versions, run.machine) == (config()["versions"], config()["machine"])
    assert [found.epoch for found in run.epochs] == [1, 2, 3, 4]
    second, written = run.epochs[1], epoch(2)
    assert {key: getattr(second, key) for key in scores()} == scores(-0.01)
    assert (second.objective, second.lr, second.seconds) == (written["objective"], written["lr"], written["seconds"])
    assert second.images_per_second == written["images_per_second"]
    assert second.gradient_norm == written["gradient_norm"]
    assert list(second.gradient_norm) == list(LAYERS)
    assert second.saturated == written["saturated"]
    assert run.summary == Scores(**scores(-0.01))
    found = run.evaluation
    assert (found.samples, found.classes) == (4, ["zero", "one", "two"])
    assert found.splits == {"validation": Scores(**scores(0.01, 4)), "test": Scores(**scores(0.02, 4))}
    assert [(one.index, one.label, one.chosen) for one in found.examples] == [
        (3, 1, "random"),
        (5, 0, "random"),
        (8, 1, "uncertain"),
    ]
    assert found.examples[0].members.tolist() == example()["members"]
    assert found.examples[0].image.tolist() == example()["image"]
    assert found.examples[0].probabilities == example()["probabilities"]
    histogram = evaluation()["disagreement"]
    assert (found.disagreement.edges, found.disagreement.correct) == (histogram["edges"], histogram["correct"])
    assert found.disagreement.wrong == histogram["wrong"]


def test_only_configuration_and_metrics_must_be_there(tmp_path):
    put(tmp_path / "config.json", {"config": {}})
    put_lines(tmp_path / "metrics.jsonl", [{"epoch": 1}])
    run = read_run(tmp_path)
    assert run.epochs == [Epoch(epoch=1)]
    assert (run.command, run.versions, run.machine, run.summary, run.evaluation) == ([], {}, {}, None, None)
    put(tmp_path / "evaluation.json", {})
    found = read_run(tmp_path).evaluation
    assert (found.splits, found.classes, found.examples, found.disagreement) == ({}, [], [], None)


def test_what_is_no_finite_number_is_missing(tmp_path):
    record = {"epoch": 1, "objective": math.nan, "lr": math.inf, "seconds": None, "saturated": {"a": math.nan}}
    put_lines(tmp_path / "m.jsonl", [record])
    assert read_metrics(tmp_path / "m.jsonl") == [Epoch(epoch=1, saturated={"a": None})]


def test_of_an_epoch_done_twice_the_later_counts(tmp_path):
    lines = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)]
    put_lines(tmp_path / "m.jsonl", [{"epoch": e, "objective": o} for e, o in lines])
    assert [(found.epoch, found.objective) for found in read_metrics(tmp_path / "m.jsonl")] == [(1, 9.0), (2, 6.0), (3, 7.0)]


@given(st.integers(0, 400))
def test_metrics_cut_anywhere_give_every_whole_epoch(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    put_lines(path, [{"epoch": e, "objective": 1.5, "gradient_norm": {"ä": 0.5}} for e in range(1, 6)])
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    found = read_metrics(path)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    # The newline itself may be missing.
    assert [one.epoch for one in found] == [e for e, end in enumerate(ends, 1) if min(cut, len(whole)) >= end - 1]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    put_lines(path, [{"epoch": 1}])
    first = path.read_text()
    path.write_text(f'{first}{{"epoch": 2, "lr"\n{first}')
    with pytest.raises(InputError, match=r"m\.jsonl', line 2: is not JSON .*; remove the line, or train again"):
        read_metrics(path)
    # The last one, too, if it was written to its end.
    path.write_text(f'{first}{{"epoch": 2, "lr"\n')
    with pytest.raises(InputError, match=r"m\.jsonl', line 2: is not JSON"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "line 1: has no 'epoch'"),
        ({"epoch": "1"}, "line 1: epoch: must be a whole number, got '1'"),
        ({"epoch": 1.5}, "epoch: must be a whole number, got 1.5"),
        ({"epoch": math.nan}, "epoch: must be a whole number, got nan"),
        ({"epoch": True}, "epoch: must be a whole number, got True"),
        ({"epoch": 1, "lr": "fast"}, "lr: must be a finite number, got 'fast'"),
        ({"epoch": 1, "saturated": [1]}, "saturated: must be an object, got [1]"),
        ({"epoch": 1, "saturated": {"a": "b"}}, "saturated.a: must be a finite number, got 'b'"),
    ],
)
def test_what_is_wrong_in_a_line_is_said(tmp_path, record, message):
    put_lines(tmp_path / "m.jsonl", [record])
    with pytest.raises(InputError) as error:
        read_metrics(tmp_path / "m.jsonl")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def failure(folder):
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_that_is_no_run(tmp_path):
    assert failure(tmp_path / "gone") == f"{tmp_path / 'gone'}: is no folder; give the folder of a run of flipgrad train"
    assert "config.json' cannot be read (No such file or directory); give the folder of a run" in failure(tmp_path)
    put(tmp_path / "config.json", config())
    assert "metrics.jsonl' cannot be read (No such file or directory); give the folder of a run" in failure(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "evaluation.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json(tmp_path, name, content):
    (write_run(tmp_path) / name).write_bytes(content)
    assert f"{name}' is not JSON" in failure(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "evaluation.json"])
def test_a_file_that_is_no_object(tmp_path, name):
    (write_run(tmp_path) / name).write_text("[1]")
    assert f"{name}' is no file of flipgrad" in failure(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config: must be an object, got None"),
        ({"command": "train"}, "command: must be a list, got 'train'"),
        ({"versions": [1]}, "versions: must be an object, got [1]"),
    ],
)
def test_a_wrong_configuration(tmp_path, change, message):
    put(write_run(tmp_path) / "config.json", config() | change)
    assert message in failure(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": "4"}, "samples: must be a whole number, got '4'"),
        ({"splits": {"test": 1}}, "splits.test: must be an object, got 1"),
        ({"classes": "ab"}, "classes: must be a list, got 'ab'"),
        ({"examples": [example(), 1]}, "examples[1]: must be an object, got 1"),
        ({"examples": [example(label=3)]}, "examples[0]: 'label' must be a class from 0 to 2, got 3"),
        ({"examples": [example(index=None)]}, "examples[0].index: must be a whole number, got None"),
        ({"examples": [example(probabilities=[1.0])]}, "'probabilities' must hold one of every class, got 1"),
        (
            {"examples": [example(probabilities=[0.5, 1.5])]},
            "examples[0].probabilities[1]: must be a finite number from 0 to 1, got 1.5",
        ),
        ({"examples": [example(members=[[0.5, 0.5]])]}, "examples[0]: 'members' must hold 3 probabilities each, got 2"),
        (
            {"examples": [example(members=[[0.5], [0.5, 0.5]])]},
            "examples[0].members: must be nested lists [n][n] of finite numbers",
        ),
        (
            {"examples": [example(image=[[1.0]])]},
            "examples[0].image: must be nested lists [n][n][n] of finite numbers, got the shape [1, 1]",
        ),
        ({"examples": [example(image=[[[math.nan]]])]}, "image: must be nested lists"),
        ({"examples": [example(image=[[["x"]]])]}, "image: must be nested lists"),
        ({"examples": [example(image=[[[10**400]]])]}, "image: must be nested lists"),
        ({"examples": [example(image=[])]}, "image: must be nested lists"),
        ({"examples": [example(point=1)]}, "examples[0].point: must be a list, got 1"),
        ({"examples": [example(point=[10**400])]}, "examples[0].point[0]: must be a finite number, got 1000"),
        ({"disagreement": 1}, "disagreement: must be an object, got 1"),
        ({"disagreement": {"edges": [0], "correct": [], "wrong": []}}, "'edges' must be two or more increasing numbers"),
        ({"disagreement": {"edges": [0, 0], "correct": [1], "wrong": [1]}}, "'edges' must be two or more increasing numbers"),
        ({"disagreement": {"edges": [0, 1], "correct": [1, 2], "wrong": [1]}}, "'correct' must have 1 counts"),
        ({"disagreement": {"edges": [0, 1], "correct": [1], "wrong": []}}, "'wrong' must have 1 counts"),
        (
            {"disagreement": {"edges": [0, 1], "correct": [-1], "wrong": [1]}},
            "disagreement.correct[0]: must be a whole number of at least 0, got -1",
        ),
    ],
)
def test_a_wrong_evaluation(tmp_path, change, message):
    put(write_run(tmp_path) / "evaluation.json", evaluation() | change)
    text = failure(tmp_path)
    assert message in text
    assert "evaluation.json: " in text
    assert text.endswith("run flipgrad evaluate again to rewrite it")
    assert len(text) < 400


def test_an_example_may_lack_members_image_and_point(tmp_path):
    short = {key: example()[key] for key in ("index", "label", "probabilities")}
    put(write_run(tmp_path) / "evaluation.json", {"examples": [short, example(image=None, point=[1, -2])]})
    first, second = read_run(tmp_path).evaluation.examples
    assert first.members is first.image is first.point is first.chosen is None
    assert second.image is None
    assert second.point == [1.0, -2.0]
    assert isinstance(second.members, np.ndarray)
