"""Figure 4 and appendix C.2: which trainings, with which seeds and augmentations, and what they say of the paper's claims."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from flipgrad import plots
from flipgrad.errors import InputError
from flipgrad.estimators.names import for_training
from flipgrad.plots.learning import GUESSING, TRAINING, VALIDATION, Training
from flipgrad.reproduce._cells import Cell
from flipgrad.reproduce._evidence import (
    Evidence,
    Verdict,
    at_the_end,
    course,
    epochs_at_guessing,
    every,
    log_ratio,
    pairs,
    percent,
    plateaus,
    points,
    rise,
    seed_mean,
    since,
)
from flipgrad.reproduce._workshop import Claim, Results, Sheet, Workshop, experiment, unfinished
from flipgrad.reproduce.learning import SMOKE, TrainingPlan, store, trainings
from flipgrad.training.config import AUTO

METHODS = ("psa:sampled", "st", "hard-st", "tanh", "concrete", "adf", "local-reparam", "reinforce")
AUGMENTATIONS = {"none": "no augmentation", "affine": "affine", "flip-crop": "flip & crop"}
ADF, ADF_STATES = "ADF", "ADF states"


@dataclass(frozen=True)
class Part:
    """Trainings with every one of some methods and augmentations, and with ``seeds`` counted from the reproduction's own."""

    methods: Sequence[str]
    augmentations: Sequence[str] = ("flip-crop",)
    seeds: Sequence[int] = (0,)


# Small: with a quarter of the inputs to every unit their noise averages out half as well, so its scale is half the paper's.
# With the paper's noise neither PSA nor ST gets anywhere in this time: at the rates that the search found, 0.0046 and 0.0049,
# losses of 2.336 and 2.338 after 18 epochs, where guessing has 2.303. The paper does not say for how many epochs it trained.
# Medium: all images that are not held out, and the paper's noise, with which trainings begin on a plateau at the loss of
# guessing. Trials of 2 epochs of 8,000 images end there and cannot tell rates apart: for ST and PSA they gave 0.0029, with
# which ST learnt nothing for 23 epochs. With 0.01 it learns in the fifth; so this is the rate of all methods.
PLANS = {
    "smoke": SMOKE,
    "small": TrainingPlan(
        "cifar10", 0.25, 20_000, 2000, 1000, epochs=18, trials=8, trial_epochs=2, trial_images=8000, noise="logistic:0.5"
    ),
    "medium": TrainingPlan("cifar10", 0.5, 45_000, 2000, 1000, epochs=30, rate=0.01),
    "paper": TrainingPlan("cifar10", 1.0, None, None, 5000, epochs=200, trials=10, trial_epochs=5, trial_images=None),
}
# In the order in which they are trained. ADF samples the head's outputs at the small scale, where one training samples the last
# states, as in the paper's appendix, and all do at the scales that are nearer to the paper's.
STUDIES = {
    "smoke": (Part(METHODS, tuple(AUGMENTATIONS)), Part(("psa:sampled", "st"), seeds=(1,))),
    "small": (
        Part(METHODS),
        Part(("psa:sampled", "st", "hard-st", "adf", "tanh"), seeds=(1, 2)),
        Part(("psa:sampled", "st", "hard-st"), ("none", "affine")),
        Part(("adf:states",)),
    ),
    "medium": (Part(("psa:sampled", "st", "hard-st", "adf:states")),),
    "paper": (Part(tuple("adf:states" if method == "adf" else method for method in METHODS), tuple(AUGMENTATIONS)),),
}

# What "about the same" and "apart" mean, as shares of a loss, and a good accuracy, as a difference of shares.
SAME, APART, GOOD = 0.05, 0.1, -0.02


def parts(scale: str) -> dict[str, int]:
    """The names of the trainings at a scale, with as many epochs as each takes."""
    plan = PLANS[scale]
    return {name: plan.cost for name, *_ in _trainings(scale, 0)}


