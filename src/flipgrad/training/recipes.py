"""Recipes: sets of options of a training that were found together, by name.

Whoever names one may change any of its options: what is given besides counts.
"""

from collections.abc import Mapping
from typing import Any

from flipgrad.errors import InputError

# Options by recipe. That for CIFAR-10 was found by short trials, whose table is in docs/recipes.md.
RECIPES: dict[str, dict[str, Any]] = {
    "cifar10": {
        "data": "cifar10",
        "model": "residual",
        "norm": "batch",
        "noise": "logistic:0.15",
        "optimizer": "adam",
        "lr": 0.004,
        "schedule": "cosine",
        "warmup": 0.1,
        "batch_size": 128,
        "epochs": 20,
        "precision": "bfloat16",
        "validation": 0.02,
        "eval_samples": 2,
    },
}


def recipe(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recipe, with those that are ``given`` in place of its own.

    >>> recipe("cifar10", {"epochs": 5})["epochs"]
    5

    Raises:
        InputError: if there is no such recipe.
    """
    if name not in RECIPES:
        raise InputError(f"unknown recipe {name!r}; choose from {', '.join(RECIPES)}")
    return {**RECIPES[name], **given}
