import copy
import math

import pytest
from synthetic import ESTIMATORS, SAMPLES, result, write

from flipgrad.errors import InputError
from flipgrad.plots.accuracy import Panel, read, read_all


def test_a_layer_is_read_as_it_was_written(tmp_path):
    content = result(0.01)
    found = read(write(tmp_path / "r.json", content), "layer 2")
    assert set(found.estimators) == set(ESTIMATORS)
    written = content["estimators"]["PSA"]["layers"][1]
    psa = found.estimators["PSA"]
    assert (psa.samples, psa.rmse, psa.cosine_low) == (SAMPLES, written["rmse"], written["cosine_low"])
    assert (psa.bias, psa.bias_low, psa.bias_high) == (written["bias"], written["bias_low"], written["bias_high"])
    assert (psa.std, psa.std_low, psa.std_high) == (written["std"], written["std_low"], written["std_high"])
    assert (psa.unbiased, found.estimators["ARM"].unbiased) == (False, True)
    assert (found.reference.estimator, found.reference.draws, found.reference.error) == ("DisARM", 1_000_000, 0.01)


def test_an_exact_reference_needs_no_remark(tmp_path):
    assert read(write(tmp_path / "r.json", result()), "all").reference is None


def message(path, layer="layer 1"):
    with pytest.raises(InputError) as error:
        read(path, layer)
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_a_missing_file(tmp_path):
    assert "No such file" in message(tmp_path / "r.json")
    assert "correct the path" in message(tmp_path / "r.json")


@pytest.mark.parametrize("content", [b"", b'{"estimators": {', b"\xff\xfe\x00"])
def test_a_corrupt_file(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert "is not JSON" in message(path)
    assert "run the evaluation again" in message(path)


def test_an_unknown_layer_names_those_there_are(tmp_path):
    text = message(write(tmp_path / "r.json", result()), "layer 9")
    assert "'layer 9'" in text
    assert "choose one of 'layer 1', 'layer 2', 'all'" in text
    assert "again" not in text


def broken(change):
    content = copy.deepcopy(result(0.01))
    change(content, content["estimators"]["PSA"], content["estimators"]["PSA"]["layers"][0])
    return content


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda file, psa, layer: file.pop("estimators"), "r.json: has no 'estimators'"),
        (lambda file, psa, layer: file.update(estimators=[]), "estimators: must be an object"),
        (lambda file, psa, layer: file.update(estimators={}), "'estimators' must hold at least one, got none"),
        (lambda file, psa, layer: psa.pop("layers"), "estimators.PSA: has no 'layers'"),
        (lambda file, psa, layer: psa.update(layers={}), "estimators.PSA.layers: must be a list, got {}"),
        (lambda file, psa, layer: psa.update(unbiased="no"), "estimators.PSA.unbiased: must be true or false, got 'no'"),
        (lambda file, psa, layer: layer.pop("rmse"), "estimators.PSA.layers[0]: has no 'rmse'"),
        (lambda file, psa, layer: layer.update(rmse=1.0), "estimators.PSA.layers[0].rmse: must be a list, got 1.0"),
        (lambda file, psa, layer: layer["rmse"].pop(), "'rmse' must have 10 entries, one per entry of 'samples', got 9"),
        (
            lambda file, psa, layer: layer["rmse"].__setitem__(2, -1.0),
            "layers[0].rmse[2]: must be a finite number of at least 0, got -1.0",
        ),
        (lambda file, psa, layer: layer["rmse"].__setitem__(2, math.nan), "got nan"),
        (lambda file, psa, layer: layer["rmse"].__setitem__(2, "1"), "got '1'"),
        (lambda file, psa, layer: layer["rmse"].__setitem__(2, True), "got True"),
        (
            lambda file, psa, layer: layer["cosine_mean"].__setitem__(0, 1.5),
            "layers[0].cosine_mean[0]: must be a finite number from -1 to 1, got 1.5",
        ),
        (lambda file, psa, layer: layer.update(samples=[1, 2, 2, *SAMPLES[3:]]), "'samples' must be increasing"),
        (lambda file, psa, layer: layer.update(samples=[]), "'samples' must be increasing and not empty"),
        (lambda file, psa, layer: layer.pop("bias_low"), "has no 'bias_low'"),
        (lambda file, psa, layer: layer.update(std_low=9.0), "'std_low' must not exceed 'std_high'"),
        (
            lambda file, psa, layer: file["reference"].update(kind="guess"),
            "reference.kind: must be 'exact' or 'draws', got 'guess'",
        ),
        (lambda file, psa, layer: file["reference"]["layers"][0].pop("error"), "reference.layers[0]: has no 'error'"),
        (
            lambda file, psa, layer: file["reference"].update(draws=0),
            "'draws' must be at least 1, got 0",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, change, expected):
    text = message(write(tmp_path / "r.json", broken(change)))
    assert expected in text
    assert text.endswith("run the evaluation again to rewrite it")


def test_a_file_that_is_json_but_no_result(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("[1, 2]")
    assert "r.json' is no file of flipgrad" in message(path)
    assert "has no 'estimators'" in message(write(path, {"samples": 3}))


def test_only_the_chosen_estimators_are_read_the_most_prominent_first(tmp_path):
    path = write(tmp_path / "r.json", result())
    (found,) = read_all([Panel(path, "all", "")], ["ARM", "Mine", "PSA"])
    assert list(found.estimators) == ["PSA", "ARM", "Mine"]


def test_an_estimator_may_miss_in_one_file_but_not_in_all(tmp_path):
    content = result()
    full = Panel(write(tmp_path / "full.json", content), "all", "")
    del content["estimators"]["LEG"]
    short = Panel(write(tmp_path / "short.json", content), "all", "")
    assert [list(found.estimators) for found in read_all([full, short], ["LEG", "PSA"])] == [["PSA", "LEG"], ["PSA"]]
    with pytest.raises(InputError, match=r"LEG is not in .*short.json; choose from PSA, ST"):
        read_all([short], ["LEG"])


def test_nothing_to_draw(tmp_path):
    with pytest.raises(InputError, match="panels: expected at least one"):
        read_all([])
    with pytest.raises(InputError, match="an empty list is not in"):
        read_all([Panel(write(tmp_path / "r.json", result()), "all", "")], [])
