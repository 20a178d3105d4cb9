import sys

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad import files
from flipgrad.training import RunFolder, TrainConfig, load_data, load_run, make_net, train
from flipgrad.training.config import augmentation
from flipgrad.user_code import call_user_function

OWN = """
import flipgrad as fg
from torch import nn
def make(data):
    return fg.Sequential(nn.Flatten(), fg.BinaryLinear(data.train.x[0].numel(), 6), head=nn.Linear(6, data.classes))
def wrong(data):
    return 3
def broken(data):
    raise KeyError("no such\\nthing")
def leaving(data):
    raise SystemExit(3)
def other_inputs(data):
    return fg.Sequential(nn.Flatten(), fg.BinaryLinear(7, 6), head=nn.Linear(6, data.classes))
def other_classes(data):
    return fg.Sequential(nn.Flatten(), fg.BinaryLinear(64, 6), head=nn.Linear(6, 3))
number = 3
"""


@pytest.fixture
def _own(tmp_path, monkeypatch):
    (tmp_path / "mine_for_training.py").write_text(OWN)
    (tmp_path / "fails_for_training.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())


def test_the_validation_images_are_held_out_by_the_seed():
    data = load_data(TrainConfig())
    assert (len(data.train), len(data.validation), len(data.test)) == (1293, 144, 360)
    other = load_data(TrainConfig(seed=1))
    assert not torch.equal(data.validation.x, other.validation.x)
    assert load_data(TrainConfig(validation=0.0)).validation is None


def test_the_networks():
    digits = load_data(TrainConfig())
    assert len(make_net(TrainConfig(), digits).binary_layers) == 2
    dense = make_net(TrainConfig(model="30-20"), digits)
    assert isinstance(dense[0], nn.Flatten)
    assert dense(digits.test.x[:3]).shape == (3, 10)
    toy = load_data(TrainConfig(data="toy"))
    assert [layer.out_features for layer in make_net(TrainConfig(data="toy"), toy).binary_layers] == [5, 5, 5]


def test_the_seed_decides_the_first_weights_and_nothing_else_is_touched():
    data = load_data(TrainConfig())
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, same, other = (make_net(TrainConfig(seed=seed), data).head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_every_data_set_has_its_usual_augmentation():
    assert augmentation(TrainConfig()) == "shift"
    assert augmentation(TrainConfig(data="cifar10")) == "flip-crop"
    assert augmentation(TrainConfig(augment="none")) == "none"


@pytest.mark.usefixtures("_own")
def test_a_persons_own_network():
    data = load_data(TrainConfig())
    net = make_net(TrainConfig(model="mine_for_training:make"), data)
    assert net.binary_layers[0].out_features == 6
    for model, message in {
        "mine_for_training:wrong": "must return a flipgrad.Sequential, or a model of binary layers written by hand, .* got 3",
        "mine_for_training:other": "has no attribute 'other'",
        "mine_for_training:number": "is a int, expected a function",
        "not_there_at_all:make": "No module named 'not_there_at_all'",
        "mine_for_training:": "give package.module:function",
        ".x:y": "--model '.x:y': give package.module:function",
        "mine_for_training:broken": r"--model 'mine.*': KeyError: 'no such.*thing' \(line 9 of .*mine_for_training.py\)$",
        "mine_for_training:leaving": r"SystemExit: 3 \(line 11 of",
        "mine_for_training:other_inputs": r"returned a network that fails on inputs \[2, 1, 8, 8\]: a fully connected layer",
        "mine_for_training:other_classes": "returned a network of 3 outputs for 10 classes",
        "fails_for_training:make": "ZeroDivisionError: division by zero",
    }.items():
        with pytest.raises(fg.InputError, match=message):
            make_net(TrainConfig(model=model), data)
    with pytest.raises(fg.InputError, match=r"give package.module:function"):
        call_user_function("math")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "mnist"}, "the data set 'mnist' is read from files: give their folder with --data-folder"),
        ({"data_folder": "here"}, "the data set 'digits' has no files; leave --data-folder out"),
        ({"image_size": 8}, "image_size is for a folder of images; the data set 'digits' has its own size"),
        ({"data": "mnist", "data_folder": "nowhere"}, "is missing"),
        (
            {"data": "toy", "augment": "shift"},
            "augment 'shift' is for images; the data set 'toy' has none: leave --augment out",
        ),
        ({"data": "toy", "augment": "affine"}, "augment 'affine' is for images"),
        ({"data": "toy", "augment": "flip-crop"}, "augment 'flip-crop' is for images"),
    ],
)
def test_bad_data_is_refused(options, message):
    with pytest.raises(fg.InputError, match=message):
        load_data(TrainConfig(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0.5, "model": "a.b:c"}, "width is for our own networks; 'a.b:c' decides itself: leave --width out"),
        ({"norm": "batch", "model": "a.b:c"}, "norm is for our own networks"),
        (
            {"weights": "binary", "model": "a.b:c"},
            "weights is for our own networks; 'a.b:c' decides itself: leave --weights out",
        ),
        (
            {"weights": "binary", "model": "50"},
            "the only binary layer has real-valued inputs.*give more layers, e.g. 50-50, or",
        ),
        ({"weights": "binary", "estimator": "arm"}, "ARM takes binary weights for random .* weight_noise, e.g. .*fg.PSA"),
        ({"weights": "binary", "estimator": "muprop", "weight_noise": "logistic"}, "MuProp has no rule for binary weights"),
        (
            {"weights": "binary", "estimator": "tanh"},
            "Tanh relaxes the distribution of binary weights, and these are not drawn",
        ),
        ({"model": "big"}, "unknown model 'big'; choose from digits, mnist, cifar, or give widths such as 200-200"),
        ({"model": "mnist"}, r"model 'mnist' is for inputs \[1, 28, 28\], the data set 'digits' has"),
        ({"model": "5-0"}, "give the units of every binary layer"),
        ({"data": "images"}, "there is no network for 'images': give --model"),
    ],
)
def test_bad_networks_are_refused(options, message):
    data = load_data(TrainConfig())
    with pytest.raises(fg.InputError, match=message):
        make_net(TrainConfig(**options), data)


