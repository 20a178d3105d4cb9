"""Recipes are options of a training, and what is given besides counts."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from command_line import flipgrad
from flipgrad.errors import InputError
from flipgrad.training import TrainConfig
from flipgrad.training.recipes import RECIPES, recipe
from pictures import render_nothing


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_configurations(name: str) -> None:
    options = recipe(name, {})
    assert options.keys() <= {field.name for field in fields(TrainConfig)}
    config = TrainConfig(**options)
    assert all(getattr(config, option) == value for option, value in options.items())


def test_what_is_given_counts() -> None:
    assert recipe("cifar10", {"epochs": 3, "noise": "normal"})["epochs"] == 3
    with pytest.raises(InputError, match="unknown recipe 'cifar'; choose from cifar10"):
        recipe("cifar", {})


def test_the_command_takes_a_recipe(tmp_path, capsys, monkeypatch):
    render_nothing(monkeypatch)
    small = (
        "--data",
        "digits",
        "--model",
        "20",
        "--norm",
        "none",
        "--noise",
        "normal",
        "--epochs",
        "1",
        "--precision",
        "float32",
    )
    code, _, err = flipgrad(capsys, "train", "--recipe", "cifar10", *small, "--output", str(tmp_path / "run"))
    assert code == 0, err
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    expected = {**RECIPES["cifar10"], "data": "digits", "model": "20", "norm": "none", "noise": "normal", "epochs": 1}
    assert stored.items() >= {**expected, "precision": "float32"}.items()
    code, _, err = flipgrad(capsys, "train", "--recipe", "imagenet")
    assert code == 2
    assert "unknown recipe 'imagenet'; choose from cifar10" in err
