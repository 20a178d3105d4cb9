"""Learning on images: trainings by the ordinary loop as cells, and the experiment of figure C.7."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flipgrad import files, plots, training
from flipgrad.data import VARIABLE, DataSet, Split, usual_folder
from flipgrad.errors import InputError
from flipgrad.estimators.names import for_training
from flipgrad.plots.learning import GUESSING, LEARNT, Training
from flipgrad.reproduce._cells import AGAIN, Cell, Place
from flipgrad.reproduce._workshop import Claim, Workshop, experiment
from flipgrad.training import DivergenceError, RunFolder, TrainConfig, load_data, make_net
from flipgrad.training.config import AUTO

RUN, IMAGES = "run", "images"
# Data sets whose files a person has to bring.
NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
# The paper's setting, as far as it is the same for all trainings. Nothing else is given: results stay good when a
# configuration learns more fields.
FIXED = {"batch_size": 64, "optimizer": "sgd", "momentum": 0.9, "schedule": "constant", "validation": 0.1, "eval_samples": 10}
# What figures need of an epoch: the method's own objective, and the network's numbers on training and validation images.
CURVES = ("epoch", "objective", "train_loss", "train_accuracy", "loss", "marginal_loss", "accuracy_1", "accuracy_n", "seconds")


@dataclass(frozen=True)
class TrainingPlan:
    """How long networks are trained, and on what; None stands for all images.

    ``width`` is the factor on the network's channels, ``images`` are trained on. After every epoch, ``held_out`` validation
    images and ``watched`` training images are evaluated. The search for a rate makes ``trials`` of ``trial_epochs`` with
    ``trial_images``; with a ``rate`` that is a number there is none. The ``model`` is by default the data set's own.
    """

    data: str
    width: float
    images: int | None
    held_out: int | None
    watched: int
    epochs: int
    trials: int = 2
    trial_epochs: int = 1
    trial_images: int | None = None
    noise: str = "logistic"
    model: str = AUTO
    rate: float | str = AUTO

    @property
    def cost(self) -> int:
        """How many epochs it takes, the search included, whose trials may have fewer images."""
        if self.rate != AUTO:
            return self.epochs
        trials = self.trials * self.trial_epochs
        if self.images and self.trial_images:
            trials = math.ceil(trials * self.trial_images / self.images)
        return self.epochs + trials

    def cell(
        self,
        shop: Workshop,
        name: str,
        estimator: str,
        augment: str,
        rate: float | str | None = None,
        *,
        seed: int | None = None,
    ) -> Cell:
        """The training with one ``estimator``. The ``rate`` is by default the plan's, the ``seed`` the reproduction's."""
        rate = self.rate if rate is None else rate
        network = {"data": self.data, "width": self.width, "noise": self.noise, "estimator": estimator}
        search = {"search_trials": self.trials, "search_epochs": self.trial_epochs, "search_images": self.trial_images}
        course = {"epochs": self.epochs, "lr": rate, "augment": augment, "eval_train": self.watched}
        course["seed"] = shop.seed if seed is None else seed
        values = {**FIXED, **network, **search, **course}
        if self.model != AUTO:
            values["model"] = self.model
        settings = {"config": values, "images": self.images, "held_out": self.held_out}
        folder = image_folder(self, shop.images)
        inputs = {} if folder is None else {IMAGES: str(folder)}
        return Cell(name, train_cell, settings, self.cost if rate == AUTO else self.epochs, inputs)


def image_folder(plan: TrainingPlan, given: Path | None) -> Path | None:
    """The folder of the images of ``plan``, None if it needs none; ``given`` is that of CIFAR-10."""
    if plan.data not in NAMES:
        return None
    if given is not None and plan.data == "cifar10":
        return given.resolve()
    usual = usual_folder(plan.data)
    if usual is not None:
        return usual.resolve()
    ways = f"with --data, or ${VARIABLE}/cifar10" if plan.data == "cifar10" else f"as ${VARIABLE}/{plan.data}"
    raise InputError(f"this scale trains on {NAMES[plan.data]}: give the folder of its files {ways}")


def train_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Search for the learning rate where none is given, and train.

    Returns:
        ``rate``, the ``trials`` of the search, ``curves`` with a number for every epoch, and ``diverged``, which says what
        happened if the training came to no end. A search in which all rates diverge leaves no rate and no curves.
    """
    config, data = prepared(settings, place)
    path = place.folder / RUN
    known = (path / RunFolder.CONFIG).is_file()
    with _or_anew(place.folder), RunFolder.reopen(path) if known else RunFolder(path, overwrite=True) as folder:
        if not known:
            folder.write_config(config)
        found: dict[str, Any] = {"rate": config.lr, "trials": [], "diverged": None}
        # The share of the updates that the search takes.
        share = 0.0
        if config.lr == AUTO:
            search = config.search_trials * config.search_epochs * (config.search_images or len(data.train))
            share = search / (search + config.epochs * len(data.train))
            found |= _search(config, data, folder, place, share)
            if found["rate"] is None:
                return {**found, "curves": {}}
        config = replace(config, lr=found["rate"])
        try:
            training.train(
                config,
                make_net(config, data),
                data,
                folder,
                checkpoint=training.read_checkpoint(folder.path),
                report=lambda done, total, record: place.report(share + (1 - share) * done / total),
                stop=place.stop,
            )
        except DivergenceError as error:
            found["diverged"] = str(error)
        return {**found, "curves": _curves(path / RunFolder.METRICS)}


