"""flipgrad pack and flipgrad predict: what they write, print and refuse; predictions need no torch."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flipgrad as fg
from alone import HEAVY, alone, lacking
from command_line import flipgrad
from flipgrad import packed
from flipgrad.data import digits
from flipgrad.data.sets import from_bytes
from flipgrad.errors import InputError
from flipgrad.packed.inputs import read_inputs

pytestmark = pytest.mark.xdist_group("packing commands")

DATA = digits().test


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed network of digits, net.safetensors, and some inputs: greys and colours, of its own size and of another."""
    path = tmp_path_factory.mktemp("packed")
    net, card = fg.zoo.load("digits-binary"), fg.zoo.card("digits-binary")
    facts = packed.Facts(tuple("abcdefghij"), 1 / 127.5, -1.0, {"1 sample": card.test["accuracy_1"]}, "digits", "a test")
    packed.pack(net, DATA.x[:1], facts).save(path / "net.safetensors")
    for i in range(4):
        image = Image.fromarray(pixels(i))
        image.save(path / f"{i}.png")
        image.convert("RGB").save(path / f"coloured-{i}.png")
        image.resize((40, 24), Image.Resampling.NEAREST).save(path / f"large-{i}.png")
    np.save(path / "batch.npy", DATA.x[:5].numpy())
    np.save(path / "pixels.npy", pixels(0)[None])
    return path


def pixels(i):
    return ((DATA.x[i, 0] + 1) * 127.5).round().byte().numpy()


def predict(capsys, folder, *arguments):
    files = [str(folder / name) if "." in name and not name.startswith("-") else name for name in arguments]
    return flipgrad(capsys, "predict", str(folder / "net.safetensors"), *files)


def predictions(capsys, folder, *arguments):
    code, out, err = predict(capsys, folder, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["predictions"]


def test_pack_writes_a_network_of_the_zoo(tmp_path, capsys):
    file = tmp_path / "net.safetensors"
    code, out, err = flipgrad(capsys, "pack", "zoo:digits-binary", "--output", str(file))
    assert (code, err) == (0, "")
    net, card = packed.load(file), fg.zoo.card("digits-binary")
    assert net.facts.classes == tuple("0123456789")
    assert (net.facts.pixel_scale, net.facts.pixel_shift, net.facts.data) == (1 / 127.5, -1.0, "digits")
    assert net.facts.accuracy == {
        "1 sample": card.test["accuracy_1"],
        "10 samples": card.test["accuracy_n"],
        "deterministic": card.test["accuracy_deterministic"],
    }
    assert net.facts.made_by == f"flipgrad {fg.__version__}"
    costs = fg.summary(fg.zoo.load("digits-binary"), DATA.x[:1])
    assert f"{file.stat().st_size:,} bytes, {costs.packed_bytes:,} of them weights, which are {costs.float_bytes:,}" in out
    assert "Outputs of 32 of 32 examples are PyTorch's, to 1e-05 of the largest" in out
    assert f"flipgrad predict {file} image.png" in out


def test_a_network_without_draws_is_asked_without_samples(tmp_path, capsys):
    file, image = tmp_path / "net.safetensors", tmp_path / "one.npy"
    code, _, err = flipgrad(capsys, "pack", "zoo:digits-binary", "--deterministic", "--output", str(file))
    assert (code, err) == (0, "")
    np.save(image, DATA.x[0].numpy())
    code, out, err = flipgrad(capsys, "predict", str(file), str(image))
    assert (code, err) == (0, "")
    assert "disagree" not in out
    code, _, err = flipgrad(capsys, "predict", str(file), str(image), "--samples", "3")
    assert code == 2
    assert "packed without draws" in err


def test_pack_takes_what_a_run_tells(tmp_path, capsys):
    for name, grey in (("dark", 0), ("light", 150)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(20):
            Image.new("L", (4, 3), grey + 5 * i).save(tmp_path / "images" / name / f"{i}.png")
    run, file = tmp_path / "run", tmp_path / "net.safetensors"
    options = ["--model", "8-8", "--weights", "binary", "--epochs", "1", "--eval-samples", "3", "--validation", "0"]
    source = ["--data", "images", "--data-folder", str(tmp_path / "images")]
    code, _, _ = flipgrad(capsys, "train", *source, *options, "--output", str(run))
    assert code == 0
    code, _, err = flipgrad(capsys, "pack", str(run), "--output", str(file))
    assert (code, err) == (0, "")
    net, summary = packed.load(file), json.loads((run / "summary.json").read_text())
    assert (net.inputs, net.facts.classes, net.facts.data) == ((1, 3, 4), ("dark", "light"), "images")
    accuracies = [summary[key] for key in ("accuracy_1", "accuracy_n", "accuracy_deterministic")]
    assert net.facts.accuracy == dict(zip(("1 sample", "3 samples", "deterministic"), accuracies, strict=True))
    # A run that was stopped tells no accuracy.
    (run / "summary.json").unlink()
    code, _, _ = flipgrad(capsys, "pack", str(run), "--output", str(file))
    assert code == 0
    assert packed.load(file).facts.accuracy is None
    (run / "summary.json").write_text("{}")
    code, _, err = flipgrad(capsys, "pack", str(run), "--output", str(file))
    assert code == 2
    assert "remove it, and the accuracies are left out" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zoo:digits"], "real weights behind states, which no bits can hold: train it with weights='binary'"),
        (["zoo:nothing"], "there is no network 'nothing' in the zoo"),
        (["zoo:digits-binary", "--output", "net.onnx"], "--output 'net.onnx' does not end with .safetensors"),
        (["zoo:digits-binary", "--model", "a:b"], "no network of the zoo has: leave them out"),
        (["zoo:digits-binary", "--data-folder", "x"], "--data-folder is for runs"),
        (["nowhere"], "cannot be read"),
    ],
)
def test_pack_refuses_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = flipgrad(capsys, "pack", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.iterdir())