def _trainings(scale: str, first_seed: int) -> Iterator[tuple[str, str, str, int]]:
    """The name of every training, its method, augmentation and seed."""
    for part in STUDIES[scale]:
        for seed in part.seeds:
            for augment in part.augmentations:
                for method in part.methods:
                    more = f"-seed-{first_seed + seed}" if seed else ""
                    yield f"cifar-{augment}-{method}{more}", method, augment, first_seed + seed


@experiment(
    "cifar",
    "Figures 4 and C.1",
    seconds=(22, 33_000, 5e6),
    cells=(26, 25, 24),
    figures={"cifar-extra": "Validation losses and training accuracies."},
    medium=(28_000, 4),
    parts=parts,
)
def cifar(shop: Workshop) -> Iterator[Claim | Sheet]:
    """Figure 4 and appendix C.2: learning on CIFAR-10.

    Training losses, validation accuracies, validation losses and training accuracies on CIFAR-10 without augmentation, with
    affine augmentation, and with flips and crops. PSA and ST train very similarly and stably. Methods with a relaxed objective
    (Tanh, Concrete, ADF, LocalReparam) lower that objective very well, while the expected loss of the binary network stalls or
    grows. HardST performs rather poorly and diverges in two of the three cases; ADF with flips and crops has a very good
    accuracy in spite of its loss; REINFORCE needs a rate so small that no progress is seen.
    """
    plan, cells = PLANS[shop.scale_name], _cells(shop)
    stem = cifar.stem(shop.scale_name)
    shop.take_over(stem, asdict(plan), cells, _kept(cells), added={"rate": AUTO})
    runs = trainings(shop, "cifar", cells)
    if not runs:
        raise InputError(f"no training of cifar is finished in '{shop.folder}'; leave out --finished to train")
    path = store(shop, stem, plan, runs)
    plots.cifar(path, shop.folder / stem)
    plots.cifar(path, shop.folder / f"{stem}-extra", (VALIDATION, TRAINING))
    for augment in AUGMENTATIONS:
        yield from cifar_claims([run for run in runs if run.augment == augment])
    yield ends(runs)
    yield from unfinished(shop, cifar.name, _left(cells, runs), len(cells))


def _cells(shop: Workshop) -> list[Cell]:
    wanted = shop.augmentations or tuple(AUGMENTATIONS)
    for augment in wanted:
        if augment not in AUGMENTATIONS:
            raise InputError(f"augmentation {augment!r}: choose {', '.join(AUGMENTATIONS)}")
    plan = PLANS[shop.scale_name]
    found = [
        plan.cell(shop, name, method, augment, seed=seed)
        for name, method, augment, seed in _trainings(shop.scale_name, shop.seed)
        if augment in wanted
    ]
    if not found:
        raise InputError(
            f"the scale {shop.scale_name!r} of cifar has no training with {', '.join(wanted)}; leave out --augment"
        )
    return found


def _kept(cells: Sequence[Cell]) -> Results:
    """Results of ``cells`` from trainings that were kept."""

    def results(stored: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], float]]:
        kept = {(run["method"], run["augment"], run.get("seed", stored["seed"])): run for run in stored["runs"]}
        found = {cell.name: run for cell in cells if (run := kept.get(_identity(cell))) is not None}
        keys = ("rate", "trials", "diverged", "curves")
        return {name: ({key: run[key] for key in keys}, run["seconds"]) for name, run in found.items()}

    return results


def _identity(cell: Cell) -> tuple[str, str, int]:
    """The method of a cell as figures call it, its augmentation and its seed."""
    config = cell.settings["config"]
    return for_training(config["estimator"], 1)[0], config["augment"], config["seed"]


