"""Random commands, of all options with hostile values: each works, or is refused with one line."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

from flipgrad import cli
from flipgrad.data import AUGMENTATIONS
from flipgrad.estimators import ESTIMATORS
from flipgrad.noise import NOISES
from flipgrad.training import TrainConfig
from torture.attack import ACCEPTED, REFUSED, Attack, Outcome
from torture.calls import call
from torture.damage import NUMBERS, TEXTS

# What makes each command small, where nothing else is said; and the share of attempts that are given to it.
SMALL: dict[str, list[str]] = {
    "train": ["--data", "toy", "--model", "3", "--epochs", "1", "--eval-samples", "1", "--batch-size", "90"],
    "evaluate": ["--samples", "1"],
    "export": [],
    "pack": [],
    "predict": ["--samples", "1"],
    "gradeval": ["--widths", "2", "--samples", "20", "--epochs", "0", "--estimators", "st", "--workers", "1"],
    "reproduce": ["--list"],
    "bench": [],
    "estimators": [],
    "zoo": [],
}
WEIGHTS = {"train": 60, "evaluate": 12, "gradeval": 18, "reproduce": 5, "bench": 2, "estimators": 1, "zoo": 2}
WEIGHTS |= {"export": 2, "pack": 3, "predict": 7}
FINISHED, PACKED, IMAGE = "finished", "net.safetensors", "image.png"

CHOICES = {field.name: tuple(field.metadata["choices"]) for field in fields(TrainConfig) if field.metadata["choices"]}
# Values that an option may well be given, besides the hostile ones.
SENSIBLE: dict[str, tuple[str, ...]] = {
    **CHOICES,
    "estimator": (*ESTIMATORS, "psa:sampled", "arms:8", "reinforce+running", "concrete:0.1", "gumbel-rao:0", "arms:1"),
    "estimators": ("psa,st", "arm,arm", "psa:sampled,concrete:0.1,reinforce+mean", ",", "exact"),
    "noise": (*NOISES, "logistic:0.5", "normal:0", "laplace:-1", "uniform:nan", "logistic:1e-300", "logistic:1e300"),
    "weight_noise": ("none", *NOISES, "logistic:0.1", "normal:0", "logistic:1e-300"),
    "augment": (*AUGMENTATIONS, "none,affine"),
    "model": (
        *("auto", "digits", "mnist", "cifar", "8", "8-8", "0", "1000000-1000000", "99999999999", "torture.owners:raises"),
        *("torture.owners:none", "torture.owners:number", "torture.owners:wrong", "torture.owners:absent", "torture.absent:x"),
        *("os:getcwd", "sys:maxsize", ".owners:raises", "torture.owners:", ":raises", "torture.owners:raises:x"),
    ),
    "widths": ("5-5-5", "0", "-5", "1-2-3", "1000000", "2-2-2-2-2"),
    "add": (FINISHED, "nowhere", "file", ""),
    "folder": (".", FINISHED, "nowhere", "file", ""),
    "sample_counts": ("1,2", "0", "2,2,1", ",", "1e3"),
    "epochs": ("1", "2", "0", "1,2", "0,0", "-1", "1000000000"),
    "device": ("cpu", "cuda", "cuda:99", "mps", "meta", "hpu", "privateuseone", "cpu:1", "xla", "fpga", "vulkan"),
    "data_folder": (".", "nowhere", "/dev/null", "/proc", "\0", FINISHED, ""),
    "lr": ("auto", "0.1", "1e9", "inf", "-1", "nan", "1e-300", "AUTO"),
    "scale": ("smoke", "tiny"),
    "names": ("toy", "nothing", "report"),
    "reference": ("auto", "exact", "disarm", "st", "nothing"),
    "name": ("nothing", "", "step ", "digits", "toy-1"),
    "output": ("out", "a/b/c", FINISHED, "file", "", ".", "\0", "x" * 300, "ü ☃", "[bold]", "-", "/dev/null", "/dev/null/x"),
    "resume": (FINISHED, "nowhere", ".", "file", "", "\0", "/dev/null", "x" * 5000),
    "network": (*[PACKED] * 8, "nowhere", FINISHED, "file", "", IMAGE, "/dev/null"),
    "inputs": (*[IMAGE] * 6, PACKED, "nowhere.png", f"{FINISHED}/curve.png", "file", "", ".", "/dev/null"),
    "run": (FINISHED, "zoo:digits", "zoo:digits-binary", "zoo:nothing", "zoo:", "nowhere", ".", "file", "", "\0", "/dev/null"),
    "json_file": ("-", "a.json", "nowhere/a.json", "/dev/null/a", "."),
    "data": (*CHOICES["data"], "nowhere"),
    "dask": ("nonsense", "tcp://", "tcp://127.0.0.1:1"),
    "keep_in": ("kept", "file"),
}
# A whole number that starts threads or processes, or fills the disk with figures, is not left to chance.
BOUNDED: dict[str, tuple[str, ...]] = {"workers": ("0", "1", "2", "-1", "x", "1e3")}


@cache
def options() -> dict[str, list[Any]]:
    """The parameters of every command."""
    return {name: cli.command(name).params for name in cli.COMMANDS}


def value(name: str, random: Random) -> str:
    """A value for an option, sensible or not."""
    if name in BOUNDED:
        return random.choice(BOUNDED[name])
    if name in SENSIBLE and random.random() < 0.7:
        return random.choice(SENSIBLE[name])
    return str(random.choice(random.choice([NUMBERS, NUMBERS, TEXTS])))


def command(random: Random) -> list[str]:
    """A whole command."""
    name = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    arguments = [name]
    parameters = options()[name]
    positional = [parameter for parameter in parameters if not parameter.opts[0].startswith("-")]
    for parameter in positional:
        arguments.extend(value(parameter.name, random) for _ in range(random.choice([1, 1, 1, 0, 2])))
    arguments.extend(SMALL[name] if random.random() < 0.95 else [])
    named = [parameter for parameter in parameters if parameter not in positional and parameter.opts[0] != "--help"]
    for parameter in random.sample(named, min(len(named), random.choice([0, 1, 1, 1, 2, 2, 3, 6]))):
        arguments.append(parameter.opts[0])
        if not parameter.is_flag:
            arguments.append(value(parameter.name, random))
    if random.random() < 0.03:
        arguments.insert(random.randrange(len(arguments) + 1), random.choice(TEXTS))
    # Nothing on a command line has a zero byte or half a character in it.
    return [argument.replace("\0", "\\0").encode(errors="replace").decode() for argument in arguments]


class CommandAttack(Attack):
    """Random commands, in this process."""

    part, name, title = "inputs", "commands", "command line"
    limit = 30.0

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def setup(self, shared: Path) -> None:
        call(["train", *SMALL["train"], "--output", str(shared / FINISHED)]).check("the base run")
        call(["pack", "zoo:digits-binary", "--output", str(shared / PACKED)]).check("the packed network")
        Image.linear_gradient("L").save(shared / IMAGE)

    def attempt(self, number: int, random: Random) -> Outcome:
        arguments = command(random)
        # A folder within folders, so that ".." leads to nothing of anyone else's.
        place = self.scratch / str(number) / "a" / "b"
        place.mkdir(parents=True)
        shutil.copytree(self.shared / FINISHED, place / FINISHED)
        (place / "file").write_bytes(b"a file")
        for name in (PACKED, IMAGE):
            shutil.copy(self.shared / name, place)
        os.chdir(place)
        try:
            answer = call(arguments, limit=1.0)
        finally:
            os.chdir(self.scratch)
            torch.set_num_threads(1)
            shutil.rmtree(self.scratch / str(number), ignore_errors=True)
        answer.check(" ".join(f"'{argument:.60}'" for argument in arguments))
        return REFUSED if answer.refused else ACCEPTED