def test_pack_refuses_a_model_written_by_hand(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_by_hand.py").write_text(
        "import flipgrad as fg\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.head = fg.BinaryLinear(64, 8), nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.layer(x.flatten(1)))\n"
        "def make(data):\n"
        "    return Net()\n"
    )
    own = ["--model", "mine_by_hand:make"]
    assert flipgrad(capsys, "train", *own, "--epochs", "1", "--eval-samples", "1", "--output", "run")[0] == 0
    code, _, err = flipgrad(capsys, "pack", "run", *own)
    assert (code, err.count("\n")) == (2, 1)
    assert "'run' holds a model written by hand" in err


def test_predict_prints_class_probability_and_disagreement(folder, capsys):
    code, out, err = predict(capsys, folder, "0.png", "large-1.png", "batch.npy")
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert len([row for row in rows if row[1]]) == 7
    assert "1 image resized to 8x8 pixels" in out
    assert "disagree" in out
    labels = [row[1] for row in rows if row[1]][-5:]
    assert sum(label == "abcdefghij"[y] for label, y in zip(labels, DATA.y.tolist(), strict=False)) >= 4
    code, out, _ = predict(capsys, folder, "0.png", "--samples", "0")
    assert code == 0
    assert "disagree" not in out


def test_predictions_are_those_of_the_network(folder, capsys):
    net = packed.load(folder / "net.safetensors")
    x = DATA.x[:5].numpy()
    found = predictions(capsys, folder, "batch.npy", "--samples", "7", "--seed", "3")
    expected = net(x, samples=7, seed=3)
    members = net.members(x, 7, 3).argmax(-1)
    for i, answer in enumerate(found):
        np.testing.assert_allclose(answer["probabilities"], expected[i], atol=1e-6)
        best = int(expected[i].argmax())
        assert (answer["input"], answer["class"]) == (f"{folder / 'batch.npy'}[{i}]", "abcdefghij"[best])
        assert answer["probability"] == answer["probabilities"][best]
        assert answer["disagreement"] == pytest.approx((members[:, i] != best).mean())
    with torch.no_grad():
        expected = fg.zoo.load("digits-binary").deterministic(DATA.x[:5]).softmax(-1)
    found = predictions(capsys, folder, "batch.npy", "--samples", "0")
    torch.testing.assert_close(torch.tensor([answer["probabilities"] for answer in found]), expected, atol=1e-4, rtol=0)