def cifar_claims(runs: Sequence[Training]) -> Iterator[Claim]:
    """What the trainings under one augmentation say, as far as there are some."""
    named: dict[str, list[Training]] = {}
    for run in runs:
        named.setdefault(run.method, []).append(run)
    for names, claims in (
        (("PSA", "ST"), _psa_and_st),
        (("HardST", "ST"), _hard_st),
        (("REINFORCE", "PSA", "ST"), _reinforce),
        ((ADF, "PSA"), _adf),
        ((ADF_STATES, "PSA"), _adf),
    ):
        if all(name in named for name in names):
            yield from claims(*(named[name] for name in names))
    for found in named.values():
        if found[0].relaxed:
            yield from _relaxed(found)


def _claim(
    runs: Sequence[Training], about: str, exactly: str, verdict: Verdict, numbers: str, seeds: int | None = None
) -> Claim:
    where = AUGMENTATIONS[runs[0].augment]
    return Claim(f"{about} ({where}; {exactly})", verdict, numbers, about, where, len(runs) if seeds is None else seeds)


def _mean(runs: Sequence[Training], value: Callable[[Training], float]) -> float:
    return fmean(map(value, runs))


def _ends(*methods: Sequence[Training]) -> str:
    return ", ".join(f"{runs[0].method} {_mean(runs, lambda run: run.end):.3f}" for runs in methods)


def _diverged(runs: Sequence[Training]) -> int:
    return sum(bool(run.diverged) for run in runs)


def _learn(runs: Sequence[Training]) -> Verdict:
    """True where all learn; open where some stay at the loss of guessing, of which nothing else can be said."""
    return None if any(run.plateau is None for run in runs) else True


def _off_the_plateau(runs: Sequence[Training], others: Sequence[Training]) -> str:
    """For how many epochs each stays at the loss of guessing, and the ratio of losses counted from there; empty where none."""
    told = plateaus(runs, others)
    ratio = at_the_end(
        log_ratio(one.after_plateau, "train_loss", other.after_plateau, "train_loss") for one, other in pairs(runs, others)
    )
    if told and ratio.values:
        names = f"{runs[0].method}'s training loss over {others[0].method}'s"
        told += f"; with epochs counted from there {names} {ratio.told(percent)}"
    return told and f"; {told}"


def _rates(runs: Sequence[Training], others: Sequence[Training]) -> Evidence:
    """The logarithms of the ratios of the learning rates."""
    return Evidence(tuple(math.log(one.rate / other.rate) for one, other in pairs(runs, others) if one.rate and other.rate))


def _psa_and_st(psa: Sequence[Training], st: Sequence[Training]) -> Iterator[Claim]:
    curves = [log_ratio(one, "train_loss", other, "train_loss") for one, other in pairs(psa, st)]
    ratio = at_the_end(curves)
    accuracies = [_mean(runs, lambda run: run.last("accuracy_n")) for runs in (psa, st)]
    yield _claim(
        psa,
        "PSA and ST train alike",
        f"training losses within {SAME:.0%} of each other at the end",
        every([ratio.within(SAME), _learn([*psa, *st])]),
        f"PSA's over ST's {ratio.told(percent)}{since(curves, lambda value: abs(value) < SAME)}; {_ends(psa, st)}; 10-sample "
        f"validation accuracies {accuracies[0]:.1%}, {accuracies[1]:.1%}{_off_the_plateau(psa, st)}",
        len(curves),
    )
    verdicts, told = [], []
    for runs in (psa, st):
        losses = [run.curve("train_loss") for run in runs]
        found = Evidence(tuple(rise(seed_mean([curve])) for curve in losses if len(curve)))
        verdicts += [found.below(SAME) if found.values else None, not _diverged(runs), _learn(runs)]
        told.append(f"{runs[0].method} ends {found.told(percent)} above its lowest, {_diverged(runs)} of {len(runs)} diverged")
    yield _claim(
        psa,
        "PSA and ST are stable",
        f"no divergence, and the smoothed training loss ends within {SAME:.0%} of its lowest",
        every(verdicts),
        "; ".join(told),
        min(len(psa), len(st)),
    )


