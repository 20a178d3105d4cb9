"""The configuration of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class TrainConfig:
    """What determines a run: the same configuration gives the same weights on the same machine.

    Attributes:
        estimator: a name from ``flipgrad.estimators.ESTIMATORS``.
        epochs: passes over the training images.
        batch_size: images per update.
        lr: the learning rate of SGD with Nesterov momentum.
        schedule: "constant", or "cosine" from ``lr`` down to 0 at the end.
        momentum: of SGD.
        shift: pixels by which training images are moved at random; 0 for none.
        samples: draws of all noises for the reported accuracy and losses.
        seed: of initialisation, order, augmentation and noise.
        device: a torch device.
        threads: CPU threads; small networks gain nothing from more than one, and one gives the same numbers everywhere.
    """

    estimator: str = "psa"
    epochs: int = 45
    batch_size: int = 64
    lr: float = 0.15
    schedule: str = "constant"
    momentum: float = 0.9
    shift: int = 1
    samples: int = 10
    seed: int = 0
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise InputError(f"unknown estimator '{self.estimator}'; choose from {', '.join(ESTIMATORS)}")
        for name, least in (("epochs", 1), ("batch_size", 1), ("samples", 1), ("shift", 0), ("seed", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"the learning rate is {self.lr}; it must be positive and finite, e.g. 0.1")
        if self.schedule not in SCHEDULES:
            raise InputError(f"unknown schedule '{self.schedule}'; choose from {', '.join(SCHEDULES)}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"the momentum is {self.momentum}; it must be in [0, 1), e.g. 0.9")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"device '{self.device}' is not available ({reason}); use cpu") from None