def test_members_that_disagree_are_counted(folder, capsys, tmp_path):
    # Noise for an image: of 64 members some see another class.
    np.save(tmp_path / "noise.npy", np.random.default_rng(0).uniform(-1, 1, (20, 1, 8, 8)).astype(np.float32))
    found = predictions(capsys, folder, str(tmp_path / "noise.npy"), "--samples", "64")
    shares = [answer["disagreement"] for answer in found]
    assert max(shares) > 0.1
    assert all(round(share * 64) == share * 64 for share in shares)


def test_the_answer_for_a_file_does_not_depend_on_the_others(folder, capsys):
    alone_, among = predictions(capsys, folder, "1.png")[0], predictions(capsys, folder, "0.png", "batch.npy", "1.png")[-1]
    assert alone_ == among
    assert predictions(capsys, folder, "1.png", "--seed", "1")[0] != alone_


def test_images_become_inputs_as_in_training(folder):
    net = packed.load(folder / "net.safetensors")
    for i in range(4):
        expected = from_bytes(torch.from_numpy(pixels(i)))[None, None].numpy()
        for name in (f"{i}.png", f"coloured-{i}.png"):
            found = read_inputs(folder / name, net)
            np.testing.assert_allclose(found.x, expected, atol=1e-6)
            assert not found.resized
        resized = read_inputs(folder / f"large-{i}.png", net)
        assert (resized.x.shape, resized.resized) == ((1, 1, 8, 8), True)
    np.testing.assert_allclose(read_inputs(folder / "pixels.npy", net).x[0, 0], pixels(0) / 127.5 - 1, atol=1e-6)
    assert np.array_equal(read_inputs(folder / "batch.npy", net).x, DATA.x[:5].numpy())


def test_a_grey_image_has_three_equal_channels_for_a_network_of_colours(folder):
    coloured = packed_net((3, 8, 8), packed.Facts(None, 1 / 255, 0.0))
    x = read_inputs(folder / "0.png", coloured).x
    assert x.shape == (1, 3, 8, 8)
    assert (x == x[:, :1]).all()


def packed_net(inputs, facts=None, outputs=3):
    """A network that is not trained."""
    size = int(np.prod(inputs))
    hidden = fg.BinaryLinear(16, 8, weights="binary")
    front = [nn.Flatten()] if len(inputs) > 1 else []
    net = fg.Sequential(*front, fg.BinaryLinear(size, 16), hidden, head=nn.Linear(8, outputs)).eval()
    return packed.pack(net, torch.zeros(1, *inputs), facts)