def test_width_norm_and_noise_are_those_of_the_network():
    data = load_data(TrainConfig())
    net = make_net(TrainConfig(width=0.5, norm="batch", noise="laplace"), data)
    for layer in net.binary_layers:
        assert layer.out_channels == 32
        assert isinstance(layer.norm, torch.nn.BatchNorm2d)
        assert layer.noise == fg.Laplace()


def test_a_run_is_loaded_with_its_weights_and_data(tmp_path):
    config = TrainConfig(data="toy", epochs=1, eval_samples=1, estimator="st")
    data = load_data(config)
    net = make_net(config, data)
    with RunFolder(tmp_path / "run") as folder:
        train(config, net, data, folder)
    run = load_run(tmp_path / "run")
    assert run.config == config
    assert not run.net.training
    assert all(torch.equal(value, run.net.state_dict()[name]) for name, value in net.state_dict().items())
    assert torch.equal(run.data.validation.x, data.validation.x)
    assert run.same_data
    (tmp_path / "run/weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(
        fg.InputError, match=r"weights.safetensors' is truncated or damaged.*; flipgrad train --resume .* writes it"
    ):
        load_run(tmp_path / "run")
    (tmp_path / "run/weights.safetensors").unlink()
    with pytest.raises(fg.InputError, match=r"weights.safetensors' is missing; flipgrad train --resume .* writes it again"):
        load_run(tmp_path / "run")
    with RunFolder.reopen(tmp_path / "run") as folder:
        folder.save_weights(fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 2)), data)
    with pytest.raises(fg.InputError, match=r"does not fit the network that the configuration makes of the data \("):
        load_run(tmp_path / "run")


def test_a_run_on_other_data_is_told(tmp_path):
    config = TrainConfig(data="toy", epochs=1, eval_samples=1, estimator="st")
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(config)
        data = load_data(config)
        data.test.y[0] = 1 - data.test.y[0]
        folder.save_weights(make_net(config, data), data)
    assert not load_run(tmp_path / "run").same_data


@pytest.mark.usefixtures("_own")
def test_a_stored_function_runs_only_if_it_is_named_again(tmp_path, monkeypatch):
    config = TrainConfig(model="mine_for_training:make", epochs=1, eval_samples=1, estimator="st")
    data = load_data(config)
    with RunFolder(tmp_path / "run") as folder:
        train(config, make_net(config, data), data, folder)
    monkeypatch.delitem(sys.modules, "mine_for_training")
    before = sys.path.copy()
    message = (
        r"config.json' names your own function 'mine_for_training:make' as the network; flipgrad runs no code that only a file "
        r"names: if you trust it, add --model mine_for_training:make \(in Python: model='mine_for_training:make'\)$"
    )
    with pytest.raises(fg.InputError, match=message):
        load_run(tmp_path / "run")
    for other in ("mine_for_training:wrong", "digits"):
        with pytest.raises(fg.InputError, match=r"the run's model is 'mine_for_training:make' and not"):
            load_run(tmp_path / "run", model=other)
    assert "mine_for_training" not in sys.modules
    assert sys.path == before
    assert len(load_run(tmp_path / "run", model="mine_for_training:make").net.binary_layers) == 1


def test_what_is_to_be_typed_is_quoted(tmp_path):
    # Whoever copies the line must not run what the file smuggles in.
    files.write_json(tmp_path / "config.json", {"config": {"model": "a:b; rm -rf ~"}})
    with pytest.raises(fg.InputError, match="--model 'a:b; rm -rf ~' "):
        load_run(tmp_path)
