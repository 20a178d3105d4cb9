"""What a configuration asks for: the data set and the network."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as brief
from typing import cast

import torch

from flipgrad.data import SOURCES, DataSet
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.noise import noise_by_name
from flipgrad.training.config import AUTO, TrainConfig
from flipgrad.training.models import NormName, model
from flipgrad.user_code import call_user_function, check_runs, is_user_function


def load_data(config: TrainConfig) -> DataSet:
    """The data set, with its validation part if one is wanted."""
    source = SOURCES[config.data]
    if source.needs_folder and config.data_folder is None:
        raise InputError(f"the data set '{config.data}' is read from files: give their folder with --data-folder")
    if not source.needs_folder and config.data_folder is not None:
        raise InputError(f"the data set '{config.data}' has no files; leave --data-folder out")
    if not source.resizes and config.image_size is not None:
        raise InputError(f"image_size is for a folder of images; the data set '{config.data}' has its own size")
    data = source.read(Path(config.data_folder or ""), config.image_size, config.seed)
    if data.train.x.dim() != 4 and augmentation(config) != "none":
        raise InputError(
            f"augment '{config.augment}' is for images; the data set '{config.data}' has none: leave --augment out"
        )
    return data.with_validation(config.validation, seed=config.seed) if config.validation else data


def make_net(config: TrainConfig, data: DataSet) -> Sequential:
    """The network with its first weights, which only the seed decides.

    A function that ``config.model`` names is imported and called: :func:`flipgrad.training.read_config` returns no such
    configuration from a file unless the caller names the function, too.
    """
    name = SOURCES[config.data].model if config.model == AUTO else config.model
    if name is None:
        raise InputError(f"there is no network for '{config.data}': give --model, e.g. 200-200 or package.module:function")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if is_user_function(name):
            return _user_net(config, data)
        return model(name, data, config.width, norm=cast(NormName, config.norm), noise=noise_by_name(config.noise))


def augmentation(config: TrainConfig) -> str:
    """The name of the augmentation that a run uses."""
    return SOURCES[config.data].augment if config.augment == AUTO else config.augment


def _user_net(config: TrainConfig, data: DataSet) -> Sequential:
    for name in ("width", "norm", "noise"):
        if getattr(config, name) != getattr(TrainConfig, name):
            raise InputError(f"{name} is for our own networks; {config.model!r} decides itself: leave --{name} out")
    net = call_user_function(config.model, data)
    if not isinstance(net, Sequential):
        raise InputError(f"--model {config.model!r} must return a flipgrad.Sequential for the data set, got {brief(net)}")
    check_runs(config.model, net, data.train.x[:2], data.classes)
    return net
