"""Networks of the zoo: those of the package are what their cards say, and others are made and refused as they should."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flipgrad as fg
from command_line import flipgrad
from flipgrad import cli, files, tensor_files
from flipgrad.data import SOURCES, DataSet, Split, digits
from flipgrad.network import layers_with_binary_weights
from flipgrad.training import MODELS, RunFolder, TrainConfig, evaluate, load_data, load_run, make_net, train
from flipgrad.zoo import Card, Zoo, adding
from flipgrad.zoo.cards import recipe
from flipgrad.zoo.folder import FORMAT, LARGEST_ZOO, as_bits, full_precision, half_precision

DATA = Path(os.environ.get("FLIPGRAD_DATA", Path(__file__).parents[2] / "../shared/data"))
DOCS = Path(__file__).parents[2] / "docs" / "zoo.md"
TINY = TrainConfig(data="toy", model="8-8", weights="binary", epochs=4, batch_size=10, eval_samples=3, lr=0.1)

# In one process: they share a run.
pytestmark = pytest.mark.xdist_group("zoo")


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "run"
    data = load_data(TINY)
    with RunFolder(path) as folder:
        train(TINY, make_net(TINY, data), data, folder)
    return path


@pytest.fixture
def run(shared_run, tmp_path):
    """A run that a test may change."""
    return Path(shutil.copytree(shared_run, tmp_path / "run"))


@pytest.fixture
def zoo(tmp_path):
    (tmp_path / "zoo").mkdir()
    return Zoo(tmp_path / "zoo")


def rewrite(zoo, name, **changes):
    """Change a card, checksum and all."""
    file = zoo.path / f"{name}.json"
    stored = json.loads(file.read_text())
    files.write_json(file, {**stored, **changes})


def test_the_networks_of_the_package_are_there_and_small():
    assert {name + kind for name in ("digits", "mnist", "cifar10") for kind in ("", "-binary")} == set(fg.zoo.names())
    inside = sorted(file.name for file in fg.zoo.OURS.path.iterdir())
    assert inside == sorted(f"{name}.{ending}" for name in fg.zoo.names() for ending in ("json", "safetensors"))
    assert sum(file.stat().st_size for file in fg.zoo.OURS.path.iterdir()) <= LARGEST_ZOO == 6_000_000


@pytest.mark.parametrize("name", fg.zoo.names())
def test_a_network_is_what_its_card_says(name):
    card, net = fg.zoo.card(name), fg.zoo.load(name)
    assert card.name == name
    assert not net.training
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in net.parameters()) == card.parameters
    assert (fg.zoo.OURS.path / f"{name}.safetensors").stat().st_size == card.bytes
    assert bool(layers_with_binary_weights(net)) == (card.config.weights == "binary") == name.endswith("-binary")
    assert net(torch.zeros(2, *card.inputs)).shape == (2, card.classes)
    assert card.epochs == len(card.curves) <= card.config.epochs
    # Rounding cost nothing that could be told from chance.
    assert abs(card.accuracy - card.accuracy_float32) < 0.005
    assert [size["samples"] for size in card.ensembles["sizes"]][:4] == [1, 2, 5, 10]
    assert card.seconds > 0
    assert card.config.data_folder is None


@pytest.mark.parametrize("name", fg.zoo.names())
def test_the_recipe_is_a_command_that_gives_the_configuration(name):
    card = fg.zoo.card(name)
    program, command, *arguments = card.command.split()
    assert (program, command) == ("flipgrad", "train")
    context = cli.command("train").make_context("train", arguments)
    given = {key: value for key, value in context.params.items() if key in card.config.to_json()}
    told = {**given, "lr": float(given["lr"]), "threads": given["threads"] or 1, "data_folder": None}
    # What is left to the data set is told in full by the card.
    model = SOURCES[card.config.data].model if told["model"] == "auto" else told["model"]
    assert {**told, "model": model} == card.config.to_json()


@pytest.mark.parametrize("name", ["digits", "digits-binary"])
def test_the_networks_for_digits_are_as_good_as_their_cards_say(name):
    card, test = fg.zoo.card(name), digits().test
    found = evaluate(fg.zoo.load(name), test, 10, generator=torch.Generator().manual_seed(card.seed))
    # The same draws; another processor rounds some units differently. Three standard errors over examples are far beyond that.
    error = card.ensembles["sizes"][3]["accuracy_error"]
    assert found.accuracy_n == pytest.approx(card.accuracy, abs=3 * error)
    assert found.accuracy_deterministic == pytest.approx(card.test["accuracy_deterministic"], abs=3 * error)
    assert found.accuracy_n > 0.97
    assert found.expected_loss == pytest.approx(card.test["expected_loss"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in fg.zoo.names() if SOURCES[fg.zoo.card(name).config.data].needs_folder])
def test_the_networks_for_data_in_files_are_as_good_as_their_cards_say(name):
    card = fg.zoo.card(name)
    folder = DATA / card.config.data
    if not folder.is_dir():
        pytest.skip(f"the files of {card.config.data} are not in {folder}; set $FLIPGRAD_DATA to their parent folder")
    loaded = fg.zoo.load_run(name, data_folder=str(folder))
    assert loaded.same_data
    found = evaluate(loaded.net, loaded.data.test, card.test["samples"], generator=torch.Generator().manual_seed(card.seed))
    error = next(size["accuracy_error"] for size in card.ensembles["sizes"] if size["samples"] == card.test["samples"])
    assert found.accuracy_n == pytest.approx(card.accuracy, abs=3 * error)
    assert found.accuracy_1 == pytest.approx(card.test["accuracy_1"], abs=3 * error)
    assert found.accuracy_deterministic == pytest.approx(card.test["accuracy_deterministic"], abs=3 * error)


def test_the_documentation_has_all_cards():
    assert fg.zoo.markdown() in DOCS.read_text(), "run: flipgrad zoo --markdown, and put it into docs/zoo.md"


def test_a_network_can_be_loaded_where_gradients_are_switched_off():
    with torch.no_grad():
        net = fg.zoo.load("digits-binary")
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_network_of_a_run_can_be_added_and_loaded(run, zoo):
    card = fg.zoo.add(zoo, run, "toy-binary", seed=3)
    assert zoo.names() == ["toy-binary"]
    assert zoo.card("toy-binary") == card
    assert (card.precision, card.epochs, card.inputs, card.classes) == ("float16", 4, [2], 2)
    assert (card.command, card.config) == (recipe(TINY), TINY)
    original, net = load_run(run), zoo.load("toy-binary")
    binary = layers_with_binary_weights(net)
    latent = {key for key, tensor in net.named_parameters() if any(tensor is layer.weight for layer in binary.values())}
    assert latent
    for key, tensor in original.net.state_dict().items():
        # Of weights that are signs, nothing else is stored.
        expected = torch.where(tensor >= 0, 1.0, -1.0) if key in latent else half_precision(tensor).float()
        assert torch.equal(net.state_dict()[key], expected)
    test = original.data.test
    found = evaluate(net, test, 3, generator=torch.Generator().manual_seed(3))
    assert found == evaluate(zoo.load_run("toy-binary").net, test, 3, generator=torch.Generator().manual_seed(3))
    assert (found.accuracy_n, found.expected_loss) == (card.test["accuracy_n"], card.test["expected_loss"])
    assert zoo.load_run("toy-binary").same_data
    assert fg.zoo.add(zoo, run, "toy-binary", samples=1).test["samples"] == 1
    assert zoo.names() == ["toy-binary"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", ["real", "binary"])
def test_every_model_can_be_in_the_zoo(zoo, model, weights):
    """It is made anew from its name and the shape of its inputs; no data are needed."""
    inputs = list(MODELS[model][1])
    config = TrainConfig(data={8: "digits", 28: "mnist", 32: "cifar10"}[inputs[-1]], model=model, weights=weights, width=0.25)
    classes, blank = 10, Split(torch.zeros(2, *inputs), torch.zeros(2).long())
    net = make_net(config, DataSet(config.data, blank, blank, classes, background=0.0))
    stored = {key: half_precision(tensor) for key, tensor in net.state_dict().items()}
    content = {"weights": tensor_files.tensors_checksum(stored), "inputs": inputs, "classes": classes, "config": config}
    zoo.store(replace(fg.zoo.card("digits"), name="any", **content), tensor_files.tensors_to_bytes(FORMAT, stored))
    loaded = zoo.load("any")
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[key].to(tensor.dtype))
    assert loaded(torch.zeros(2, *inputs)).shape == (2, classes)


def test_half_precision_keeps_every_sign():
    values = torch.tensor([-1e-30, -3e-8, -1e-7, 0.0, 1e-30, 0.3])
    rounded = half_precision(values)
    assert rounded.dtype == torch.float16
    assert torch.equal(rounded >= 0, values >= 0)
    assert half_precision(torch.arange(3)).dtype == torch.int64


def test_signs_are_stored_as_bits_and_come_back():
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights[0, 0] = 0
    bits = as_bits(weights)
    assert bits.dtype == torch.uint8
    assert len(bits) == 2
    back = full_precision({"w.bits": bits, "n": torch.tensor(3), "h": torch.ones(2).half()}, {"w": weights})
    assert torch.equal(back["w"], torch.where(weights >= 0, 1.0, -1.0))
    assert back["h"].dtype == torch.float32
    for wrong in ({"v.bits": bits}, {"w.bits": bits[:1]}, {"w.bits": bits.float()}):
        with pytest.raises(RuntimeError, match="does not hold the bits of a weight"):
            full_precision(wrong, {"w": weights})


def test_weights_stay_as_they_are_where_rounding_costs_accuracy(run, zoo, monkeypatch):
    with monkeypatch.context() as patch:
        # A network without weights says the same of everything, and is right in half of the examples.
        patch.setattr(adding, "half_precision", lambda tensor: torch.zeros_like(tensor).half())
        trained = load_run(run)
        before = evaluate(trained.net, trained.data.test, 3, generator=torch.Generator().manual_seed(0)).accuracy_n
        assert before > 0.6
        card = fg.zoo.add(zoo, run, "toy")
    assert card.precision == "float32"
    assert card.accuracy == card.accuracy_float32 == before
    assert torch.equal(zoo.load("toy").head.weight, trained.net.head.weight)


def test_an_unknown_name_is_refused_with_those_there_are(zoo):
    with pytest.raises(
        fg.InputError, match=r"there is no network 'nothing' in the zoo; choose from cifar10, cifar10-binary, digits"
    ):
        fg.zoo.load("nothing")
    with pytest.raises(fg.InputError, match=r"no network '\.\./digits' in the zoo"):
        fg.zoo.card("../digits")
    with pytest.raises(fg.InputError, match="choose from none: it is empty"):
        zoo.load("digits")
    with pytest.raises(fg.InputError, match="device 'nowhere' is not available"):
        fg.zoo.load("digits", device="nowhere")


@pytest.mark.parametrize("name", ["", "Digits", "a b", "../a", "-a", "a--b", "a.json"])
def test_names_are_plain(run, zoo, name):
    with pytest.raises(fg.InputError, match="give small letters, digits and hyphens"):
        fg.zoo.add(zoo, run, name)


def test_what_cannot_be_added_is_refused(run, zoo, monkeypatch):
    config = json.loads((run / "config.json").read_text())
    for change in ({"model": "os:getcwd"}, {"estimator": "mine:Mix"}):
        files.write_json(run / "config.json", {**config, "config": {**config["config"], **change}})
        with pytest.raises(fg.InputError, match=r"names your own code '.*'; networks of the zoo are of flipgrad's own models"):
            fg.zoo.add(zoo, run, "toy")
    files.write_json(run / "config.json", {**config, "config": {**config["config"], "seed": 1}})
    with pytest.raises(fg.InputError, match="was trained on other data than are there now"):
        fg.zoo.add(zoo, run, "toy")
    files.write_json(run / "config.json", config)
    monkeypatch.setattr("flipgrad.zoo.folder.LARGEST_ZOO", 1000)
    with pytest.raises(fg.InputError, match=r"the zoo would have [\d,]+ bytes, and may have 1,000; train a smaller network"):
        fg.zoo.add(zoo, run, "toy")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(fg.InputError, match="has no whole epoch yet; go on with flipgrad train --resume"):
        fg.zoo.add(zoo, run, "toy")
    with pytest.raises(fg.InputError, match="give the folder of a run of flipgrad train"):
        fg.zoo.add(zoo, run / "nowhere", "toy")
    assert zoo.names() == []


def test_damaged_and_foreign_files_are_refused(run, zoo):
    fg.zoo.add(zoo, run, "toy")
    fg.zoo.add(zoo, run, "other")
    weights = zoo.path / "toy.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(fg.InputError, match="is damaged: its checksum is wrong; install flipgrad again"):
        zoo.load("toy")
    weights.write_bytes((fg.zoo.OURS.path / "digits.safetensors").read_bytes())
    with pytest.raises(fg.InputError, match="holds other weights than its card tells"):
        zoo.load("toy")
    weights.unlink()
    with pytest.raises(fg.InputError, match="is missing; install flipgrad again"):
        zoo.load("toy")
    (zoo.path / "toy.json").write_text("{}")
    with pytest.raises(fg.InputError, match="has no checksum"):
        zoo.card("toy")
    config = zoo.card("other").config
    rewrite(zoo, "other", config=replace(config, model="7-7").to_json())
    with pytest.raises(fg.InputError, match="does not fit the network of its card"):
        zoo.load("other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"model": "os:getcwd"}}, "names your own code 'os:getcwd'"),
        ({"config": {"estimator": "os:getcwd"}}, "names your own code 'os:getcwd'"),
        ({"config": {"modell": "3"}}, "has an unknown field 'modell'"),
        ({"inputs": [2**20, 2**20]}, "which no network has"),
        ({"inputs": [-3]}, "which no network has"),
        ({"inputs": []}, "which no network has"),
        ({"classes": 1}, "which no network has"),
        ({"classes": "2"}, "is no card of a network"),
        ({"curves": []}, "is no card of a network"),
        ({"curves": [{"epoch": 1}]}, "is no card of a network"),
        ({"test": {}}, "is no card of a network"),
        ({"ensembles": {"sizes": [], "reliability": []}}, "is no card of a network"),
        ({"more": 1}, "is no card of a network"),
    ],
)
def test_a_card_that_is_none_of_ours_is_refused_and_nothing_is_run(run, zoo, change, message):
    fg.zoo.add(zoo, run, "toy", samples=1)
    rewrite(zoo, "toy", **change)
    with pytest.raises(fg.InputError, match=message):
        zoo.load("toy")


def test_calibration_that_was_not_measured_is_refused():
    card = fg.zoo.card("digits")
    assert card.calibration_error(1) != card.calibration_error(None)
    with pytest.raises(fg.InputError, match=r"the calibration of 'digits' was measured with \[1, 10\] samples, or None"):
        card.calibration_error(3)


def test_the_files_of_a_data_set_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    with pytest.raises(
        fg.InputError, match=r"'mnist' is for the files of mnist: give their folder, --data-folder, or set \$FLIP"
    ):
        fg.zoo.load_run("mnist")
    monkeypatch.setenv("FLIPGRAD_DATA", str(tmp_path))
    with pytest.raises(fg.InputError, match=f"'{tmp_path}/mnist/train-images-idx3-ubyte' is missing"):
        fg.zoo.load_run("mnist")
    with pytest.raises(fg.InputError, match="the data set 'digits' has no files"):
        fg.zoo.load_run("digits", data_folder="somewhere")


def test_a_recipe_has_all_that_is_not_usual():
    config = TrainConfig(data="mnist", data_folder="~/mnist", lr=0.1, schedule="cosine", seed=3)
    assert recipe(config) == (
        "flipgrad train --data mnist --data-folder $FLIPGRAD_DATA/mnist --lr 0.1 --schedule cosine --seed 3 --threads 1"
    )
    assert recipe(TrainConfig(noise="logistic:0.5")) == "flipgrad train --noise logistic:0.5"


def test_a_card_tells_a_training_that_did_not_end(run, zoo):
    card = fg.zoo.add(zoo, run, "toy")
    assert "4 epochs, " in card.markdown()
    assert "4 epochs of 9 planned" in replace(card, config=replace(card.config, epochs=9)).markdown()
    assert isinstance(card, Card)


def test_the_command_lists_shows_and_adds(run, tmp_path, capsys):
    code, out, err = flipgrad(capsys, "zoo")
    assert (code, err) == (0, "")
    for word in ("digits-binary", "mnist", "10 samples", "ECE", f"{fg.zoo.card('digits').accuracy:.2%}"):
        assert word in out
    code, out, _ = flipgrad(capsys, "zoo", "digits-binary")
    assert code == 0
    assert f"`{fg.zoo.card('digits-binary').command}`" in out
    assert flipgrad(capsys, "zoo", "--markdown")[1] == fg.zoo.markdown() + "\n"
    folder = str(tmp_path / "own")
    code, _, err = flipgrad(capsys, "zoo", "--folder", folder)
    assert code == 2
    assert "is no folder; make it first, or leave it out for the package's own" in err
    (tmp_path / "own").mkdir()
    code, out, err = flipgrad(capsys, "zoo", "toy", "--add", str(run), "--folder", folder, "--samples", "2")
    assert (code, err) == (0, "")
    assert f"Stored in {folder}" in out
    assert "| toy |" in flipgrad(capsys, "zoo", "--folder", folder, "--markdown")[1]
    for arguments in (["--folder", folder], ["toy"]):
        code, _, err = flipgrad(capsys, "zoo", *arguments, "--add", str(run))
        assert code == 2
        assert "--add stores the network of a run under a name in a folder: give both, e.g. flipgrad zoo NAME --add RUN" in err
    code, _, err = flipgrad(capsys, "zoo", "nothing")
    assert code == 2
    assert "there is no network 'nothing' in the zoo; choose from cifar10" in err


def test_evaluate_takes_a_network_of_the_zoo(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = flipgrad(capsys, "evaluate", "zoo:digits-binary", "--sample-counts", "1,10")
    assert (code, err) == (0, "")
    assert "Test images" in out
    assert list(tmp_path.iterdir()) == []
    page = tmp_path / "page"
    code, out, err = flipgrad(capsys, "evaluate", "zoo:digits-binary", "--samples", "2", "--output", str(page))
    assert (code, err) == (0, "")
    assert json.loads((page / "evaluation.json").read_text())["same_data"]
    text = (page / "report.html").read_text()
    for word in ("Can its confidence be believed?", "Losses", "flipgrad train --weights binary", "binary weights"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "zoo:nothing"], "there is no network 'nothing' in the zoo; choose from cifar10"),
        (["evaluate", "zoo:digits", "--model", "a:b"], "which no network of the zoo has: leave them out"),
        (["evaluate", "nowhere", "--output", "x"], "a run keeps its evaluation in its own folder: leave it out"),
        (["evaluate", "zoo:digits", "--data-folder", "x"], "the data set 'digits' has no files; leave --data-folder out"),
    ],
)
def test_what_evaluate_cannot_do_with_the_zoo_is_told(capsys, arguments, message):
    code, _, err = flipgrad(capsys, *arguments)
    assert code == 2
    assert message in err
