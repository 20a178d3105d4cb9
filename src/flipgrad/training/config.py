"""The configuration of a training run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from reprlib import repr as brief

import torch

from flipgrad.data import AUGMENTATIONS
from flipgrad.errors import InputError
from flipgrad.estimators.names import for_training
from flipgrad.noise import noise_by_name
from flipgrad.training.models import NORMS

DATA = ("digits", "toy", "mnist", "cifar10", "images")
SCHEDULES = ("constant", "cosine", "step")
OPTIMIZERS = ("sgd", "adam")
OBJECTIVES = ("expected", "bound")
DRAWS = ("independent", "antithetic")
PRECISIONS = ("float32", "bfloat16")
# What is wanted is found by the run itself: the data set's own choice, or a search.
AUTO = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """What determines a run: the same configuration gives the same weights on the same machine.

    Attributes:
        data: "digits", "toy", "mnist", "cifar10", or "images" for a folder of images by class.
        data_folder: where the files of "mnist", "cifar10" or "images" are.
        image_size: resize "images" to so many pixels, squared; None if they have one size.
        model: "auto" for the data set's own network; a name from ``training.MODELS``; widths of binary layers such as
            "200-200"; or "package.module:function", called with the data set.
        width: the factor on the channels or units of our networks.
        norm: before every sign of our networks: "none", "batch" (BatchNorm) or "affine" (a learned scale and shift).
        noise: of all units of our networks: "logistic", "normal", "laplace" or "uniform", with a scale if wanted,
            "logistic:0.5".
        estimator: a name from ``flipgrad.estimators.ESTIMATORS``, with a number where it takes one ("concrete:0.1") or with a
            baseline ("reinforce+running").
        epochs: passes over the training images.
        batch_size: images per update, of all processes together.
        lr: the learning rate, or "auto" to search for it.
        search_trials: how many rates the search tries.
        search_epochs: the length of each trial.
        search_images: training images of each trial; None for all.
        schedule: of the rate: "constant", "cosine" from ``lr`` down to 0 at the end, or "step", which divides it by 10 after
            half and after three quarters of the updates.
        optimizer: "sgd" with Nesterov momentum, or "adam".
        momentum: of SGD.
        weight_decay: the factor of the weights that is added to their gradient.
        augment: a name from ``flipgrad.data.AUGMENTATIONS``, or "auto" for the data set's usual one.
        validation: the share of the training images that is held out, drawn by the seed. Metrics of an epoch are measured on
            it, so that the test images are looked at only at the end. With 0 they are measured on the test images.
        samples: draws of all noises per update; the gradient is the mean of their estimates.
        draws: "independent", or "antithetic" for pairs of draws with Z and -Z, which have less variance.
        eval_samples: draws of all noises for the reported accuracies and losses.
        eval_train: after every epoch, measure these also on so many training images, augmented as in training; 0 for none.
        objective: "expected", the expected loss, or "bound", the multi-sample bound of ``samples`` draws.
        seed: of initialisation, order, augmentation and noise.
        device: "cpu", "cuda", "cuda:1", "mps".
        threads: CPU threads of a process; one for small networks gives the same numbers everywhere.
        precision: "float32", or "bfloat16" for mixed precision.
    """

    data: str = "digits"
    data_folder: str | None = None
    image_size: int | None = None
    model: str = AUTO
    width: float = 1.0
    norm: str = "none"
    noise: str = "logistic"
    estimator: str = "psa"
    epochs: int = 45
    batch_size: int = 64
    lr: float | str = 0.15
    search_trials: int = 10
    search_epochs: int = 5
    search_images: int | None = None
    schedule: str = "constant"
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    augment: str = AUTO
    validation: float = 0.1
    samples: int = 1
    draws: str = "independent"
    eval_samples: int = 10
    eval_train: int = 0
    objective: str = "expected"
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    precision: str = "float32"

    def __post_init__(self) -> None:
        self._check_types()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"unknown {name} {brief(getattr(self, name))}; choose from {', '.join(choices)}")
        for_training(self.estimator, points=1)
        noise_by_name(self.noise)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; it must be at least {least}")
        if self.lr != AUTO and not (isinstance(self.lr, float | int) and math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"the learning rate is {self.lr}; it must be positive and finite, e.g. 0.1, or auto")
        if not (math.isfinite(self.width) and self.width > 0):
            raise InputError(f"width is {self.width}; the factor on the channels must be positive, e.g. 0.25")
        if not 0 <= self.momentum < 1:
            raise InputError(f"the momentum is {self.momentum}; it must be in [0, 1), e.g. 0.9")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InputError(f"weight_decay is {self.weight_decay}; it must be 0 or more and finite, e.g. 1e-4")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation is {self.validation}; give a share of the training images in [0, 1), e.g. 0.1")
        if self.objective == "bound" and self.samples < 2:
            raise InputError("the bound of one sample is the expected loss; give more, e.g. --samples 5")
        if self.draws == "antithetic" and (self.samples % 2 or self.objective == "bound"):
            raise InputError("antithetic draws are pairs for the expected loss; give an even number of them, e.g. --samples 2")
        check_device(self.device)

    @property
    def rate(self) -> float:
        """The learning rate as a number."""
        if isinstance(self.lr, str):
            raise InputError("the learning rate is 'auto': search for it first, and train with what was found")
        return self.lr

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: object, where: str = "the configuration") -> TrainConfig:
        """The configuration of fields by name; those that are missing have their default.

        Args:
            values: what :meth:`to_json` gave.
            where: the file they come from, for errors.

        Raises:
            InputError: if a name is unknown or a value is not what it should be.

        >>> TrainConfig.from_json({"epochs": 3}).epochs
        3
        """
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must hold fields by name, got {values!r:.60}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"{where} has an unknown field {brief(name)}; the fields are {', '.join(known)}")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def _check_types(self) -> None:
        """Values from a file may be anything."""
        for field in fields(self):
            kinds = [KINDS[part] for part in str(field.type).split(" | ")]
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, tuple(kind for pair in kinds for kind in pair)):
                raise InputError(f"{field.name} is {brief(value)}, expected {field.type}")
            most = MOST.get(field.name, LARGEST_INT)
            if isinstance(value, int) and abs(value) > most:
                raise InputError(f"{field.name} is {brief(value)}; it must be at most {most}")
            if isinstance(value, str) and (len(value) > LONGEST_TEXT or CONTROL.search(value)):
                raise InputError(
                    f"{field.name} is {brief(value)}; it must have at most {LONGEST_TEXT} characters, and no control characters"
                )


# What 64 bits hold, and torch takes as a seed.
LARGEST_INT = 2**63 - 1
# As much as a path may have.
LONGEST_TEXT = 4096
# They could make a terminal show something else than what a file says.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "None": (type(None),)}
CHOICES: dict[str, tuple[str, ...]] = {
    "data": DATA,
    "norm": NORMS,
    "schedule": SCHEDULES,
    "optimizer": OPTIMIZERS,
    "augment": (AUTO, *AUGMENTATIONS),
    "objective": OBJECTIVES,
    "draws": DRAWS,
    "precision": PRECISIONS,
}
LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "samples": 1,
    "eval_samples": 1,
    "eval_train": 0,
    "seed": 0,
    "threads": 1,
    "image_size": 1,
    "search_trials": 2,
    "search_epochs": 1,
    "search_images": 2,
}
# More threads than any processor has; torch crashes where the system refuses them.
MOST = {"threads": 1024}


def check_device(device: str) -> None:
    """Refuse a device that is not there, or that cannot draw random numbers and give them back."""
    try:
        float(torch.rand(1, device=device, generator=torch.Generator(device)))
    # Each backend fails in its own way, also by not finding its own modules.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"device {brief(device)} is not available ({reason:.200}); use cpu") from None
