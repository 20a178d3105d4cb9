"""Real against binary weights: the small networks, the trainings, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pieces import silent

import flipgrad as fg
from flipgrad.plots.learning import Training
from flipgrad.plots.weights import Accuracy, Course
from flipgrad.reproduce import EXPERIMENTS, Workshop, weights
from flipgrad.reproduce.weights import DEFAULT, HARD, LABELS, PAPER, ST


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The experiment at its smallest: one network of each kind, few draws, and two updates of trainings."""
    patch = pytest.MonkeyPatch()
    patch.delenv("FLIPGRAD_DATA", raising=False)
    plan = replace(weights.PLANS["smoke"][0], images=64, held_out=20, watched=20, epochs=1, width=0.25)
    patch.setitem(weights.PLANS, "smoke", (plan, weights.MNIST))
    patch.setitem(weights.NETWORKS, "smoke", 1)
    path = tmp_path_factory.mktemp("weights")
    EXPERIMENTS["weights"].reproduce(Workshop(path, "smoke", 0, silent))
    patch.undo()
    return path


def test_the_experiment_writes_numbers_pictures_and_a_text(folder):
    for name in ("weights.json", "weights.md", "weights.png", "weights.pdf", "weights-training.png", "measured/weights.json"):
        assert (folder / name).stat().st_size > 500
    text = (folder / "weights.md").read_text()
    assert "in latent weights PSA is less biased than ST and HardST, layer 1" in text
    # A data set that nobody has given is left out, and the text says so.
    assert "MNIST is left out: give its folder as $FLIPGRAD_DATA/mnist" in text
    stored = fg.files.read_json(folder / "measured" / "weights.json", missing="", broken="")
    assert [(row["weights"], row["method"]) for row in stored["accuracies"]] == [
        (kind, label) for kind in ("real", "binary") for label in LABELS
    ]
    assert {course["data"] for course in stored["courses"]} == {"digits"}
    assert all(len(course["losses"]) == 1 for course in stored["courses"])


def test_trainings_differ_in_their_weights_alone(folder):
    configs = {}
    for kind in ("real", "binary"):
        path = folder / "cells" / f"weights-digits-{kind}-st-0.1" / "result.json"
        configs[kind] = fg.files.read_json(path, missing="", broken="")["settings"]["config"]
    assert configs["binary"].pop("weights") == "binary"
    assert configs["binary"] == configs["real"]


def test_networks_of_both_kinds_share_their_latent_weights():
    real, binary = (weights.network(kind, 3) for kind in ("real", "binary"))
    for one, other in zip(real.binary_layers, binary.binary_layers, strict=True):
        torch.testing.assert_close(one.weight, other.weight / other.weight.shape[1] ** 0.5)
        torch.testing.assert_close(other.weight_scale, torch.full_like(other.bias, other.weight.shape[1] ** -0.5))
        assert torch.equal(one.bias, other.bias)
        assert other.weights == "binary"
        assert other.weight_noise == fg.Logistic(0.5)
    assert torch.equal(real.head.weight, binary.head.weight)
    assert sum(layer.weight.numel() for layer in binary.binary_layers) <= 14


def accuracy(kind: str, method: str, bias: float, rmse: float = 1.0, unbiased: int = 0) -> Accuracy:
    return Accuracy(kind, method, ["layer 1", "layer 2"], [bias] * 2, [rmse] * 2, [0.5] * 2, [unbiased] * 2, 10)


def test_claims_of_accuracies_follow_the_numbers():
    binary = [accuracy("binary", *row) for row in ((PAPER, 0.1, 1.0, 9), (DEFAULT, 0.1, 0.8), (ST, 0.3), (HARD, 0.9, 2.0))]
    real = [accuracy("real", label, 0.2) for label in LABELS]
    assert [claim.holds for claim in weights.accuracy_claims([*real, *binary])] == [True] * 6
    worse = [accuracy("binary", *row) for row in ((PAPER, 0.4, 1.0, 7), (DEFAULT, 0.1, 1.1), (ST, 0.1), (HARD, 0.9, 2.0))]
    assert [claim.holds for claim in weights.accuracy_claims([*real, *worse])] == [False] * 6


def course(kind: str, method: str, loss: float, accuracy: float, diverged: str | None = None) -> Course:
    return Course("digits", kind, method, 0.1, [2.0, loss], [0.5, accuracy], diverged)


def test_claims_of_trainings_follow_the_numbers():
    def claims(psa: float, st: float, hard: float, accuracy: float, diverged: str | None = None) -> list[bool]:
        rows = [course("real", DEFAULT, 0.1, 0.98), course("binary", DEFAULT, psa, accuracy, diverged)]
        rows += [course("binary", ST, st, 0.97), course("binary", HARD, hard, 0.97)]
        return [claim.holds for claim in weights.training_claims(rows)]

    assert claims(0.2, 0.25, 0.4, 0.97) == [True, True, True]
    assert claims(0.3, 0.25, 0.26, 0.95) == [False, False, False]
    assert claims(0.2, 0.25, 0.4, 0.97, "the loss") == [False, False, True]


def test_the_best_rate_counts_and_no_training_that_diverged():
    def training(rate: float, loss: float, diverged: str | None = None) -> Training:
        curves = {"train_loss": [2.0, loss], "accuracy_n": [0.5, 0.9]}
        return Training("ST", "none", False, False, False, rate, [], diverged, curves, 1.0)

    best = weights._best("digits", "binary", "ST", [training(0.1, 0.5), training(0.2, 0.4), training(0.5, 0.1, "it did")])
    assert (best.rate, best.loss, best.accuracy) == (0.2, 0.4, 0.9)
    assert best.told == "ST 0.400"
