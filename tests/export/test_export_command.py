"""``flipgrad export``: networks of runs and of the zoo become ONNX files, which are checked and tell what they are."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch

import flipgrad as fg
from command_line import flipgrad
from flipgrad.cli import export as command
from flipgrad.cli._trained import Trained
from flipgrad.data import SOURCES, digits, image_folder
from flipgrad.training import RunFolder, TrainConfig, load_data, load_run, make_net, train

pytest.importorskip("onnxscript", reason="ONNX files need pip install 'flipgrad[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install onnxruntime, and ONNX files are run")

# In one process: the first export of a process takes seconds, the others less than one.
pytestmark = pytest.mark.xdist_group("export")

TINY = TrainConfig(data="toy", model="8-8", weights="binary", epochs=1, batch_size=20, eval_samples=2, lr=0.1)


def test_a_network_of_the_zoo(tmp_path, capsys):
    file = tmp_path / "digits.onnx"
    code, out, err = flipgrad(capsys, "export", "zoo:digits-binary", "--to", "onnx", "--output", str(file))
    assert (code, err) == (0, "")
    assert f"Deterministic network in {file}: ONNX, operators of version 18, {file.stat().st_size:,} bytes" in out
    assert "Checked by onnxruntime: 256 of 256 examples have torch's outputs" in out
    session, net, test = fg.export.OnnxSession(file), fg.zoo.load("digits-binary"), digits().test
    expected = net.deterministic(test.x).detach()
    torch.testing.assert_close(session(test.x), expected, rtol=1e-5, atol=1e-5)
    accuracy = float((session(test.x).argmax(1) == test.y).double().mean())
    assert accuracy == pytest.approx(fg.zoo.card("digits-binary").test["accuracy_deterministic"], abs=1e-6)
    facts = session.metadata
    assert json.loads(facts.pop("classes")) == [str(digit) for digit in range(10)]
    assert json.loads(facts.pop("accuracy"))["deterministic"] == pytest.approx(accuracy, abs=1e-6)
    assert facts == {
        "flipgrad": version("flipgrad"),
        "name": "digits-binary",
        "command": fg.zoo.card("digits-binary").command,
        "data": "digits",
        "inputs": "1x8x8: pixels of 0 to 16, / 8 - 1",
        "outputs": "scores of the classes; their softmax gives probabilities",
        "weights": "binary",
        "kind": "deterministic",
    }


def test_a_member_of_a_run(tmp_path, capsys, monkeypatch):
    run, file = tmp_path / "run", tmp_path / "net.onnx"
    data = load_data(TINY)
    with RunFolder(run) as folder:
        train(TINY, make_net(TINY, data), data, folder)
    arguments = ["export", str(run), "--output", str(file), "--member", "--seed", "3", "--batch-size", "7"]
    code, out, err = flipgrad(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Member network in" in out
    # Of 200 points, 28 batches of 7.
    assert "Checked by onnxruntime: 196 of 196 examples" in out
    loaded = load_run(run)
    x = loaded.data.test.x[:7]
    member = loaded.net.member(x[:1], generator=torch.Generator().manual_seed(3))
    session = fg.export.OnnxSession(file)
    torch.testing.assert_close(session(x), member(x).detach(), rtol=1e-5, atol=1e-5)
    assert (session.metadata["kind"], session.metadata["seed"]) == ("member", "3")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, out, err = flipgrad(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Not checked: pip install onnxruntime, and it is." in out


def test_a_file_that_gives_other_outputs_is_no_success(tmp_path, monkeypatch):
    file = tmp_path / "net.onnx"
    file.touch()
    monkeypatch.setattr(command, "OnnxSession", lambda file: lambda x: torch.ones(len(x), 2))
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=torch.nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="onnxruntime gives other outputs than torch for 10 of 10 examples"):
        command._checked(fg.export.deterministic(net), torch.randn(10, 2), file, None)
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere/config.json' cannot be read"),
        (["zoo:nothing"], "there is no network 'nothing' in the zoo; choose from"),
        (["zoo:digits", "--to", "tflite"], "--to 'tflite': choose onnx"),
        (["zoo:digits", "--output", "net.bin"], "--output 'net.bin' does not end with .onnx: name a file that does"),
        (["zoo:digits", "--output", "no/net.onnx"], "--output 'no/net.onnx' is in a folder that is not there: make that first"),
        (["zoo:digits", "--batch-size", "0"], "--batch-size 0: give at least 1, or leave it out for batches of any size"),
        (["zoo:digits", "--model", "a:b"], "which no network of the zoo has: leave them out"),
        (["zoo:digits", "--data-folder", "x"], "--data-folder is for runs: a network of the zoo is written without its data"),
        (["zoo:digits", "--seed", "-1"], "seed is -1; it must be from 0 to"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = flipgrad(capsys, "export", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_classes_have_their_names(tmp_path):
    from PIL import Image

    assert SOURCES["cifar10"].class_names[:2] == ("airplane", "automobile")
    assert len(SOURCES["cifar10"].class_names) == 10
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("L", (4, 4), number).save(tmp_path / name / f"{number}.png")
    assert image_folder(tmp_path).class_names == ("cats", "dogs")
    config = TrainConfig(data="cifar10", data_folder="x")
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=torch.nn.Linear(3, 2))
    facts = command._facts(Trained(net, torch.zeros(1, 3, 32, 32), config, ("cat", "dog"), None, {}))
    assert json.loads(facts["classes"]) == ["cat", "dog"]
    assert facts["inputs"] == "3x32x32: pixels of 0 to 255, / 127.5 - 1"
    assert "accuracy" not in facts