@contextmanager
def _or_anew(folder: Path) -> Iterator[None]:
    """Whatever is wrong with the files of a training here, there is one more way out than a single run has."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; or delete '{folder}', and this training is done anew") from None


def prepared(settings: Mapping[str, Any], place: Place) -> tuple[TrainConfig, DataSet]:
    """The configuration of a training, and its examples: as many as the settings say, of all classes alike."""
    config = TrainConfig.from_json({**settings["config"], "data_folder": place.inputs.get(IMAGES)})
    data, held_out = load_data(config), settings["held_out"]

    def some(split: Split, count: int | None) -> Split:
        if count is None or count >= len(split):
            return split
        return split.divide(count / len(split), seed=config.seed)[1]

    validation = None if data.validation is None else some(data.validation, held_out)
    # The test images have no part in the experiments; the loop evaluates them at its end.
    test = some(data.test, held_out)
    return config, replace(data, train=some(data.train, settings["images"]), validation=validation, test=test)


def _search(config: TrainConfig, data: DataSet, folder: RunFolder, place: Place, share: float) -> dict[str, Any]:
    """The ``rate`` that was found and the ``trials``; where all of them diverged, no rate, and what ``diverged`` says."""
    try:
        found = training.automatic_rate(
            config,
            lambda: make_net(config, data),
            data,
            done=training.read_trials(folder.path, data),
            report=lambda updates, total, trials: place.report(share * updates / total),
            trial_done=lambda trials: folder.write_trials(trials, data),
            stop=place.stop,
        )
    except InputError as error:
        trials = training.read_trials(folder.path, data)
        if trials and all(trial.diverged for trial in trials):
            return {"rate": None, "diverged": str(error)}
        raise
    return {"rate": found.rate, "trials": [trial.as_json() for trial in found.trials]}


def _curves(metrics: Path) -> dict[str, list[float | None]]:
    """The :data:`CURVES`, in few digits: a file to be kept."""
    rows = []
    for record in files.read_json_lines(metrics, missing=AGAIN, broken=AGAIN):
        trained = {"train_loss": record["training"]["expected_loss"], "train_accuracy": record["training"]["accuracy_n"]}
        rows.append({**record, **trained, "loss": record["expected_loss"]})
    return {key: [float(f"{row[key]:.6g}") if math.isfinite(row[key]) else None for row in rows] for key in CURVES}


def trainings(shop: Workshop, stage: str, cells: Sequence[Cell], *, starred: bool = False) -> list[Training]:
    """Do the cells, and return what they found, in their order."""
    found = []
    for record in shop.cells(stage, cells).values():
        config = record["settings"]["config"]
        label, estimator = for_training(config["estimator"], 1)
        facts = {"searched": config["lr"] == AUTO, "starred": starred, "relaxed": estimator.relaxed_objective}
        more = {"seconds": record["seconds"], "seed": config["seed"]}
        found.append(Training(label, config["augment"], **facts, **record["result"], **more))
    return found


def store(shop: Workshop, name: str, plan: TrainingPlan, found: Sequence[Training]) -> Path:
    """Write the result file of some trainings, and return it."""
    seconds = sum(run.seconds for run in found)
    return shop.store(name, {"plan": asdict(plan), "runs": [asdict(run) for run in found], "seconds": seconds})


SMOKE = TrainingPlan("digits", 1.0, 128, 64, 64, epochs=2, trials=2, trial_epochs=1, trial_images=64)

# The rates of figure C.7 beside the one that the search finds.
RATES = (1e-3, 1e-4)
# The paper trains for 1,000 epochs. Small: the noise's scale goes with the root of the width, as in figure 4.
MUPROP_PLANS = {
    "smoke": SMOKE,
    "small": TrainingPlan(
        "cifar10", 0.125, 5000, 256, 256, epochs=15, trials=6, trial_epochs=1, trial_images=3000, noise="logistic:0.35"
    ),
    "paper": TrainingPlan("cifar10", 1.0, None, None, 5000, epochs=1000, trials=10, trial_epochs=5, trial_images=None),
}


@experiment("muprop", "Figure C.7", seconds=(5, 1000, 1e7), cells=(7, 7, 7))
def muprop(shop: Workshop) -> Iterator[Claim]:
    """Appendix C.3: REINFORCE and MuProp with running baselines on CIFAR-10.

    Training losses of REINFORCE and MuProp with the running average of every example's loss as the baseline, at several
    learning rates. With a careful choice both make progress, at rates one to two orders smaller than those of biased methods:
    in 1,000 epochs hardly that of biased ones in 10.
    """
    plan = MUPROP_PLANS[shop.scale_name]
    wanted = [(method, rate) for method in ("reinforce+running", "muprop+running") for rate in (AUTO, *RATES)]
    cells = [
        plan.cell(shop, f"muprop-{method}-{rate if rate == AUTO else f'{rate:g}'}", method, "flip-crop", rate)
        # To compare with, a biased method.
        for method, rate in (("psa:sampled", AUTO), *wanted)
    ]
    runs = trainings(shop, "muprop", cells, starred=True)
    plots.muprop(store(shop, "muprop", plan, runs), shop.folder / "muprop")
    return muprop_claims(runs[1:], biased=runs[0])


def _told(*runs: Training) -> str:
    return ", ".join(f"{run.told} at {run.told_rate}{'*' if run.searched else ''}" for run in runs)


def _best(runs: Sequence[Training]) -> Training:
    """The lowest training loss at the end, of those that came to one."""
    return min((run for run in runs if run.values("train_loss")), key=lambda run: run.end, default=runs[0])


def muprop_claims(runs: Sequence[Training], biased: Training) -> Iterator[Claim]:
    """Whether unbiased methods lower the loss, at which rates, and how far they come against a few epochs of PSA."""
    methods = dict.fromkeys(run.method for run in runs)
    yield Claim(
        "with a suitable rate, both can make progress (training loss more than 1 % below that of guessing)",
        all(_best([run for run in runs if run.method == method]).end < LEARNT for method in methods),
        f"guessing {GUESSING:.3f}; at the end, * for rates from the search: {_told(*runs)}",
    )
    best = _best(runs)
    yield Claim(
        "the learning rates they need are one to two orders smaller than with biased methods",
        best.has_a_tenth_of_the_rate_of(biased),
        f"best: {_told(best)}; found for {biased.method}: {_told(biased)}",
    )
    losses = biased.values("train_loss")
    few = max(1, len(losses) // 10)
    early = losses[few - 1] if losses else math.nan
    yield Claim(
        "they are much slower: after all epochs they have hardly come as far as a biased method after a few",
        bool(losses) and not best.end < early,
        f"{_told(best)}; {biased.method} after {few} epoch{'s' * (few > 1)} {early:.3f}, at the end {biased.end:.3f}"
        if losses
        else "no training came to an end",
    )
