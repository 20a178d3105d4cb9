"""Beyond the paper: latent-variable models, the benchmark on which estimators are usually compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from flipgrad import files, plots, tensor_files
from flipgrad.contract import Estimator
from flipgrad.data import VARIABLE, digits, mnist, usual_folder
from flipgrad.errors import InputError
from flipgrad.estimators import PSA, REINFORCE, RELAX, ST, DisARM, FlipCV, LearnedBaseline
from flipgrad.plots.vae import ElboCourse
from flipgrad.reproduce._cells import AGAIN, Cell, Place
from flipgrad.reproduce._evidence import Evidence, Verdict, every
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop, experiment, unfinished
from flipgrad.training.latents import ElboTraining, baseline_network, binarised, gradient_variance, latent_model

# By the name of a method: its estimator for images of so many pixels, whose negative ELBO begins at so much.
METHODS: dict[str, Callable[[int, float], Estimator]] = {
    "PSA": lambda pixels, start: PSA(),
    "ST": lambda pixels, start: ST(),
    "DisARM": lambda pixels, start: DisARM(),
    "REINFORCE + learned": lambda pixels, start: REINFORCE(LearnedBaseline(baseline_network(pixels, start))),
    "RELAX": lambda pixels, start: RELAX(),
    "FlipCV": lambda pixels, start: FlipCV(),
}
UNBIASED = ("DisARM", "REINFORCE + learned", "RELAX")
# Where flips of the decoder are not a sum over flips, a few of them do.
ONLY_NONLINEAR = ("FlipCV",)
BATCH, SAMPLES, VARIANCE_DRAWS = 50, 100, 20
STATE, STATE_FORMAT = "state.safetensors", "elbo training 1"
# Pictures of each kind.
SHOWN = 12
# How many images are held out of the 60,000 training images, as in the literature.
HELD_OUT = 10_000
BINARISED_BY = 12345


@dataclass(frozen=True)
class ElboPlan:
    """How much is trained: models with the number of seeds each, updates, and updates between two looks.

    At ``looks`` times in all, spread evenly, the gradient's variance is measured and the bound of ``unseen`` images.
    """

    data: str
    units: int
    seeds: Mapping[str, int]
    steps: int
    every: int
    looks: int
    unseen: int
    at_the_end: int


PLANS = {
    "smoke": ElboPlan("digits", 10, {"linear": 1, "nonlinear": 1, "two-layer": 1}, 60, 20, 2, 20, 40),
    "small": ElboPlan("mnist", 200, {"linear": 3, "two-layer": 1, "nonlinear": 1}, 50_000, 500, 10, 500, 10_000),
    "paper": ElboPlan(
        "mnist", 200, {"linear": 5, "two-layer": 3, "four-layer": 3, "nonlinear": 3}, 1_000_000, 2000, 50, 1000, 10_000
    ),
}


def methods_of(model: str) -> list[str]:
    """The methods that a model is trained by."""
    return [method for method in METHODS if model == "nonlinear" or method not in ONLY_NONLINEAR]


def parts(scale: str) -> dict[str, int]:
    """The names of the trainings at a scale, with the updates of each."""
    return {name: PLANS[scale].steps for name, *_ in _trainings(PLANS[scale], 0)}


def _trainings(plan: ElboPlan, first_seed: int) -> Iterator[tuple[str, str, str, int]]:
    """The name of every training, its model, method and seed; all models of the first seed come before those of the second."""
    for number in range(max(plan.seeds.values())):
        for model in (model for model, seeds in plan.seeds.items() if number < seeds):
            for method in methods_of(model):
                seed = first_seed + number
                yield f"vae-{model}-{method.replace(' + ', '-')}-{seed}", model, method, seed


@experiment(
    "vae",
    "Beyond the paper",
    seconds=(30, 20_000, 2_000_000),
    cells=(15, 25, 70),
    figures={"vae-pictures": "Images, their reconstructions by the linear model that PSA trained, and samples of it."},
    parts=parts,
)
def vae(shop: Workshop) -> Iterator[Claim | Sheet]:
    """Beyond the paper: binary latent-variable models, trained by the evidence lower bound.

    The paper names variational bounds as future work. Those who propose estimators compare them on binary autoencoders and
    sigmoid belief networks of binarised MNIST digits: 200 units in every latent layer, batches of 50, Adam at 1e-4. Where the
    likelihood adds up over pixels and the decoder is linear, PSA with one latent layer is unbiased and costs about one backward
    pass. Shown are training ELBOs against updates and against time, and the variance of the encoder's gradient.
    """
    plan = PLANS[shop.scale_name]
    folder = usual_folder(plan.data)
    if plan.data == "mnist" and folder is None and not shop.finished:
        raise InputError(f"vae needs MNIST: put its four files into a folder mnist and give the folder of that as ${VARIABLE}")
    cells = {cell.name: cell for cell in _cells(shop, plan, folder)}
    # More seeds leave trainings as they are.
    facts = {key: value for key, value in asdict(plan).items() if key != "seeds"}
    shop.take_over(vae.name, facts, list(cells.values()), _kept)
    records = shop.cells("vae", list(cells.values()))
    if not records:
        raise InputError(f"no training of vae is finished in '{shop.folder}'; leave out --finished to train")
    courses = [_course(cells[name], record["result"]) for name, record in records.items()]
    spent = {name: record["seconds"] for name, record in records.items()}
    stored = {"plan": facts, "courses": list(map(asdict, courses)), "cells": spent}
    # Pictures of one training are kept: that of the linear model by PSA with the first seed.
    pictures = next((record["result"]["pictures"] for name, record in records.items() if name == _pictured(shop.seed)), None)
    path = shop.store(vae.name, {**stored, "pictures": pictures} if pictures else stored)
    plots.elbos(path, shop.folder / "vae")
    if pictures:
        plots.pictures(path, shop.folder / "vae-pictures")
    for model in plan.seeds:
        yield from claims([course for course in courses if course.model == model])
    yield sheet(courses, plan)
    left: dict[str, list[int]] = {}
    for name, cell in cells.items():
        if name not in records:
            left.setdefault(f"{cell.settings['model']}, {cell.settings['method']}", []).append(cell.settings["seed"])
    yield from unfinished(shop, vae.name, left, len(cells))


def _pictured(first_seed: int) -> str:
    """The name of the training whose pictures are shown."""
    return f"vae-linear-PSA-{first_seed}"


def _cells(shop: Workshop, plan: ElboPlan, folder: Path | None) -> Iterator[Cell]:
    for name, model, method, seed in _trainings(plan, shop.seed):
        settings = {
            "data": plan.data, "model": model, "method": method, "units": plan.units, "seed": seed,
            "steps": plan.steps, "every": plan.every, "looks": plan.looks, "unseen": plan.unseen,
            "at_the_end": plan.at_the_end,
        }  # fmt: skip
        yield Cell(name, train, settings, plan.steps, {} if folder is None else {"folder": str(folder)})


def _kept(stored: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], float]]:
    """Results of cells from trainings that were kept; one of them has pictures."""
    found: dict[str, tuple[Mapping[str, Any], float]] = {}
    for (name, seconds), course in zip(stored["cells"].items(), stored["courses"], strict=True):
        rows = {key: value for key, value in course.items() if key not in ("model", "method", "seed")}
        found[name] = ({**rows, "pictures": stored["pictures"] if name == _pictured(stored["seed"]) else None}, seconds)
    return found


def images(data: str, folder: str | None) -> tuple[Tensor, Tensor]:
    """Training images and unseen ones, [N, pixels] from 0 to 1."""
    source = digits() if data == "digits" else mnist(Path(folder or ""))
    train, unseen = ((part.x.flatten(1) + 1) / 2 for part in (source.train, source.test))
    return (train if data == "digits" else train[: len(train) - HELD_OUT]), unseen


def train(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The cell of one training; it goes on from its last look."""
    seen, unseen = images(settings["data"], place.inputs.get("folder"))
    torch.manual_seed(settings["seed"])
    model = latent_model(settings["model"], seen.mean(0), units=settings["units"])
    with torch.no_grad():
        start = float(model(binarised(seen[:BATCH], torch.Generator().manual_seed(settings["seed"]))).mean())
    rule = METHODS[settings["method"]](seen.shape[1], start)
    training = ElboTraining(model, rule, seen, batch=BATCH, seed=settings["seed"])
    rows: dict[str, list[Any]] = {key: [] for key in ("steps", "seconds", "elbos", "looked", "variances", "bounds")}
    path = place.folder / STATE
    if path.exists():
        tensors, facts = tensor_files.read_tensors(path, STATE_FORMAT, missing=AGAIN, broken=AGAIN)
        training.load(tensors)
        rows = facts["rows"]
    test = binarised(unseen, torch.Generator().manual_seed(BINARISED_BY))
    looks = {round(settings["steps"] * (k + 1) / settings["looks"]) for k in range(settings["looks"])}
    while training.steps < settings["steps"]:
        _advance(training, min(settings["every"], settings["steps"] - training.steps), rows)
        if any(training.steps - settings["every"] < look <= training.steps for look in looks):
            _look(training, seen, test[: settings["unseen"]], rows)
        place.report(training.steps / settings["steps"])
        stop = place.stop()
        if stop or training.steps % (10 * settings["every"]) == 0:
            files.write(path, tensor_files.tensors_to_bytes(STATE_FORMAT, training.state(), {"rows": rows}))
        if stop:
            raise KeyboardInterrupt
    files.write(path, tensor_files.tensors_to_bytes(STATE_FORMAT, training.state(), {"rows": rows}))
    bound = _bound(training, test[: settings["at_the_end"]])
    return {**rows, "bound": bound, "pictures": _pictures(training, unseen)}