def _hard_st(hard: Sequence[Training], st: Sequence[Training]) -> Iterator[Claim]:
    whole = [run for run in hard if not run.diverged]
    curves = [log_ratio(one, "train_loss", other, "train_loss") for one, other in pairs(whole, st)]
    ratio, lost = at_the_end(curves), _diverged(hard)
    count = f"{lost} of {len(hard)} diverged"
    worse = ratio.above(SAME) if ratio.values else True
    if worse is False and any(one.plateau is None and other.plateau is None for one, other in pairs(whole, st)):
        # Neither has learnt anything yet.
        worse = None
    told = (
        f"HardST's training loss over ST's {ratio.told(percent)}{since(curves, lambda value: value > SAME)}; " if curves else ""
    )
    reason = "" if worse else f"; {course(whole, 'train_loss', 'the loss of HardST')}"
    yield _claim(
        hard,
        "HardST performs worse than ST",
        f"it diverges, or its training loss is over {SAME:.0%} higher at the end",
        # Where some seeds diverged and others did not do worse, it is open.
        None if lost and worse is False else worse,
        f"{told}{_ends(hard, st)}; {count}{_off_the_plateau(whole, st)}{reason}",
    )
    if hard[0].augment != "flip-crop":
        yield _claim(hard, "HardST diverges", "the paper: in the first two of three cases", _most(lost, len(hard)), count)
    if hard[0].searched:
        rates = _rates(hard, st)
        yield _claim(
            hard,
            "HardST has a smaller learning rate than ST",
            "as the search finds them",
            rates.below(0.0) if rates.values else None,
            f"HardST's over ST's {rates.told(percent)}",
            len(rates.values),
        )


def _most(count: int, total: int) -> Verdict:
    """Whether something happened to all; open where it did to some."""
    return True if count == total else False if not count else None


def _reinforce(reinforce: Sequence[Training], psa: Sequence[Training], st: Sequence[Training]) -> Iterator[Claim]:
    shares = [
        (GUESSING - one.end) / (GUESSING - other.end)
        for one, other in pairs(reinforce, psa)
        if other.end < GUESSING and one.curves
    ]
    share = Evidence(tuple(shares))
    yield _claim(
        reinforce,
        "REINFORCE makes no progress",
        "less than a tenth of PSA's, from the loss of guessing",
        share.below(0.1) if shares else None,
        f"{share.told('{:.1%}'.format)} of PSA's; guessing {GUESSING:.3f}, {_ends(reinforce, psa)}",
    )
    if reinforce[0].searched:
        rates = _rates(reinforce, st)
        yield _claim(
            reinforce,
            "REINFORCE needs a very small learning rate",
            "a tenth of ST's or less",
            rates.below(math.log(0.1) + 1e-9) if rates.values else None,
            f"found: REINFORCE {', '.join(run.told_rate for run in reinforce)}, ST {', '.join(run.told_rate for run in st)}",
        )


def _adf(adf: Sequence[Training], psa: Sequence[Training]) -> Iterator[Claim]:
    name = adf[0].method
    curves = [log_ratio(one, "loss", other, "loss") for one, other in pairs(adf, psa)]
    loss = at_the_end(curves)
    both = [(one.curve("accuracy_n"), other.curve("accuracy_n")) for one, other in pairs(adf, psa)]
    gains = [one[: len(other)] - other[: len(one)] for one, other in both]
    gain = at_the_end(gains)
    verdict = every([loss.above(0.0), gain.above(GOOD)]) if loss.values else None
    reason = course(adf, "loss", f"the validation loss of {name}")
    yield _claim(
        adf,
        f"{name} reaches a good validation accuracy despite its loss",
        f"the validation loss is higher than PSA's, the 10-sample accuracy at most {-100 * GOOD:.0f} points lower",
        verdict,
        f"accuracy over PSA's {gain.told(points)}{since(gains, lambda value: value > GOOD)}; validation loss over PSA's "
        f"{loss.told(percent)}{since(curves, lambda value: value > 0)}{_off_the_plateau(adf, psa)}; {reason}",
        len(curves),
    )


