"""Every data set of the command line has what its row in the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from flipgrad.data import AUGMENTATIONS, SOURCES
from flipgrad.training import MODELS, TrainConfig, load_data, make_net

BUILT_IN = [name for name, source in SOURCES.items() if not source.needs_folder]


@pytest.mark.parametrize("name", SOURCES)
def test_the_usual_network_and_augmentation_exist(name):
    source = SOURCES[name]
    assert source.augment in AUGMENTATIONS
    assert source.model is None or source.model in MODELS or source.model.replace("-", "").isdecimal()


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_needs_no_folder_is_read_without_one(name):
    data = SOURCES[name].read(Path(), None, 3)
    assert data.name == name
    config = TrainConfig(data=name, validation=0.0, seed=3)
    assert load_data(config).fingerprint == data.fingerprint
    net = make_net(config, data)
    assert net(data.train.x[:2]).shape == (2, data.classes)


def test_names_of_classes_are_as_many_as_these():
    assert len(SOURCES["cifar10"].class_names) == 10
    assert all(len(set(source.class_names)) == len(source.class_names) for source in SOURCES.values())
