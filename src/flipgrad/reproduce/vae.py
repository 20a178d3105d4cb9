"""Beyond the paper: latent-variable models, the benchmark on which estimators are usually compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop, experiment
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


@experiment(
    "vae",
    "Beyond the paper",
    seconds=(30, 20_000, 2_000_000),
    cells=(15, 25, 70),
    figures={"vae-pictures": "Images, their reconstructions by the linear model that PSA trained, and samples of it."},
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
    if plan.data == "mnist" and folder is None:
        raise InputError(f"vae needs MNIST: put its four files into a folder mnist and give the folder of that as ${VARIABLE}")
    cells = {cell.name: cell for cell in _cells(shop, plan, folder)}
    records = shop.cells("vae", list(cells.values()))
    courses = [_course(cells[name], record["result"]) for name, record in records.items()]
    pictures = next(record["result"]["pictures"] for name, record in records.items() if "linear-PSA" in name)
    path = shop.store("vae", {"courses": list(map(asdict, courses)), "pictures": pictures})
    plots.elbos(path, shop.folder / "vae")
    plots.pictures(path, shop.folder / "vae-pictures")
    for model in plan.seeds:
        yield from claims([course for course in courses if course.model == model])
    yield sheet(courses, plan)


def methods_of(model: str) -> list[str]:
    """The methods that a model is trained by."""
    return [method for method in METHODS if model == "nonlinear" or method not in ONLY_NONLINEAR]


def _cells(shop: Workshop, plan: ElboPlan, folder: Path | None) -> Iterator[Cell]:
    for model, seeds in plan.seeds.items():
        for number in range(seeds):
            for method in methods_of(model):
                settings = {
                    "data": plan.data, "model": model, "method": method, "units": plan.units, "seed": shop.seed + number,
                    "steps": plan.steps, "every": plan.every, "looks": plan.looks, "unseen": plan.unseen,
                    "at_the_end": plan.at_the_end,
                }  # fmt: skip
                name = f"vae-{model}-{method.replace(' + ', '-')}-{shop.seed + number}"
                yield Cell(name, train, settings, plan.steps, {} if folder is None else {"folder": str(folder)})


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
    """What the trainings of one model say: means over seeds."""
    by_method = {method: [course for course in courses if course.method == method] for method in methods_of(courses[0].model)}
    model, psa = courses[0].model, by_method["PSA"]
    ends = {method: fmean(course.elbos[-1] for course in runs) for method, runs in by_method.items()}
    others = [method for method in by_method if method != "PSA"]
    told = ", ".join(f"{method} {end:.2f}" for method, end in ends.items())
    yield Claim(
        f"after equal updates PSA has the highest training ELBO, {model} model",
        all(ends["PSA"] > ends[method] for method in others),
        f"after {psa[0].steps[-1]:,} updates: {told}",
    )
    shortest = min(course.seconds[-1] for course in courses)
    at_time = {method: fmean(course.after(shortest) for course in runs) for method, runs in by_method.items()}
    yield Claim(
        f"after equal time PSA has the highest training ELBO, {model} model",
        all(at_time["PSA"] > at_time[method] for method in others),
        f"after {shortest:,.0f} s of one core: " + ", ".join(f"{method} {elbo:.2f}" for method, elbo in at_time.items()),
    )
    bounds = {method: fmean(course.bound or course.bounds[-1] for course in runs) for method, runs in by_method.items()}
    yield Claim(
        f"PSA has the highest bound of the log-likelihood of unseen images, {model} model",
        all(bounds["PSA"] > bounds[method] for method in others),
        f"{SAMPLES} samples: " + ", ".join(f"{method} {bound:.2f}" for method, bound in bounds.items()),
    )
    spread = {method: fmean(course.variances[-1] for course in runs) for method, runs in by_method.items()}
    yield Claim(
        f"the variance of PSA's gradient is at most a tenth of every unbiased estimator's, {model} model",
        all(10 * spread["PSA"] <= spread[method] for method in UNBIASED),
        "over PSA's: " + ", ".join(f"{method} {spread[method] / spread['PSA']:.3g}" for method in others),
    )
    if "FlipCV" in by_method:
        unbiased = [*UNBIASED, "PSA", "FlipCV"]
        yield Claim(
            f"after equal time FlipCV has the highest training ELBO of all unbiased estimators, {model} model",
            all(at_time["FlipCV"] >= at_time[method] for method in unbiased),
            f"after {shortest:,.0f} s of one core: " + ", ".join(f"{method} {at_time[method]:.2f}" for method in unbiased),
        )


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
