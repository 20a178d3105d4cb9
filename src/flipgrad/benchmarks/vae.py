"""Estimators of the ELBO's gradient in the linear model of MNIST after some training: time of a step, and variance."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flipgrad.contract import Estimator
from flipgrad.data import digits, mnist, usual_folder
from flipgrad.estimators import (
    ARM,
    ARMS,
    LEG,
    PSA,
    REBAR,
    REINFORCE,
    RELAX,
    ST,
    ZGR,
    BitFlip,
    Concrete,
    DisARM,
    DoubleCV,
    GumbelRao,
    LearnedBaseline,
    MuProp,
)
from flipgrad.latent import Variational
from flipgrad.machine import fastest
from flipgrad.training.latents import (
    ElboTraining,
    baseline_network,
    binarised,
    encoder_gradients,
    gradient_variance,
    latent_model,
)

# Updates by PSA before anything is measured, images of a batch, and draws of a gradient whose variance is measured.
STEPS, BATCH, DRAWS, REPEATS = 2000, 50, 40, 10
# The relative error of PSA's gradient that the default tolerance may make.
LARGEST_ERROR = 3e-3
# A rate of nearly 0: the work of an update, and all estimators see the same model.
RATE = 1e-12
SIZE = 28


def vae() -> dict[str, Any]:
    """Times of a step (batch, forward, backward, update) over that of ST, and variances of the encoder's gradient over PSA's.

    Of a 784-200-784 model, on MNIST if its folder is in ``$FLIPGRAD_DATA``, else on the embedded digits, enlarged.
    """
    torch.manual_seed(0)
    images, name = _images()
    model = latent_model("linear", images.mean(0))
    training = ElboTraining(model, PSA(), images, batch=BATCH)
    losses = [training.update() for _ in range(STEPS)]
    x = binarised(images[:BATCH], torch.Generator().manual_seed(1))
    rules = _estimators(images.shape[1], sum(losses[-100:]) / 100)
    updates = {key: _idle(model, rule, images) for key, rule in rules.items()}
    seconds = fastest({key: updates[key].update for key in rules}, repeats=REPEATS)
    variances = {key: gradient_variance(model, x, rule, DRAWS, torch.Generator().manual_seed(2)) for key, rule in rules.items()}
    error = _error(model, x)
    right = error <= LARGEST_ERROR
    return {
        "data": name,
        "steps": STEPS,
        "batch": BATCH,
        "threads": torch.get_num_threads(),
        "elbo": -sum(losses[-100:]) / 100,
        **{f"{key}_over_st": seconds[key] / seconds["st"] if right else None for key in rules if key != "st"},
        **{f"{key}_variance_over_psa": variances[key] / variances["psa"] if right else None for key in rules if key != "psa"},
        "psa_relative_error": error,
        "seconds": seconds,
        "variances": variances,
    }


def _images() -> tuple[Tensor, str]:
    """Training images [N, 784] from 0 to 1, and their name."""
    folder = usual_folder("mnist")
    if folder is not None and os.path.isdir(folder):
        return (mnist(folder).train.x.flatten(1) + 1) / 2, "mnist"
    enlarged = functional.interpolate(digits().train.x, (SIZE, SIZE), mode="bilinear")
    return (enlarged.flatten(1) + 1) / 2, "digits"


def _estimators(pixels: int, start: float) -> dict[str, Estimator]:
    reinforce = REINFORCE(LearnedBaseline(baseline_network(pixels, start)))
    return {
        "st": ST(), "psa": PSA(), "disarm": DisARM(), "arm": ARM(), "arms": ARMS(), "reinforce": reinforce,
        "muprop": MuProp(), "rebar": REBAR(), "relax": RELAX(), "double_cv": DoubleCV(), "bitflip": BitFlip(), "leg": LEG(),
        "concrete": Concrete(0.5), "gumbel_rao": GumbelRao(), "zgr": ZGR(),
    }  # fmt: skip


def _idle(model: Variational, rule: Estimator, images: Tensor) -> ElboTraining:
    """A training whose updates change next to nothing."""
    training = ElboTraining(model, rule, images, batch=BATCH, rate=RATE)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = RATE
    return training


def _error(model: Variational, x: Tensor) -> float:
    """The relative error of PSA's gradient in the encoder against exact sums over flips with the same draw."""
    found, exact = (encoder_gradients(model, x, rule, 1, torch.Generator().manual_seed(3)) for rule in (PSA(), PSA(exact=True)))
    return float((found - exact).norm() / exact.norm())
