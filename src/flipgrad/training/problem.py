"""What a configuration asks for: the data set and the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from flipgrad.data import DataSet, cifar10, digits, image_folder, mnist, toy
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.training.config import AUTO, TrainConfig
from flipgrad.training.models import cifar_net, digits_net, fully_connected
from flipgrad.training.own import own_function

# Data sets whose files a person has to bring.
NEED_FOLDER = ("mnist", "cifar10", "images")

# The network of every data set that has one.
MODELS: dict[str, Callable[[TrainConfig, DataSet], Sequential]] = {
    "digits": lambda config, data: digits_net(data.classes),
    "toy": lambda config, data: dense_net(data, [5, 5, 5]),
    "mnist": lambda config, data: dense_net(data, [200] * 4),
    "cifar10": lambda config, data: cifar_net(config.width, data.classes),
}

# The usual augmentation of every data set.
AUGMENT = {"digits": "shift", "toy": "none", "mnist": "affine", "cifar10": "flip-crop", "images": "none"}


def load_data(config: TrainConfig) -> DataSet:
    """The data set, with its validation part if one is wanted."""
    if config.data in NEED_FOLDER and config.data_folder is None:
        raise InputError(f"the data set '{config.data}' is read from files: give their folder with --data-folder")
    if config.data not in NEED_FOLDER and config.data_folder is not None:
        raise InputError(f"the data set '{config.data}' has no files; leave --data-folder out")
    if config.image_size is not None and config.data != "images":
        raise InputError(f"image_size is for a folder of images; the data set '{config.data}' has its own size")
    folder = Path(config.data_folder or "")
    readers: dict[str, Callable[[], DataSet]] = {
        "digits": digits,
        "toy": lambda: toy(seed=config.seed),
        "mnist": lambda: mnist(folder),
        "cifar10": lambda: cifar10(folder),
        "images": lambda: image_folder(folder, config.image_size, seed=config.seed),
    }
    data = readers[config.data]()
    return data.with_validation(config.validation, seed=config.seed) if config.validation else data


def make_net(config: TrainConfig, data: DataSet) -> Sequential:
    """The network with its first weights, which only the seed decides."""
    if config.width != 1 and not (config.data == "cifar10" and config.model == AUTO):
        raise InputError("width is the factor on the channels of the CIFAR-10 network; it goes with --data cifar10 alone")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.model != AUTO:
            return _own_net(config.model, data) if ":" in config.model else dense_net(data, _widths(config.model))
        if config.data not in MODELS:
            raise InputError(f"there is no network for '{config.data}': give --model, e.g. 200-200 or package.module:function")
        return MODELS[config.data](config, data)


def dense_net(data: DataSet, widths: list[int]) -> Sequential:
    """Fully connected binary layers of the given ``widths`` for inputs of any shape."""
    net = fully_connected(data.train.x[0].numel(), widths, data.classes)
    if data.train.x.dim() == 2:
        return net
    return Sequential(nn.Flatten(), *(net[k] for k in range(len(net))), head=net.head)


def augmentation(config: TrainConfig) -> str:
    """The name of the augmentation that a run uses."""
    return AUGMENT[config.data] if config.augment == AUTO else config.augment


def _widths(model: str) -> list[int]:
    try:
        return [int(width) for width in model.split("-")]
    except ValueError:
        raise InputError(f"model {model!r}: give auto, widths such as 200-200, or package.module:function") from None


def _own_net(model: str, data: DataSet) -> Sequential:
    net = own_function(model)(data)
    if not isinstance(net, Sequential):
        raise InputError(f"--model {model!r} must return a flipgrad.Sequential for the data set, got {net!r:.60}")
    return net