def test_one_output_is_about_two_classes(tmp_path, capsys):
    net = packed_net((4,), packed.Facts(("no", "yes")), outputs=1)
    net.save(tmp_path / "net.safetensors")
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    found = predictions(capsys, tmp_path, "x.npy", "--samples", "5")
    chances = net(x, samples=5)[:, 0]
    for answer, chance in zip(found, chances, strict=True):
        np.testing.assert_allclose(answer["probabilities"], [1 - chance, chance], atol=1e-6)
        assert answer["class"] == ("yes" if chance > 0.5 else "no")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.png", "does not exist; give a file that does"),
        ("net.safetensors", "is no image and no array: give .png, .jpg, .jpeg or .npy files"),
        ("folder.npy", "is a folder, expected a file; give .png"),
        ("text.png", "cannot be read as PNG or JPEG"),
        ("text.npy", "cannot be read as an array"),
        ("shape.npy", "has the shape [2, 1, 8, 9]; write it with numpy.save, inputs [1, 8, 8] or a batch of these"),
        ("empty.npy", "write it with numpy.save"),
        ("words.npy", "holds <U3, not real numbers"),
        ("objects.npy", "cannot be read as an array"),
        ("nan.npy", "holds numbers that are not finite"),
    ],
)
def test_inputs_that_are_none_are_told_in_one_line(name, message, folder, capsys):
    (folder / "folder.npy").mkdir(exist_ok=True)
    for file in ("text.png", "text.npy"):
        (folder / file).write_text("no image, and no array")
    arrays = {"shape": np.zeros((2, 1, 8, 9)), "empty": np.zeros((0, 1, 8, 8)), "words": np.full((1, 8, 8), "one")}
    arrays |= {"objects": np.full((1, 8, 8), None), "nan": np.full((1, 8, 8), np.nan)}
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", array, allow_pickle=True)
    code, out, err = predict(capsys, folder, "0.png", name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_other_mistakes_are_told_in_one_line(folder, capsys):
    for arguments, message in (
        (["0.png", "--samples", "-1"], "--samples -1: give at least 1, or 0 for the network without noise"),
        (["0.png", "--seed", "-1"], "seed=-1: give a whole number"),
        ([], "Missing argument"),
    ):
        code, out, err = predict(capsys, folder, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    code, _, err = flipgrad(capsys, "predict", str(folder / "0.png"), str(folder / "0.png"))
    assert (code, err.count("\n")) == (2, 1)
    assert "flipgrad pack" in err


def test_more_members_than_memory_holds_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr("flipgrad.memory.installed", lambda: 10**6)
    code, out, err = predict(capsys, folder, "batch.npy", "--samples", "2000")
    assert (code, out) == (2, "")
    assert "2,000 members for 5 inputs need 0.0 GiB, more than this machine's 0.0 GiB; give fewer --samples" in err
    assert predict(capsys, folder, "batch.npy", "--samples", "200")[0] == 0


def test_an_image_for_a_network_of_other_inputs_is_refused(folder):
    for net in (packed_net((64,)), packed_net((1, 8, 8)), packed_net((2, 8, 8), packed.Facts(None, 1.0, 0.0))):
        with pytest.raises(InputError, match=r"is an image, and the network takes inputs \[.*\]: give these as an array"):
            read_inputs(folder / "0.png", net)


def test_damaged_arrays_are_refused_and_never_crash(folder, tmp_path):
    net = packed.load(folder / "net.safetensors")
    content, draw = (folder / "batch.npy").read_bytes(), random.Random(0)
    refused: list[str] = []
    path = tmp_path / "damaged.npy"
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(130)] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            read_inputs(path, net)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 300
    assert all(len(message.splitlines()) == 1 for message in refused)
    # An array of 10^18 numbers that is not there.
    path.write_bytes(content.replace(b"(5, 1, 8, 8), }" + b" " * 16, b"(999999999999999, 1, 8, 8), }  "))
    with pytest.raises(InputError, match="cannot be read as an array"):
        read_inputs(path, net)


def test_predictions_need_no_torch(folder):
    arguments = ["predict", str(folder / "net.safetensors"), str(folder / "0.png"), str(folder / "batch.npy"), "--json"]
    printed = lacking(f"from flipgrad.cli import main\nmain({arguments!r})", *HEAVY)
    net = packed.load(folder / "net.safetensors")
    found = np.array([answer["probabilities"] for answer in json.loads(printed)["predictions"]])
    np.testing.assert_allclose(found[1:], net(DATA.x[:5].numpy(), samples=10), atol=1e-6)


def test_arrays_need_numpy_alone(folder):
    code = f"""
import numpy
from flipgrad.packed import load
from flipgrad.packed.inputs import read_inputs
from pathlib import Path
net = load({str(folder / "net.safetensors")!r})
print(net(read_inputs(Path({str(folder / "batch.npy")!r}), net).x, samples=2).argmax(-1).tolist())
"""
    expected = packed.load(folder / "net.safetensors")(DATA.x[:5].numpy(), samples=2).argmax(-1).tolist()
    assert alone(code, "numpy") == f"{expected}\n"