def _advance(training: ElboTraining, steps: int, rows: dict[str, list[Any]]) -> None:
    """Updates, and a row of their mean ELBO and the time so far."""
    started = process_time()
    losses = [training.update() for _ in range(steps)]
    spent = process_time() - started + (rows["seconds"][-1] if rows["seconds"] else 0.0)
    for key, value in (("steps", training.steps), ("seconds", spent), ("elbos", -fmean(losses))):
        rows[key].append(value)


def _look(training: ElboTraining, seen: Tensor, test: Tensor, rows: dict[str, list[Any]]) -> None:
    """A row of the gradient's variance and the bound; neither draws from the training's source of noise, nor learns."""
    x = binarised(seen[:BATCH], torch.Generator().manual_seed(BINARISED_BY))
    generator = torch.Generator().manual_seed(training.steps)
    before = {name: tensor.clone() for name, tensor in training.state().items() if name.startswith("estimator.")}
    variance = gradient_variance(training.model, x, training.estimator, VARIANCE_DRAWS, generator)
    if isinstance(training.estimator, nn.Module):
        training.estimator.load_state_dict({name.partition(".")[2]: tensor for name, tensor in before.items()})
    for key, value in (("looked", training.steps), ("variances", variance), ("bounds", _bound(training, test))):
        rows[key].append(value)


