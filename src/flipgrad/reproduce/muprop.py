"""Appendix C.3: REINFORCE and MuProp with the running average of every example's loss as a baseline, at several rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from flipgrad import plots
from flipgrad.reproduce._curves import GUESSING, TrainingCurves, measure
from flipgrad.reproduce._experiment import Claim, CoreTime, Experiment
from flipgrad.reproduce._training import TrainingPlan, image_folder
from flipgrad.reproduce._workshop import Workshop
from flipgrad.training.config import AUTO

METHODS = ("reinforce+running", "muprop+running")
# Beside the rate that the search finds.
RATES = (1e-3, 1e-4)
# With automatic rates: to compare with.
BIASED = "psa:sampled"
AUGMENT = "flip-crop"

# The paper trains for 1,000 epochs. Small: the noise's scale goes with the root of the width, as in the experiment on CIFAR-10.
PLANS = {
    "smoke": TrainingPlan("digits", 1.0, 128, 64, 64, epochs=2, trials=2, trial_epochs=1, trial_images=64),
    "small": TrainingPlan(
        "cifar10", 0.125, 5000, 256, 256, epochs=15, trials=6, trial_epochs=1, trial_images=3000, noise="logistic:0.35"
    ),
    "paper": TrainingPlan("cifar10", 1.0, None, None, 5000, epochs=1000, trials=10, trial_epochs=5, trial_images=None),
}


@final
class MuProp(Experiment):
    """Training losses of unbiased methods with baselines."""

    name = "muprop"
    title = "Appendix C.3: REINFORCE and MuProp with running baselines on CIFAR-10"
    place = "Figure C.7"
    words = (
        "Training losses of REINFORCE and MuProp with the running average of every example's loss as the baseline, at "
        "several learning rates. With a careful choice both make progress, at rates one to two orders smaller than "
        "those of biased methods: in 1,000 epochs hardly that of biased ones in 10."
    )
    cost = CoreTime((5, 1000, 1e7), cells=(7, 7, 7))

    def run(self, shop: Workshop) -> list[Claim]:
        plan = PLANS[shop.scale_name]
        folder = image_folder(plan, shop.images)
        wanted = [(BIASED, AUTO), *((method, rate) for method in METHODS for rate in (AUTO, *RATES))]
        cells = [
            plan.cell(f"muprop-{method}-{rate if rate == AUTO else f'{rate:g}'}", method, AUGMENT, shop.seed, folder, rate)
            for method, rate in wanted
        ]
        runs, path = measure(shop, self.name, plan, cells, starred=True)
        plots.muprop(path, shop.folder / self.name)
        biased, *unbiased = runs
        return [can_progress(unbiased), small_rates(unbiased, biased), slow(unbiased, biased)]


def _told(runs: Sequence[TrainingCurves]) -> str:
    return ", ".join(f"{run.told()} at {run.told_rate}{'*' if run.searched else ''}" for run in runs)


def _best(runs: Sequence[TrainingCurves]) -> TrainingCurves:
    """The lowest training loss at the end, of those that came to one."""
    return min((run for run in runs if run.values("train_loss")), key=lambda run: run.last("train_loss"), default=runs[0])


def can_progress(runs: Sequence[TrainingCurves]) -> Claim:
    """Whether the best rates lower the loss below that of guessing."""
    best = [_best([run for run in runs if run.method == method]) for method in dict.fromkeys(run.method for run in runs)]
    return Claim(
        "with a suitable rate, both can make progress (training loss more than 1 % below that of guessing)",
        all(run.last("train_loss") < 0.99 * GUESSING for run in best),
        f"guessing {GUESSING:.3f}; at the end, * for rates from the search: {_told(runs)}",
    )


def small_rates(runs: Sequence[TrainingCurves], biased: TrainingCurves) -> Claim:
    """The rate of the best unbiased training against that of PSA."""
    best = _best(runs)
    return Claim(
        "the learning rates they need are one to two orders smaller than with biased methods",
        best.has_a_tenth_of_the_rate_of(biased),
        f"best: {_told([best])}; found for {biased.method}: {_told([biased])}",
    )


def slow(runs: Sequence[TrainingCurves], biased: TrainingCurves) -> Claim:
    """How far they come in all epochs, against what PSA reaches in a few of them."""
    losses = biased.values("train_loss")
    few = max(1, len(losses) // 10)
    best = _best(runs)
    return Claim(
        "they are much slower: after all epochs they have hardly come as far as a biased method after a few",
        bool(losses) and not best.last("train_loss") < losses[few - 1],
        f"{_told([best])}; {biased.method} after {few} epoch{'s' * (few > 1)} {losses[few - 1]:.3f}, at the end "
        f"{biased.last('train_loss'):.3f}"
        if losses
        else "no training came to an end",
    )