def _relaxed(runs: Sequence[Training]) -> Iterator[Claim]:
    """What a relaxed method minimises, what the binary network then has, and whether that falls, too, in the second half."""
    name = runs[0].method
    curves = [log_ratio(run, "train_loss", run, "objective") for run in runs]
    gap = at_the_end(curves)
    yield _claim(
        runs,
        f"the relaxed objective of {name} parts from the true loss",
        f"the binary network's is over {APART:.0%} higher at the end",
        gap.above(math.log1p(APART)) if gap.values else None,
        f"true over relaxed {gap.told(percent)}{since(curves, lambda value: value > math.log1p(APART))}; "
        f"{_mean(runs, lambda run: run.last('objective')):.3f} relaxed, {_mean(runs, lambda run: run.end):.3f} true",
    )
    changes = [(_second_half(run, "objective"), _second_half(run, "train_loss")) for run in runs if len(run.curve("objective"))]
    relaxed, true = (
        (Evidence(tuple(values)) for values in zip(*changes, strict=True)) if changes else (Evidence(()), Evidence(()))
    )
    stall = Evidence(tuple(after - before / 2 for before, after in changes))
    yield _claim(
        runs,
        f"while the relaxed objective of {name} is optimised, the true loss stalls or grows",
        "in the second half of the training it falls by less than half as much",
        every([relaxed.below(0.0), stall.above(0.0)]) if changes else None,
        f"from the middle to the end: relaxed {relaxed.told(percent)}, true {true.told(percent)}; "
        f"{course(runs, 'train_loss', 'the true loss')}",
    )


def _second_half(run: Training, key: str) -> float:
    """The logarithm of a curve's change from its middle to its end; the means of some epochs are compared."""
    values = run.values(key)
    some = max(1, len(values) // 5)
    middle = values[len(values) // 2 - some // 2 :][:some]
    return math.log(fmean(values[-some:]) / fmean(middle))


def ends(runs: Sequence[Training]) -> Sheet:
    """A row for every method and augmentation: means over the seeds, and their range."""
    rows = []
    for augment, where in AUGMENTATIONS.items():
        for method in dict.fromkeys(run.method for run in runs if run.augment == augment):
            same = [run for run in runs if (run.method, run.augment) == (method, augment)]
            diverged = f"; {_diverged(same)} diverged" if _diverged(same) else ""
            facts = [f"{len(same)}{diverged}", ", ".join(run.told_rate for run in same), epochs_at_guessing(same)]
            relaxed = _range(same, "objective") if same[0].relaxed else ""
            losses = [_range(same, "train_loss"), relaxed, _range(same, "loss")]
            rows.append([f"{method}, {where}", *facts, *losses, _range(same, "accuracy_n", "{:.1%}")])
    return Sheet(
        "At the end, the mean of the last fifth of the epochs: means over the seeds, and their range. Expected losses of the "
        "binary network on training and validation images, the relaxed objective that is minimised, and the accuracy of 10 "
        "samples. Of every seed the rate, and for how many epochs its training loss is not below that of guessing. ADF draws "
        "the head's outputs; ADF states draws the last layer's states, as in the paper's appendix.",
        ["training", "seeds", "rates", "epochs at guessing", "training loss", "relaxed", "validation loss", "accuracy"],
        rows,
    )


def _range(runs: Sequence[Training], key: str, form: str = "{:.3f}") -> str:
    values = [run.last(key) for run in runs if run.values(key)]
    if not values:
        return "none"
    mean = form.format(fmean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def _left(cells: Sequence[Cell], runs: Sequence[Training]) -> dict[str, list[int]]:
    """Which trainings are still to be done, and with which seeds."""
    done = {(run.method, run.augment, run.seed) for run in runs}
    left: dict[str, list[int]] = {}
    for method, augment, seed in map(_identity, cells):
        if (method, augment, seed) not in done:
            left.setdefault(f"{method}, {AUGMENTATIONS[augment]}", []).append(seed)
    return left
