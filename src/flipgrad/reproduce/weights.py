"""Beyond the paper: real against binary weights, by the gradients of small networks and by trainings."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import sqrt
from statistics import fmean
from typing import Any

import torch

from flipgrad import gradeval, plots
from flipgrad.connections import WeightKind
from flipgrad.data import VARIABLE, usual_folder
from flipgrad.estimators.names import for_training
from flipgrad.layers import BinaryLinear
from flipgrad.network import Sequential
from flipgrad.noise import Logistic
from flipgrad.objectives import CrossEntropy
from flipgrad.plots.learning import Training
from flipgrad.plots.weights import Accuracy, Course, of
from flipgrad.reproduce._cells import Cell, read_result
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop, experiment
from flipgrad.reproduce.learning import NAMES, TrainingPlan, trainings

KINDS: tuple[WeightKind, ...] = ("real", "binary")
# The paper's PSA, what the default is in such networks, and straight-through by the slopes of means and by a clipped identity.
METHODS = ("psa:sampled", "psa:posterior", "st", "hard-st")
LABELS = [for_training(method, 1)[0] for method in METHODS]
PAPER, DEFAULT, ST, HARD = LABELS

# Small networks on the plane: 10 weights, so that the sum over all of them is cheap.
INPUTS, WIDTHS, CLASSES = 2, (2, 3), 2
LAYERS = ("layer 1", "layer 2")
# Drawn weights, with noise half as large as the latent weights.
WEIGHT_NOISE = Logistic(0.5)
# By scale: how many random networks, and data points of each. What one network says is chance.
NETWORKS, POINTS = {"smoke": 2, "small": 10, "paper": 30}, 20

# By scale: trainings, and the rates of which each method gets its best. The schedule is what binary weights need.
DIGITS = TrainingPlan("digits", 1.0, None, None, 500, epochs=30, model="digits")
MNIST = TrainingPlan("mnist", 1.0, 10_000, 1000, 500, epochs=4, model="mnist")
PLANS: dict[str, tuple[TrainingPlan, ...]] = {
    "smoke": (replace(DIGITS, images=256, held_out=100, watched=100, epochs=3),),
    "small": (DIGITS, MNIST),
    "paper": (replace(DIGITS, epochs=60), replace(MNIST, images=None, held_out=None, watched=5000, epochs=20)),
}
RATES = {"smoke": (0.1,), "small": (0.05, 0.2), "paper": (0.02, 0.05, 0.1, 0.2)}
SCHEDULE = "cosine"
# How much lower, in shares, the accuracy of a network of bits may be to be called close; and equal losses, relative.
CLOSE, SAME = 0.02, 0.1


@experiment(
    "weights",
    "Beyond the paper",
    seconds=(25, 800, 35_000),
    cells=(8, 32, 64),
    figures={"weights-training": "Trainings with real and with binary weights."},
)
def weights(shop: Workshop) -> Iterator[Claim | Sheet]:
    """Beyond the paper: binary weights, by PSA, straight-through and the clipped identity.

    The paper calls binary weights an extra stochastic binarization layer and does not train them. With weights of one size
    a flip of a unit or of a weight has rank one, so that PSA is exact at the price of ST. Shown are the errors of gradients
    in small random networks whose weights are real, or drawn as signs, against the exact gradient; and trainings with real
    weights and with the signs of latent ones.
    """
    accuracies = measure(shop)
    courses, left_out = train(shop)
    path = shop.store("weights", {"accuracies": list(map(asdict, accuracies)), "courses": list(map(asdict, courses))})
    plots.weights_accuracy(path, shop.folder / "weights")
    plots.weights_training(path, shop.folder / "weights-training")
    yield from accuracy_claims(accuracies)
    for data in dict.fromkeys(course.data for course in courses):
        yield from training_claims([course for course in courses if course.data == data])
    yield accuracy_sheet(accuracies, NETWORKS[shop.scale_name], shop.scale.samples)
    yield training_sheet(courses, left_out)


def network(kind: WeightKind, seed: int) -> Sequential:
    """A small random network; of both kinds alike, but that real weights are the latent ones of the other, times a scale."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for n, m in zip((INPUTS, *WIDTHS), WIDTHS, strict=False):
        options = {"weights": kind, "weight_noise": WEIGHT_NOISE} if kind == "binary" else {}
        layer = BinaryLinear(n, m, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            layer.weight.normal_(generator=generator)
            layer.bias.normal_(std=0.5, generator=generator)
            if layer.weight_scale is None:
                layer.weight /= sqrt(n)
        layers.append(layer)
    head = torch.nn.Linear(WIDTHS[-1], CLASSES)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return Sequential(*layers, head=head)


def measure(shop: Workshop) -> list[Accuracy]:
    """The errors of all estimators in all networks, combined: biases and RMSEs by their mean square, cosines by their mean."""
    found = []
    for kind in KINDS:
        entries: dict[str, list[Any]] = {label: [] for label in LABELS}
        for number in range(NETWORKS[shop.scale_name]):
            for label, entry in _measured(shop, kind, number)["estimators"].items():
                entries[label].append({layer["name"]: layer for layer in entry["layers"]})
        found += [_combined(kind, label, nets) for label, nets in entries.items()]
    return found


def _measured(shop: Workshop, kind: WeightKind, number: int) -> dict[str, Any]:
    """What :mod:`flipgrad.gradeval` finds in one network; measured now if it is not there yet."""
    samples = shop.scale.samples
    path = shop.stored(f"weights-{kind}-{number}-{samples}")
    if not path.exists():
        rules = dict(for_training(method, 1) for method in METHODS)
        total = len(KINDS) * NETWORKS[shop.scale_name] * samples * len(rules)

        def report(label: str, new: int) -> None:
            shop.report(f"{kind} weights: {label}", new, total)

        x, objective = shop.data.x[:POINTS], CrossEntropy(shop.data.y[:POINTS])
        net = network(kind, shop.seed + number)
        shop.store(path.stem, gradeval.evaluate(net, x, objective, rules, samples, seed=shop.seed, report=report).to_dict())
    return read_result(path, "estimators")


def _combined(kind: str, label: str, nets: Sequence[dict[str, Any]]) -> Accuracy:
    def over_nets(key: str, layer: str) -> list[float]:
        values = [net[layer][key] for net in nets]
        return [value[0] if isinstance(value, list) else value for value in values]

    def root_mean_square(key: str) -> list[float]:
        return [sqrt(fmean(value**2 for value in over_nets(key, layer))) for layer in LAYERS]

    cosine = [fmean(over_nets("cosine_mean", layer)) for layer in LAYERS]
    unbiased = [sum(low == 0 for low in over_nets("bias_low", layer)) for layer in LAYERS]
    return Accuracy(kind, label, list(LAYERS), root_mean_square("bias"), root_mean_square("rmse"), cosine, unbiased, len(nets))


def train(shop: Workshop) -> tuple[list[Course], list[str]]:
    """The trainings, of every method at its best rate; and the data sets that are left out, as nobody has given them."""
    plans = PLANS[shop.scale_name]
    left_out = [NAMES[plan.data] for plan in plans if plan.data in NAMES and usual_folder(plan.data) is None]
    wanted = [
        (plan, kind, method, rate)
        for plan in plans
        if NAMES.get(plan.data) not in left_out
        for kind in KINDS
        for method in METHODS
        for rate in RATES[shop.scale_name]
    ]
    found = trainings(shop, "weights", [_cell(shop, *one) for one in wanted])
    groups: dict[tuple[str, str, str], list[Training]] = {}
    for (plan, kind, _, _), run in zip(wanted, found, strict=True):
        groups.setdefault((plan.data, kind, run.method), []).append(run)
    return [_best(*key, runs) for key, runs in groups.items()], left_out


def _cell(shop: Workshop, plan: TrainingPlan, kind: WeightKind, method: str, rate: float) -> Cell:
    cell = plan.cell(shop, f"weights-{plan.data}-{kind}-{method}-{rate:g}", method, "none", rate)
    config = {**cell.settings["config"], "schedule": SCHEDULE, **({} if kind == "real" else {"weights": kind})}
    return replace(cell, settings={**cell.settings, "config": config})


def _best(data: str, kind: str, method: str, runs: Sequence[Training]) -> Course:
    """The training with the lowest loss at its end; one that diverged only where all did."""
    best = min(runs, key=lambda run: (bool(run.diverged), run.end))
    losses, accuracies = best.curve("train_loss").tolist(), best.curve("accuracy_n").tolist()
    return Course(data, kind, method, best.rate or 0.0, losses, accuracies, best.diverged)


def accuracy_claims(accuracies: Sequence[Accuracy]) -> Iterator[Claim]:
    """Who is biased, and how accurate one draw is."""
    psa, default, st, hard = (of(accuracies, "binary", label) for label in LABELS)
    for index, layer in enumerate(LAYERS):
        yield Claim(
            f"in latent weights PSA is less biased than ST and HardST, {layer}",
            psa.bias[index] < min(st.bias[index], hard.bias[index]),
            f"relative bias of PSA {psa.bias[index]:.3f}, ST {st.bias[index]:.3f}, HardST {hard.bias[index]:.3f}",
        )
    last = len(LAYERS) - 1
    yield Claim(
        "in the last layer PSA's bias in latent weights cannot be told from 0 (in at least 4 of 5 networks)",
        psa.unbiased[last] >= 0.8 * psa.networks,
        f"its 95 % interval contains 0 in {psa.unbiased[last]} of {psa.networks} networks; ST's in {st.unbiased[last]}",
    )
    for index, layer in enumerate(LAYERS):
        rows = (default, psa, st, hard)
        yield Claim(
            f"one draw of the default PSA is more accurate than one of ST and of HardST, {layer}",
            default.rmse[index] < min(st.rmse[index], hard.rmse[index]),
            f"relative RMSE of {', '.join(f'{row.method} {row.rmse[index]:.2f}' for row in rows)}",
        )
    real = of(accuracies, "real", ST)
    yield Claim(
        "ST is more biased with binary weights than with real ones in the first layer",
        st.bias[0] > real.bias[0],
        f"relative bias {st.bias[0]:.3f} against {real.bias[0]:.3f}; of PSA {psa.bias[0]:.3f} against "
        f"{of(accuracies, 'real', PAPER).bias[0]:.3f}",
    )


def training_claims(courses: Sequence[Course]) -> Iterator[Claim]:
    """What the trainings on one data set say."""
    psa, st, hard = (of(courses, "binary", label) for label in (DEFAULT, ST, HARD))
    real, data = of(courses, "real", DEFAULT), courses[0].data
    yield Claim(
        f"with binary weights PSA trains at least as well as ST on {data} (its loss is at most {1 + SAME:.2g} times ST's)",
        not psa.diverged and psa.loss <= (1 + SAME) * st.loss,
        f"training losses: {psa.told}, {st.told}",
    )
    yield Claim(
        f"with binary weights PSA and ST train better than HardST on {data}",
        not psa.diverged and not st.diverged and (bool(hard.diverged) or max(psa.loss, st.loss) < hard.loss),
        f"training losses: {psa.told}, {st.told}, {hard.told}",
    )
    yield Claim(
        f"binary weights cost at most {100 * CLOSE:.0f} points of accuracy on {data} (10 samples, validation images, PSA)",
        psa.accuracy >= real.accuracy - CLOSE,
        f"{psa.accuracy:.1%} with binary weights, {real.accuracy:.1%} with real ones",
    )


def accuracy_sheet(accuracies: Sequence[Accuracy], networks: int, samples: int) -> Sheet:
    """All errors."""
    shape = "-".join(map(str, WIDTHS))
    caption = (
        f"Relative bias, relative RMSE and cosine of one draw in {networks} random {shape} networks of {POINTS} points, from "
        f"{samples:,} draws each against the exact gradient; weights are real, or drawn as signs."
    )
    head = ["weights, estimator", *(f"{what}, {layer}" for layer in LAYERS for what in ("bias", "RMSE", "cosine"))]
    rows = [
        [
            f"{row.weights}, {row.method}",
            *(f"{part[index]:.3f}" for index in range(len(LAYERS)) for part in (row.bias, row.rmse, row.cosine)),
        ]
        for row in accuracies
    ]
    return Sheet(caption, head, rows)


def training_sheet(courses: Sequence[Course], left_out: Sequence[str]) -> Sheet:
    """The ends of all trainings."""
    caption = "Trainings, each at the best one of its rates: losses on training images and accuracies on validation images."
    if left_out:
        caption += f" {', '.join(left_out)} is left out: give its folder as ${VARIABLE}/mnist."
    head = ["data, weights, estimator", "rate", "training loss", "accuracy of 10 samples"]
    rows = [
        [
            f"{course.data}, {course.weights}, {course.method}",
            f"{course.rate:g}",
            f"{course.loss:.3f}{' (diverged)' if course.diverged else ''}",
            f"{course.accuracy:.1%}",
        ]
        for course in courses
    ]
    return Sheet(caption, head, rows)
