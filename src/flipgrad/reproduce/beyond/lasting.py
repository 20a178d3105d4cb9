"""Long trainings on the toy problem, whose losses are known exactly: a bias, which short ones on images hide, shows here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from flipgrad import plots
from flipgrad.reproduce._experiment import Claim, Sheet
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.accuracy import WIDTHS
from flipgrad.reproduce.beyond.options import PAPER, RECOMMENDED
from flipgrad.reproduce.toy import trainings

NAME = "beyond-toy"
OPTIONS = ("st:sampled", "st:mean", "psa:sampled", "psa:posterior", "psa:rao-blackwell", "psa:mean")
# Epochs and networks by scale.
LENGTH = {"smoke": (3, 1), "small": (600, 3), "paper": (2000, 10)}


@final
@dataclass(frozen=True)
class Lasting:
    """Exact expected losses over epochs, and those at the end for every network, by option."""

    epochs: list[float]
    losses: Mapping[str, list[list[float]]]

    @staticmethod
    def measure(shop: Workshop) -> Lasting:
        """Train, and draw the curves."""
        found = trainings(shop, NAME, OPTIONS, *LENGTH[shop.scale_name])
        path = shop.store(NAME, {"methods": found, "widths": list(WIDTHS)})
        plots.toy_training(path, shop.folder / NAME)
        return Lasting.of(found)

    @staticmethod
    def of(methods: Mapping[str, Any]) -> Lasting:
        """From what is stored."""
        epochs = next(iter(methods.values()))["epochs"]
        return Lasting(epochs, {label: [run["expected"] for run in entry["runs"]] for label, entry in methods.items()})

    def ends(self, label: str) -> list[float]:
        """The last losses, by network."""
        return [losses[-1] for losses in self.losses[label]]

    def claims(self) -> list[Claim]:
        """Whether options come to a lower loss than the paper's PSA."""
        return [self._lower(RECOMMENDED), self._lower("PSA mean")]

    def _lower(self, option: str) -> Claim:
        told = ", ".join(f"{label} {np.mean(self.ends(label)):.4f}" for label in self.losses)
        return Claim(
            f"{option} comes to a lower expected loss than PSA in a long training (5-5-5, toy problem; exact losses, means of "
            f"the last stretch, around epoch {self.epochs[-1]:,.0f}; every one of {len(self.ends(option))} networks)",
            all(ours < theirs for ours, theirs in zip(self.ends(option), self.ends(PAPER), strict=True)),
            f"means over networks: {told}",
        )

    def sheet(self) -> Sheet:
        """Losses along the training, and at its end."""
        last = self.epochs[-1]
        some = [min(range(len(self.epochs)), key=lambda k: abs(self.epochs[k] - last * share)) for share in (0.01, 0.1, 0.3)]
        heads = [f"epoch {self.epochs[k]:,.0f}" for k in some]
        networks = len(self.ends(PAPER))
        rows = [
            [label, *(f"{np.mean([run[k] for run in runs]):.4f}" for k in some), *(f"{run[-1]:.4f}" for run in runs)]
            for label, runs in self.losses.items()
        ]
        return Sheet(
            "Long trainings of 5-5-5 on the toy problem, at the paper's rate: exact expected losses, means over networks along "
            "the training, and of every network at the end.",
            ["option", *heads, *(f"end, network {k}" for k in range(1, networks + 1))],
            rows,
        )