def _bound(training: ElboTraining, test: Tensor) -> float:
    """The mean lower bound of the log-likelihood of images."""
    generator = torch.Generator().manual_seed(training.steps)
    parts = [training.model.log_likelihood(part, SAMPLES, generator=generator) for part in test.split(BATCH)]
    return float(torch.cat(parts).mean())


def _pictures(training: ElboTraining, unseen: Tensor) -> dict[str, list[list[int]]]:
    generator = torch.Generator().manual_seed(training.steps)
    some = unseen[:SHOWN]
    reconstructed = training.model.reconstruct(binarised(some, generator), generator=generator)
    kinds = {"data": some, "reconstructions": reconstructed, "samples": training.model.sample(SHOWN, generator=generator)}
    return {name: (255 * values).round().long().tolist() for name, values in kinds.items()}


def _course(cell: Cell, result: Mapping[str, Any]) -> ElboCourse:
    rows = {key: value for key, value in result.items() if key != "pictures"}
    return ElboCourse(cell.settings["model"], cell.settings["method"], cell.settings["seed"], **rows)


def claims(courses: Sequence[ElboCourse]) -> Iterator[Claim]:
    """What the trainings of one model say, as far as there are some: of the seeds that all methods have."""
    known = {method: {course.seed: course for course in courses if course.method == method} for method in METHODS}
    known = {method: runs for method, runs in known.items() if runs}
    seeds = sorted(set.intersection(*map(set, known.values()))) if "PSA" in known and len(known) > 1 else []
    if seeds:
        yield from _claims({method: [runs[seed] for seed in seeds] for method, runs in known.items()})


def _claims(by_method: Mapping[str, Sequence[ElboCourse]]) -> Iterator[Claim]:
    psa, seeds = by_method["PSA"], len(by_method["PSA"])
    model, others = psa[0].model, [method for method in by_method if method != "PSA"]

    def values(number: Callable[[ElboCourse], float]) -> dict[str, list[float]]:
        return {method: list(map(number, runs)) for method, runs in by_method.items()}

    def told(numbers: Mapping[str, Sequence[float]], form: str = "{:.2f}") -> str:
        return ", ".join(f"{method} {form.format(fmean(own))}" for method, own in numbers.items())

    ends = values(lambda course: course.elbos[-1])
    yield Claim(
        f"after equal updates PSA has the highest training ELBO, {model} model",
        _highest(ends, "PSA"),
        f"after {psa[0].steps[-1]:,} updates: {told(ends)}",
        seeds=seeds,
    )
    shortest = min(course.seconds[-1] for runs in by_method.values() for course in runs)
    at_time = values(lambda course: course.after(shortest))
    yield Claim(
        f"after equal time PSA has the highest training ELBO, {model} model",
        _highest(at_time, "PSA"),
        f"after {shortest:,.0f} s of one core: {told(at_time)}",
        seeds=seeds,
    )
    bounds = values(lambda course: course.bound if course.bound is not None else course.bounds[-1])
    yield Claim(
        f"PSA has the highest bound of the log-likelihood of unseen images, {model} model",
        _highest(bounds, "PSA"),
        f"{SAMPLES} samples: {told(bounds)}",
        seeds=seeds,
    )
    spread = values(lambda course: course.variances[-1])
    ratios = {method: [own / least for own, least in zip(spread[method], spread["PSA"], strict=True)] for method in others}
    unbiased = [method for method in UNBIASED if method in by_method]
    if unbiased:
        yield Claim(
            f"the variance of PSA's gradient is at most a tenth of every unbiased estimator's, {model} model",
            every([Evidence(tuple(map(log, ratios[method]))).above(log(10)) for method in unbiased]),
            f"over PSA's: {told(ratios, '{:.3g}')}",
            seeds=seeds,
        )
    if "FlipCV" in by_method and unbiased:
        compared = {method: at_time[method] for method in [*unbiased, "PSA", "FlipCV"]}
        yield Claim(
            f"after equal time FlipCV has the highest training ELBO of all unbiased estimators, {model} model",
            _highest(compared, "FlipCV"),
            f"after {shortest:,.0f} s of one core: {told(compared)}",
            seeds=seeds,
        )


def _highest(numbers: Mapping[str, Sequence[float]], method: str) -> Verdict:
    """Whether a method's numbers, one for every seed, are above those of each other: by the interval of their differences."""
    others = [own for other, own in numbers.items() if other != method]
    return every([Evidence(tuple(a - b for a, b in zip(numbers[method], own, strict=True))).above(0.0) for own in others])


def sheet(courses: Sequence[ElboCourse], plan: ElboPlan) -> Sheet:
    """The ends of all trainings."""
    caption = (
        f"Trainings on {plan.data}, {plan.units} units in every latent layer, batches of {BATCH}: ends after {plan.steps:,} "
        f"updates. The bound is that of {SAMPLES} samples on unseen images, the time that of one core without measurements."
    )
    head = ["model, estimator, seed", "training ELBO", "bound, unseen", "variance", "ms per update"]
    rows = []
    for course in courses:
        bound = course.bound if course.bound is not None else course.bounds[-1]
        pace = 1e3 * course.seconds[-1] / course.steps[-1]
        numbers = [f"{course.elbos[-1]:.2f}", f"{bound:.2f}", f"{course.variances[-1]:.3g}", f"{pace:.1f}"]
        rows.append([f"{course.model}, {course.method}, {course.seed}", *numbers])
    return Sheet(caption, head, rows)
